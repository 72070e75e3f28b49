"""Where filters end over several ranks, by kernels and by torch's operations: the same places, of any row and any
cut."""

import random
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from flashsampling.exchange_protocol import NAN as NAN_WORD
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.sharded import cutoffs as by_kernels
from flashsampling.reference import logit_transforms
from flashsampling.sampling_params import SamplingParams
from flashsampling.tensor_parallel import cutoffs as by_torch
from flashsampling.tensor_parallel.cutoffs import Collective, FixedPointScale, Shards
from tests.conftest import DEVICE
from tests.mixes import INF, NAN
from tests.tensor_parallel.test_filters import Board, on_all_ranks

ROOM = 4096
SIZES = (7, 150) if DEVICE.type == "cpu" else (1, 300, 5000, 40_001)


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a small row has several."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr(by_kernels, "TILE", 64)
        monkeypatch.setattr(by_kernels, "CHUNK", 8)


def rows_of(kind: str, batch: int, vocab: int) -> Tensor:
    logits = torch.randn(batch, vocab) * 3
    if kind == "ties":
        return (logits * 2).round() / 2
    if kind == "flat":
        return torch.zeros(batch, vocab).where(torch.rand(batch, 1) < 0.5, -0.0)
    if kind == "wide":
        return logits * 10.0 ** torch.randint(-3, 38, (batch, 1))
    if kind == "few":
        return logits.masked_fill(torch.rand(batch, vocab) < 0.97, -INF)
    if kind == "infinite":
        return logits.where(
            torch.rand(batch, vocab) > 0.03, torch.tensor([INF, -INF])[torch.randint(2, (batch, vocab))]
        )
    if kind == "poisoned":
        return logits.where(
            torch.rand(batch, vocab) > 0.1, torch.tensor([INF, -INF, NAN])[torch.randint(3, (batch, vocab))]
        )
    return logits


