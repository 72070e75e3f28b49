"""Kept sets and log-probabilities against transformers' own processors and warpers, on rows like a model's."""

import math

import pytest
import torch
from torch import Tensor

from flashsampling import TokenCounts, sample_from_logits
from flashsampling.reference import logit_transforms
from flashsampling.sampling_params import SamplingParams

processors = pytest.importorskip("transformers.generation.logits_process")
VOCAB = 5000


def rows_like_a_model_s(batch: int) -> Tensor:
    """A power law of token probabilities, with some spread, as language has it; no two logits are equal."""
    generator = torch.Generator().manual_seed(11)
    ranks = torch.arange(1, VOCAB + 1).log()
    rows = []
    for row in range(batch):
        logits = -(0.9 + 0.1 * row) * ranks + 0.3 * torch.randn(VOCAB, generator=generator)
        logits[:3] += 0.5 * row
        rows.append(logits[torch.randperm(VOCAB, generator=generator)])
    return torch.stack(rows)


@pytest.fixture(scope="module")
def rows() -> Tensor:
    return rows_like_a_model_s(8)


def processed_by(step: list, ids: Tensor, logits: Tensor) -> Tensor:
    for processor in step:
        logits = processor(ids, logits)
    return logits


def assert_same(rows: Tensor, received: Tensor, temperature: float = 1.0, ids: Tensor | None = None, **request) -> None:
    """The kept set, exactly, and every kept token's log-probability; through the public function, and in
    ``filters``."""
    wanted = torch.log_softmax(received.double(), -1)
    counts = request.get("token_counts")
    params = SamplingParams(**{"counts" if name == "token_counts" else name: value for name, value in request.items()})
    params = params if counts is None else params._replace(counts=counts.counts.clone())
    temperatures = torch.full((len(rows),), temperature)
    logits = logit_transforms.processed(rows, params)
    kept = logit_transforms.kept(logits, temperatures, **params.filter_values())
    if params.token_mask is not None:
        kept &= logit_transforms.allowed(params, rows.shape[1])
    assert torch.equal(kept, received > -math.inf)
    ours = logit_transforms.kept_logprobs(logits, temperatures, kept)
    assert torch.allclose(ours[kept].double(), wanted[kept], atol=1e-5)
    assert int(kept.sum(1).min()) >= 1
    for impl in ("reference", "streaming"):
        public = {name: value for name, value in request.items() if name != "token_counts"}
        out = sample_from_logits(
            rows, temperature=temperature, seed=torch.arange(len(rows)), num_samples=5, return_logprobs=True, impl=impl,
            token_counts=None if counts is None else counts.counts, **public,
        )  # fmt: skip
        assert kept.gather(1, out.token_ids).all()
        assert torch.allclose(out.processed_logprobs.double(), wanted.gather(1, out.token_ids), atol=1e-5)
        raw = torch.log_softmax(rows.double(), -1).gather(1, out.token_ids)
        assert torch.allclose(out.logprobs.double(), raw, atol=1e-5)


NO_IDS = torch.zeros(1, 0, dtype=torch.int64)


FILTERS = {
    "top_k": (processors.TopKLogitsWarper, (1, 2, 50, 1000)),
    "top_p": (processors.TopPLogitsWarper, (0.001, 0.3, 0.5, 0.9, 0.95, 0.999)),
    "min_p": (processors.MinPLogitsWarper, (0.001, 0.05, 0.3, 1.0)),
    "epsilon_cutoff": (processors.EpsilonLogitsWarper, (1e-5, 0.003, 0.2, 0.999)),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, values) in FILTERS.items() for value in values]
)
def test_one_filter(name, value, rows):
    value = value if name == "top_k" else torch.tensor(value).item()  # as float32 has it
    assert_same(rows, FILTERS[name][0](value)(NO_IDS, rows.double()), **{name: value})


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_all_of_them_in_their_order(temperature, rows):
    step = [
        processors.TemperatureLogitsWarper(temperature),
        processors.TopKLogitsWarper(40),
        processors.TopPLogitsWarper(0.8),
        processors.MinPLogitsWarper(0.1),
        processors.EpsilonLogitsWarper(0.13),
    ]
    received = processed_by(step, NO_IDS, rows.double())
    assert_same(rows, received, temperature, top_k=40, top_p=0.8, min_p=0.1, epsilon_cutoff=0.13)
    without_min_p = processed_by(step[:-2], NO_IDS, rows.double())
    assert not torch.equal(received, without_min_p) or temperature < 1  # it does something


