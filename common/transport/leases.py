"""A worker's sign of life: one key a partition, renewed from a thread of its own."""

from __future__ import annotations


class Lease:
    """The lease of one worker incarnation. Synchronous, for one thread; made by `LogClient.lease`.

    ``worker`` must be unique among live workers; ``token`` is drawn afresh for each incarnation.
    """

    worker: str
    token: str
    ttl_s: float

    def renew(self) -> None:
        """Extend the lease in every partition by ``ttl_s``; call it every quarter of that.

        Raises `Fenced` when another incarnation holds the name (stop the worker), `LogUnavailable` when Redis cannot
        be reached (keep trying: an expired lease may be taken up again, epochs protect the requests).
        """

    def release(self) -> None:
        """Give the lease up at once, so that others take over without waiting. Safe to repeat."""

    def close(self) -> None:
        """Close the connections; does not release."""
