"""``headrace serve`` as a user meets it: started, tried, hurt, stopped. All processes and the model are real."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.demo_model import demo_model_dir
from tests.integration.serve.served import ROOT, Served, eventually, is_alive

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]


def ask(facts: dict[str, Any]) -> tuple[str, str]:
    """A completion and the id of its request."""
    body = {"model": facts["model"], "prompt": "One, two,", "max_tokens": 4, "temperature": 0}
    request = urllib.request.Request(
        f"{facts['url']}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=200) as answer:
        text: str = json.loads(answer.read())["choices"][0]["text"]
        return text, answer.headers["x-request-id"]


def complete(facts: dict[str, Any]) -> str:
    return ask(facts)[0]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model = str(demo_model_dir())
    served = Served(
        tmp_path_factory.mktemp("serve") / "state", model, "--served-model-name", "demo", "--port", "0",
        "--host", "127.0.0.1", "--drain-notice-s", "0.1", "--no-worker-grace-s", "600",
    )  # fmt: skip
    yield served
    served.process.kill()
    served.process.wait()


def test_it_says_where_it_is_and_the_line_to_try_works(served: Served) -> None:
    facts = served.facts()
    assert f"Headrace serves demo at {facts['url']}/v1" in served.said()
    (line,) = re.findall(r"^  curl (?:.*\\\n)*.*", served.text(), re.MULTILINE)
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=True, timeout=180)
    assert done.stdout.strip().endswith("data: [DONE]")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_grammar_that_grows_too_large_in_mid_answer_is_the_client_s_mistake_and_tried_once(
    served: Served, stream: bool
) -> None:
    facts = served.facts()
    late = {"structured_outputs": {"grammar": 'start: /[a-z]{8}/ "!" "a"{1000000}'}}
    before = failures(facts)

    def ask(client: openai.OpenAI) -> None:
        answer = client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": "x"}], max_tokens=40, stream=stream, extra_body=late
        )
        _ = list(answer)

    with (
        openai.OpenAI(base_url=f"{facts['url']}/v1", api_key="x", max_retries=3) as client,
        pytest.raises(openai.APIError) as caught,
    ):
        ask(client)
    assert isinstance(caught.value, openai.BadRequestError) or stream
    assert (caught.value.code, caught.value.param) == ("invalid_request", "structured_outputs.grammar")
    assert "too large to be followed" in caught.value.message
    eventually(lambda: failures(facts) == before + 1, served.text)
    assert complete(facts), "others are not concerned"


def failures(facts: dict[str, Any]) -> float:
    with urllib.request.urlopen(f"{facts['url']}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    counts = re.findall(r'^headrace_edge_requests_total\{.*outcome="error"\} (\S+)$', page, re.MULTILINE)
    return sum(map(float, counts))


def test_one_page_shows_the_metrics_of_edge_and_workers(served: Served) -> None:
    facts = served.facts()
    complete(facts)
    with urllib.request.urlopen(f"{facts['url']}/metrics", timeout=60) as answer:
        page = answer.read().decode()
    assert 'vllm:num_requests_running{engine="0",model_name="demo"}' in page
    assert re.search(r'^headrace_edge_requests_total\{endpoint="completion.*outcome="ok"\}', page, re.MULTILINE)


def test_a_second_serve_on_the_same_state_is_refused_in_one_line(served: Served) -> None:
    served.facts()
    second = subprocess.run(
        [sys.executable, "-m", "cli", "serve", "--state-dir", str(served.state_dir), "--port", "0"],
        capture_output=True, text=True, check=False, cwd=ROOT, timeout=180,
    )  # fmt: skip
    assert second.returncode == 2
    assert second.stderr.splitlines() == [
        f"headrace serve: state_dir: {served.state_dir} is in use by another headrace "
        f"(pid {served.process.pid}); stop it or give --state-dir"
    ]


@pytest.mark.parametrize("child", ["worker-1", "edge-1"])
def test_a_killed_child_is_restarted_and_says_so_and_all_goes_on(served: Served, child: str) -> None:
    facts = served.facts()
    before = served.pid(child)
    os.kill(before, signal.SIGKILL)
    if child == "worker-1":
        assert complete(facts), "it waits for the next one: nobody is refused meanwhile"
    eventually(lambda: f"{child} died (killed by SIGKILL), restarting in" in served.text(), served.text)
    eventually(
        lambda: (served.state_dir / "run" / f"{child}.pid").exists() and served.pid(child) != before, served.text
    )
    eventually(lambda: served.facts()["children"].get(child) == served.pid(child), served.text)

    def answers() -> bool:
        try:
            return bool(complete(facts))
        except OSError:
            return False

    eventually(answers, served.text)


def test_a_killed_log_is_restarted_with_everything_in_it(served: Served) -> None:
    facts = served.facts()
    log = int(_log_pid(served))
    os.kill(log, signal.SIGKILL)
    eventually(lambda: "the embedded server died, restarting it" in served.text(), served.text)

    def answers() -> bool:
        try:
            return bool(complete(facts))
        except OSError:
            return False

    eventually(answers, served.text)


def test_a_stop_ends_all_children_in_order_and_leaves_nothing(served: Served) -> None:
    text, request_id = ask(served.facts())
    pids = [served.pid("worker-1"), served.pid("edge-1"), int(_log_pid(served))]
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(180) == 0
    assert [pid for pid in pids if is_alive(pid)] == []
    assert served.said()[-1] == "headrace serve: stopping"
    assert "Traceback" not in served.text()
    edge, worker = served.text().rindex("Finished server process"), served.text().rindex('"drained"')
    assert edge < worker
    assert not (served.state_dir / "serve.json").exists()
    for _ in range(2):  # its log is started to be read, and stopped again
        inspected = subprocess.run(
            [sys.executable, "-m", "cli", "inspect", request_id, "--state-dir", str(served.state_dir)],
            capture_output=True, text=True, check=True, cwd=ROOT, timeout=60,
        )  # fmt: skip
        assert inspected.stdout.rstrip("\n").endswith(text)


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (("no/such/model", "--port", "0"), 1, "worker-1 could not be started: there is no model at 'no/such/model'"),
        (("--port", "TAKEN"), 2, "cannot be listened on"),
        (("--port", "0", "--redis-url", "redis://127.0.0.1:1/0"), 1, "the log cannot be reached"),
        (
            ("MODEL", "--port", "0", "--kv-cache-memory-bytes", "999999999999999"),
            1,
            "worker-1 could not be started: kv_cache_memory_bytes asks for",
        ),
    ],
)
def test_what_cannot_start_says_why_and_leaves_nothing(
    tmp_path: Path, argv: tuple[str, ...], code: int, reason: str
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        real = {"TAKEN": str(taken.getsockname()[1]), "MODEL": str(demo_model_dir())}
        served = Served(tmp_path / "state", "--host", "127.0.0.1", *(real.get(word, word) for word in argv))
        assert served.process.wait(240) == code
    assert reason in served.said()[-1]
    assert "Traceback" not in served.text()
    run = tmp_path / "state" / "run"
    assert not run.exists() or list(run.iterdir()) == []


def _log_pid(served: Served) -> str:
    """The embedded server is the child of serve that is no Python."""
    children = (
        Path(f"/proc/{served.process.pid}/task/{served.process.pid}/children").read_text(encoding="ascii").split()
    )
    ours = {str(served.pid("worker-1")), str(served.pid("edge-1"))}
    (log,) = [pid for pid in children if pid not in ours]
    return log
