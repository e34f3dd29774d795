"""Contenders in turn: starting and ending a server, medians, ratios."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import pytest

from bench.compare import Results, Sample, default_baseline, parse, ratios, scaled
from bench.front_door import FrontDoor, Pair
from bench.servers import Server, ServerFailed, descendants, get, running
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


def test_ratios_are_of_medians_and_refer_to_the_baseline() -> None:
    results = Results(start_s={"headrace-int4": [1.0], "other": [2.0]})
    for rate in (10.0, 40.0, 20.0):
        results.add("A", "headrace-int4", sample(rate))
    results.add("A", "other", sample(5.0))
    results.add("B", "headrace-int4", sample(8.0))
    assert default_baseline(results) == "other"
    head, first, second, alone = ratios(results, "other")
    assert "of other" in head
    assert first.split()[:3] == ["A", "headrace-int4", "20.0"]
    assert first.split()[-3:] == ["4.00", "0.25", "0.25"]
    assert second.split()[-3:] == ["1.00", "1.00", "1.00"]
    assert len(alone.split()) == 5  # nothing to compare with at B


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
