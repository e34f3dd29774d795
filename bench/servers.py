"""Servers to be compared: how each is started, starting one, and ending it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal

from cli.bench.machine import cpu_s
from cli.serve import free_port
from cli.supervisor import die_with

_START_S: Final = 600.0  # vLLM compiles for minutes the first time
_STOP_S: Final = 30.0
_HOST: Final = "127.0.0.1"


class ServerFailed(Exception):
    """A server ended or did not answer in time; the text holds its last words."""


@dataclass(frozen=True, slots=True)
class Server:
    """How to start one. ``command``: from a port and a directory of its own to the words of the command."""

    name: str
    command: Callable[[int, Path], Sequence[str]]
    environ: Mapping[str, str] = field(default_factory=dict)  # where our own environment does not say otherwise


@dataclass(frozen=True, slots=True)
class Running:
    """A server that has answered a request."""

    url: str  # up to and including /v1
    model: str
    process_id: int
    start_s: float  # from starting it to its first answer

    def cpu_by_part(self) -> dict[str, float]:
        """CPU seconds so far of the process and its descendants, by what they are."""
        parts: dict[str, float] = {}
        for process_id in descendants(self.process_id):
            part = _part(process_id)
            parts[part] = parts.get(part, 0.0) + cpu_s(process_id)
        return parts


@dataclass(frozen=True, slots=True)
class Format:
    """How Headrace keeps weights and KV cache."""

    quantization: Literal["none", "int8", "int4"]
    kv_cache_dtype: Literal["auto", "int8"] = "auto"


FORMATS: Final[dict[str, Format]] = {
    "int4": Format("int4"),
    "int8": Format("int8"),
    "bf16": Format("none"),
    "int4-kv8": Format("int4", "int8"),
    "int8-kv8": Format("int8", "int8"),
}


def headrace(mode: str, model_dir: Path) -> Server:
    """``headrace serve`` as it is by default, but for its format: a name of `FORMATS`."""
    known = FORMATS[mode]
    formats = ["--quantization", known.quantization, "--kv-cache-dtype", known.kv_cache_dtype]

    def command(port: int, directory: Path) -> list[str]:
        options = [*formats, "--port", str(port), "--state-dir", str(directory)]
        return [sys.executable, "-m", "cli.main", "serve", str(model_dir), *options]

    return Server(f"headrace-{mode}", command)


def llama_server(name: str, binary: Path, gguf: Path) -> Server:
    """llama.cpp's own server on all cores, 32 slots of 2,048 tokens."""
    threads = _num_cores()
    options = ["-c", "65536", "-np", "32", "--cont-batching", "-t", threads, "-tb", threads]

    def command(port: int, _: Path) -> list[str]:
        return [str(binary), "-m", str(gguf), "--host", _HOST, "--port", str(port), *options]

    return Server(name, command)


def llama_cpp_python(gguf: Path) -> Server:
    """The server of llama-cpp-python, which answers one request at a time."""
    threads = _num_cores()
    options = ["--n_ctx", "4096", "--n_threads", threads, "--n_threads_batch", threads]

    def command(port: int, _: Path) -> list[str]:
        where = ["--host", _HOST, "--port", str(port)]
        return [sys.executable, "-m", "llama_cpp.server", "--model", str(gguf), *where, *options]

    return Server("llama-cpp-python", command)


def vllm(binary: Path, hf_dir: Path) -> Server:
    """vLLM's CPU build as its documentation recommends: tcmalloc and Intel's OpenMP preloaded where they are found.

    It keeps one core free of computing by itself; VLLM_CPU_OMP_THREADS_BIND in the environment says otherwise.
    """
    options = ["--dtype", "bfloat16", "--max-model-len", "4096", "--max-num-seqs", "64", "--enable-prefix-caching"]
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    preloaded = [*sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4")), binary.parent.parent / "lib/libiomp5.so"]
    found = ":".join(str(library) for library in preloaded if library.is_file())

    def command(port: int, _: Path) -> list[str]:
        return [str(binary), "serve", str(hf_dir), "--host", _HOST, "--port", str(port), *options]

    return Server("vllm-bf16", command, {**offline, "LD_PRELOAD": found, "VLLM_CPU_KVCACHE_SPACE": "2"})


def transformers_serve(binary: Path, hf_dir: Path) -> Server:
    """`transformers serve` with its continuous batching."""
    options = ["--continuous-batching", "--dtype", "bfloat16", "--device", "cpu"]

    def command(port: int, _: Path) -> list[str]:
        return [str(binary), "serve", str(hf_dir), "--host", _HOST, "--port", str(port), *options]

    return Server("transformers-bf16", command, {"HF_HUB_OFFLINE": "1"})


@contextmanager
def running(server: Server, directory: Path) -> Iterator[Running]:
    """Start ``server``, wait for its first answer, and end it with all its processes. Raises `ServerFailed`."""
    directory.mkdir(parents=True, exist_ok=True)
    port = free_port(_HOST)
    url = f"http://{_HOST}:{port}/v1"
    log = directory / "output.log"
    own = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    started = time.perf_counter()
    with log.open("wb") as output:
        process = subprocess.Popen(
            server.command(port, directory),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),  # should we be killed
            env={**server.environ, **own},
        )
    try:
        model = _first_answer(process, url, log)
        yield Running(url, model, process.pid, time.perf_counter() - started)
    finally:
        _end(process)


def descendants(process_id: int) -> list[int]:
    """A process and all below it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
        except OSError:
            continue  # ended meanwhile
        children.setdefault(parent, []).append(int(entry.name))
    found = [process_id]
    for one in found:
        found += children.get(one, [])
    return found


def post(url: str, body: Mapping[str, Any]) -> Any:
    """JSON of a 200. Raises OSError (with HTTP errors) and ValueError."""
    request = urllib.request.Request(
        url, data=json.dumps(body).encode(), headers={"Content-Type": "application/json"}, method="POST"
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def get(url: str) -> str:
    """Body of a 200. Raises OSError."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        body: bytes = answer.read()
        return body.decode()


def _first_answer(process: subprocess.Popen[bytes], url: str, log: Path) -> str:
    deadline = time.monotonic() + _START_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            model: str = json.loads(get(f"{url}/models"))["data"][0]["id"]
            post(f"{url}/completions", {"model": model, "prompt": "Hello", "max_tokens": 1})
        except (urllib.error.URLError, OSError, ValueError, LookupError):
            time.sleep(0.1)
        else:
            return model
    raise ServerFailed(f"no answer from {url}: {log.read_text(errors='replace')[-2000:]}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_S)
    finally:  # also when we are interrupted while it takes its time
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _part(process_id: int) -> str:
    try:
        words = Path(f"/proc/{process_id}/cmdline").read_text(errors="replace").replace("\0", " ")
    except OSError:
        return "ended"
    known = {"engine_worker": "worker", "-m edge": "edge", "valkey-server": "log", "redis-server": "log"}
    return next((part for word, part in known.items() if word in words), "server")


def _num_cores() -> str:
    return str(len(os.sched_getaffinity(0)))
