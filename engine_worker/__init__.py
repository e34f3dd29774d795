"""The engine worker: one model on one device group, fed from the log and writing to it."""
