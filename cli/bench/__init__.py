"""``headrace bench``: measure a server, the engine by itself, and one engine step by part."""

import engine_worker  # noqa: F401 -- says how threads wait, which has to happen before a module here loads torch
