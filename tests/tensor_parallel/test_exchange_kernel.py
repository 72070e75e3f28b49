"""The peer-to-peer protocol as the kernels run it, with all ranks on one GPU: a stream and a table each, in one
process. Without a GPU the Hopper kernel's launches of all ranks run in turns (``tests.emulator``), in an order drawn at
random."""

import contextlib
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flashsampling import exchange_protocol
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import DIFFERS, LATE, Shard, Verdict
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams

from ..conftest import DEVICE
from ..emulator.machine import together
from ..problems import KERNELS, NEEDS_CUTE, Problem, make_problem

ON_GPU = DEVICE.type == "cuda"
# Triton's interpreter does one rank after the other, each of which waits for all
EXCHANGING = KERNELS if ON_GPU else tuple(kernel for kernel in KERNELS if kernel == "cute")
SECONDS = 30.0


@dataclass
class Ranks:
    """The memory that ``TensorParallel`` makes for each rank of a group, in one process."""

    impl: str
    size: int
    capacity: int
    seconds: float = SECONDS

    def __post_init__(self) -> None:
        words = exchange_protocol.shared_words(self.size, self.capacity)
        self.shared = torch.zeros(self.size, words, dtype=torch.int64, device=DEVICE)
        self.told = torch.zeros(self.size, dtype=torch.int64, pin_memory=ON_GPU)
        self.tables = torch.zeros(
            self.size, exchange_protocol.TABLE_SHARED + self.size, dtype=torch.int64, device=DEVICE
        )
        addresses = [row.data_ptr() for row in self.shared]
        for rank in range(self.size):
            told, nanoseconds = self.told[rank:].data_ptr(), int(self.seconds * 1e9)
            self.tables[rank] = torch.tensor(
                exchange_protocol.table_words(rank, self.capacity, nanoseconds, told, addresses)
            )
        self.streams = [torch.cuda.Stream() for _ in range(self.size)] if ON_GPU else []

    @property
    def slots(self) -> Tensor:
        """Of whom, buffer, from whom, row, word."""
        first = exchange_protocol.first_slot(self.capacity)
        return self.shared[:, first:].view(self.size, 2, self.size, -1, 2)

    def stream(self, rank: int) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self.streams[rank]) if ON_GPU else contextlib.nullcontext()

    def step(self, problem: Problem, rank: int, **options: Any) -> SampleInputs:
        """Returns a step over a rank's shard."""
        first, last = (problem.vocab * (rank + i) // self.size for i in range(2))
        part = Shard(first, self.tables[rank].data_ptr())
        return problem.step(weight=problem.weight[first:last].clone(), vocab_size=last - first, shard=part, **options)

    def run(
        self, steps: dict[int, SampleInputs], before: Callable[[int], object] = lambda rank: None
    ) -> dict[int, Tensor]:
        """Runs the ranks' steps at once, each after ``before(rank)``. Returns their ids."""
        synchronize()
        out = {}
        with contextlib.nullcontext() if ON_GPU else together():
            for rank, step in steps.items():
                with self.stream(rank):
                    before(rank)
                    out[rank] = BACKENDS[self.impl].run(step).ids
        synchronize()
        return out

    def draw(self, problems: dict[int, Problem], skipped_calls: dict[int, int] | None = None) -> dict[int, Tensor]:
        """Tokens, (B, num_samples), of a step of those ranks, each with its own problem."""
        steps = {}
        for rank, problem in problems.items():
            self.tables[rank, exchange_protocol.TABLE_LEFT_OUT] = (skipped_calls or {}).get(rank, 0)
            steps[rank] = self.step(problem, rank)
        return {rank: ids.view(-1, problems[rank].num_samples) for rank, ids in self.run(steps).items()}

    def draw_masked(
        self, problem: Problem, masks: dict[int, Tensor | None], numbers: dict[int, int] | None = None
    ) -> dict[int, Tensor]:
        """Tokens, (B,), of a step of ranks with a token mask each; None: default parameters. ``numbers``: the parameter
        hashes that masked ranks compare in a step before, as ``p2p.PeerToPeer.compare`` does; None: no comparison."""
        params = {
            rank: DEFAULT_PARAMS if mask is None else SamplingParams(token_mask=mask) for rank, mask in masks.items()
        }
        steps = {rank: self.step(problem, rank, params=params[rank]) for rank in masks}
        if not numbers:
            return self.run(steps)
        collectives = importlib.import_module("flashsampling.kernels.triton.sharded.collectives")
        hashes = {rank: torch.tensor([numbers[rank]], device=DEVICE) for rank in masks if masks[rank] is not None}

        def compare(rank: int) -> None:
            if rank in hashes:
                table, own = self.tables[rank].data_ptr(), hashes[rank]
                collectives.all_gather(table, own, self.size, (0, own), steps[rank]._replace(params=DEFAULT_PARAMS))

        return self.run(steps, compare)

    def same_for_all(self, problem: Problem) -> dict[int, Problem]:
        return dict.fromkeys(range(self.size), problem)

    def assert_empty(self) -> None:
        assert not self.shared[:, : exchange_protocol.SHARED_DETAILS].any()
        assert not self.shared[:, exchange_protocol.first_slot(self.capacity) :].any()
        assert not self.told.any()

    def verdict(self, ranks: range | list[int] | None = None) -> Verdict:
        """Returns the verdict of these ranks, which is the same for all."""
        told = {int(self.told[rank]) for rank in (range(self.size) if ranks is None else ranks)}
        assert len(told) == 1
        return Verdict.of(told.pop())


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def batch_shape(batch: int, num_samples: int = 1, vocab: int = 1500 if ON_GPU else 700) -> Problem:
    return make_problem(batch, vocab, 64, DEVICE, torch.bfloat16, num_samples)


@pytest.fixture(params=EXCHANGING)
def impl(request):
    if not ON_GPU:
        return request.param
    # a kernel is loaded while nothing waits: loading may wait for the device
    problem = batch_shape(4)
    Ranks(request.param, 1, 4).draw({0: replace(problem, temperature=1.0)})
    for batch in (5, 30, 40, 70, 130, 256, 330):
        for num_samples in (1, 3):
            Ranks(request.param, 1, 1000).draw({0: batch_shape(batch, num_samples)})
    problem.sample(request.param)
    return request.param


@pytest.mark.quick(1)
@pytest.mark.parametrize("size", [2, 3, 4, 8] if ON_GPU else [2, 3, 8])
def test_ranks_draw_the_whole_vocabulary_s_tokens(impl, size):
    """One row to two blocks of them, one draw to three; NaN and infinities on some shard. Every slot is empty after
    it."""
    ranks = Ranks(impl, size, 1000)
    shapes = [(1, 1), (5, 1), (30, 1), (5, 3), (256, 3), (130, 3)]
    shapes += [(batch, 1) for batch in (1, 40, 70, 130, 256, 330)]
    if not ON_GPU:  # a kernel for every width
        shapes = [(1, 1), (5, 1), (15, 1), (5, 3), (1, 1), (256, 1), (500, 1), (8, 3)]
    for step, (batch, num_samples) in enumerate(shapes):
        problem = batch_shape(batch, num_samples)
        if step % 2:
            problem.hidden_states[0, 1], problem.weight[7, 0] = float("nan"), float("inf")
        expected = problem.sample(impl)
        for tokens in ranks.draw(ranks.same_for_all(problem)).values():
            assert torch.equal(tokens, expected), (batch, num_samples)
        ranks.assert_empty()
        assert (ranks.tables[:, exchange_protocol.TABLE_STEPS] == step + 1).all()
        assert not ranks.tables[:, exchange_protocol.TABLE_FINISHED].any()


@NEEDS_CUTE
@pytest.mark.parametrize("size", [2, 3, 8])
def test_masks(size):
    """Logit transforms run in the launch of the exchange. Masks are the whole vocabulary's, at any cut."""
    for batch in (1, 5, 70, 256) if ON_GPU else (1, 7):
        ranks, problem = Ranks("cute", size, 256), batch_shape(batch)
        mask = torch.randint(-(2**31), 2**31 - 1, (batch, -(-problem.vocab // 32)), device=DEVICE).int()
        mask[-1] = 0
        expected = BACKENDS["cute"].run(problem.step(params=SamplingParams(token_mask=mask))).ids
        assert expected[-1] == -1
        for tokens in ranks.draw_masked(problem, dict.fromkeys(range(size), mask)).values():
            assert torch.equal(tokens, expected)
        ranks.assert_empty()


@pytest.mark.gpu
@NEEDS_CUTE
@pytest.mark.parametrize("size", [2, 5])
def test_requests_are_compared_before_the_launch_that_does_them(size):
    """If one rank has other parameters, or none, no rank gets a token of that step."""
    problem = batch_shape(30)
    mask = torch.full((30, -(-problem.vocab // 32)), 0x0F0F0F0F, dtype=torch.int32, device=DEVICE)
    alone = Ranks("cute", 1, 30)
    for one in (mask, None):  # a kernel is loaded while nothing waits
        alone.draw_masked(problem, {0: one}, {0: 7})
    expected = alone.draw_masked(problem, {0: mask}, {0: 7})[0]
    draft_hash = dict.fromkeys(range(size), 7)
    cases = [
        (dict.fromkeys(range(size), mask), draft_hash, False),
        (dict.fromkeys(range(size), mask), draft_hash | {size - 1: 8}, True),
        (dict.fromkeys(range(size), mask) | {size - 1: None}, draft_hash, True),
        (dict.fromkeys(range(size)) | {0: mask}, draft_hash, True),
    ]
    for masks, numbers, fails in cases:
        ranks = Ranks("cute", size, 30)
        for _ in range(3):
            for tokens in ranks.draw_masked(problem, masks, numbers).values():
                assert (tokens == -1).all() if fails else torch.equal(tokens, expected)
        if fails:
            assert ranks.verdict()._replace(straggler=0, reporter=0) == Verdict(DIFFERS, 0, 0)
        else:
            ranks.assert_empty()
            assert (ranks.tables[:, exchange_protocol.TABLE_STEPS] == 6).all()


def mix(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The protocol's hash, written anew."""
    with np.errstate(over="ignore"):
        h = (a ^ np.uint32(0x9E3779B9)) * np.uint32(0x85EBCA6B)
        h = (h ^ h >> np.uint32(15) ^ b) * np.uint32(0xC2B2AE35)
        h = (h ^ h >> np.uint32(13)) * np.uint32(0x27D4EB2F)
        return h ^ h >> np.uint32(16)


def messages(problem: Problem, winners: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Words, (B * num_samples, 2) int64, that the rank with these packed winners sends in the step of that number;
    details."""
    batch, draws = len(problem.seed), problem.num_samples

    def words(values: Tensor) -> np.ndarray:
        return values.cpu().numpy().view(np.uint32).reshape(batch, -1).repeat(draws, axis=0)

    seed, offset = words(problem.seed), words(problem.offset)
    same = np.ones(batch * draws, np.uint32)
    fields = [
        mix(batch * same, np.uint32(draws)),
        mix(seed[:, 0], seed[:, 1]),
        mix(offset[:, 0], offset[:, 1]),
        mix(words(problem.temperature)[:, 0], np.uint32(0)),
    ]
    step = number * same
    some = mix(fields[0] ^ fields[1], fields[2] ^ fields[3]) >> np.uint32(16)
    tag0 = 1 << 31 | (number & 0x7FFF) << 16 | some.astype(np.int64)
    tag1 = mix(mix(mix(fields[0], fields[1]), mix(fields[2], fields[3])), step) | np.uint32(1)
    high, low = winners.cpu().numpy() >> 32, winners.cpu().numpy() & 0xFFFFFFFF
    sent = np.stack([high << 32 | tag0, low << 32 | tag1.astype(np.int64)], axis=1)
    details = sum((field >> np.uint32(16)).astype(np.int64) << 48 - 16 * i for i, field in enumerate(fields))
    return torch.from_numpy(sent).to(DEVICE), torch.from_numpy(details).to(DEVICE)


RANKS_AND_ROWS = [(2, (256, 1)), (5, (1, 1)), (32, (16, 1)), (33, (256, 1)), (72, (7, 5))]
if ON_GPU:
    sizes, rows = (2, 5, 8, 31, 32, 33, 64, 72), ((1, 1), (9, 1), (33, 1), (130, 1), (256, 1), (7, 5), (260, 1))
    RANKS_AND_ROWS = list(itertools.product(sizes, rows))


@pytest.mark.quick(1)
@pytest.mark.parametrize(("size", "rows"), RANKS_AND_ROWS)
def test_a_rank_among_messages_that_are_there(impl, size, rows):
    """Words as the protocol has them, for any rank and more of them than a warp has lanes; what it sends is as well."""
    (batch, num_samples), n = rows, rows[0] * rows[1]
    ranks = Ranks(impl, size, n + 1)
    problem = batch_shape(batch, num_samples)
    edges = [problem.vocab * i // size for i in range(size + 1)]
    winners = [problem.winners(impl, first, last) for first, last in itertools.pairwise(edges)]
    expected = problem.sample(impl)
    for launches, skipped_calls, rank in ((0, 0, 0), (1, 0, size - 1), (2**15, 2**31 - 2**15 + 3, size // 2)):
        ranks.shared.zero_()
        ranks.tables[rank, exchange_protocol.TABLE_STEPS] = launches
        reported = [messages(problem, winner, (launches + skipped_calls) % 2**32) for winner in winners]
        for peer in range(size):
            if peer != rank:
                ranks.slots[rank, launches % 2, peer, :n] = reported[peer][0]
        tokens = ranks.draw({rank: problem}, {rank: skipped_calls})[rank]
        assert torch.equal(tokens, expected)
        assert torch.equal(ranks.shared[rank, exchange_protocol.SHARED_DETAILS :][:n], reported[rank][1])
        for peer in range(size):
            got = ranks.slots[peer, launches % 2, rank, :n]
            assert torch.equal(got, reported[rank][0] if peer != rank else torch.zeros_like(got))
            got.zero_()
        ranks.assert_empty()
    # the last row of the last rank is of another step, or missing: nothing is drawn, and that rank is to blame
    for number, verdict in (
        (4, Verdict(DIFFERS, size - 1, 0, ahead=2, step=2)),
        (None, Verdict(LATE, size - 1, 0, step=2)),
    ):
        ranks = Ranks(impl, size, n + 1, seconds=SECONDS if number else 0.2)
        ranks.tables[0, exchange_protocol.TABLE_STEPS] = 2
        for peer in range(1, size):
            sent, details = messages(problem, winners[peer], 2)
            ranks.slots[0, 0, peer, :n], ranks.shared[peer, exchange_protocol.SHARED_DETAILS :][:n] = sent, details
        ranks.slots[0, 0, size - 1, n - 1] = 0 if number is None else messages(problem, winners[-1], number)[0][-1]
        assert (ranks.draw({0: problem})[0] == -1).all()
        assert ranks.verdict([0]) == verdict
        assert (ranks.shared[:, exchange_protocol.SHARED_FAILURE] == verdict.word()).all()


def changed(problem: Problem, what: str) -> Problem:
    """The problem with something else in its last row, or in all."""
    if what == "one row fewer":
        return problem.rows(slice(0, len(problem.seed) - 1))
    if what == "draws":  # as many in all
        draws = 2 if len(problem.seed) % 4 else 4
        return replace(problem.rows(slice(0, len(problem.seed) // draws)), num_samples=draws * problem.num_samples)
    if what == "left out":
        return problem
    values = getattr(problem, what).clone()
    values[-1] += {"seed": 2**40, "offset": 1, "temperature": 1e-3}[what]
    return replace(problem, **{what: values})


FIELDS = {"one row fewer": 8, "draws": 8, "seed": 4, "offset": 2, "temperature": 1, "left out": 0}


DIFFERING = [(2, 0, 6), (2, 1, 6), (3, 1, 6), (3, 2, 256)]  # ranks, which of them, rows
if ON_GPU:
    DIFFERING = [(size, odd, batch) for size in (2, 3) for odd in range(size) for batch in (6, 130, 330)]


@pytest.mark.quick(6)
@pytest.mark.parametrize("what", FIELDS)
@pytest.mark.parametrize(("size", "odd", "batch"), DIFFERING)
def test_a_rank_whose_call_differs(impl, size, odd, what, batch):
    """All ranks' rows are -1, and all get the same verdict: the rank and the fields."""
    ranks = Ranks(impl, size, 1000)
    problem = batch_shape(batch)
    ranks.draw(ranks.same_for_all(problem))
    problems = ranks.same_for_all(problem) | {odd: changed(problem, what)}
    for tokens in ranks.draw(problems, {odd: 2} if what == "left out" else None).values():
        assert (tokens == -1).all()
    verdict = ranks.verdict()
    assert verdict.kind == DIFFERS
    assert verdict.straggler == (odd if size > 2 else 1)
    assert verdict.reporter != verdict.straggler
    if what == "draws":  # of which the rows are others, and so may be all of them
        assert verdict.fields & FIELDS[what]
    else:
        assert verdict.fields == FIELDS[what]
    assert verdict.ahead == ((2 if verdict.straggler == odd else -2) if what == "left out" else 0)
    if what != "left out":
        assert verdict.step == 1
    before = ranks.shared.clone()
    for tokens in ranks.draw(ranks.same_for_all(problem)).values():  # for good, and nothing is sent
        assert (tokens == -1).all()
    assert torch.equal(ranks.shared, before)
    assert ranks.verdict() == verdict


@pytest.mark.quick(3)
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("batch", [5, 330] if ON_GPU else [5, 500])
def test_a_late_rank(impl, size, batch):
    """The others give up and say who it was; it hears of it when it comes, and no later step has a token."""
    ranks = Ranks(impl, size, 1000, seconds=0.3)
    problem = batch_shape(batch)
    ranks.draw(ranks.same_for_all(problem))
    others = {rank: problem for rank in range(size) if rank != 1}
    for _ in range(2):
        for tokens in ranks.draw(others).values():
            assert (tokens == -1).all()
        assert ranks.verdict(list(others)) == Verdict(LATE, 1, ranks.verdict(list(others)).reporter, step=1)
    assert ranks.told[1] == 0
    assert (ranks.draw({1: problem})[1] == -1).all()
    assert ranks.verdict().straggler == 1
    for tokens in ranks.draw(ranks.same_for_all(problem)).values():
        assert (tokens == -1).all()


def test_a_closed_group(impl):
    """Nothing of another rank's memory is touched, and the rows are -1."""
    ranks = Ranks(impl, 2, 1000)
    ranks.tables[:, exchange_protocol.TABLE_RANKS] = 0
    ranks.tables[:, exchange_protocol.TABLE_SHARED :] = 8  # no address
    for batch, num_samples in ((3, 1), (330 if ON_GPU else 500, 1), (40 if ON_GPU else 16, 3)):
        for tokens in ranks.draw(ranks.same_for_all(batch_shape(batch, num_samples))).values():
            assert (tokens == -1).all()
    assert not ranks.shared.any()
    assert not ranks.told.any()


@pytest.mark.gpu
def test_a_failure_that_a_host_declares(impl):
    """All ranks hear of it at their next step, the first declared is the one."""
    pytest.importorskip("triton")
    from flashsampling.kernels.triton.sharded.peer_exchange import declare

    ranks = Ranks(impl, 3, 1000)
    problem = batch_shape(5)
    ranks.draw(ranks.same_for_all(problem))
    first = Verdict(exchange_protocol.DECLARED, 2, 2, step=7)
    for rank, verdict in ((2, first), (0, Verdict(LATE, 1, 0))):
        declare[(1,)](ranks.tables[rank].data_ptr(), verdict.word(), num_warps=1)
    for tokens in ranks.draw(ranks.same_for_all(problem)).values():
        assert (tokens == -1).all()
    assert ranks.verdict() == first


def test_parameters_as_numbers_are_the_same_as_in_tensors(impl):
    """A rank may pass a number where another passes a tensor of equal values."""
    ranks = Ranks(impl, 2, 100)
    problem = batch_shape(4)
    problem.temperature[:], problem.seed[:], problem.offset[:] = 0.7, -(2**60), 3
    numbers = replace(problem, temperature=0.7, seed=-(2**60), offset=3)
    expected = problem.sample(impl)
    for tokens in ranks.draw({0: problem, 1: numbers}).values():
        assert torch.equal(tokens, expected)


def test_verdicts_survive_their_word():
    for verdict in (
        Verdict(LATE, 1, 0),
        Verdict(DIFFERS, 1023, 1022, 15, -32, 2**31 - 1),
        Verdict(DIFFERS, 0, 1, 5, 31, 12345),
        Verdict(exchange_protocol.DECLARED, 71, 70, 0, 0, 1),
    ):
        assert 0 < verdict.word() < 2**63
        assert Verdict.of(verdict.word()) == verdict


# -- rounds of requests


class Rounds(Ranks):
    """The same, whose ranks swap words."""

    def all_gather(
        self,
        words: dict[int, Tensor],
        problem: Problem,
        requests: dict[int, int] | None = None,
        params: dict[int, SamplingParams] | None = None,
    ) -> dict[int, tuple[Tensor, bool]]:
        """All ranks' words, (ranks, n), and whether the group has failed, by rank."""
        from flashsampling.kernels.triton.sharded import collectives

        out, step = {}, problem.step()
        hashes = {rank: torch.tensor([(requests or {}).get(rank, 12345 << 40)], device="cuda") for rank in words}
        torch.cuda.synchronize()
        for rank, local in words.items():
            with torch.cuda.stream(self.streams[rank]):
                table = self.tables[rank].data_ptr()
                own = step._replace(params=(params or {}).get(rank, DEFAULT_PARAMS))
                out[rank] = collectives.all_gather(table, local, self.size, (0, hashes[rank]), own)
        torch.cuda.synchronize()
        return {rank: (received, bool((received == -1).all())) for rank, received in out.items()}


def some_words(ranks: int, count: int, seed: int = 0) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**63), 2**63 - 1, (ranks, count), generator=generator)
    words[:, ::3] = 0  # an empty slot's
    words[:, 1::5] = -1
    return dict(enumerate(words.cuda()))


@pytest.fixture
def loaded():
    """A kernel is loaded while nothing waits."""
    pytest.importorskip("triton")
    Rounds("triton", 1, 100).all_gather(some_words(1, 100), batch_shape(4))
    Rounds("triton", 1, 1000).draw({0: batch_shape(4)})


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 3, 8])
def test_words_reach_all_ranks(loaded, size):
    """One program's to many programs', fewer than rows and more; every slot is empty after it."""
    ranks = Rounds("triton", size, 5000)
    for step, count in enumerate((1, 4, 255, 256, 257, 1000, 4096, 5000, 3)):
        words = some_words(size, count, seed=step)
        for received, failed in ranks.all_gather(words, batch_shape(5, num_samples=3)).values():
            assert torch.equal(received, torch.stack(list(words.values())))
            assert not failed
        ranks.assert_empty()
        assert (ranks.tables[:, exchange_protocol.TABLE_STEPS] == step + 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p", "joint_top_p", "repetition_penalty", "presence_penalty"])
def test_a_rank_whose_row_has_another_number(loaded, name):
    """A message with a word per row finds one row's number; a number and a tensor of it are the same."""
    dtype = {"top_k": torch.int64, "joint_top_p": torch.int32}.get(name, torch.float32)
    values = torch.ones(6, dtype=dtype, device="cuda")
    other = values.clone()
    other[4] += 1
    for params, fails in (((1, values), False), ((values, other), True), ((1, other), True)):
        ranks = Rounds("triton", 2, 5000)
        own = {rank: DEFAULT_PARAMS._replace(**{name: value}) for rank, value in enumerate(params)}
        for received, failed in ranks.all_gather(some_words(2, 6), batch_shape(6), params=own).values():
            assert failed == fails
            assert fails or torch.equal(received, torch.stack(list(some_words(2, 6).values())))


LOGITS = [(2, 3, [0, 2100, 4200]), (3, 5, [0, 2048, 2052, 6000]), (4, 3, [0, 8, 16, 4001, 4001]), (2, 1, [0, 3, 7])]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("size", "batch", "ends"), LOGITS)
def test_logits_reach_their_rows_owners(size, batch, ends):
    """Nothing else is written; a closed group writes nothing, and no more does a dry run."""
    pytest.importorskip("triton")
    from flashsampling.kernels.triton.sharded.collectives import push_logits

    vocab, share = ends[-1], -(-batch // size)
    stride, slots = -(-vocab // 4) * 4, exchange_protocol.shared_words(size, 16)
    slots += slots % 2
    shared = torch.zeros(size, slots + share * stride // 2, dtype=torch.int64, device=DEVICE)
    logits, bias = torch.randn(batch, vocab, device=DEVICE), torch.randn(vocab, device=DEVICE)
    addresses = [row.data_ptr() for row in shared]
    for rank, (first, last) in enumerate(itertools.pairwise(ends)):
        if first == last:
            continue
        table = torch.tensor(exchange_protocol.table_words(rank, 16, 10**9, 0, addresses), device=DEVICE)
        own = torch.empty(batch, -(-(last - first) // 4) * 4, device=DEVICE)[:, : last - first]
        own.copy_(logits[:, first:last])
        place = (rank, size)
        push_logits(table.data_ptr(), 8 * slots, own, bias[first:last].clone(), place, batch, first, stride)
        push_logits(table.data_ptr(), 8 * slots, own * 0, None, place, 0, first, stride)
        table[exchange_protocol.TABLE_RANKS] = 0
        push_logits(table.data_ptr(), 8 * slots, own * 0, None, place, batch, first, stride)
    synchronize()
    assert not shared[:, :slots].any()
    rows = shared[:, slots:].contiguous().view(torch.float32).view(size * share, stride)
    assert torch.equal(rows[:batch, :vocab], logits + bias)
    assert not rows[batch:].any()
    assert not rows[:, vocab:].any()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [6, 3000])
@pytest.mark.parametrize(("size", "odd"), [(2, 1), (3, 0), (3, 2)])
def test_a_rank_whose_request_differs(loaded, size, odd, count):
    """None of the fields differs."""
    ranks = Rounds("triton", size, 5000)
    problem = batch_shape(6)
    ranks.all_gather(some_words(size, count), problem)
    out = ranks.all_gather(some_words(size, count), problem, {odd: 5 << 40})
    assert all(failed for _, failed in out.values())
    verdict = ranks.verdict()
    assert (verdict.kind, verdict.fields, verdict.ahead) == (DIFFERS, 0, 0)
    assert verdict.straggler == (odd if size > 2 else 1)
    again = ranks.all_gather(some_words(size, count), problem)
    assert all(failed for _, failed in again.values())  # for good


@pytest.mark.gpu
def test_a_late_rank_of_a_round(loaded):
    ranks = Rounds("triton", 3, 5000, seconds=0.3)
    problem = batch_shape(5)
    ranks.all_gather(some_words(3, 3000), problem)
    words = some_words(3, 3000)
    late = {1: words.pop(1)}
    assert all(failed for _, failed in ranks.all_gather(words, problem).values())
    assert ranks.verdict([0, 2]) == Verdict(LATE, 1, ranks.verdict([0, 2]).reporter, step=1)
    assert ranks.all_gather(late, problem)[1][1]
