"""The Lua scripts: text, hash, and which shared parts stand before them.

Every script takes the full names of its keys, all of one partition (one hash slot), may be repeated (except `CLAIM`),
and answers with codes instead of errors; each file states its keys, arguments and reply at the top.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources


@dataclass(frozen=True, slots=True)
class Script:
    """One script as the server gets it."""

    name: str
    text: str
    sha: str


def _load(*names: str) -> Script:
    """``names``: shared parts, then the script itself."""
    folder = resources.files("common.transport") / "lua"
    text = "".join((folder / f"{name}.lua").read_text(encoding="utf-8") for name in names)
    # The server names scripts by SHA-1; nothing secret is hashed.
    return Script(name=names[-1], text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


SUBMIT = _load("prelude", "backlog", "submit")
CLAIM = _load("backlog", "claim")
OWN = _load("prelude", "backlog", "own")
APPEND = _load("prelude", "append")
CANCEL = _load("prelude", "backlog", "cancel")
CONSUMERS = _load("consumers")
TAKEOVER = _load("takeover")
RELEASE = _load("release")
FORGIVE = _load("forgive")
GIVE_UP = _load("prelude", "backlog", "give_up")
RENEW = _load("renew")
ATTACH = _load("attach")
SEEN = _load("seen")
LENGTHS = _load("lengths")
PLACE = _load("prelude", "backlog", "place")
