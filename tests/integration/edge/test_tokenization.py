"""The tokenizer routes of a running edge."""

from __future__ import annotations

from tests.integration.edge import letters_model
from tests.integration.edge.running_edge import ThreadedEdge
from tests.integration.edge.test_surface import call, error_of


async def test_text_goes_to_ids_and_back(edge: ThreadedEdge) -> None:
    asked = {"model": letters_model.NAME, "prompt": "hello", "return_token_strs": True}
    counted = (await call(edge, "POST", "/tokenize", json=asked)).json()
    assert counted["count"] == len(counted["tokens"]) == len(counted["token_strs"])
    assert "hello" in "".join(counted["token_strs"])
    back = (await call(edge, "POST", "/detokenize", json={"tokens": counted["tokens"]})).json()
    assert "hello" in back["prompt"]


async def test_wrong_bodies_are_refused_by_name(edge: ThreadedEdge) -> None:
    for path, body, param in (
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
        ("/detokenize", {}, "tokens"),
        ("/tokenize", {"prompt": "a", "model": "nobody"}, "model"),
    ):
        answer = await call(edge, "POST", path, json=body)
        assert answer.status_code == (404 if param == "model" else 400)
        assert error_of(answer)["param"] == param