@pytest.mark.parametrize("penalty", [0.7, 1.3])
def test_repetition_penalty(penalty, rows):
    ids = rows.topk(30).indices[:, ::2]
    received = processors.RepetitionPenaltyLogitsProcessor(penalty)(ids, rows.clone())
    for prompt in (15, 7, 0):  # prompt and output count alike
        counts = TokenCounts(len(rows), rows.shape[1])
        counts.reset(prompt_token_ids=ids[:, :prompt])
        counts.add(ids[:, prompt:])
        assert_same(rows, received, token_counts=counts, repetition_penalty=penalty)


def test_masks_are_suppressed_and_allowed_tokens(rows):
    vocab = rows.shape[1]
    banned = rows.topk(7).indices.flatten().unique()
    received = processors.SuppressTokensLogitsProcessor(banned.tolist(), device="cpu")(NO_IDS, rows.clone())
    allowed = torch.ones(-(-vocab // 32) * 32, dtype=torch.int64)
    allowed[banned] = 0

    def packed(bits: Tensor) -> Tensor:
        words = (bits.view(-1, 32) << torch.arange(32)).sum(1)
        return (words - (words >> 31 << 32)).to(torch.int32).expand(len(rows), -1)

    assert_same(rows, received, token_mask=packed(allowed))
    step = [processors.SuppressTokensLogitsProcessor(banned.tolist(), device="cpu"), processors.TopPLogitsWarper(0.7)]
    assert_same(rows, processed_by(step, NO_IDS, rows.double()), token_mask=packed(allowed), top_p=0.7)
    only = processors.PrefixConstrainedLogitsProcessor(lambda batch, ids: banned.tolist(), 1)
    assert_same(rows, only(torch.zeros(len(rows), 1).long(), rows.clone()), token_mask=packed(1 - allowed))


def test_sequence_bias_of_single_tokens(rows):
    biases = {int(token): value for token, value in zip(rows[0].topk(4).indices, (-100.0, 3.0, -1.5, 100.0))}
    received = processors.SequenceBiasLogitsProcessor({(token,): value for token, value in biases.items()})(
        torch.zeros(len(rows), 1).long(), rows.clone()
    )
    dense = torch.zeros(rows.shape[1])
    dense[list(biases)] = torch.tensor(list(biases.values()))
    ours = logit_transforms.processed(rows, SamplingParams(dense_bias=dense))
    assert torch.equal(ours, received)
    ids = torch.tensor(list(biases), dtype=torch.int32).expand(len(rows), -1)
    sparse = SamplingParams(bias_ids=ids, bias_values=torch.tensor(list(biases.values())).expand(len(rows), -1))
    assert torch.equal(logit_transforms.processed(rows, sparse), received)


def test_frequency_and_presence_penalties_are_openai_s(rows):
    """``mu[j] -> mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence``, c counting what was sampled."""
    output = rows.topk(12).indices.repeat_interleave(2, 1)[:, :-1]
    counts = torch.zeros(rows.shape).scatter_add_(1, output, torch.ones(output.shape))
    received = rows - counts * 0.4 - (counts > 0).float() * 0.3
    state = TokenCounts(len(rows), rows.shape[1])
    state.reset(prompt_token_ids=rows.topk(50).indices)  # prompts do not count
    state.add(output)
    assert_same(rows, received, token_counts=state, frequency_penalty=0.4, presence_penalty=0.3)
