"""Calls that need more stack than a thread usually has."""

from __future__ import annotations

import json
import threading

import llguidance
import pytest

from common.deep_stack import on_deep_stack


def chain_of_rules(links: int) -> str:
    rules = (f'a{i}: ("x" a{i + 1})? "c"*' for i in range(links))
    source: str = llguidance.LLMatcher.grammar_from_lark("\n".join(["start: a0", *rules, f'a{links}: "b"']))
    return source


def chain_of_references(links: int) -> str:
    definitions: dict[str, object] = {
        f"a{i}": {"type": "object", "properties": {"x": {"$ref": f"#/$defs/a{i + 1}"}}} for i in range(links)
    }
    schema = {"$ref": "#/$defs/a0", "$defs": definitions | {f"a{links}": {"type": "string"}}}
    source: str = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    return source


@pytest.mark.parametrize("grammar", [chain_of_rules(12_000), chain_of_references(5_000)])
def test_a_grammar_of_the_longest_chain_does_not_end_the_process(grammar: str) -> None:
    # An overflow is a segmentation fault: there is nothing weaker to assert.
    validated = on_deep_stack(lambda: llguidance.LLMatcher.validate_grammar(grammar))
    assert isinstance(validated, str)


def test_the_result_is_that_of_the_call_and_other_threads_keep_their_stacks() -> None:
    usual = threading.stack_size()
    assert on_deep_stack(lambda: threading.current_thread().name) == "deep-stack"
    assert threading.stack_size() == usual


def test_what_the_call_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        on_deep_stack(lambda: 1 // 0)
