"""A bench that is ended from outside leaves no server behind. All processes are real."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.serve.served import ROOT, is_alive

pytestmark = [pytest.mark.e2e]

BENCH = """
import sys, time
from contextlib import ExitStack
from pathlib import Path
from bench import servers
from bench.ending import end_in_order

end_in_order()
servers._first_answer = lambda *_: "model"
server = servers.Server("sleeper", lambda port, directory: (sys.executable, "-c", "import time; time.sleep(600)"))
with servers.running(server, Path(sys.argv[1])) as running:
    print(running.process_id, flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGTERM, 128 + signal.SIGTERM), (signal.SIGHUP, 128 + signal.SIGHUP), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_a_bench_that_is_ended_takes_its_server_with_it(tmp_path: Path, number: signal.Signals, code: int) -> None:
    command = [sys.executable, "-c", BENCH, str(tmp_path / "server")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as bench:
        assert bench.stdout is not None
        server = int(bench.stdout.readline())
        assert is_alive(server)
        bench.send_signal(number)
        assert bench.wait(60) == code
    deadline = time.monotonic() + 60
    while is_alive(server):
        assert time.monotonic() < deadline, "the server outlives its bench"
        time.sleep(0.05)
