"""A worker that one kind of prompt kills, as a broken kernel would: ``python -m tests.faults.poison_worker``.

Its process ends without a word in the first step that computes a prompt with `POISON` in it.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from engine_worker.__main__ import main
from engine_worker.runner.model_runner import ModelRunner
from engine_worker.step import StepPlan
from tests.integration.edge import letters_model

POISON = "☠"


def is_poisoned(plan: StepPlan, token_ids: list[int]) -> bool:
    """Whether any sequence of the plan has the tokens in a row."""
    for item in plan.scheduled:
        prompt = item.sequence.tokens[: item.sequence.num_prompt_tokens].tolist()
        if any(prompt[i : i + len(token_ids)] == token_ids for i in range(len(prompt))):
            return True
    return False


def poison_token_ids() -> list[int]:
    return list(letters_model.tokenizer().encode(POISON))


class Fragile:
    """The real runner, until it is fed the poison."""

    def __init__(self) -> None:
        self._execute = ModelRunner.execute
        self._token_ids = poison_token_ids()

    def __call__(self, runner: ModelRunner, plan: StepPlan) -> Any:
        if is_poisoned(plan, self._token_ids):
            os._exit(139)
        return self._execute(runner, plan)


if __name__ == "__main__":
    fragile = Fragile()
    ModelRunner.execute = lambda runner, plan: fragile(runner, plan)  # type: ignore[method-assign]
    sys.exit(main(sys.argv[1:]))
