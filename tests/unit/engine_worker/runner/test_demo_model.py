"""SmolLM2 in fp32 says word for word what transformers says with the same weights."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from common.tokenization.tokenizer import Tokenizer
from engine_worker.kernels.build import BuildSettings, KernelsUnavailable, build
from engine_worker.weights.checkpoint import FormattedWeights
from engine_worker.weights.model_files import open_model
from tests.demo_model import demo_model_dir
from tests.unit.engine_worker.runner.small_world import SmallWorld, load

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

NUM_TOKENS = 64
PROMPTS = (
    "The capital of France is",
    "Once upon a time",
    "def fibonacci(n):",
    "1, 2, 3, 4, 5,",
    "Water boils at",
    "The three primary colors are",
    "In 1969, the first humans",
    "To make bread you need flour,",
    "Dear Sir or Madam,",
    "The opposite of hot is",
    "import numpy as np\n",
    "A triangle has",
    "Photosynthesis is the process",
    "She opened the door and",
    "SELECT name FROM users WHERE",
    "The largest planet is",
    "Ein Hund läuft",
    "List of fruits:\n- apple\n-",
    "My favourite season is autumn because",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
)


@functools.cache
def transformers_model() -> Any:
    """transformers' Llama with the weights of the GGUF file, dequantised."""
    import transformers

    directory = demo_model_dir()
    files = open_model(str(directory))
    weights = FormattedWeights(files.checkpoint, "none")
    config = transformers.AutoConfig.from_pretrained(directory)
    config._attn_implementation = "eager"
    model = transformers.LlamaForCausalLM(config).eval()
    state = {}
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            state[name] = weights.vector(name, parameter.shape[0])
        else:
            (matrix,) = weights.matrices([name], [(parameter.shape[0], parameter.shape[1])])
            state[name] = matrix.values
    model.load_state_dict({**state, "lm_head.weight": state["model.embed_tokens.weight"]})
    return model


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_greedy_answers_equal_transformers(backend: str) -> None:
    if backend == "native":
        try:
            build(BuildSettings())
        except KernelsUnavailable as error:
            pytest.skip(str(error))
    model = load(demo_model_dir(), backend, quantization="none", max_model_len=256)
    tokenizer = Tokenizer.from_json(model.tokenizer_json, model.tokenizer_config)
    world = SmallWorld(model, cache_mib=256)
    sequences = [world.sequence(tokenizer.encode(text), max_tokens=NUM_TOKENS, ignore_eos=True) for text in PROMPTS]
    world.run(*sequences)
    for sequence in sequences:
        tokens = sequence.tokens[: sequence.num_tokens].tolist()
        assert sequence.num_output_tokens == NUM_TOKENS
        # Greedy decoding is settled by induction: each token is the argmax behind all that came before it.
        with torch.inference_mode():
            logits = transformers_model()(torch.tensor([tokens[:-1]]), use_cache=False).logits[0]
        expected = logits[sequence.num_prompt_tokens - 1 :].argmax(-1).tolist()
        assert tokens[sequence.num_prompt_tokens :] == expected


def test_an_answer_equals_transformers_own_generate() -> None:
    model = load(demo_model_dir(), quantization="none", max_model_len=256)
    tokenizer = Tokenizer.from_json(model.tokenizer_json, model.tokenizer_config)
    prompt = tokenizer.encode(PROMPTS[-1])
    world = SmallWorld(model, cache_mib=64)
    sequence = world.sequence(prompt, max_tokens=24, eos_token_ids=model.eos_token_ids)
    world.run(sequence)
    with torch.inference_mode():
        generated = transformers_model().generate(
            torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=list(model.eos_token_ids)
        )[0]
    assert list(sequence.output_token_ids()) == generated[len(prompt) :].tolist()
    assert "Paris" in tokenizer.decode(sequence.output_token_ids())
