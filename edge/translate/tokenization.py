"""/tokenize and /detokenize: what a prompt or a chat costs, and what token ids spell."""

from __future__ import annotations

from common.errors import InvalidRequest
from edge.openai.decoding import decode_body
from edge.openai.tokenize import DetokenizeAnswer, DetokenizeRequest, TokenizeAnswer, TokenizeRequest
from edge.translate.bounds import check_token_ids
from edge.translate.model import ServedModel
from edge.translate.prompts import ChatPrompt, encode_chat, render_chat
from edge.translate.tools import parse_tools


def parse_tokenize(raw: bytes) -> TokenizeRequest:
    """The body of /tokenize. Raises `InvalidRequest`."""
    return decode_body(raw, TokenizeRequest)


def parse_detokenize(raw: bytes) -> DetokenizeRequest:
    """The body of /detokenize. Raises `InvalidRequest`."""
    return decode_body(raw, DetokenizeRequest)


def tokenize(body: TokenizeRequest, model: ServedModel) -> TokenizeAnswer:
    """Token ids as a generation would get them. May take long for large bodies. Raises `InvalidRequest`."""
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", param="prompt")
    if body.prompt is not None:
        token_ids = model.tokenizer.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    else:
        token_ids = _tokenize_chat(body, model)
    strings = [model.tokenizer.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
    return TokenizeAnswer(
        count=len(token_ids), max_model_len=model.card.max_model_len, tokens=token_ids, token_strs=strings
    )


def detokenize(body: DetokenizeRequest, model: ServedModel) -> DetokenizeAnswer:
    """Raises `InvalidRequest` for ids out of the vocabulary."""
    check_token_ids("tokens", body.tokens, model.card.vocab_size)
    return DetokenizeAnswer(prompt=model.tokenizer.decode(body.tokens, skip_special_tokens=False))


def _tokenize_chat(body: TokenizeRequest, model: ServedModel) -> list[int]:
    chat = ChatPrompt(
        messages=body.messages or (),
        tools=() if body.tools is None else parse_tools(body.tools),
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template=body.chat_template,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    return encode_chat(render_chat(chat, model), model, add_special_tokens=bool(body.add_special_tokens))