def any_of(choices: list[float], batch: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.tensor(random.choices(choices, k=batch), dtype=dtype, device=DEVICE)


@dataclass
class Problem:
    """Rows over ranks, and their filters."""

    logits: Tensor
    ranges: list[tuple[int, int]]
    allowed: Tensor | None  # (B, V) bool
    few: int

    def __post_init__(self) -> None:
        batch, vocab = self.logits.shape
        self.temperature = any_of([0.0, 1e-6, 0.7, 1.0, 3.0, 1e6, INF, INF, NAN], batch)
        self.top_k = any_of([-1, 0, 1, 5, 20, 60, vocab - 1, vocab, vocab + 1, 2**40], batch, torch.int64)
        self.top_p = any_of([0.0, 1e-9, 0.3, 0.5, 0.9, 0.999, 1.0, 2.0, -1.0, NAN], batch)
        self.min_p = any_of([-1.0, 0.0, 1e-9, 0.1, 1.0, NAN], batch)

    def local(self, rank: int) -> SampleInputs:
        first, last = self.ranges[rank]
        mask = None
        if self.allowed is not None:
            bits = torch.nn.functional.pad(self.allowed[:, first:last], (0, first - last & 31)).unflatten(1, (-1, 32))
            mask = (bits.long() << torch.arange(32, device=DEVICE)).sum(dim=2).to(torch.int32)
        seeds = torch.zeros(len(self.logits), dtype=torch.int64, device=DEVICE)
        states = self.logits[:, :0]
        return SampleInputs(
            states,
            states,
            self.temperature,
            seeds,
            seeds,
            1,
            last - first,
            Shard(first, PACKED),
            SamplingParams(token_mask=mask),
        )

    def check(self, rank: int, meet: Collective) -> None:
        """Both ways, on every rank; the kernels' rounds and torch's in turn."""
        (first, last), vocab = self.ranges[rank], self.logits.shape[1]
        mine, shards, local = self.logits[:, first:last], Shards(rank, self.ranges, ROOM), self.local(rank)
        words, _ = by_torch.highest(local, mine)
        ours, known = by_kernels.highest(local, mine)
        assert torch.equal(ours, words)
        best = meet(words)[:, :, 0].amax(dim=0)
        undefined = (best == NAN_WORD) | (best == 0)
        top = logit_transforms.values_of(torch.where(undefined, 0, best - (2**31 << 31)) >> 31)
        scale = FixedPointScale(top, self.temperature, by_torch.fixed_point_scale_of(vocab))
        places = logit_transforms.places_of(logit_transforms.keys_of(mine), torch.arange(first, last, device=DEVICE))

        def end_of_nucleus(counted: Tensor | None) -> Tensor:
            """(B, n) bool: tokens before which the mass of those that count, from this rank's limit on, is p but for
            1e-6."""
            ids = torch.arange(vocab, device=DEVICE)
            everywhere, masses = (
                logit_transforms.places_of(logit_transforms.keys_of(self.logits), ids),
                scale.of(self.logits).double(),
            )
            if counted is not None:
                limits = meet(counted[:, None])[:, :, 0]
                for (start, stop), limit in zip(self.ranges, limits):
                    masses[:, start:stop] *= everywhere[:, start:stop] >= limit[:, None]
            order = everywhere.argsort(dim=1, descending=True)
            before = torch.zeros_like(masses).scatter_(1, order, masses.gather(1, order).cumsum(dim=1)) - masses
            total = masses.sum(dim=1, keepdim=True)
            return ((before - self.top_p[:, None].double() * total).abs() <= 1e-6 * total)[:, first:last]

        def agree(ours: Tensor, theirs: Tensor, unless: Tensor | None = None) -> None:
            assert ours.dtype == theirs.dtype == torch.int64
            kept, expected = ((places >= limit[:, None]) & ~undefined[:, None] for limit in (ours, theirs))
            differ = kept != expected
            assert not (differ if unless is None else differ & ~unless).any()

        both = (by_kernels, by_torch)
        if self.few < vocab:
            few = [module.of_few(meet, mine, known, self.few, self.top_p, scale, shards) for module in both]
            agree(*few, end_of_nucleus(by_torch.of_few(meet, mine, known, self.few, 1.0, scale, shards)))
        top_k = [module.of_top_k(meet, mine, known, self.top_k, scale, vocab, shards) for module in both]
        agree(*top_k)
        for limit in (None, top_k[1]):
            top_p = [module.of_top_p(meet, mine, known, scale, self.top_p, limit, vocab, shards) for module in both]
            agree(*top_p, end_of_nucleus(limit))
        of_both = by_kernels.of_top_k_and_p
        agree(of_both(meet, mine, known, self.top_k, 1.0, scale, vocab, shards), top_k[1])
        limit = of_both(meet, mine, known, self.top_k, self.top_p, scale, vocab, shards)
        agree(limit, top_p[1], end_of_nucleus(top_k[1]))
        agree(*(module.of_min_p(mine, known, scale, self.min_p) for module in both))
        ours, theirs = (module.mass_of(mine, top_k[1], scale, first) for module in both)
        assert ours.shape == theirs.shape == (len(mine), 1)
        ours, theirs = (masses.double()[~undefined] for masses in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=1e-6 if DEVICE.type == "cpu" else 5e-7, atol=4.0)  # units


def meeting(board: Board, rank: int) -> Collective:
    """On which nothing rests that nobody is said to want."""

    def meet(words: Tensor, wanted: Tensor | None = None) -> Tensor:
        theirs = board.all_gather(rank, words)
        return theirs if wanted is None or wanted.item() else torch.randint_like(theirs, -(2**62), 2**62)

    return meet


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["usual", "ties", "flat", "wide", "few", "infinite", "poisoned"])
def test_the_same_places(kind):
    random.seed(kind)
    torch.manual_seed(random.randrange(10**6))
    for vocab in SIZES:
        ends = sorted(random.choices(range(vocab + 1), k=random.randrange(1, 4)))
        ranges = list(zip([0, *ends], [*ends, vocab]))
        random.shuffle(ranges)
        batch = random.randrange(2, 5)
        allowed = torch.rand(batch, vocab, device=DEVICE) < 0.5 if random.random() < 0.5 else None
        logits = rows_of(kind, batch, vocab).to(DEVICE)
        problem, board = Problem(logits, ranges, allowed, random.choice([1, 3, 20, 128])), Board(len(ranges))
        on_all_ranks(board, lambda rank: problem.check(rank, meeting(board, rank)))  # noqa: B023, all are done by then


def known_of(module: ModuleType, logits: Tensor) -> Tensor | None:
    """What the first round finds of a shard's logits for the others."""
    seeds = torch.zeros(len(logits), dtype=torch.int64, device=DEVICE)
    step = SampleInputs(logits, logits, seeds.float(), seeds, seeds, 1, logits.shape[1], Shard(7, PACKED))
    return module.highest(step, logits)[1]


@pytest.mark.parametrize("most", [10, 1000])
def test_first_places_of_more_chunks_than_a_program_has(most, monkeypatch):
    monkeypatch.setattr(by_kernels, "_MOST", most)
    logits = rows_of("ties", 3, 90).to(DEVICE)
    known = known_of(by_kernels, logits)
    places = by_kernels.first_places(logits, known, 20, 7)
    assert torch.equal(places.sort(dim=1, descending=True).values, by_torch.highest_places(logits, 7, 20))


def alone(words: Tensor, wanted: Tensor | None = None) -> Tensor:
    """Of one rank."""
    return words[None]


