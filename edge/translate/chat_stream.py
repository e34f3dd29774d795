"""Chunks of a streamed chat: the role, echoed text, deltas, and the end of each choice."""

from __future__ import annotations

from common.events import ChoiceFinished, EngineRequest, PromptScored, Tokens, Usage
from common.tokenization.tokenizer import Tokenizer
from edge.openai.usage import usage_object
from edge.parsers.parts import Content, Part
from edge.translate.choice_fold import ChoiceFold
from edge.translate.chunk_writer import NO_DELTA, ROLE, ChunkWriter, choice_members, member
from edge.translate.logprobs import TokenNames, chat_entries
from edge.translate.presentation import Presentation


class ChatStream:
    """One chunk a delta. Log probabilities and token ids ride on the first chunk of their event."""

    def __init__(self, request: EngineRequest, presentation: Presentation, tokenizer: Tokenizer) -> None:
        self._request = request
        self._presentation = presentation
        self._names = TokenNames(tokenizer, as_ids=presentation.tokens_as_ids)
        self._writer = ChunkWriter(presentation, request.num_choices)
        self._folds = [ChoiceFold(presentation) for _ in range(request.num_choices)]
        self._has_begun = False
        shows_tokens = presentation.include_reasoning
        self._with_logprobs = presentation.logprobs is not None and shows_tokens
        self._with_ids = presentation.return_token_ids and shows_tokens
        self._is_plain = not (self._with_logprobs or self._with_ids or presentation.continuous_usage)
        # Nothing is looked for in the text, and nothing but it is shown: by far the most frequent kind of stream.
        self._is_verbatim = self._is_plain and all(fold.is_verbatim for fold in self._folds)
        self._cached_tokens = 0

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of the reasoning in all choices; None where no reasoning is looked for."""
        if not self._presentation.reasoning_format:
            return None
        return sum(fold.num_reasoning_tokens for fold in self._folds)

    def prompt_scored(self, event: PromptScored) -> list[bytes]:
        """Nothing: a streamed chat does not show the prompt's log probabilities."""
        return []

    def tokens(self, event: Tokens) -> list[bytes]:
        self._cached_tokens = event.cached_tokens or self._cached_tokens
        chunks = [] if self._has_begun else self._begin()
        if self._is_verbatim:
            return [*chunks, self._writer.content(event.choice, event.text)] if event.text else chunks
        parts = self._folds[event.choice].tokens(event.token_ids, event.text)
        if not self._is_plain:
            return chunks + self._full(event, parts)
        return chunks + [self._plain(event.choice, part) for part in parts]

    def finished(self, event: ChoiceFinished) -> list[bytes]:
        chunks = [] if self._has_begun else self._begin()
        fold = self._folds[event.choice]
        for part in fold.finish(event.text):
            delta = self._writer.delta(event.choice, part)
            chunks.append(self._writer.chat(event.choice, delta, of_chunk=self._running_usage(event.choice)))
        end = choice_members(finish_reason=fold.finish_reason(event.finish_reason), stop_reason=event.stop_reason)
        chunks.append(
            self._writer.chat(event.choice, NO_DELTA, of_choice=end, of_chunk=self._running_usage(event.choice))
        )
        return chunks

    def usage(self, usage: Usage) -> bytes:
        return self._writer.usage(usage_object(usage, self.reasoning_tokens))

    def _begin(self) -> list[bytes]:
        """The role of every choice, when the first output of any has come."""
        self._has_begun = True
        chunks = []
        for index in range(self._request.num_choices):
            extra = self._running_usage(index)
            if index == 0 and self._presentation.return_token_ids:
                extra += member("prompt_token_ids", self._request.prompts[0])
            chunks.append(self._writer.chat(index, ROLE, of_chunk=extra))
        if self._presentation.echo:
            chunks += [self._plain(index, Content(self._presentation.echo)) for index in range(len(chunks))]
        return chunks

    def _plain(self, index: int, part: Part) -> bytes:
        if isinstance(part, Content):
            return self._writer.content(index, part.text)
        return self._writer.chat(index, self._writer.delta(index, part))

    def _full(self, event: Tokens, parts: list[Part]) -> list[bytes]:
        """Chunks with everything that was asked for; a swallowed delta is empty, but its tokens are reported."""
        index = event.choice
        has_report = (self._with_logprobs and event.logprobs) or (self._with_ids and event.token_ids)
        deltas = [self._writer.delta(index, part) for part in parts] or ([NO_DELTA] if has_report else [])
        logprobs = None
        if self._with_logprobs and event.logprobs:
            content = chat_entries(self._names, event.token_ids, event.logprobs)
            logprobs = {"content": content, "refusal": None}
        report = choice_members(logprobs=logprobs, token_ids=event.token_ids if self._with_ids else None)
        usage = self._running_usage(index)
        return [
            self._writer.chat(index, delta, of_choice=b"" if i else report, of_chunk=usage)
            for i, delta in enumerate(deltas)
        ]

    def _running_usage(self, index: int) -> bytes:
        """Usage of this choice so far, where every chunk is to carry it."""
        if not self._presentation.continuous_usage:
            return b""
        prompt = self._request.prompts[index // self._request.n]
        running = Usage(
            prompt_tokens=len(prompt),
            completion_tokens=self._folds[index].num_tokens,
            cached_tokens=self._cached_tokens,
        )
        return member("usage", usage_object(running))
