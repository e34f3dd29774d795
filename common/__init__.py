"""Words shared by the edge and the engine worker: events, settings, errors, tokenisation, telemetry and the log."""
