"""The plug-in in SGLang itself, on a GPU: a tiny model of random weights, SGLang's engine in processes of its own.

Needs SGLang 0.5.15 with its kernels, and this package's entry point. Deterministic inference, so that hidden states do not
depend on the batch either: then a seeded request has the same tokens alone, among others, and beside one left to SGLang.
"""

import os
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
sglang = pytest.importorskip("sglang")
transformers = pytest.importorskip("transformers")

V, TOKENS = 1003, 12
PROMPTS = [[5, 31, 7, 7], [9] * 20, [3]]
SEEDED: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0, "sampling_seed": 1},
    "hot": {"temperature": 1.9, "sampling_seed": 2},
    "greedy": {"temperature": 0.0},
    "top_k": {"top_k": 9, "sampling_seed": 3},
    "top_p": {"top_p": 0.6, "sampling_seed": 4},
    "min_p": {"min_p": 0.1, "sampling_seed": 5},
    "bias": {"logit_bias": {"4": 3.0, "1002": 5.0, "31": -100.0}, "sampling_seed": 6},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=V, **sizes, num_key_value_heads=2, max_position_embeddings=512)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.lm_head.weight.data.normal_()  # so that tokens are not all as likely
    model.save_pretrained(place)
    return str(place)


def tokens_of(folder, plugin, batches):
    """What an engine makes of batches of (prompt, parameters)."""
    os.environ["FLASHSAMPLING_SGLANG"] = plugin
    engine = sglang.Engine(
        model_path=folder,
        skip_tokenizer_init=True,
        enable_deterministic_inference=True,
        disable_radix_cache=True,
        mem_fraction_static=0.3,
        cuda_graph_max_bs=16,
    )
    try:
        made = []
        for batch in batches:
            params = [{"max_new_tokens": TOKENS, "ignore_eos": True, **given} for _, given in batch]
            outputs = engine.generate(input_ids=[prompt for prompt, _ in batch], sampling_params=params)
            made.append([output["output_ids"] for output in outputs])
        return made
    finally:
        engine.shutdown()


def test_seeded_requests_alone_and_among_others(folder):
    requests = [(PROMPTS[row % 3], given) for row, given in enumerate(SEEDED.values())]
    left = (PROMPTS[0], {"repetition_penalty": 1.3, "sampling_seed": 9})
    batches = [[request] for request in requests] + [requests, requests[::-1], [*requests, left]]
    *alone, among, backwards, beside = tokens_of(folder, "require", batches)
    wanted = [tokens for (tokens,) in alone]
    assert all(len(tokens) == TOKENS for tokens in wanted)
    assert among == wanted
    assert backwards == wanted[::-1]
    assert beside[:-1] == wanted
    off, off_left = tokens_of(folder, "off", [requests, [left]])
    assert off_left == beside[-1:]
    assert off[0] != wanted[0]  # SGLang's noise is another
    greedy = [*SEEDED].index("greedy")
    assert off[greedy][0] == wanted[greedy][0]  # later ones may part where bfloat16 ties
