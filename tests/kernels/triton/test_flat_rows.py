"""Rows with next to nothing to choose by, from logits in memory, by Triton: equal logits, few values, many
candidates."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.conftest import DEVICE
from tests.kernels.triton.test_filtered import INF, SMALL, VOCAB, check, make_step, of, with_logits
from tests.zero_words import ZERO_WORDS

BLOCK = SMALL.block


def flat_step(params: SamplingParams, num_samples: int = 1, vocab: int = VOCAB) -> SampleInputs:
    """Zeros, an ordinary row, two values, few values, no two alike."""
    step = make_step(batch=5, vocab=vocab, params=params, num_samples=num_samples, std=1.0)
    logits = step.hidden_states.clone()
    logits[0] = 0.0
    logits[0, 5] = -0.0
    logits[1] *= 3
    logits[2] = torch.where(logits[2] > 0.0, 1.5, 1.0)
    logits[3] = (logits[3] * 2).round() * 0.01
    logits[4] *= 0.01
    return with_logits(step, logits)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=VOCAB - 150),
        SamplingParams(top_p=0.5),
        SamplingParams(top_p=1 - 1e-6),
        SamplingParams(min_p=0.992),
        SamplingParams(top_k=VOCAB - 50, top_p=0.7),
        SamplingParams(top_k=VOCAB - 50, top_p=0.9, min_p=0.5, logprobs=True, top_logprobs=4),
        SamplingParams(epsilon_cutoff=1 / VOCAB),
        SamplingParams(top_n_sigma=3.0, top_p=0.9, epsilon_cutoff=1.1 / VOCAB),
        SamplingParams(top_k=3),
        SamplingParams(top_p=1e-30),
        SamplingParams(min_p=1.5),
        SamplingParams(),
    ],
)
def test_flat_rows(params):
    """More candidates than there is room for, all of them ties or next to it; few of them kept, or many."""
    check(flat_step(params, num_samples=2 if params.logprobs else 1))


@pytest.mark.parametrize("top_p", [0.6, 1 - 1e-6])
def test_more_candidates_than_there_is_room_for_and_not_enough(top_p):
    """Each chunk's highest is far above half of its tokens: a bound between takes in more than fit, and too little
    mass."""
    step = make_step(batch=4, params=SamplingParams(top_p=top_p), std=0.004, temperature=1.0, num_samples=4)
    logits = step.hidden_states.clone()
    logits[:, torch.arange(VOCAB, device=logits.device) // 8 % 2 == 0] += 0.2
    check(with_logits(step, logits))


@pytest.mark.parametrize("count", [3, 20])
def test_likeliest_of_flat_rows(count):
    """Of many equal ones the lowest ids, whether or not the blocks they are in fit among the candidates."""
    check(flat_step(SamplingParams(top_logprobs=count)), replace(SMALL, capacity=max(SMALL.capacity, 256)))


def test_equal_logits_at_every_edge():
    """Prefixes of ids that end before, at and after a block's end."""
    top_k = [1, BLOCK - 1, BLOCK, BLOCK + 1, VOCAB - 1, VOCAB]
    step = make_step(batch=6, params=SamplingParams(top_k=of(top_k)), std=0.0)
    step = with_logits(step, step.hidden_states - 17.25)
    assert check(step).ids[0] == 0
    edge = BLOCK / VOCAB
    top_p = [0.0, edge * (1 - 1e-6), edge, edge * (1 + 1e-6), 1 - 1e-7, 1.0]
    check(step._replace(params=SamplingParams(top_p=of(top_p), logprobs=True)))


@pytest.mark.quick(9)
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=VOCAB - 7), SamplingParams(top_p=0.9, logprobs=True)]
)
def test_equal_infinities(params, temperature, num_samples):
    """None is finite; a finite one beside them, in whatever block, makes the row one to draw from."""
    step = make_step(batch=4, params=params, temperature=temperature, num_samples=num_samples)
    logits = torch.full_like(step.hidden_states, INF)
    logits[1] = -INF
    logits[2, ::2] = -INF
    logits[3, VOCAB - 1] = 2.0
    ids = check(with_logits(step, logits)).ids[: 4 * num_samples].view(4, num_samples)
    assert ids[:3].tolist() == 3 * [num_samples * [-1]]
    assert ids[3].min() >= 0


@pytest.mark.quick(6)
@pytest.mark.parametrize("num_samples", [1, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=5), SamplingParams(top_p=0.9, logprobs=True)]
)
def test_infinite_logits_at_an_infinite_temperature(params, masked, num_samples):
    """No score: -1, unless the mask leaves them out."""
    out = torch.full((4, -(-VOCAB // 32)), -1, dtype=torch.int32)
    if masked:
        out[3, 2] = ~(1 << 13)
        params = params._replace(token_mask=out.to(DEVICE))
    step = make_step(batch=4, params=params, temperature=INF, num_samples=num_samples)
    logits = step.hidden_states.clone()
    logits[1, 77] = -INF
    logits[2, VOCAB - 1] = INF
    logits[3, 77] = -INF
    drawn = check(with_logits(step, logits)).ids[: 4 * num_samples].view(4, num_samples)
    assert (drawn < 0).tolist() == [num_samples * [undefined] for undefined in (False, True, True, not masked)]


@pytest.mark.parametrize("many", [SMALL.tile // 2, min(SMALL.capacity, 900) - 1])
def test_words_of_zero_among_candidates(many):
    """Few of them, and more."""
    seeds, offsets, tokens, _ = zip(*ZERO_WORDS, strict=True)
    step = make_step(batch=3, vocab=900, params=SamplingParams(top_k=many), temperature=1.0, num_samples=2)
    logits = torch.full_like(step.hidden_states, -INF)
    for row, token in enumerate(tokens):
        others = torch.randperm(900)
        ids = torch.cat([torch.tensor([token]), others[others != token][: many - 1]])
        logits[row, ids] = 1.0 + torch.rand(many).to(DEVICE) * 0.01
    drawn = check(with_logits(step._replace(seed=of(seeds), offset=of(offsets)), logits))
    assert drawn.ids.view(3, 2)[:, 0].tolist() == list(tokens)


@pytest.mark.parametrize(
    "params",
    [SamplingParams(top_k=VOCAB - 100), SamplingParams(top_p=0.99), SamplingParams(top_k=VOCAB - 3, top_p=0.97)],
)
def test_logits_over_many_magnitudes(params):
    """Values that thresholds, by value or by bits, hardly tell apart."""
    step = make_step(batch=2, params=params, temperature=2.0**60)
    powers = (2.0 ** (torch.arange(VOCAB) % 200 - 100).double()).float().to(DEVICE)
    check(with_logits(step, torch.stack([powers, -powers])))
