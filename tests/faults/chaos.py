"""``python -m tests.faults.chaos --seconds 600 --seed 1``: faults and traffic for as long as asked, then the figures.

Exit code 1 when a promise was broken; each break is printed. ``--keep`` keeps the logs of all processes. For many
requests and faults in little time: ``--short --requests 10000 --faults 500 --concurrency 24 --every-s 2``.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from engine_worker.config import LeaseSettings
from tests.faults.audit import Findings, Takeover, audit
from tests.faults.client import Transcript
from tests.faults.deployment import Deployment
from tests.faults.features import FEATURES, SHORT_FEATURES
from tests.faults.injector import SERVERS, Injector, kinds
from tests.faults.nursery import Nursery
from tests.faults.traffic import Goal, Traffic, undisturbed
from tests.servers import Cluster, Server, Watched

FSYNC = {"standard": "everysec", "strict": "always"}
_REPLICAS = 2
_PROGRESS_S = 30.0
PAUSES = ("worker killed", "worker frozen")


@dataclass(frozen=True)
class Plan:
    """One run. ``every_s``: mean time between faults."""

    seconds: float
    seed: int
    requests: int = 0  # at least so many, and so many faults
    faults: int = 0
    short: bool = False  # most answers are short
    durability: str = "strict"
    concurrency: int = 6
    every_s: float = 3.0
    edges: int = 2
    workers: int = 2
    forked: bool = True  # processes come out of a nursery: a restart costs little
    lease_s: float = float(LeaseSettings().lease_ttl_s)
    layout: str = "single"  # or sentinel, cluster: the log fails over to a replica
    links: bool = False  # the ways to a single log are hurt, too

    @property
    def kinds(self) -> dict[str, int]:
        return kinds(self.layout, has_links=self.links)

    def server(self) -> Server | Watched | Cluster:
        """The log of this plan, not started."""
        options = {"stream-node-max-bytes": "1024"}
        if self.layout == "single":
            return Server(fsync=FSYNC[self.durability], options=options)
        if self.layout == "cluster":
            return Cluster(3, replicas=1, options=options)
        # A primary that wakes up after its successor was chosen has no replicas, and must not take writes.
        return Watched(_REPLICAS, options={**options, "min-replicas-to-write": "1", "min-replicas-max-lag": "2"})

    @property
    def settings(self) -> dict[str, object]:
        """Of edges and workers."""
        # Every replica that may be promoted has to acknowledge: one that has not can still become the primary.
        replicas = {"single": 0, "sentinel": _REPLICAS, "cluster": 1}[self.layout]
        return {
            "durability": self.durability,
            "strict_replicas": replicas if self.durability == "strict" else 0,
            "reader_timeout_s": 5.0,
            "retention_s": 3 * 3600,
        }


@dataclass(frozen=True)
class Outcome:
    """What one run has shown."""

    plan: Plan
    findings: Findings
    injector: Injector
    transcripts: Sequence[Transcript]
    took_s: float

    def pauses(self, kind: str) -> list[float]:
        """Seconds without output, of each stream whose worker had this fault last."""
        measured = [t for t in self.findings.takeovers if t.pause_s is not None and self._cause(t) == kind]
        return sorted(t.pause_s for t in measured if t.pause_s is not None)

    def _cause(self, takeover: Takeover) -> str:
        faults = [f for f in self.injector.faults if f.name == takeover.from_worker and f.at < takeover.at]
        return faults[-1].kind if faults else ""

    def unprovoked(self) -> int:
        """Takeovers from workers that had no fault: a lease that ran out because the machine was busy. Those after a
        server's death count too, although all leases may be gone then."""
        hurt = {fault.name for fault in self.injector.faults}
        return sum(t.from_worker not in hurt for t in self.findings.takeovers)

    def lines(self) -> list[str]:
        """The figures, as a table."""
        found, counts = self.findings, self.injector.counts
        rows = [
            (
                "duration of the traffic, seed, durability",
                f"{self.took_s:.0f} s, {self.plan.seed}, {self.plan.durability}",
            ),
            ("requests accepted", str(found.accepted)),
            ("faults", str(len(self.injector.faults))),
            ("… ended, of these cancelled on purpose; failed", f"{found.ended}, {found.cancelled}; {found.failed}"),
            ("tokens in the log", str(found.tokens)),
            ("answers compared with the undisturbed ones", str(found.checked_answers)),
            ("readers that resumed on a new connection", str(found.resumed_readers)),
            ("takeovers of a running request", str(len(found.takeovers))),
            ("… from workers that had no fault", str(self.unprovoked())),
            *((kind, str(counts[kind])) for kind in self.plan.kinds),
            ("lost", str(found.lost)),
            ("events seen twice", str(found.repeated)),
            ("promises broken, in all", str(len(found.wrong))),
            *((f"pause, {kind}: p50, p99, max", _percentiles(self.pauses(kind))) for kind in PAUSES),
        ]
        return ["| figure | value |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)]


def _percentiles(pauses: list[float]) -> str:
    if len(pauses) < 2:
        return f"{len(pauses)} streams"
    cuts = statistics.quantiles(pauses, n=100, method="inclusive")
    return f"{statistics.median(pauses):.2f}, {cuts[98]:.2f}, {pauses[-1]:.2f} s ({len(pauses)} streams)"


async def run(plan: Plan, directory: Path) -> Outcome:
    """One whole run in ``directory``."""
    rng = Random(plan.seed)
    nursery = await asyncio.to_thread(Nursery) if plan.forked else None
    try:
        return await _run(plan, directory, rng, nursery)
    finally:
        if nursery is not None:
            await asyncio.to_thread(nursery.close)


async def _run(plan: Plan, directory: Path, rng: Random, nursery: Nursery | None) -> Outcome:
    common = plan.settings
    deployment = await Deployment.open(
        directory,
        edges=plan.edges,
        workers=plan.workers,
        server=plan.server(),
        has_links=plan.links,
        worker={**common, "lease_ttl_s": plan.lease_s, "max_takeovers": 3},
        edge=common,
        nursery=nursery,
    )
    try:
        expected = await undisturbed(deployment, FEATURES + SHORT_FEATURES if plan.short else FEATURES)
        injector = Injector(deployment, Random(rng.random()), plan.kinds, every_s=plan.every_s, lease_s=plan.lease_s)
        traffic = Traffic(injector, Random(rng.random()), concurrency=plan.concurrency, is_short=plan.short)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            group.create_task(injector.run())
            progress = group.create_task(_tell_progress(traffic, injector))
            await traffic.run_until(Goal(plan.seconds, plan.requests, plan.faults))
            injector.stop()
            progress.cancel()
        took_s = time.monotonic() - began
        findings = await audit(deployment, traffic.transcripts, expected)
        return Outcome(plan, findings, injector, traffic.transcripts, took_s)
    finally:
        await deployment.close()


async def _tell_progress(traffic: Traffic, injector: Injector) -> None:
    began = time.monotonic()
    while True:
        await asyncio.sleep(_PROGRESS_S)
        done, faults = len(traffic.transcripts), len(injector.faults)
        print(f"{time.monotonic() - began:.0f} s: {done} requests, {faults} faults", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults.chaos", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--durability", choices=sorted(FSYNC), default="strict")
    parser.add_argument("--concurrency", type=int, default=6)
    parser.add_argument("--every-s", type=float, default=3.0, help="mean time between faults")
    parser.add_argument("--requests", type=int, default=0, help="go on until so many were made")
    parser.add_argument("--faults", type=int, default=0, help="go on until so many were had")
    parser.add_argument("--short", action="store_true", help="most answers are short")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--edges", type=int, default=2)
    parser.add_argument(
        "--forked", action=argparse.BooleanOptionalAction, default=True, help="processes come out of a nursery"
    )
    parser.add_argument("--layout", choices=sorted(SERVERS), default="single", help="what the log is")
    parser.add_argument("--links", action="store_true", help="hurt the ways to a single log, too")
    parser.add_argument("--keep", action="store_true", help="keep the logs of all processes")
    given = vars(parser.parse_args())
    if given["links"] and given["layout"] != "single":
        parser.error("--links: the servers of a sentinel or a cluster tell their own addresses")
    keep = given.pop("keep")
    directory = Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    try:
        outcome = asyncio.run(run(Plan(**given), directory))
    finally:
        if keep:
            print(f"logs: {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
    print("\n".join(outcome.lines()))
    for line in outcome.findings.wrong:
        print("BROKEN", line)
    return 1 if outcome.findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
