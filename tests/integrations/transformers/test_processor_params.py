"""``generate`` with everything that a configuration may ask for: the tokens of transformers' own processors, with our
noise."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers.generation.logits_process import (  # noqa: E402
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashsampling import noise  # noqa: E402
from flashsampling.integrations.transformers import NoTokenError, generate  # noqa: E402
from flashsampling.integrations.transformers.arguments import CACHE  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402
from tests.integrations.transformers.oracle import plain  # noqa: E402
from tests.integrations.transformers.test_generate import llama, prompt  # noqa: E402

SEEDS = [11, -5, 2**62]
NEW = {"max_new_tokens": 12, "eos_token_id": [2, 5]}


@pytest.fixture(scope="module")
def model():
    """A model that repeats itself."""
    return llama(scale=32)


def fused(model, seeds=SEEDS, lengths=(9, 4, 7), **options):
    options = prompt(lengths) | {"do_sample": True} | NEW | options
    return model.generate(**options, custom_generate=generate, **{"seed": seeds} if seeds else {})


def expected(model, seeds=SEEDS, lengths=(9, 4, 7), **options):
    seeds = None if seeds is None else torch.tensor(seeds, device=DEVICE)
    return plain(model, seeds, **prompt(lengths) | NEW | options)


FIELDS: dict[str, dict[str, Any]] = {
    "default settings": {},
    "top_k": {"top_k": 3},
    "top_p": {"top_k": 0, "top_p": 0.7},
    "min_p": {"top_k": 0, "min_p": 0.2},
    "epsilon_cutoff": {"top_k": 0, "epsilon_cutoff": 0.02},
    "filters at a temperature": {"temperature": 2.0, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
    "repetition_penalty": {"repetition_penalty": 3.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1, "top_k": 2},
    "min_new_tokens": {"min_new_tokens": 6, "eos_token_id": list(range(300, 1000))},
    "min_length": {"min_length": 14, "eos_token_id": list(range(300, 1000))},
    "forced_bos_token_id": {"forced_bos_token_id": 77, "lengths": (1, 1, 1)},
    "forced_eos_token_id": {"forced_eos_token_id": 78},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 1.5},
    "own processors": {
        "logits_processor": [SequenceBiasLogitsProcessor({(3,): 8.0}), SuppressTokensLogitsProcessor([4])]
    },
    "own warpers": {"logits_processor": [TemperatureLogitsWarper(2.0), TopKLogitsWarper(9), TopPLogitsWarper(0.6)]},
    "no cache": {"use_cache": False, "repetition_penalty": 1.5},
    "everything": {
        "temperature": 1.7, "top_k": 30, "top_p": 0.95, "min_p": 0.01, "epsilon_cutoff": 0.02,
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "suppress_tokens": list(range(100, 200)), "begin_suppress_tokens": [7], "min_new_tokens": 3,
        "sequence_bias": {(3,): 2.0, (4, 5): 9.0}, "forced_eos_token_id": 5,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", FIELDS)
def test_tokens_are_those_of_transformers_own_processors(model, case):
    assert torch.equal(fused(model, **FIELDS[case]), expected(model, **FIELDS[case]))


@pytest.mark.parametrize(
    "case", ["default settings", "repetition_penalty", "no_repeat_ngram_size", "own warpers", "everything"]
)
def test_greedy(model, case):
    options = {"seeds": None, "do_sample": False} | FIELDS[case]
    assert torch.equal(fused(model, **options), expected(model, **options))


def test_embeddings_as_a_prompt(model):
    """The penalty ignores a prompt of embeddings, and a padded row's first new tokens, as in transformers."""
    inputs = prompt([9, 4])
    options = {
        "inputs_embeds": model.get_input_embeddings()(inputs["input_ids"]),
        "attention_mask": inputs["attention_mask"],
    }
    options |= {"repetition_penalty": 4.0, "top_k": 5, "max_new_tokens": 15, "eos_token_id": -1, "do_sample": True}
    ours = model.generate(**options, custom_generate=generate, seed=[1, 2])
    assert torch.equal(ours, plain(model, torch.tensor([1, 2], device=DEVICE), **options))


