"""From `AppendItem` to the append script's arguments and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from common.errors import LogCorrupt
from common.events import CancelReason, encode
from common.transport.keys import GROUP, Keys
from common.transport.records import AppendItem, AppendOutcome, AppendStatus, Frame
from common.transport.settings import RedisSettings

# A script over 2,000 requests blocks the server for up to 11 ms; over 256 for about one.
CHUNK: Final = 256
_STATUS: Final = {
    0: AppendStatus.FENCED,
    1: AppendStatus.APPENDED,
    2: AppendStatus.DUPLICATE,
    4: AppendStatus.GAP,
}


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the script: items of one partition. ``indexes`` are their places in the caller's list."""

    partition: int
    indexes: tuple[int, ...]
    items: tuple[AppendItem, ...]
    payloads: tuple[tuple[bytes, ...], ...]

    def keys(self, keys: Keys, model: str, worker: str) -> list[str]:
        names = [keys.load(self.partition, model), *keys.queues(self.partition, model)]
        for item in self.items:
            names += (keys.request(item.request_id), keys.output(item.request_id))
        names.append(keys.lease(self.partition, worker))
        return names

    def arguments(
        self, settings: RedisSettings, keys: Keys, token: str, reader_timeout_ms: int, *, pushes: bool
    ) -> list[Any]:
        """``pushes``: the script pushes the frames itself, to channels that stand on the same server."""
        channel = keys.bus(0, "") if pushes else ""
        head = len(keys.request(self.items[0].request_id).encode()) - len(self.items[0].request_id)
        arguments: list[Any] = [GROUP, settings.retention_s, reader_timeout_ms, token, channel, head]
        for item, payloads in zip(self.items, self.payloads, strict=True):
            arguments += (item.epoch, item.first_n, int(item.is_final), len(payloads), *payloads)
        return arguments

    def outcomes(self, reply: Any) -> list[AppendOutcome]:
        """Raises `LogCorrupt` when the answer is not one for each item."""
        if len(reply) != len(self.items):
            raise LogCorrupt(f"append answered {len(reply)} of {len(self.items)} requests")
        return [
            AppendOutcome(
                request_id=item.request_id,
                status=_STATUS[code],
                length=length,
                cancel=CancelReason(cancel.decode()) if cancel else None,
            )
            for item, (code, length, _, cancel) in zip(self.items, reply, strict=True)
        ]

    def frames(self, reply: Any) -> Iterator[tuple[bytes, list[Frame]]]:
        """What to push where the script does not: everything that is in the log now, again after a repetition."""
        for item, payloads, (code, _, edges, _) in zip(self.items, self.payloads, reply, strict=True):
            if code in (1, 2) and edges:
                yield edges, [Frame(item.request_id, item.first_n + k, data) for k, data in enumerate(payloads)]


def batches(items: Sequence[AppendItem], keys: Keys) -> list[Batch]:
    """The items by partition, in chunks, their order kept within each request.

    Raises `ValueError` for an item without events.
    """
    by_partition: dict[int, list[int]] = {}
    for index, item in enumerate(items):
        if not item.events:
            raise ValueError(f"nothing to append to request {item.request_id}")
        by_partition.setdefault(keys.partition(item.request_id), []).append(index)
    return [
        Batch(
            partition=partition,
            indexes=tuple(chunk),
            items=tuple(items[index] for index in chunk),
            payloads=tuple(tuple(encode(event) for event in items[index].events) for index in chunk),
        )
        for partition, indexes in by_partition.items()
        for chunk in (indexes[start : start + CHUNK] for start in range(0, len(indexes), CHUNK))
    ]
