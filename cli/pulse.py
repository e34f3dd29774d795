"""Whether worker processes answer at all. One whose interpreter is held by native code for good does not, and only its
parent can end it: every thread of its own stands still."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

_STOPPED: Final = frozenset("Tt")  # by a signal or a debugger: somebody wants it so


class Pulse:
    """Asks ``/health`` of each listener, from a thread of its own between `start` and `stop`."""

    def __init__(self, urls: Mapping[str, str], *, interval_s: float = 5.0, patience: int = 12) -> None:
        """``urls``: by the name of the process. Silent is who has let ``patience`` questions in a row wait for
        ``interval_s`` each. Who does not listen (it starts, or has ended) is not silent."""
        self._urls = urls
        self._interval_s = interval_s
        self._patience = patience
        self._unanswered = dict.fromkeys(urls, 0)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def take_silent(self, pids: Mapping[str, int]) -> list[str]:
        """Names of those that are silent and not stopped on purpose; they count from the beginning again."""
        silent = [name for name, count in self._unanswered.items() if count >= self._patience]
        for name in silent:
            self._unanswered[name] = 0
        return [name for name in silent if name in pids and not _is_stopped(pids[name])]

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            for name, url in self._urls.items():
                self._unanswered[name] = 0 if self._answers(url) else self._unanswered[name] + 1

    def _answers(self, url: str) -> bool:
        """False only for who listens and says nothing."""
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=self._interval_s)
        try:
            connection.request("GET", "/health")
            connection.getresponse().read()  # closing with something unread would reset the connection
        except TimeoutError:
            return False
        except (OSError, http.client.HTTPException):
            return True
        finally:
            connection.close()
        return True


def _is_stopped(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in _STOPPED
