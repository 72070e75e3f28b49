"""What ``verify`` emits has the target's joint distribution over several positions, whatever is drafted, and as many
drafts are accepted as theory says. Tests of the power that ``assert_distribution`` asserts."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from flashsampling import noise, sample_from_logits, verify_from_logits
from flashsampling.reference import streaming
from tests.kernels.test_distribution import LEVEL, assert_distribution

VOCAB, POSITIONS, REQUESTS = 3, 3, 8_000
TEMPERATURE = 0.9
_normal = torch.randn(VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(8)) * 1.3
TARGET = _normal  # logits of the next token after each token; the last row: of the first
HOLES = _normal.masked_fill(torch.eye(VOCAB + 1, VOCAB).bool(), -math.inf)  # a token never follows itself


def softmax(logits: Tensor) -> Tensor:
    return torch.softmax(logits.double() / TEMPERATURE, dim=-1)


def joint(target: Tensor) -> Tensor:
    """Of all sequences of POSITIONS tokens, the last token changing fastest."""
    p, out = softmax(target), []
    for tokens in itertools.product(range(VOCAB), repeat=POSITIONS):
        out.append(math.prod(float(p[before, token]) for before, token in zip((VOCAB, *tokens), tokens)))
    return torch.tensor(out, dtype=torch.float64)


def _drafter(logits: Tensor) -> Tensor:
    return torch.softmax(logits.float(), dim=-1)


DRAFTERS = {  # probabilities of the next draft after each token
    "identical": lambda target: softmax(target).float(),
    "good": lambda target: _drafter(target.clamp(min=-9) + torch.linspace(-0.5, 0.5, VOCAB)),
    "bad": lambda target: _drafter(-target.clamp(min=-3) * 2),
    "zeros where p has mass": lambda target: _drafter(
        target.masked_fill(target == target.amax(1, keepdim=True), -math.inf)
    ),
    "mass where p has none": lambda target: _drafter(torch.eye(VOCAB + 1, VOCAB) * 2),
    "disjoint": lambda target: torch.nn.functional.one_hot(torch.arange(VOCAB + 1) % VOCAB, VOCAB).float(),
}
CASES = [("rejection", name, holes) for name, holes in zip(DRAFTERS, (True, False) * 3)]
CASES += [("match", "identical", False), ("match", "bad", True)]  # it looks at drafts, never at q


def emitted(target: Tensor, propose: Callable[[Tensor, Tensor], tuple[Tensor, dict[str, Tensor]]], **options) -> Tensor:
    """(REQUESTS, POSITIONS) of a loop of drafts and ``verify``. ``propose``: from last tokens and offsets drafts and
    arguments; their parents, if there are, say after which token each comes."""
    seeds = torch.arange(REQUESTS) * 7919 - 10**9
    offsets, last = torch.zeros(REQUESTS, dtype=torch.int64), torch.full((REQUESTS,), VOCAB)
    got = torch.full((REQUESTS, POSITIONS + 1), -1)
    while bool((offsets < POSITIONS).any()):
        drafts, arguments = propose(last, offsets)
        after = torch.cat([last[:, None], drafts], dim=1)
        common = {"temperature": TEMPERATURE, "seed": seeds, "offset": offsets, **options}
        out = verify_from_logits(target[after], drafts, **arguments, **common)
        assert bool((out.token_ids[:, 0] >= 0).all())
        where = offsets[:, None] + torch.arange(out.token_ids.shape[1])
        where = torch.where((out.token_ids >= 0) & (where < POSITIONS), where, POSITIONS)
        got.scatter_(1, where, out.token_ids)
        offsets = offsets + out.num_emitted
        last = out.token_ids.gather(1, (out.num_emitted - 1)[:, None])[:, 0]
    return got[:, :POSITIONS]


def assert_joint(target: Tensor, tokens: Tensor) -> None:
    places = VOCAB ** torch.arange(POSITIONS - 1, -1, -1)
    counts = torch.bincount((tokens * places).sum(1), minlength=VOCAB**POSITIONS)
    probabilities = joint(target)
    assert counts[probabilities == 0].sum() == 0
    there = probabilities > 0
    assert_distribution(counts[there], probabilities[there], distance=0.14)


def draw_from(q: Tensor, chance: torch.Generator) -> Tensor:
    return torch.multinomial(q, 1, generator=chance)[:, 0]


def chain(q: Tensor, n: int, method: str, chance: torch.Generator):
    """Proposes n drafts, each from what q says after the one before."""

    def propose(last: Tensor, offsets: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        drafts, probs = [], []
        for _ in range(n):
            probs.append(q[last])
            last = draw_from(q[last], chance)
            drafts.append(last)
        return torch.stack(drafts, 1), {"draft_probs": torch.stack(probs, 1)} if method == "rejection" else {}

    return propose


@pytest.mark.quick(2)
@pytest.mark.parametrize(("method", "drafter", "holes"), CASES)
def test_joint_distribution(method, drafter, holes):
    target = HOLES if holes else TARGET
    propose = chain(DRAFTERS[drafter](target), 2, method, torch.Generator().manual_seed(1))
    assert_joint(target, emitted(target, propose, method=method))


def test_filters_and_penalties_are_in_p():
    """Rejection with top-k: the joint distribution of what it keeps; with a presence penalty: no draft comes twice."""
    kept = TARGET.masked_fill(TARGET.amin(1, keepdim=True) == TARGET, -math.inf)
    q = DRAFTERS["bad"](TARGET)
    propose = chain(q, 2, "rejection", torch.Generator().manual_seed(3))
    assert_joint(kept, emitted(TARGET, propose, method="rejection", top_k=torch.full((REQUESTS,), 2)))
    rows = 500
    drafts = torch.tensor([[1, 1, 2]]).expand(rows, 3)
    probs = torch.nn.functional.one_hot(drafts, VOCAB).float()
    logits = torch.tensor([-20.0, 9.0, 0.0]).expand(rows, 4, VOCAB)
    counts = torch.zeros(rows, VOCAB, dtype=torch.int32)
    out = verify_from_logits(
        logits,
        drafts,
        method="rejection",
        draft_probs=probs,
        presence_penalty=50.0,
        token_counts=counts,
        seed=torch.arange(rows),
    )
    assert (out.num_accepted >= 1).float().mean() > 0.99
    assert out.num_accepted.max() == 1  # the second 1 has 9 - 50
    assert not counts.any()


def binomial(successes: int, trials: int, probability: float) -> None:
    """Within what a fair coin of that probability does with LEVEL; 0 and 1 exactly."""
    deviation = math.sqrt(trials * probability * (1 - probability))
    assert abs(successes - trials * probability) <= 5 * deviation + 1e-6 * trials, (successes / trials, probability)


@pytest.mark.quick(1)
@pytest.mark.parametrize("drafter", list(DRAFTERS))
def test_acceptance_rates(drafter):
    """Rejection accepts sum(min(p, q)); matching independent drafts sum(p q); matching drafts of the same noise
    sum over x of 1 / sum over y of max(p_y / p_x, q_y / q_x), from (1 - TV) / (1 + TV) to 1 - TV."""
    assert LEVEL < 1e-5  # of what five deviations are
    chance, rows = torch.Generator().manual_seed(4), 15_000
    p, q = softmax(HOLES)[0], DRAFTERS[drafter](HOLES)[0]
    q = q / q.sum()
    wide = q.double()
    drafts = torch.multinomial(q, rows, replacement=True, generator=chance)[:, None]
    logits, seeds = HOLES[0].expand(rows, 2, VOCAB), torch.arange(rows)
    common = {"temperature": TEMPERATURE, "seed": seeds, "offset": 3}
    out = verify_from_logits(logits, drafts, method="rejection", draft_probs=q.expand(rows, 1, VOCAB), **common)
    binomial(int(out.num_accepted.sum()), rows, float(torch.minimum(p, wide).sum()))
    certain = verify_from_logits(logits, drafts, method="rejection", **common)
    binomial(int(certain.num_accepted.sum()), rows, float((p * wide).sum()))
    matched = verify_from_logits(logits, drafts, **common)
    binomial(int(matched.num_accepted.sum()), rows, float((p * wide).sum()))

    coupled = sample_from_logits(q.log().expand(rows, VOCAB), seed=seeds, offset=3).token_ids[:, None]
    out = verify_from_logits(logits, coupled, **common)
    both = [x for x in range(VOCAB) if p[x] > 0 and wide[x] > 0]
    expected = sum(1 / float(torch.maximum(p / p[x], wide / wide[x]).sum()) for x in both)
    distance = float((p - wide).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) - 1e-6 <= expected <= 1 - distance + 1e-6
    binomial(int(out.num_accepted.sum()), rows, expected)


@pytest.mark.parametrize("word", [0, 2**32 - 1])
def test_end_points(word, monkeypatch):
    """The least coin does not accept what p does not have; the greatest accepts what p and q have alike. No coin is 0
    or 1."""
    real = noise.philox4x32_10

    def words(counter, key):
        is_coin = bool((counter[1] >> 24 == noise.Stream.ACCEPTANCE_COIN).all())
        return tuple(torch.full_like(w, word) for w in real(counter, key)) if is_coin else real(counter, key)

    monkeypatch.setattr(noise, "philox4x32_10", words)
    one = torch.zeros(1, dtype=torch.int64)
    assert 0.0 < float(noise.coin(one, one)) < 1.0
    p = torch.tensor([0.0, 0.25, 0.25, 0.25, 0.25])  # which a softmax gives to the bit
    logits, rows = p.log().expand(5, 2, 5), torch.arange(5)
    drafts = rows[:, None]

    def accepted(q: Tensor | None) -> list[int]:
        probs = None if q is None else q.expand(5, 1, 5)
        return verify_from_logits(
            logits, drafts, method="rejection", draft_probs=probs, seed=rows
        ).num_accepted.tolist()

    least = word == 0
    assert accepted(p) == [0, 1, 1, 1, 1]
    assert accepted(None) == [0, *[int(least)] * 4]
    assert accepted(torch.full((5,), 0.5)) == [0, *[int(least)] * 4]
    assert accepted(torch.full((5,), 0.2)) == [0, 1, 1, 1, 1]
    assert accepted(torch.zeros(5)) == [0, 1, 1, 1, 1]  # p / 0 is above every coin, 0 / 0 below


def test_what_takes_the_place_of_a_draft():
    """p - q alone; where q has more than p everywhere, which no q that sums to 1 has, p."""
    rows = 2000
    p = torch.tensor([0.5, 0.3, 0.2, 0.0])
    drafts, logits, seeds = torch.full((rows, 1), 3), p.log().expand(rows, 2, 4), torch.arange(rows)
    for q, left in (
        ([0.5, 0.0, 0.0, 0.5], [0.0, 0.6, 0.4, 0.0]),
        ([1.0, 1.0, 1.0, 1.0], [0.5, 0.3, 0.2, 0.0]),
        (None, [0.5, 0.3, 0.2, 0.0]),
    ):
        probs = None if q is None else torch.tensor(q).expand(rows, 1, 4)
        out = verify_from_logits(logits, drafts, method="rejection", draft_probs=probs, seed=seeds)
        assert out.num_accepted.max() == 0
        for token, share in enumerate(left):
            binomial(int((out.token_ids[:, 0] == token).sum()), rows, share)
    nan = torch.tensor([0.5, 0.3, math.nan, 0.2]).expand(rows, 1, 4)
    out = verify_from_logits(logits, drafts, method="rejection", draft_probs=nan, seed=seeds)
    assert (out.token_ids == -1).all()
    assert out.num_emitted.max() == 0


def test_a_q_below_0_is_0():
    """What the target never draws, a masked token for one, is neither accepted nor recovered because of it."""
    p, q = torch.tensor([0.5, 0.3, 0.2, 0.0, 0.0]), torch.tensor([0.6, -0.5, -0.0, -9.0, -math.inf])
    drafts, logits, rows = (
        torch.tensor([[3], [4], [0], [1]]).repeat(25, 1),
        p.log().expand(100, 2, 5),
        torch.arange(100),
    )
    given, clamped = (
        verify_from_logits(logits, drafts, method="rejection", draft_probs=probs.expand(100, 1, 5), seed=rows)
        for probs in (q, q.clamp(min=0.0))
    )
    assert torch.equal(given.token_ids, clamped.token_ids)
    assert given.num_accepted.view(25, 4).sum(dim=0)[[0, 1, 3]].tolist() == [0, 0, 25]
    assert given.token_ids.max() == 2


KNOWN = [0.6619735347339883, 0.6346070050494745, 0.685742549947463, 0.4050077273277566]


def test_known_coins():
    """Words of token 0, stream 1; changing them changes every accepted draft."""
    seeds, offsets = torch.tensor([0, 1, -1, 2**62]), torch.tensor([0, 5, -1, 2**40 + 3])
    counter = (
        torch.zeros_like(seeds),
        torch.full_like(seeds, 1 << 24),
        offsets & 0xFFFFFFFF,
        offsets >> 32 & 0xFFFFFFFF,
    )
    words = noise.philox4x32_10(counter, (seeds & 0xFFFFFFFF, seeds >> 32 & 0xFFFFFFFF))[0]
    coins = noise.coin(seeds, offsets)
    assert coins.dtype is torch.float64
    assert torch.equal((coins * 2**32 - 0.5).long(), words)
    assert coins.tolist() == KNOWN
    token = noise.gumbel(seeds, offsets, torch.zeros(1).long(), 0, 1, noise.Stream.ACCEPTANCE_COIN)[:, 0, 0]
    assert torch.allclose(token.double(), -torch.log(-torch.log1p(-coins)), atol=1e-5)


def test_groups_of_rows_are_one(monkeypatch):
    """However few rows of probabilities are made at a time."""
    states, q = torch.randn(9, 4, 16), torch.softmax(torch.randn(9, 3, 16), dim=-1)
    drafts = torch.randint(0, 16, (9, 3))
    expected = verify_from_logits(states, drafts, method="rejection", draft_probs=q, seed=torch.arange(9))
    for rows in (1, 2, 5):
        monkeypatch.setattr(streaming, "_LOGITS_AT_ONCE", {"cpu": 16 * rows, "cuda": 16 * rows})
        out = verify_from_logits(states, drafts, method="rejection", draft_probs=q, seed=torch.arange(9))
        assert torch.equal(out.token_ids, expected.token_ids)


def test_every_draft_has_its_own_q():
    """In both layouts. A q of 0 accepts every draft that the target may draw, one of 1e9 accepts none."""
    is_accepted = torch.rand(40, 3, generator=torch.Generator().manual_seed(6)) < 0.7
    probs = torch.where(is_accepted, 0.0, 1e9)[:, :, None].expand(-1, -1, 4)
    logits, drafts, options = torch.zeros(40, 4, 4), torch.zeros(40, 3, dtype=torch.int64), {"method": "rejection"}
    out = verify_from_logits(logits, drafts, draft_probs=probs, seed=torch.arange(40), **options)
    assert torch.equal(out.num_accepted, is_accepted.long().cumprod(1).sum(1))
    lengths = torch.arange(40) % 4
    there = torch.arange(3) < lengths[:, None]
    flat = {"cu_draft_lengths": [0, *lengths.cumsum(0).tolist()], "max_draft_length": 3, "draft_probs": probs[there]}
    states = torch.zeros(int(lengths.sum()) + 40, 4)
    out = verify_from_logits(states, drafts[there], seed=torch.arange(40), **flat, **options)
    assert torch.equal(out.num_accepted, (is_accepted & there).long().cumprod(1).sum(1))