def test_top_p_is_of_what_top_k_keeps():
    logits = torch.zeros(1, 100, device=DEVICE)
    shards, scale = (
        Shards(0, [(0, 100)], ROOM),
        FixedPointScale(logits[:, 0], torch.ones(1, device=DEVICE), by_torch.fixed_point_scale_of(100)),
    )
    known = known_of(by_kernels, logits)
    limit = by_kernels.of_top_k(alone, logits, known, 20, scale, 100, shards)
    limit = by_kernels.of_top_p(alone, logits, known, scale, 0.5, limit, 100, shards)
    assert by_torch.is_kept(logits, limit, 0)[0].nonzero()[:, 0].tolist() == list(range(10))


@pytest.mark.parametrize("module", [by_kernels, by_torch])
@pytest.mark.parametrize("top_p", [1.0, 2.0])
def test_top_p_that_is_off_keeps_tokens_without_mass(top_p, module):
    """Of one row; the other's ends before them."""
    logits = torch.zeros(2, 100, device=DEVICE)
    logits[:, 50:] = -1e4
    shards, rows = Shards(0, [(0, 100)], ROOM), torch.tensor([top_p, 0.999], device=DEVICE)
    scale = FixedPointScale(logits[:, 0], torch.ones(2, device=DEVICE), by_torch.fixed_point_scale_of(100))
    known = known_of(module, logits)
    limits = [
        module.of_few(alone, logits, known, 60, rows, scale, shards),
        module.of_top_p(alone, logits, known, scale, rows, None, 100, shards),
    ]
    assert [by_torch.is_kept(logits, limit, 0).sum(dim=1).tolist() for limit in limits] == [[60, 50], [100, 50]]


@pytest.mark.parametrize("module", [by_kernels, by_torch])
def test_min_p_of_logits_farther_apart_than_float32_goes(module):
    """At a temperature at which the lowest are kept all the same."""
    logits = torch.tensor([3e38] * 40 + [-3e38] * 40, device=DEVICE)[None]
    scale = FixedPointScale(logits[:, 0], torch.tensor([3e38], device=DEVICE), by_torch.fixed_point_scale_of(80))
    for min_p, kept in ((0.1, 80), (0.2, 40)):
        limit = module.of_min_p(logits, known_of(module, logits), scale, min_p)
        assert by_torch.is_kept(logits, limit, 0).sum() == kept


@pytest.mark.parametrize("ranks", [64, 126, 128, 200])
def test_as_many_ranks_as_there_are(ranks):
    """A rank knows of each other one whether its tokens come before its own; of equal logits that is all that
    counts."""
    mine, scale = (
        torch.zeros(1, 2, device=DEVICE),
        FixedPointScale(*torch.ones(2, 1, device=DEVICE), by_torch.fixed_point_scale_of(2 * ranks)),
    )
    at = ranks * 2 // 3
    places = [*range(ranks - 1, at, -1), *range(at), at]  # the last rank's tokens lie in between
    shards = Shards(ranks - 1, [(2 * place, 2 * place + 2) for place in places], 1 << 16)
    assert shards.first == 2 * at

    def meet(words: Tensor, wanted: Tensor | None = None) -> Tensor:
        return words.repeat(ranks, 1, 1)

    for k, kept in ((2 * at, 0), (2 * at + 1, 1), (2 * at + 2, 2), (3, 0), (2 * ranks - 1, 2)):
        known = known_of(by_kernels, mine)
        limit = by_kernels.of_top_k(meet, mine, known, k, scale, 2 * ranks, shards)
        assert by_torch.is_kept(mine, limit, shards.first).sum() == kept, k


def test_messages_of_few_words():
    """40 of a row: six digits of 5 bits, and one of 2."""
    mine, shards = rows_of("ties", 3, 90).to(DEVICE), Shards(1, [(0, 90), (90, 180)], 3 * 40)
    assert shards.digit_width(3) == 5
    scale = FixedPointScale(mine.amax(dim=1), torch.ones(3, device=DEVICE), by_torch.fixed_point_scale_of(180))
    top_k, top_p = torch.tensor([5, 60, 171], device=DEVICE), torch.tensor([0.3, 0.9, 0.999], device=DEVICE)

    def meet(amounts: Tensor, wanted: Tensor | None = None) -> Tensor:
        assert amounts.numel() <= shards.room
        return amounts.repeat(2, 1, 1)

    def kept(module: ModuleType) -> Tensor:
        known = known_of(module, mine)
        limits = [module.of_top_k(meet, mine, known, top_k, scale, 180, shards)]
        limits.append(module.of_top_p(meet, mine, known, scale, top_p, limits[0], 180, shards))
        return torch.stack([by_torch.is_kept(mine, limit, shards.first) for limit in limits])

    ours = kept(by_kernels)
    assert torch.equal(ours, kept(by_torch))
    assert 0 < ours.sum() < ours.numel()
