"""Whole deployments while they are operated: restarted one process after the other, on servers of every kind."""
