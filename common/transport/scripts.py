"""The Lua scripts: text, hash, and whether the prelude stands before them.

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


def _load(name: str, *, with_prelude: bool = False) -> Script:
    folder = resources.files("common.transport") / "lua"
    text = (folder / f"{name}.lua").read_text(encoding="utf-8")
    if with_prelude:
        text = (folder / "prelude.lua").read_text(encoding="utf-8") + text
    # The server names scripts by SHA-1; nothing secret is hashed.
    return Script(name=name, text=text, sha=hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


SUBMIT = _load("submit", with_prelude=True)
CLAIM = _load("claim")
OWN = _load("own", with_prelude=True)
APPEND = _load("append", with_prelude=True)
CANCEL = _load("cancel", with_prelude=True)
CONSUMERS = _load("consumers")
TAKEOVER = _load("takeover")
RELEASE = _load("release")
FORGIVE = _load("forgive")
GIVE_UP = _load("give_up", with_prelude=True)
RENEW = _load("renew")
ATTACH = _load("attach")
SEEN = _load("seen")
LENGTHS = _load("lengths")
PLACE = _load("place", with_prelude=True)
