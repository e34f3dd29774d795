"""Contenders in turn: starting and ending a server, medians, ratios."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from bench.compare import Comparison, parse
from bench.contenders import Contender, Live, Load, Sample, scaled
from bench.front_door import FrontDoor, Pair
from bench.servers import Server, ServerFailed, descendants, get, running
from bench.standings import Results, default_baseline, duels, table
from cli.bench.workload import WORKLOADS

_SERVER: Final = """
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self): self.answer({"data": [{"id": "tiny"}]})
    def do_POST(self): self.answer({"choices": []})
    def answer(self, body):
        self.send_response(200); self.end_headers(); self.wfile.write(json.dumps(body).encode())

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def sample(rate: float) -> Sample:
    return Sample(rate, 2 * rate, ttft_p50_ms=1000 / rate, itl_p50_ms=100 / rate, errors=0, other_cores=0.0)


class Scripted:
    """A contender that notes what is done with it, in a diary that all share."""

    def __init__(self, name: str, diary: list[str]) -> None:
        self.name = name
        self.start_s = 1.0
        self._diary = diary

    def measure(self, load: Load) -> Sample:
        self._diary.append(f"{self.name}{load.workload}{load.seed}")
        if self.name == "bad":
            raise ServerFailed("gone")
        return sample(10.0)

    def pause(self) -> None:
        self._diary.append(f"{self.name} stops")

    def resume(self) -> None:
        self._diary.append(f"{self.name} goes on")


def scripted(name: str, diary: list[str], workloads: str = "ABCDE") -> Contender:
    @contextmanager
    def opened(_: Path) -> Iterator[Live]:
        diary.append(f"{name} up")
        yield Scripted(name, diary)
        diary.append(f"{name} down")

    return Contender(name, opened, frozenset(workloads))


def compared(names: list[Contender], *words: str) -> Comparison:
    arguments = parse(["--workloads", "A,B", "--rounds", "2", *words])
    arguments.model_dir = Path()
    return Comparison(names, arguments)


def test_one_at_a_time_each_round_goes_the_other_way() -> None:
    diary: list[str] = []
    compared([scripted("x", diary), scripted("y", diary, "A")]).one_at_a_time()
    x, y = (["x up", "xA1", "xB1", "x down"], ["y up", "yA1", "y down"])
    later_y, later_x = (["y up", "yA2", "y down"], ["x up", "xA2", "xB2", "x down"])
    assert diary == [*x, *y, *later_y, *later_x]


def test_together_each_workload_goes_through_all_before_the_next() -> None:
    diary: list[str] = []
    comparison = compared([scripted("x", diary), scripted("y", diary, "A")])
    comparison.together()
    assert [entry for entry in diary if entry[1] in "AB"] == ["xA1", "yA1", "yA2", "xA2", "xB1", "xB2"]
    assert diary[:4] == ["x up", "x stops", "y up", "y stops"]
    at = diary.index("yA1")
    assert diary[at - 1 : at + 2] == ["y goes on", "yA1", "y stops"]
    assert diary[-2:] == ["y down", "x down"]
    assert len(comparison.results.samples["A"]["x"]) == 2


def test_a_contender_that_fails_is_reported_and_left_out() -> None:
    diary: list[str] = []
    comparison = compared([scripted("bad", diary), scripted("x", diary)])
    comparison.together()
    assert comparison.results.failures == {"bad": "gone"}
    assert [entry for entry in diary if entry.startswith("bad") and entry[3] in "AB"] == ["badA1"]
    assert list(comparison.results.samples["B"]) == ["x"]


def test_nothing_new_is_measured_when_time_is_up() -> None:
    diary: list[str] = []
    compared([scripted("x", diary)], "--minutes", "-1").together()
    assert not [entry for entry in diary if entry[1] in "AB"]


def test_ratios_are_of_medians_and_refer_to_the_baseline() -> None:
    results = Results()
    for rate in (10.0, 40.0, 20.0):
        results.add("A", "headrace-int4", sample(rate))
    results.add("A", "other", sample(5.0))
    results.add("B", "headrace-int4", sample(8.0))
    assert default_baseline(results) == "other"
    head, first, second, alone = table(results, "other")
    assert "of other" in head
    assert first.split()[:4] == ["A", "headrace-int4", "20.0", "40.0"]
    assert first.split()[-3:] == ["4.00", "0.25", "0.25"]
    assert second.split()[-3:] == ["1.00", "1.00", "1.00"]
    assert len(alone.split()) == 6  # nothing to compare with at B


def test_duels_are_of_the_same_weights_and_of_the_best() -> None:
    results = Results()
    rates = {"headrace-int4": 30.0, "headrace-bf16": 12.0, "llama-q4_1": 10.0, "vllm-bf16": 6.0, "llama-q4_0": 15.0}
    for name, rate in rates.items():
        results.add("C", name, sample(rate))
    results.add("D", "headrace-int4", sample(30.0))
    _, bf16, int4, best = duels(results)
    assert bf16.split()[:4] == ["C", "headrace-bf16", "/", "vllm-bf16"]
    assert bf16.split()[-3:] == ["2.00", "0.50", "0.50"]
    assert int4.split()[-3] == "3.00"
    assert best.split()[:5] == ["C", "headrace-int4", "/", "llama-q4_0", "(best)"]
    assert best.split()[-3] == "2.00"
    assert duels(Results()) == []


def test_shortened_runs_keep_the_concurrency() -> None:
    assert scaled(WORKLOADS["C"], 0.1) == 32
    assert scaled(WORKLOADS["C"], 1.0) == 64


def test_names_that_do_not_exist_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--modes", "int4,int2"])
    assert "int2" in capsys.readouterr().err
    assert parse(["--workloads", "A,C"]).workloads == ["A", "C"]


def test_a_server_is_started_until_it_answers_and_ended_afterwards(tmp_path: Path) -> None:
    server = Server("tiny", lambda port, _: [sys.executable, "-c", _SERVER, str(port)])
    with running(server, tmp_path) as live:
        assert live.model == "tiny"
        assert live.process_id in descendants(live.process_id)
        assert set(live.cpu_by_part()) == {"server"}
        url = f"{live.url}/models"
        assert "tiny" in get(url)
    with pytest.raises(OSError, match=r"."):
        get(url)


def test_a_server_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    server = Server("broken", lambda _port, _: [sys.executable, "-c", "raise SystemExit('no such model')"])
    with pytest.raises(ServerFailed, match="no such model"), running(server, tmp_path):
        pass


def test_the_front_door_report_says_what_the_way_costs() -> None:
    pair = Pair(
        engine_tokens_per_s=100.0,
        served_tokens_per_s=95.0,
        engine_ttft_ms=50.0,
        served_ttft_ms=58.0,
        engine_itl_ms=10.0,
        served_itl_ms=10.5,
        other_cores=0.1,
    )
    report = FrontDoor(pairs={"C": [pair]}, cpu_us_per_token={"worker": [900.0], "edge": [100.0]})
    text = str(report)
    assert "C: 95 of 100 output tokens/s, ratio 0.950; TTFT p50 50.0 +8.0 ms; ITL p50 10.00 +0.50 ms" in text
    assert "worker 900, edge 100" in text
