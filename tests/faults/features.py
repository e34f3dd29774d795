"""What is asked under faults: one row a feature. A new feature of the API is one more row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.faults.tiny_model import NAME

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
_SCHEMA = {
    "type": "object",
    "properties": {
        "names": {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 8, "maxItems": 20},
        "age": {"type": "integer"},
    },
    "required": ["names", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Feature:
    """A request that has one right answer: greedy, or with a seed."""

    name: str
    path: str = COMPLETIONS
    fields: dict[str, Any] = field(default_factory=dict)
    prompt: str = "Once upon a time"

    def body(self, *, stream: bool, **more: Any) -> dict[str, Any]:
        usual: dict[str, Any] = {"model": NAME, "max_tokens": 600, "seed": 7, "ignore_eos": True}
        if self.path == CHAT:
            usual["messages"] = [{"role": "user", "content": self.prompt}]
        else:
            usual["prompt"] = self.prompt
        if stream:
            usual |= {"stream": True, "stream_options": {"include_usage": True}}
        return usual | self.fields | more


FEATURES = (
    Feature("greedy", fields={"temperature": 0, "max_tokens": 2000}),
    Feature("sampled", fields={"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": 3000}),
    Feature("chat", CHAT, {"temperature": 1.0, "top_k": 40, "seed": 12, "max_tokens": 1500}),
    Feature("min_p", fields={"min_p": 0.02, "seed": 13, "max_tokens": 1000}),
    Feature("penalties", fields={"presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.1}),
    Feature("logit_bias", CHAT, {"logit_bias": {"65": 3, "66": -100}, "seed": 14}),
    Feature("logprobs", CHAT, {"logprobs": True, "top_logprobs": 3, "seed": 15, "max_tokens": 300}),
    Feature("completion_logprobs", fields={"logprobs": 2, "seed": 16, "max_tokens": 300}),
    Feature("stop", fields={"stop": ["never seen", "e\u0000e\u0000e", "ab"], "seed": 17}),
    Feature("multi_byte", fields={"structured_outputs": {"regex": "(🦊|字|é|x){150,200}"}, "seed": 18}),
    Feature("multi_byte_stop", CHAT, {"structured_outputs": {"regex": "(🦊|字){90}é字é"}, "stop": ["é字"], "seed": 19}),
    Feature("min_tokens", fields={"min_tokens": 200, "ignore_eos": False, "logit_bias": {"256": 8}, "seed": 20}),
    Feature("choices", CHAT, {"n": 2, "seed": 21, "max_tokens": 400}),
    Feature("prompts", fields={"prompt": ["one", "two", "three"], "max_tokens": 200, "seed": 22}),
    Feature(
        "json_schema",
        CHAT,
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}, "seed": 23},
    ),
    Feature("long_prompt", fields={"temperature": 0, "max_tokens": 100}, prompt="the cat sat on the mat, " * 60),
)


def feature(name: str) -> Feature:
    return next(one for one in FEATURES if one.name == name)
