"""What is asked under faults: one row a feature. A new feature of the API is one more row."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.faults.tiny_model import NAME

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def _schema(scale: int) -> dict[str, Any]:
    names = {"type": "array", "items": {"type": "string", "maxLength": 30}, "minItems": 8 // scale, "maxItems": 20}
    return {
        "type": "object",
        "properties": {"names": names, "age": {"type": "integer"}},
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


def _matrix(scale: int) -> tuple[Feature, ...]:
    """The answers are ``scale`` times shorter than the full ones."""
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": _schema(scale)}}
    suffix = "" if scale == 1 else "_short"

    def one(name: str, path: str, begin: str = "Once upon a time", *, tokens: int = 600, **fields: Any) -> Feature:
        return Feature(name + suffix, path, {"max_tokens": tokens // scale, **fields}, begin)

    def regex(before: str, count: int, after: str = "") -> dict[str, str]:
        return {"regex": f"({before}){{{3 * count // 4 // scale},{count // scale}}}{after}"}

    stops = ["never seen", "e\u0000e\u0000e", "ab"]
    return (
        one("greedy", COMPLETIONS, tokens=2000, temperature=0),
        one("sampled", COMPLETIONS, tokens=3000, temperature=0.9, top_p=0.95, seed=11),
        one("chat", CHAT, tokens=1500, temperature=1.0, top_k=40, seed=12),
        one("min_p", COMPLETIONS, tokens=1000, min_p=0.02, seed=13),
        one("penalties", COMPLETIONS, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.1),
        one("logit_bias", CHAT, logit_bias={"65": 3, "66": -100}, seed=14),
        one("logprobs", CHAT, tokens=300, logprobs=True, top_logprobs=3, seed=15),
        one("completion_logprobs", COMPLETIONS, tokens=300, logprobs=2, seed=16),
        one("stop", COMPLETIONS, stop=stops, seed=17),
        one("multi_byte", COMPLETIONS, structured_outputs=regex("🦊|字|é|x", 200), seed=18),
        one("multi_byte_stop", CHAT, structured_outputs=regex("🦊|字", 90, "é字é"), stop=["é字"], seed=19),
        one("min_tokens", COMPLETIONS, min_tokens=200 // scale, ignore_eos=False, logit_bias={"256": 8}, seed=20),
        one("choices", CHAT, tokens=400, n=2, seed=21),
        one("prompts", COMPLETIONS, tokens=200, prompt=["one", "two", "three"], seed=22),
        one("json_schema", CHAT, response_format=schema, seed=23),
        one("long_prompt", COMPLETIONS, "the cat sat on the mat, " * 60, tokens=100, temperature=0),
    )


FEATURES = _matrix(1)
SHORT_FEATURES = _matrix(8)


def feature(name: str) -> Feature:
    return next(one for one in FEATURES if one.name == name)
