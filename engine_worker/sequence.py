"""A sequence: one choice of one request while it lives in the engine."""

from __future__ import annotations

from enum import Enum, auto
from typing import Final

import numpy as np
import numpy.typing as npt

from common.events import FinishReason, SamplingParams

NO_ROW: Final = None


class SequenceStatus(Enum):
    """WAITING -> RUNNING -> FINISHED; preemption leads from RUNNING back to WAITING."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens known and tokens computed of one choice. Owned and changed by the engine thread alone.

    ``tokens[:num_tokens]`` are the prompt and the output so far; the buffer is allocated once for the longest the
    sequence can get. ``num_computed_tokens`` of them have their keys and values in the cache; a step lets the
    computed tokens catch up with the known ones and, when they have, draws one more::

        tokens   [ prompt ............ | output ...... | free ... ]
                 0        num_prompt_tokens       num_tokens
                 0 ... num_computed_tokens ...............^
    """

    __slots__ = (
        "adapter",
        "arrival_s",
        "block_hashes",
        "block_table_row",
        "cache_salt",
        "choice",
        "finish_reason",
        "num_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_scored_tokens",
        "num_tokens",
        "priority",
        "prompt_index",
        "request_id",
        "sampling",
        "seq_id",
        "status",
        "stop_reason",
        "tenant",
        "tokens",
        "weight",
    )

    def __init__(  # noqa: PLR0913 -- every fact of one choice, by name
        self,
        *,
        seq_id: int,
        request_id: str,
        choice: int,
        prompt_token_ids: tuple[int, ...],
        sampling: SamplingParams,
        max_model_len: int,
        output_token_ids: tuple[int, ...] = (),
        prompt_index: int = 0,
        priority: int = 0,
        arrival_s: float = 0.0,
        tenant: str = "",
        weight: float = 1.0,
        cache_salt: str = "",
        adapter: str = "",
        scores_prompt: bool | None = None,
    ) -> None:
        num_prompt = len(prompt_token_ids)
        num_known = num_prompt + len(output_token_ids)
        capacity = max(num_known, min(num_prompt + sampling.max_tokens, max_model_len))
        self.seq_id = seq_id
        self.request_id = request_id
        self.choice = choice
        self.prompt_index = prompt_index
        self.sampling = sampling
        self.tokens: npt.NDArray[np.int32] = np.zeros(capacity, dtype=np.int32)
        self.tokens[:num_prompt] = prompt_token_ids
        self.tokens[num_prompt:num_known] = output_token_ids
        self.num_prompt_tokens = num_prompt
        self.num_tokens = num_known
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0  # of the prompt, found in the prefix cache at first admission
        self.num_preemptions = 0
        self.priority = priority
        self.arrival_s = arrival_s
        self.tenant = tenant
        self.weight = weight
        self.cache_salt = cache_salt
        self.adapter = adapter
        # Prompt tokens whose log probability is known: 1 .. num_prompt_tokens (the first has none). By default a
        # sequence scores its prompt when the request asks for it; pass False for the siblings of a choice that does,
        # and on a resume when the log already holds the scores.
        wants_scores = sampling.prompt_logprobs is not None if scores_prompt is None else scores_prompt
        self.num_scored_tokens = min(1, num_prompt) if wants_scores else num_prompt
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        # Kept by the KV cache manager:
        self.block_table_row: int | None = NO_ROW  # row of KvCacheManager.block_tables while it has blocks
        self.num_blocks = 0
        self.block_hashes: list[bytes] = []  # chained hashes of the full blocks of tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def capacity(self) -> int:
        """Tokens this sequence may hold at most (prompt + max_tokens, cut at the model's context)."""
        return len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of prompt tokens are still to be computed."""
        return self.num_scored_tokens < self.num_prompt_tokens

    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.tokens[self.num_prompt_tokens : self.num_tokens].tolist())

    def append(self, token_id: int) -> None:
        """One more known token. The caller has checked that there is room (``num_tokens < capacity``)."""
        self.tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.request_id!r}[{self.choice}], {self.status.name}, "
            f"prompt={self.num_prompt_tokens}, tokens={self.num_tokens}, computed={self.num_computed_tokens}, "
            f"blocks={self.num_blocks})"
        )
