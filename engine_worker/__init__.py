"""The engine worker: one model on one device group, fed from the log and writing to it."""

import os

# Idle threads of the OpenMP runtime spin for milliseconds by default, on CPUs that the edge and Redis want. The runtime
# reads this when torch loads it, so it is set before any module of this package imports torch.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")  # about 0.1 ms
