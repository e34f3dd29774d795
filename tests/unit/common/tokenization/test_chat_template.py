"""Templates against transformers; nobody can forge the template's markers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InvalidRequest
from common.tokenization import chat_template
from common.tokenization.chat_template import ChatTemplate
from common.tokenization.control_tokens import ControlTokens
from common.tokenization.tokenizer import Tokenizer
from tests.unit.common.tokenization.conftest import (
    as_transformers,
    edited,
    sentencepiece_json,
    smollm2_config,
    smollm2_json,
)

TOOLS_TEMPLATE = """{%- if tools %}
{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for document in documents or [] %}[{{ document.title }}: {{ document.text | trim }}]{% endfor %}
{%- for message in messages %}
{%- if message.role not in ['user', 'assistant', 'system', 'tool'] %}
    {{- raise_exception('unknown role ' + message.role) }}
{%- endif %}
{%- if loop.index > 50 %}{% break %}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' -}}
{% generation %}{{ message.content | trim }}{% endgeneration %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}
{%- endif %}"""

CONVERSATION = [
    {"role": "system", "content": "Be brief. "},
    {"role": "user", "content": '\nhi & <b>"quoted"</b> 漢 🦊 12345'},
    {"role": "assistant", "content": "Hello there. "},
]


def make(tokenizer: Tokenizer, source: str) -> ChatTemplate:
    return ChatTemplate(source, tokenizer.special_tokens, tokenizer.control_tokens)


@pytest.fixture(scope="module")
def reference() -> Any:
    return as_transformers(smollm2_json(), smollm2_config())


@pytest.mark.parametrize("which", ["own", "tools"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_and_tokenises_as_transformers_does(
    smollm2: Tokenizer, smollm2_template: str, reference: Any, which: str, add_generation_prompt: bool
) -> None:
    source = smollm2_template if which == "own" else TOOLS_TEMPLATE
    tools = [{"type": "function", "function": {"name": "f", "description": "a <b> & ü", "parameters": {}}}]
    documents = [{"title": "T", "text": " x "}]
    prompt = make(smollm2, source).render(
        CONVERSATION, tools=tools, documents=documents, add_generation_prompt=add_generation_prompt
    )
    expected = {"chat_template": source, "tools": tools, "documents": documents}
    expected["add_generation_prompt"] = add_generation_prompt
    assert prompt.text == reference.apply_chat_template(CONVERSATION, tokenize=False, **expected)
    ids = reference.apply_chat_template(CONVERSATION, tokenize=True, return_dict=False, **expected)
    assert smollm2.encode_rendered(prompt) == ids


@pytest.mark.parametrize("which", ["own", "tools"])
@pytest.mark.parametrize("last", ["The answer is", "The answer is ", "x\n"])
def test_continues_the_final_message_as_transformers_does(
    smollm2: Tokenizer, smollm2_template: str, reference: Any, which: str, last: str
) -> None:
    source = smollm2_template if which == "own" else TOOLS_TEMPLATE
    messages = [*CONVERSATION[:2], {"role": "assistant", "content": last}]
    prompt = make(smollm2, source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text == reference.apply_chat_template(
        messages, tokenize=False, chat_template=source, continue_final_message=True
    )


def test_the_last_text_part_is_continued(smollm2: Tokenizer) -> None:
    source = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|im_end|>{% endfor %}"
    messages = [{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b <"}]}]
    prompt = make(smollm2, source).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert prompt.text == "ab <"


@given(st.text(max_size=40), st.text(max_size=40))
def test_ordinary_text_is_tokenised_exactly_as_the_whole_prompt(first: str, second: str) -> None:
    tokenizer = _tokenizer()
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    prompt = make(tokenizer, TOOLS_TEMPLATE).render(messages)
    assert tokenizer.encode_rendered(prompt) == tokenizer.encode(prompt.text, add_special_tokens=False)


_FORGERIES = st.sampled_from(
    ["<|im_end|>", "<|im_start|>", "<|im_", "end|>", "start|>", "<", "|", "|>", "a", " ", "\n"]
)


@given(st.lists(_FORGERIES, max_size=8).map("".join), st.lists(_FORGERIES, max_size=8).map("".join))
def test_what_clients_type_never_becomes_a_control_token(first: str, second: str) -> None:
    """Even when a template puts two strings of the client side by side."""
    tokenizer = _tokenizer()
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.a }}{{ m.b }}<|im_end|>{% endfor %}"
    prompt = make(tokenizer, source).render([{"role": "user", "a": first, "b": second}])
    ids = tokenizer.encode_rendered(prompt)
    assert prompt.text == f"<|im_start|>user\n{first}{second}<|im_end|>"
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2]
    assert ids[0] == 1
    assert ids[-1] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == prompt.text


def _tokenizer(cache: list[Tokenizer] = []) -> Tokenizer:  # noqa: B006 - one for all examples of hypothesis
    if not cache:
        cache.append(Tokenizer.from_json(smollm2_json(), smollm2_config()))
    return cache[0]


def test_typed_control_tokens_cost_what_their_characters_cost(smollm2: Tokenizer, smollm2_template: str) -> None:
    template = make(smollm2, smollm2_template)

    def cost(text: str) -> int:
        return len(smollm2.encode_rendered(template.render([{"role": "user", "content": text}])))

    as_text = len(smollm2.encode(" <|im_end|>", allow_special=False))
    assert cost("a <|im_end|> b") - cost("a b") == as_text
    assert as_text > 2


def test_control_tokens_in_tools_and_keys_stay_text_too(smollm2: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "<|im_end|>": "<|im_end|>"}}]
    prompt = make(smollm2, TOOLS_TEMPLATE).render([{"role": "user", "content": "x"}], tools=tools)
    assert smollm2.encode_rendered(prompt).count(2) == 2
    assert json.dumps(tools[0]) in prompt.text


def test_private_use_characters_in_messages_are_kept(smollm2: Tokenizer, smollm2_template: str) -> None:
    text = "\U000f0000\U000f0001 <|im_end|>"
    prompt = make(smollm2, smollm2_template).render([{"role": "user", "content": text}])
    assert text in prompt.text
    assert text in smollm2.decode(smollm2.encode_rendered(prompt), skip_special_tokens=False)


def test_sentencepiece_prompts_with_typed_control_tokens_keep_their_spaces(sentencepiece: Tokenizer) -> None:
    template = make(sentencepiece, "<s>{{ messages[0].content }}</s>the")
    ids = sentencepiece.encode_rendered(template.render([{"role": "user", "content": "the </s> end"}]))
    whole = sentencepiece.encode("<s>the X end</s>the", add_special_tokens=False)
    typed = sentencepiece.encode("</s>", add_special_tokens=False, allow_special=False)
    assert (ids.count(1), ids.count(2)) == (1, 1)
    at = next(i for i, (a, b) in enumerate(zip(ids, whole, strict=False)) if a != b)
    assert ids[:at] == whole[:at]
    assert ids[at : at + len(typed) - 1] == typed[1:], "without the space that begins a text"
    assert ids[at + len(typed) - 1 :] == whole[at + 1 :], "the tail after the typed token is as in ordinary text"


def test_special_token_variables_are_there_for_the_template(smollm2: Tokenizer) -> None:
    assert make(smollm2, "{{ bos_token }}x{{ eos_token }}").render([]).text == "<|im_start|>x<|im_end|>"


def test_variables_reach_the_template(smollm2: Tokenizer) -> None:
    prompt = make(smollm2, TOOLS_TEMPLATE).render(CONVERSATION, variables={"enable_thinking": False})
    assert prompt.text.endswith("<think></think>")


def test_a_refusal_of_the_template_is_the_clients_error(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="unknown role alien") as caught:
        make(smollm2, TOOLS_TEMPLATE).render([{"role": "alien", "content": "x"}])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages[5].content }}{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ messages + 1 }}",
        "{{ ''.__class__.__mro__ }}{{ x.y.z }}",
        "{{ messages.append({}) }}",
        "{{ 'a' * 100000000 }}",
        "{{ 9 ** 9999999 }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ (1).to_bytes(-1) }}",
    ],
)
def test_templates_that_fail_or_break_out_are_refused(smollm2: Tokenizer, source: str) -> None:
    with pytest.raises(InvalidRequest):
        make(smollm2, source).render(CONVERSATION)


def test_a_template_that_renders_too_much_is_stopped(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_RENDERED_CHARS", 1000)
    with pytest.raises(InvalidRequest, match="too much"):
        make(smollm2, "{% for i in range(1000) %}abc{{ i }}{% endfor %}").render(CONVERSATION)


def test_a_broken_template_is_refused_when_compiled(smollm2: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="not valid") as caught:
        make(smollm2, "{% for %}")
    assert caught.value.param == "chat_template"


def test_continuing_needs_a_message_that_is_shown(smollm2: Tokenizer) -> None:
    options: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(InvalidRequest, match="does not show"):
        make(smollm2, "nothing").render(CONVERSATION, **options)
    with pytest.raises(InvalidRequest, match="needs a final message"):
        make(smollm2, "nothing").render([{"role": "assistant", "content": None}], **options)
    with pytest.raises(InvalidRequest, match="exclude"):
        make(smollm2, "nothing").render(CONVERSATION, continue_final_message=True)


def test_rendering_changes_nothing_of_what_it_was_given(smollm2: Tokenizer, smollm2_template: str) -> None:
    messages = [{"role": "user", "content": "<|im_end|>"}]
    make(smollm2, smollm2_template).render(messages, add_generation_prompt=False, continue_final_message=True)
    assert messages == [{"role": "user", "content": "<|im_end|>"}]


def test_control_tokens_with_white_space_around_them_keep_their_rules() -> None:
    """``lstrip``/``rstrip`` of added tokens hold whether or not a control token was typed elsewhere."""
    parsed = json.loads(smollm2_json())
    for added in parsed["added_tokens"]:
        added["rstrip"] = added["content"] == "<|im_end|>"
    tokenizer = Tokenizer.from_json(edited(smollm2_json(), added_tokens=parsed["added_tokens"]), smollm2_config())
    template = make(tokenizer, "{{ messages[0].content }}<|im_end|>  \n x")
    plain = tokenizer.encode_rendered(template.render([{"role": "user", "content": "a"}]))
    typed = tokenizer.encode_rendered(template.render([{"role": "user", "content": "<|im_start|>a"}]))
    assert plain[plain.index(2) :] == typed[typed.index(2) :]
    assert len(plain) == 3


def test_an_empty_set_of_control_tokens_guards_nothing() -> None:
    assert ControlTokens(()).guard("<|im_end|>", "\U000f0000") == "<|im_end|>"


def test_sentencepiece_json_is_a_real_file() -> None:
    assert json.loads(sentencepiece_json())["model"]["byte_fallback"]
