"""Plain answers: the same folds as the streams, collected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from common.events import ChoiceFinished, EngineRequest, PromptScored, Tokens, Usage
from common.tokenization.tokenizer import Tokenizer
from edge.openai.chat import AssistantMessage, ChatChoice, ChatCompletion, ChatLogprobs, FunctionCall, ToolCall
from edge.openai.completions import Completion, CompletionChoice, CompletionLogprobs
from edge.openai.usage import usage_object
from edge.parsers.parts import CallArguments, CallStarted, Content, Part, Reasoning
from edge.translate.choice_fold import FINISH_REASONS, ChoiceFold, call_id
from edge.translate.completion_stream import EchoedPrompts
from edge.translate.logprobs import CompletionEntries, TokenNames, chat_entries, joined, prompt_entries
from edge.translate.presentation import Presentation


@dataclass(slots=True)
class _Collected:
    """One choice of a chat so far."""

    content: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[int, str, list[str]]] = field(default_factory=list)  # number, name, fragments of arguments
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Content(text):
                    self.content.append(text)
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStarted(call, name):
                    self.calls.append((call, name, []))
                case CallArguments(_, fragment):
                    self.calls[-1][2].append(fragment)


class ChatAnswer:
    """chat.completion."""

    def __init__(self, request: EngineRequest, presentation: Presentation, tokenizer: Tokenizer) -> None:
        self._request = request
        self._presentation = presentation
        self._names = TokenNames(tokenizer, as_ids=presentation.tokens_as_ids)
        self._folds = [ChoiceFold(presentation) for _ in range(request.num_choices)]
        self._choices = [_Collected() for _ in range(request.num_choices)]
        self._prompt_scores: PromptScored | None = None

    def prompt_scored(self, event: PromptScored) -> None:
        self._prompt_scores = event

    def tokens(self, event: Tokens) -> None:
        choice = self._choices[event.choice]
        choice.add(self._folds[event.choice].tokens(event.token_ids, event.text))
        if not self._presentation.include_reasoning:
            return
        choice.token_ids += event.token_ids
        if self._presentation.logprobs is not None:
            choice.logprobs += chat_entries(self._names, event.token_ids, event.logprobs)

    def finished(self, event: ChoiceFinished) -> None:
        choice, fold = self._choices[event.choice], self._folds[event.choice]
        choice.add(fold.finish(event.text))
        choice.finish_reason = fold.finish_reason(event.finish_reason)
        choice.stop_reason = event.stop_reason

    def body(self, usage: Usage) -> bytes:
        shown = self._presentation
        reasoning = sum(fold.num_reasoning_tokens for fold in self._folds) if shown.reasoning_format else None
        scores = self._prompt_scores
        prompt = self._request.prompts[0]
        return msgspec.json.encode(
            ChatCompletion(
                id=shown.response_id,
                created=shown.created,
                model=shown.model,
                choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
                usage=usage_object(usage, reasoning),
                system_fingerprint=shown.system_fingerprint,
                prompt_logprobs=_raw(prompt_entries(self._names, prompt, scores.logprobs))
                if shown.prompt_logprobs and scores is not None
                else UNSET,
                prompt_token_ids=list(prompt) if shown.return_token_ids else UNSET,
            )
        )

    def _choice(self, index: int, choice: _Collected) -> ChatChoice:
        shown = self._presentation
        calls = [
            ToolCall(id=call_id(shown, index, call), function=FunctionCall(name=name, arguments="".join(fragments)))
            for call, name, fragments in choice.calls
        ]
        text = shown.echo + "".join(choice.content)
        is_free = shown.tool_choice not in ("required", "named")  # a forced call has "" beside it, as OpenAI's has
        reasoning = "".join(choice.reasoning) or UNSET
        return ChatChoice(
            index=index,
            message=AssistantMessage(
                content=text or (None if calls and is_free else ""),
                reasoning=reasoning,
                reasoning_content=reasoning,
                tool_calls=calls or UNSET,
            ),
            logprobs=ChatLogprobs(content=[_raw(entry) for entry in choice.logprobs])
            if shown.logprobs is not None
            else None,
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if shown.return_token_ids else UNSET,
        )


class CompletionAnswer:
    """text_completion."""

    def __init__(self, request: EngineRequest, presentation: Presentation, tokenizer: Tokenizer) -> None:
        self._request = request
        self._presentation = presentation
        self._names = TokenNames(tokenizer, as_ids=presentation.tokens_as_ids)
        self._echoed = EchoedPrompts(request, presentation)
        self._texts: list[list[str]] = [[] for _ in range(request.num_choices)]
        self._tokens: list[list[Tokens]] = [[] for _ in range(request.num_choices)]
        self._ends: dict[int, ChoiceFinished] = {}
        self._prompt_scores: dict[int, PromptScored] = {}

    def prompt_scored(self, event: PromptScored) -> None:
        self._echoed.scored(event)
        self._prompt_scores[event.prompt_index] = event

    def tokens(self, event: Tokens) -> None:
        self._texts[event.choice].append(event.text)
        self._tokens[event.choice].append(event)

    def finished(self, event: ChoiceFinished) -> None:
        self._texts[event.choice].append(event.text)
        self._ends[event.choice] = event

    def body(self, usage: Usage) -> bytes:
        shown = self._presentation
        return msgspec.json.encode(
            Completion(
                id=shown.response_id,
                created=shown.created,
                model=shown.model,
                choices=[self._choice(index) for index in range(self._request.num_choices)],
                usage=usage_object(usage),
                system_fingerprint=shown.system_fingerprint,
            )
        )

    def _choice(self, index: int) -> CompletionChoice:
        shown, end = self._presentation, self._ends[index]
        output = [] if shown.hide_output else self._tokens[index]
        text = "" if shown.hide_output else "".join(self._texts[index])
        prompt_index = index // self._request.n
        prompt = self._request.prompts[prompt_index]
        scores = self._prompt_scores.get(prompt_index)
        return CompletionChoice(
            index=index,
            text=self._echoed.text(index) + text,
            logprobs=None if shown.logprobs is None else self._logprobs(index, output),
            finish_reason=FINISH_REASONS[end.finish_reason],
            stop_reason=end.stop_reason,
            prompt_logprobs=_raw(prompt_entries(self._names, prompt, scores.logprobs))
            if shown.prompt_logprobs and scores is not None
            else UNSET,
            token_ids=[token_id for event in output for token_id in event.token_ids]
            if shown.return_token_ids
            else UNSET,
            prompt_token_ids=list(prompt) if shown.return_token_ids else UNSET,
        )

    def _logprobs(self, index: int, output: Sequence[Tokens]) -> CompletionLogprobs:
        entries = CompletionEntries(self._names)
        lists = self._echoed.logprobs(index, entries)
        token_ids = [token_id for event in output for token_id in event.token_ids]
        logprobs = [entry for event in output for entry in event.logprobs]
        after = entries.lists(token_ids, logprobs)
        return after if lists is None else joined(lists, after)


def _raw(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))
