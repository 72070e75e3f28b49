"""Packed winners: what a shard says of a row, on one device that plays all ranks."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from flashsampling import exchange_protocol

from ..problems import IMPLEMENTATIONS, assert_agreement, fit, make_problem


def test_packed_winners_of_any_split_are_the_whole_rows_winner():
    """Every class of scores a shard can hold, in every combination over three shards."""
    numbers = random.Random(0)
    inf, nan = float("inf"), float("nan")
    classes = [[-inf, -inf], [-inf, inf], [1.5, inf], [-2.0, 0.0], [-0.0, -inf], [nan, 1.0], [nan, inf], [3e38, -3e38]]
    classes += [[], [-5.0, -3.0], [-3.0, -4.0], [-1e-30, -inf], [-3e38]]  # shards whose bests are all negative
    for _ in range(400):
        shards = [numbers.choice(classes) for _ in range(3)]
        scores = [score for shard in shards for score in shard]
        winners, start = [], 0
        for shard in shards:
            row = torch.tensor(shard)
            best = row.max() if len(shard) else torch.tensor(-inf)
            token = start + int((row == best).nonzero()[0]) if len(shard) and not best.isnan() else -1
            winners.append(exchange_protocol.pack(best[None], torch.tensor([token]), row.isfinite().any()[None]))
            start += len(shard)
        assert all(winner.item() != 0 for winner in winners)
        expected = -1
        if any(abs(score) < inf for score in scores) and not any(score != score for score in scores):
            expected = scores.index(max(scores))
        assert exchange_protocol.tokens_of(torch.stack(winners)).item() == expected, shards


def _shard_winners(impl, problem, ends):
    """(shards, B * num_samples) packed winners of one device that plays all ranks."""
    return torch.stack([problem.winners(impl, first, last) for first, last in itertools.pairwise((0, *ends))])


@pytest.mark.quick(3)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("batch", "num_samples"), [(5, 1), pytest.param(70, 1, marks=pytest.mark.gpu), (130, 1), (6, 3)]
)
def test_winners_of_shards_are_the_whole_vocabulary_s(impl, batch, num_samples, device):
    """Cut anywhere, also in the middle of a tile and of a Philox group; some shards are empty."""
    if impl == "triton" and device.type == "cpu" and batch > 70:
        pytest.skip("minutes in the interpreter")
    dim = 1544 if device.type == "cuda" else 64  # deep enough that the Hopper kernel starts its tiles at different k
    problem = make_problem(batch, 700, dim, device, torch.bfloat16, num_samples, impl=impl)
    whole = problem.sample(impl)
    cuts = ((0, 1, 129, 129, 511, 700), (127, 640, 640, 700), (350, 700), (100, 200, 300, 400, 500, 600, 700))
    for ends in cuts[:2] if impl == "triton" and device.type == "cpu" else cuts:
        tokens = exchange_protocol.tokens_of(_shard_winners(impl, problem, ends)).view(batch, num_samples)
        if impl == "streaming":
            assert_agreement(tokens, problem)
        else:
            assert torch.equal(tokens, whole), ends


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rare_scores_on_shards(impl, device):
    """NaN, infinities and rows without a finite score, on either side of a cut. Of two negative scores the higher one
    wins, and of equal ones the lower id."""
    inf, nan = float("inf"), float("nan")
    low = dict.fromkeys(range(300), -100.0)
    rows = [
        {},
        {299: nan},
        {3: inf, 298: inf},
        {298: inf, 5: -inf},
        dict.fromkeys(range(300), -inf),
        {token: inf if token == 280 else -inf for token in range(300)},
        {token: -inf for token in range(299)},
        {token: inf if token == 130 else -inf for token in range(200)},
        low | {10: -2.0, 250: -3.0},
        low | {10: -3.0, 250: -2.0},
        low | {40: -2.5, 200: -2.5},
    ]
    for row, logits in enumerate(rows):
        weight = torch.zeros(300, 8, device=device)
        for token, logit in logits.items():
            weight[token, 0] = logit
        states = torch.ones(1, 8, device=device)  # not 0: times inf it is NaN
        problem = replace(make_problem(1, 300, 8, device), weight=fit(impl, weight), hidden_states=fit(impl, states))
        problem.temperature[:] = 0.0 if logits.get(0) == -100.0 else 1.0
        tokens = exchange_protocol.tokens_of(_shard_winners(impl, problem, (150, 300)))
        assert torch.equal(tokens[:, None], problem.sample("reference")), row