def test_the_dictionary_and_its_logprobs():
    model = llama(scale=32, attn_implementation="eager")
    options: dict[str, Any] = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
    options |= {"eos_token_id": list(range(300, 500)), "return_dict_in_generate": True}
    options |= {"output_hidden_states": True, "output_attentions": True}
    ours: Any = fused(model, **options, return_logprobs=True, top_logprobs=3)
    received = expected(model, **options, output_logits=True, output_scores=True)
    assert type(ours).__name__ == "GenerateOutput"
    assert torch.equal(ours.sequences, received.sequences)
    assert ours.scores is None
    assert ours.logits is None
    steps = ours.sequences.shape[1] - 9
    for name in ("hidden_states", "attentions"):
        assert len(ours[name]) == steps
        for local, others in zip(ours[name], received[name], strict=True):
            assert all(torch.equal(*pair) for pair in zip(local, others, strict=True))
    assert ours[CACHE].get_seq_length() == 9 + steps - 1
    ended = torch.zeros(3, dtype=torch.bool, device=DEVICE)
    for step in range(steps):
        tokens = ours.sequences[:, 9 + step]
        offset, draw = torch.full((3,), step, device=DEVICE), torch.zeros(1, dtype=torch.int64, device=DEVICE)
        gumbel = noise.gumbel(torch.tensor(SEEDS, device=DEVICE), offset, draw, 0, 1000)[:, 0]
        raw, processed = received.logits[step].log_softmax(-1), (received.scores[step] - gumbel).log_softmax(-1)
        for local, others in ((ours.logprobs, raw), (ours.processed_logprobs, processed)):
            others = others.gather(1, tokens[:, None])[:, 0]
            assert torch.allclose(local[~ended, step], others[~ended], atol=1e-4)
            assert local[ended, step].isnan().all()
        best = raw.topk(3)
        assert torch.equal(ours.top_token_ids[~ended, step], best.indices[~ended])
        assert torch.allclose(ours.top_logprobs[~ended, step], best.values[~ended], atol=1e-4)
        rank = 1 + (raw > raw.gather(1, tokens[:, None])).sum(dim=1)
        assert torch.equal(ours.ranks[:, step], torch.where(ended, -1, rank))
        assert (ours.top_token_ids[ended, step] == -1).all()
        ended |= (tokens >= 300) & (tokens < 500)
    assert ended.any()


def test_a_request_per_row(model):
    """Each row draws what it would draw alone, with a configuration of its own."""
    request: dict[str, Any] = {"top_k": [1, 30, 0], "top_p": [1.0, 0.6, 0.9], "min_p": [0.0, 0.0, 0.1]}
    request["repetition_penalty"] = [1.0, 2.0, 1.3]
    temperatures = [0.9, 1.4, 2.0]
    batch = fused(model, request=request, temperatures=temperatures, eos_token_id=-1)
    for row in range(3):
        config = {name: values[row] for name, values in request.items()}
        inputs = {name: value[row : row + 1] for name, value in prompt([9, 4, 7]).items()}
        seeds = torch.tensor(SEEDS[row : row + 1], device=DEVICE)
        config["temperature"] = temperatures[row]
        alone = plain(model, seeds, **inputs, **config, max_new_tokens=12, eos_token_id=-1)
        assert torch.equal(batch[row : row + 1], alone)


def test_penalties_that_transformers_does_not_have(model):
    out = fused(
        model, request={"presence_penalty": [1e4, 0.0, 0.0], "frequency_penalty": [0.0, 1e4, 0.0]}, eos_token_id=-1
    )
    repeated = [12 - len(set(row)) for row in out[:, 9:].tolist()]
    assert repeated[:2] == [0, 0]
    top = fused(model, request={"top_k": 1}, eos_token_id=-1)
    assert torch.equal(top, fused(model, seeds=None, do_sample=False, eos_token_id=-1))


def test_a_mask_of_ones_own(model):
    mask = torch.zeros(32, dtype=torch.int32, device=DEVICE)
    mask[3] = 0b111  # tokens 96 to 98
    out = fused(model, request={"token_mask": mask}, suppress_tokens=[97], eos_token_id=-1)
    assert set(out[:, 9:].unique().tolist()) == {96, 98}
    with pytest.raises(NoTokenError, match="masked out"):
        fused(model, request={"token_mask": mask}, suppress_tokens=[96, 97, 98], eos_token_id=-1)


def test_a_penalty_of_the_request_leaves_padding_out_as_the_fields_does(model):
    inputs = prompt([9, 4])
    alone = {name: rows[1:, 5:] for name, rows in inputs.items()}
    first = int(model.generate(**alone, do_sample=False, max_new_tokens=1)[0, -1])  # and what pads is a penalised token
    inputs["input_ids"] = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, first)
    options = {"do_sample": False, "max_new_tokens": 1, "pad_token_id": first, "custom_generate": generate}
    for penalty in (100.0, [1.0, 100.0]):
        out = model.generate(**inputs, **options, request={"repetition_penalty": penalty})
        assert int(out[1, -1]) == first
