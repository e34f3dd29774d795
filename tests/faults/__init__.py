"""Faults: real servers, edges and workers are killed, frozen and stopped while real clients read.

What a client saw, byte for byte, is compared with what the log holds and with the same request when nothing went wrong.
"""
