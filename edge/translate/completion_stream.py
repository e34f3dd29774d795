"""Chunks of a streamed completion: echoed prompts, text, and the end of each choice."""

from __future__ import annotations

from common.events import ChoiceFinished, EngineRequest, PromptScored, TokenLogprobs, Tokens, Usage
from common.tokenization.tokenizer import Tokenizer
from edge.openai.completions import CompletionLogprobs
from edge.openai.usage import usage_object
from edge.translate.choice_fold import FINISH_REASONS
from edge.translate.chunk_writer import ChunkWriter, choice_members, member
from edge.translate.logprobs import CompletionEntries, TokenNames, joined
from edge.translate.presentation import Presentation


class EchoedPrompts:
    """What precedes the output of each choice: the prompt's text, and its log probabilities if these are wanted."""

    def __init__(self, request: EngineRequest, presentation: Presentation) -> None:
        self._request = request
        self._presentation = presentation
        self._scores: dict[int, tuple[TokenLogprobs | None, ...]] = {}

    def scored(self, event: PromptScored) -> None:
        self._scores[event.prompt_index] = event.logprobs

    def text(self, choice: int) -> str:
        echoed = self._presentation.echo_prompts
        return echoed[choice // self._request.n] if echoed else ""

    def logprobs(self, choice: int, entries: CompletionEntries) -> CompletionLogprobs | None:
        """Lists for the prompt's tokens, to be put before those of the output."""
        if not self._presentation.echo_prompts or self._presentation.logprobs is None:
            return None
        prompt = self._request.prompts[choice // self._request.n]
        scores = self._scores.get(choice // self._request.n) or (None,) * len(prompt)
        return entries.lists(prompt, scores)


class CompletionStream:
    """One chunk an event. What was echoed is glued to a choice's first chunk."""

    def __init__(self, request: EngineRequest, presentation: Presentation, tokenizer: Tokenizer) -> None:
        names = TokenNames(tokenizer, as_ids=presentation.tokens_as_ids)
        self._request = request
        self._presentation = presentation
        self._writer = ChunkWriter(presentation, request.num_choices)
        self._echoed = EchoedPrompts(request, presentation)
        self._entries = [CompletionEntries(names) for _ in range(request.num_choices)]
        self._num_tokens = [0] * request.num_choices
        self._has_begun = [False] * request.num_choices
        self._cached_tokens = 0
        self._is_plain = not (
            presentation.logprobs is not None
            or presentation.return_token_ids
            or presentation.continuous_usage
            or presentation.echo_prompts
        )

    def prompt_scored(self, event: PromptScored) -> list[bytes]:
        self._echoed.scored(event)
        return []

    def tokens(self, event: Tokens) -> list[bytes]:
        if self._is_plain:
            return [self._writer.text(event.choice, event.text)] if event.text else []
        index, hidden = event.choice, self._presentation.hide_output
        self._num_tokens[index] += len(event.token_ids)
        self._cached_tokens = event.cached_tokens or self._cached_tokens
        prefix, lists = self._prefix(index)
        text = prefix if hidden else prefix + event.text
        if self._presentation.logprobs is not None and event.logprobs and not hidden:
            output = self._entries[index].lists(event.token_ids, event.logprobs)
            lists = output if lists is None else joined(lists, output)
        with_ids = self._presentation.return_token_ids and not hidden
        if not text and lists is None and not with_ids:
            return []
        report = choice_members(logprobs=lists, token_ids=event.token_ids if with_ids else None)
        return [self._written(index, text, report)]

    def finished(self, event: ChoiceFinished) -> list[bytes]:
        prefix, lists = self._prefix(event.choice)
        text = prefix if self._presentation.hide_output else prefix + event.text
        end = choice_members(
            logprobs=lists, finish_reason=FINISH_REASONS[event.finish_reason], stop_reason=event.stop_reason
        )
        return [self._written(event.choice, text, end)]

    def usage(self, usage: Usage) -> bytes:
        return self._writer.usage(usage_object(usage))

    def _prefix(self, index: int) -> tuple[str, CompletionLogprobs | None]:
        """Echoed text and its log probabilities, before a choice's first chunk only."""
        if self._has_begun[index]:
            return "", None
        return self._echoed.text(index), self._echoed.logprobs(index, self._entries[index])

    def _written(self, index: int, text: str, of_choice: bytes) -> bytes:
        prompt = self._request.prompts[index // self._request.n]
        if not self._has_begun[index] and self._presentation.return_token_ids:
            of_choice += member("prompt_token_ids", prompt)
        self._has_begun[index] = True
        of_chunk = b""
        if self._presentation.continuous_usage:
            running = Usage(
                prompt_tokens=len(prompt),
                completion_tokens=self._num_tokens[index],
                cached_tokens=self._cached_tokens,
            )
            of_chunk = member("usage", usage_object(running))
        return self._writer.completion(index, text, of_choice=of_choice, of_chunk=of_chunk)
