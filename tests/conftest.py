"""What every test shares."""

from __future__ import annotations

import sys

import hypothesis
import structlog

# The same examples in every run, so that a change that is judged fails by its own doing; new ones are looked for with
# --hypothesis-profile=explore. Shared machines make single examples slow: the time limit of a whole test is pytest's.
_SLOW = (hypothesis.HealthCheck.too_slow,)
hypothesis.settings.register_profile(
    "headrace", deadline=None, derandomize=True, database=None, suppress_health_check=_SLOW
)
hypothesis.settings.register_profile(
    "explore", deadline=None, derandomize=False, print_blob=True, suppress_health_check=_SLOW
)
hypothesis.settings.load_profile("headrace")

# As in a process of Headrace. The library's own choice needs seconds to draw a traceback with its variables.
_plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
structlog.configure(processors=[*structlog.get_config()["processors"][:-1], _plain])


def pytest_runtest_setup() -> None:
    """What a test draws does not depend on which tests ran before it."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(0)
