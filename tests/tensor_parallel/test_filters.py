"""Filters and log-probabilities over several ranks' shards equal the oracle's for any cut.

The ranks are threads that meet on a board. ``tests/tensor_parallel/scenarios.py`` has processes and transports."""

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flashsampling import ops
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.inputs import SampleInputs
from flashsampling.outputs import SampleResult, layout
from flashsampling.reference import logit_transforms
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.tensor_parallel import cutoffs, filtered_sampling, outputs, rejection
from flashsampling.tensor_parallel.filtered_sampling import Part
from flashsampling.tensor_parallel.message import FIRST_PARAM, HEADER, Hashes, difference
from flashsampling.tensor_parallel.transport import DryRun
from tests.conftest import DEVICE
from tests.kernels.test_filters import differences, parts_of
from tests.mixes import INF, NAN, NOT_OVER_RANKS, Mix
from tests.problems import KERNELS
from tests.zero_words import ZERO_WORDS


class Board:
    """A meeting point of the ranks' threads.

    Only one of them is at work at a time, as Triton's interpreter is not made for several."""

    def __init__(self, ranks: int) -> None:
        self.barrier, self.words = threading.Barrier(ranks, timeout=60), [torch.empty(0)] * ranks
        self.at_work = threading.Lock()

    def all_gather(self, rank: int, words: Tensor) -> Tensor:
        self.words[rank] = words.clone()
        self.wait()
        out = torch.stack(self.words)  # RuntimeError if the ranks do not send as much
        self.wait()
        return out

    def wait(self) -> None:
        self.at_work.release()
        try:
            self.barrier.wait()
        finally:
            self.at_work.acquire()


class Transport:
    """A rank's collectives, which count messages. Unwanted rounds return words that a reader would notice."""

    def __init__(self, board: Board, rank: int, room: int, skips: bool = False) -> None:
        self.board, self.rank, self.room, self.skips, self.messages = board, rank, room, skips, 0

    def begin(self, step: SampleInputs) -> None:
        self.messages = 0

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        assert words.dtype == torch.int64
        assert words.ndim == 1
        assert 1 <= len(words) <= self.room
        self.messages += 1
        received = self.board.all_gather(self.rank, words)
        is_wanted = wanted is None or wanted.item() != 0 or not self.skips
        return received if is_wanted else torch.full_like(received, 2**62 - 12345)

    def end(self, error: BaseException | None = None) -> None:
        pass


def on_all_ranks(board: Board, work: Callable[[int], None]) -> None:
    """``work(rank)`` in a thread of each; what one raises is raised here."""
    errors: list[BaseException] = []

    def on_rank(rank: int) -> None:
        board.at_work.acquire()
        try:
            work(rank)
        except BaseException as error:
            errors.append(error)
            board.barrier.abort()
        finally:
            board.at_work.release()

    threads = [threading.Thread(target=on_rank, args=(rank,)) for rank in range(board.barrier.parties)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    assert not errors


def run(
    step: SampleInputs, ranges: list[tuple[int, int]], impl: str = "streaming", room: int = 2048, skips: bool = False
) -> tuple[SampleResult, int]:
    """Returns the result, which has the same bits on every rank, and the number of messages."""
    board, outs = Board(len(ranges)), {}
    transports = [Transport(board, rank, room, skips) for rank in range(len(ranges))]

    def work(rank: int) -> None:
        first, last = ranges[rank]
        part = Part(transports[rank], BACKENDS[impl], ranges, rank, step.vocab_size)
        params = step.params
        if params.bias is not None:
            params = params._replace(bias=params.bias[first:last])
        shard = Shard(first, PACKED)
        local = step._replace(
            weight=step.weight[first:last].clone(), vocab_size=last - first, shard=shard, params=params
        )
        outs[rank] = (filtered_sampling.draw if step.drafted is None else rejection.reject)(part, local)

    on_all_ranks(board, work)
    first = outs[0]
    for other in outs.values():
        assert torch.equal(other.ids, first.ids)
        assert (other.values is None) == (first.values is None)
        assert other.values is None or torch.equal(other.values.nan_to_num(7.0), first.values.nan_to_num(7.0))
    return first, transports[0].messages


def cut(mix: Mix, vocab: int) -> list[tuple[int, int]]:
    """Returns the ranges of two to four ranks, in any order; some may be empty."""
    ends = sorted(mix.random.choices(range(vocab + 1), k=mix.random.randrange(1, 4)))
    ranges = list(zip([0, *ends], [*ends, vocab]))
    mix.random.shuffle(ranges)
    return ranges


def test_any_cut_is_the_oracle_s():
    """Poisoned rows too; messages that take one word of a row or all of them at once."""
    rows, params = 0, set()
    for seed in range(10**6):
        mix = Mix(seed + 4 * 10**7, ranks=True)
        step = mix.of_a_head(mix.make())
        if step.params is DEFAULT_PARAMS or not step.params.names():
            continue
        ours, _ = run(step, cut(mix, step.vocab_size), room=mix.random.choice((128, 300, 4096)))
        assert not differences(ours, ops.sample(step, "reference"), step, 2e-6), seed
        rows += len(step.hidden_states)
        params |= set(step.params.names())
        if rows >= 600:
            break
    assert params == set(SamplingParams._fields) - {"stream", "seen", *NOT_OVER_RANKS}


def test_cuts_do_not_matter():
    """The same tokens, nuclei's edges too: masses are integers."""
    for seed in range(20):
        mix = Mix(seed + 5 * 10**7, poisoned=False, ranks=True)
        step = mix.of_a_head(mix.make(batch=5, vocab=130))
        step = step._replace(params=step.params._replace(top_p=torch.rand(5), top_k=40, logprobs=True))
        one, other = (run(step, cut(mix, 130))[0] for _ in range(2))
        for name, part in parts_of(one, step).items():
            received = parts_of(other, step)[name]
            if name in ("token_ids", "ranks", "top_token_ids"):
                assert torch.equal(part, received), (seed, name)
            else:
                torch.testing.assert_close(part, received, rtol=1e-6, atol=1e-6, equal_nan=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize("impl", KERNELS)
def test_kernels_do_it_too(impl):
    rows, wanted = 0, 3000 if DEVICE.type == "cuda" else 16
    pytest.importorskip("triton")
    from tests.kernels.triton.test_filtered import agrees

    for seed in range(10**6):
        mix = Mix(seed + 6 * 10**7, poisoned=False, device=DEVICE, ranks=True)
        step = mix.of_a_head(mix.make(vocab=mix.random.choice((70, 130, 300))))
        if not step.params.names():
            continue
        dtype = torch.float32 if impl == "triton" and DEVICE.type == "cpu" else torch.bfloat16
        step = step._replace(hidden_states=step.hidden_states.to(dtype), weight=step.weight.to(dtype))
        ours, _ = run(step, cut(mix, step.vocab_size), impl, skips=mix.random.random() < 0.5)
        agrees(ours, step, 1e-4 if step.params.soft_cap else 3e-5)
        rows += len(step.hidden_states)
        if rows >= wanted:
            break


@pytest.mark.quick(1)
@pytest.mark.parametrize("skips", [False, True])
def test_a_rank_s_number_may_be_another_s_tensor(skips):
    """Both forms of a large top-k hash alike, so they take the same messages."""
    pytest.importorskip("triton")
    forms, ranges, board, outs = [200, torch.full((2,), 200, device=DEVICE)], [(0, 250), (250, 400)], Board(2), {}
    sizes: list[list[int]] = [[], []]
    torch.manual_seed(3)
    step = flat(2, 400, DEFAULT_PARAMS, num_samples=40)
    states, weight, seeds = (tensor.to(DEVICE) for tensor in (torch.randn(2, 8), torch.randn(400, 8), step.seed))

    class Counting(Transport):
        def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
            sizes[self.rank].append(len(words))
            return super().all_gather(words, step, wanted)

    def work(rank: int) -> None:
        first, last = ranges[rank]
        part = Part(Counting(board, rank, 2048, skips), BACKENDS["triton"], ranges, rank, 400)
        local = step._replace(
            hidden_states=states, weight=weight[first:last].clone(), seed=seeds, shard=Shard(first, PACKED)
        )
        local = local._replace(vocab_size=last - first, params=SamplingParams(top_k=forms[rank], top_p=0.9))
        outs[rank] = filtered_sampling.draw(part, local)

    on_all_ranks(board, work)
    assert sizes[0] == sizes[1]
    assert torch.equal(outs[0].ids, outs[1].ids)
    whole = step._replace(hidden_states=states, weight=weight, seed=seeds, params=SamplingParams(top_k=200, top_p=0.9))
    assert torch.equal(outs[0].ids, ops.sample(whole, "reference").ids)


def test_a_message_may_be_a_part_of_something(monkeypatch):
    """gloo returns rows that lie further apart than they are long."""
    pytest.importorskip("triton")
    monkeypatch.setattr(
        Board,
        "all_gather",
        lambda *given, all_gather=Board.all_gather: torch.nn.functional.pad(all_gather(*given), (9, 9))[:, 9:-9],
    )
    step = flat(2, 60, SamplingParams(top_k=torch.tensor([5, 45], device=DEVICE)), num_samples=12)
    step = step._replace(**{name: getattr(step, name).to(DEVICE) for name in ("hidden_states", "weight", "seed")})
    assert torch.equal(*(run(step, [(0, 40), (40, 60)], impl)[0].ids for impl in ("streaming", "triton")))


def test_a_message_of_a_failed_step_is_as_large_as_any():
    """nccl sends nothing then; kernels must not read behind the end of the result."""

    step = flat(2, 40, SamplingParams(top_p=0.5))
    part = Part(DryRun(3, 2048), BACKENDS["streaming"], [(0, 40), (40, 80), (80, 90)], 0, 90)
    meet, _ = filtered_sampling.prepare(part, step)
    assert meet(torch.zeros(2, 5, dtype=torch.int64)).stride() == (10, 5, 1)


def flat(batch: int, vocab: int, params: SamplingParams, **others: Any) -> SampleInputs:
    """Rows of equal logits, 0."""
    states, weight = torch.zeros(batch, 8), torch.zeros(vocab, 8)
    return SampleInputs(states, weight, 1.0, torch.arange(batch), 0, 1, vocab, params=params)._replace(**others)


def kept_by(params: SamplingParams, ranges: list[tuple[int, int]], vocab: int, draws: int = 3000) -> set[int]:
    """The tokens that are ever drawn of equal logits."""
    drawn, _ = run(flat(1, vocab, params, num_samples=draws, seed=7), ranges, room=1 << 16)
    return set(drawn.ids.tolist())


RANGES = [[(0, 40), (40, 100)], [(60, 100), (0, 5), (5, 60)], [(0, 100), (100, 100)]]


@pytest.mark.parametrize("ranges", RANGES)
def test_ties_at_the_edge_go_to_the_lowest_ids_of_all_shards(ranges):
    assert kept_by(SamplingParams(top_k=45), ranges, 100) == set(range(45))
    assert kept_by(SamplingParams(top_k=5), ranges, 100) == set(range(5))
    assert kept_by(SamplingParams(top_p=0.625), ranges, 100) == set(range(63))
    assert kept_by(SamplingParams(top_p=0.5, top_k=42), ranges, 100) == set(range(21))
    assert kept_by(SamplingParams(min_p=1.0, top_k=42), ranges, 100) == set(range(42))
    assert kept_by(SamplingParams(top_p=0.0), ranges, 100) == {0}
    for k, p in ((45, 1.0), (42, 0.5), (5, 0.3)):  # searched for, or by the places of a few
        rows = SamplingParams(top_k=torch.tensor([k]), top_p=p)
        assert (
            kept_by(rows, ranges, 100)
            == kept_by(SamplingParams(top_k=k, top_p=p), ranges, 100)
            == set(range(math.ceil(k * p)))
        )


@pytest.mark.parametrize("ranges", RANGES)
@pytest.mark.parametrize(("less", "many"), [(5.0, 2), (8.0, 1)])
def test_min_p_of_one_ends_where_fp64_rounds_to_one(ranges, less, many):
    bias = torch.full((100,), -INF)
    bias[[30, 70]] = torch.tensor([-less, 0.0])
    step = flat(1, 100, SamplingParams(min_p=1.0, dense_bias=bias), temperature=1e17, num_samples=100, seed=7)
    drawn, _ = run(step, ranges)
    assert set(drawn.ids.tolist()) == set([70, 30][:many])
    assert torch.equal(ops.sample(step, "reference").ids, drawn.ids)


def test_masks_leave_tokens_of_one_shard_or_none():
    mask = torch.zeros(3, 4, dtype=torch.int32)
    mask[0, 2] = 1 << 6  # 70
    mask[1, 0] = 2  # 1
    step = flat(3, 100, SamplingParams(token_mask=mask, top_p=0.9, logprobs=True))
    drawn, _ = run(step, [(0, 33), (33, 67), (67, 100)])
    parts = parts_of(drawn, step)
    assert parts["token_ids"].flatten().tolist() == [70, 1, -1]
    assert parts["processed_logprobs"].flatten()[:2].tolist() == [0, 0]
    assert parts["ranks"].flatten().tolist() == [1, 1, -1]
    assert parts["logprobs"].isnan().flatten().tolist() == [False, False, True]


def test_a_temperature_of_minus_infinity_is_greedy_too():
    """Beside infinite logits as well, which leave no token at an infinite temperature."""
    temperature = torch.tensor([-INF, -INF, INF, INF, -1.0])
    biased = torch.zeros(100)
    biased[[7, 70]] = torch.tensor([-INF, 2.0])
    for params in (
        SamplingParams(top_p=0.999),
        SamplingParams(top_p=0.999, dense_bias=biased),
        SamplingParams(min_p=1e-9, dense_bias=biased.clamp(min=-1)),
    ):
        step = flat(5, 100, params, temperature=temperature, weight=torch.randn(100, 8), hidden_states=torch.ones(5, 8))
        expected = ops.sample(step, "reference")
        assert not differences(run(step, [(0, 33), (33, 100)])[0], expected, step), params
        assert not differences(ops.sample(step, "streaming"), expected, step), params


def test_an_infinite_logit_with_nothing_finite_on_its_shard():
    """It wins over the finite ones of other shards."""
    bias = torch.zeros(100)
    bias[67:] = -INF
    bias[70] = INF
    for params in (SamplingParams(dense_bias=bias, min_p=0.1), SamplingParams(dense_bias=bias, logprobs=True)):
        step = flat(2, 100, params, temperature=torch.tensor([1.0, 0.0]))
        assert run(step, [(0, 33), (67, 100), (33, 67)])[0].ids[:2].tolist() == [70, 70]


@pytest.mark.parametrize("impl", ["streaming", *KERNELS])
def test_words_of_zero(impl):
    """A token whose noise needs the refinement: with it 10 below the others it wins, 20 below them it does not."""
    if impl != "streaming":
        pytest.importorskip("triton")
    seeds, offsets, tokens, _ = zip(*ZERO_WORDS, strict=True)
    ids = torch.tensor(tokens, dtype=torch.int32)[:, None]
    for logit, wins in ((-10.0, True), (-20.0, False)):
        params = SamplingParams(
            min_p=1e-12, bias_ids=ids.to(DEVICE), bias_values=torch.full((3, 1), logit, device=DEVICE)
        )
        step = flat(
            3, 900, params, seed=torch.tensor(seeds, device=DEVICE), offset=torch.tensor(offsets, device=DEVICE)
        )
        dtype = torch.bfloat16 if impl == "cute" else torch.float32
        step = step._replace(hidden_states=torch.zeros(3, 8, dtype=dtype, device=DEVICE))
        step = step._replace(weight=torch.zeros(900, 8, dtype=dtype, device=DEVICE))
        drawn, _ = run(step, [(300, 900), (0, 300)], impl)
        assert torch.equal(drawn.ids, ops.sample(step, "reference").ids)
        assert [token == own for token, own in zip(drawn.ids.tolist(), tokens)] == [wins] * 3


def test_a_share_that_is_no_number_leaves_no_token():
    """Only that row has no token."""
    shares = torch.tensor([0.5, NAN, 0.25])
    for params in (
        SamplingParams(top_p=shares),
        SamplingParams(min_p=shares),
        SamplingParams(top_k=5, top_p=shares),
        SamplingParams(top_k=5, min_p=shares),
    ):
        step = flat(3, 100, params)
        drawn, _ = run(step, [(0, 33), (33, 100)])
        assert torch.equal(drawn.ids, ops.sample(step, "reference").ids), params
        assert (drawn.ids < 0).tolist() == [False, True, False], params


def test_a_call_that_raises_leaves_nothing_to_the_next_step():
    """A step ends wherever a call raises, in its middle or at its beginning."""

    class Raises:
        room, skips, module = 2048, False, None

        def __init__(self, where: str, error: type[BaseException]) -> None:
            self.module, self.where, self.error = self, where, error
            self.calls: list[str] = []

        def call(self, name: str) -> None:
            self.calls.append(name)
            if name == self.where:
                raise self.error(name)

        def begin(self, step: SampleInputs) -> None:
            self.call("begin")

        def shard_logits(self, step: SampleInputs) -> None:
            self.call("shard_logits")

        def end(self, error: BaseException | None = None) -> None:
            self.call("end")
            raise RuntimeError("the device is broken: says less")

    for where, error in (("begin", MemoryError), ("shard_logits", MemoryError), ("shard_logits", KeyboardInterrupt)):
        both: Any = Raises(where, error)
        with pytest.raises(error, match=where):
            filtered_sampling.draw(Part(both, both, [(0, 50), (50, 100)], 0, 100), flat(3, 50, SamplingParams(top_k=5)))
        assert both.calls[-1] == "end"


def test_a_failed_step_has_no_token():
    """A failed step has neither tokens nor numbers, whatever words it receives."""

    class Failed(DryRun):
        def end(self, error: BaseException | None = None) -> Tensor:  # type: ignore[override]
            return torch.tensor(True)

    step = flat(
        2,
        40,
        SamplingParams(top_p=0.5, logprobs=True, top_logprobs=3, logprob_ids=torch.tensor([[1], [89]]), logsumexp=True),
    )
    transport: Any = Failed(3, 2048)
    drawn = filtered_sampling.draw(Part(transport, BACKENDS["streaming"], [(0, 40), (40, 80), (80, 90)], 0, 90), step)
    assert drawn.values is not None
    assert (drawn.ids == -1).all()
    assert drawn.values.isnan().all()


def test_p2p_keeps_no_tensor_of_a_step():
    """Tensors of a recorded graph's pool must end with the recording, or compilers raise."""
    from flashsampling.tensor_parallel.p2p import PeerToPeer

    transport: Any = object.__new__(PeerToPeer)
    transport._device, transport._hashes = torch.device("cpu"), Hashes(8, torch.device("cpu"))
    transport._no_params = torch.zeros(1, dtype=torch.int64)
    for _ in range(2):
        transport.begin(flat(5, 70, SamplingParams(top_k=5)))
        kept = [weakref.ref(transport._param_hash), weakref.ref(transport._step_failed)]
        transport._step_failed.fill_(-1)
        assert bool(transport.end())
        assert [one() for one in kept] == [None, None]


def test_how_many_messages():
    """The number of messages depends on parameters and sizes alone, as docs/tensor_parallel.md says."""
    for params, room, messages in (
        (SamplingParams(min_p=0.1), 4096, 2),
        (SamplingParams(top_k=20, top_p=0.9), 16 * 4, 2 + 2),  # 4 * 20 words
        (SamplingParams(top_k=20, top_p=torch.ones(4)), 256 * 4, 2 + 1),
        (SamplingParams(top_k=129), 16 * 4, 2 + 8),
        (SamplingParams(top_k=torch.ones(4, dtype=torch.int64)), 256 * 4, 2 + 4),
        (SamplingParams(top_k=129, top_p=0.9), 64 * 4, 2 + 6 + 6),
        (
            SamplingParams(top_p=torch.ones(4), logprobs=True, logprob_ids=torch.zeros(4, 2, dtype=torch.int64)),
            4096,
            1 + 4 + 2,
        ),
        (SamplingParams(logprob_ids=torch.zeros(4, 200, dtype=torch.int64)), 100, 1 + 9),  # 4 * (1 + 1 + 200) words
    ):
        assert run(flat(4, 200, params), [(0, 50), (50, 200)], room=room)[1] == messages, params


def test_masses_of_as_many_as_there_can_be_do_not_overflow():
    for vocab in (1, 2, 3, 130, 151_936, 2**20, 2**31 - 1):
        unit = cutoffs.fixed_point_scale_of(vocab)
        assert unit * vocab <= 2**62 < 4 * unit * vocab


def test_places_are_the_row_s_order():
    logits = torch.tensor([[0.0, -0.0, INF, -INF, 1e-45, -3.0, 3.0, 3.0]])
    places = logit_transforms.places_of(logit_transforms.keys_of(logits), torch.arange(8))
    assert places.argsort(descending=True).tolist() == [[2, 6, 7, 4, 0, 1, 5, 3]]
    assert torch.equal(
        logit_transforms.values_of(logit_transforms.keys_of(logits)), logits.abs().where(logits == 0, logits)
    )
    assert (logit_transforms.keys_of(torch.tensor([[NAN, -NAN]])) > logit_transforms.keys_of(logits).max()).all()


@pytest.mark.parametrize(
    ("first", "last"), [(0, 100), (0, 32), (32, 96), (1, 100), (31, 33), (45, 70), (50, 50), (99, 100)]
)
def test_a_mask_is_cut_at_any_bit(first, last):
    mask = torch.randint(-(2**31), 2**31, (3, 4), dtype=torch.int32)
    whole = logit_transforms.allowed(SamplingParams(token_mask=mask), 100)
    assert whole is not None
    part = SamplingParams(token_mask=mask).shard(first, last)
    if last > first:
        assert torch.equal(logit_transforms.allowed(part, last - first), whole[:, first:last])


# -- what ranks must agree on


USUAL: dict[str, Any] = {
    "logit_scale": 2.0,
    "soft_cap": 30.0,
    "dense_bias": torch.randn(70),
    "bias_ids": torch.randint(0, 70, (5, 3), dtype=torch.int32),
    "bias_values": torch.randn(5, 3),
    "repetition_penalty": torch.rand(5) + 1,
    "frequency_penalty": 0.25,
    "presence_penalty": torch.rand(5),
    "token_mask": torch.randint(-(2**31), 2**31, (5, 3), dtype=torch.int32),
    "top_k": torch.randint(1, 60, (5,)),
    "top_p": torch.rand(5),
    "min_p": 0.5,
    "joint_top_p": torch.tensor([0, 1, 0, 1, 1], dtype=torch.int32),
    "logprobs": True,
    "top_logprobs": 3,
    "logprob_ids": torch.randint(0, 70, (5, 4)),
    "logsumexp": True,
}


def _header(params: SamplingParams) -> list[int]:
    header = torch.zeros(HEADER + 2, dtype=torch.int64)
    Hashes(8, torch.device("cpu")).write(header, flat(5, 70, params))
    return header[:HEADER].tolist()


@pytest.mark.parametrize("name", USUAL)
def test_what_differs_has_its_name(name):
    """Left out, and changed in a single place."""
    usual, value = SamplingParams(**USUAL), USUAL[name]
    others: list[Any] = [getattr(DEFAULT_PARAMS, name)]
    if isinstance(value, Tensor):
        changed = value.clone()
        flat_, step = changed.view(-1), 1 if not value.is_floating_point() else 2.0**-20
        for place in (0, 1, flat_.numel() - 1):
            changed = value.clone()
            changed.view(-1)[place] += step
            others.append(changed)
    elif not isinstance(value, bool):
        others.append(value + 1)
    public = {
        "dense_bias": "logit_bias",
        "bias_ids": "logit_bias",
        "bias_values": "logit_bias",
        "logprobs": "return_logprobs",
    }
    public |= {"logsumexp": "return_logsumexp"}
    headers = [_header(usual)]
    for other in others:
        headers.append(_header(usual._replace(**{name: other})))
        failure = difference([headers[0], headers[-1], headers[0]])
        assert failure is not None
        assert (failure.rank, failure.differs) == (1, (public.get(name, name),))
    assert len({tuple(header) for header in headers}) == len(headers)


@pytest.mark.parametrize("name", ["bias_ids", "bias_values", "logprob_ids"])
def test_lists_that_are_longer_differ(name):
    """Zeros at the end change the hash: otherwise ranks would send words of other shapes."""
    usual = SamplingParams(**USUAL)
    longer = usual._replace(**{name: torch.nn.functional.pad(USUAL[name], (0, 1))})
    assert _header(longer) != _header(usual)


def test_what_does_not_differ():
    """Numbers for values of all rows, bits and columns that are no token's, memory in another order."""
    usual = SamplingParams(**USUAL)
    wide = torch.cat([USUAL["token_mask"], torch.ones(5, 2, dtype=torch.int32)], dim=1)
    wide[:, 2] ^= 1 << 6  # token 70
    for name, values in (
        ("min_p", torch.full((5,), 0.5)),
        ("frequency_penalty", torch.full((5,), 0.25)),
        ("token_mask", wide),
        ("dense_bias", torch.cat([USUAL["dense_bias"], torch.ones(3)])),
        ("bias_ids", USUAL["bias_ids"].T.contiguous().T),
    ):
        assert _header(usual._replace(**{name: values})) == _header(usual), name
    assert _header(SamplingParams(top_k=900)) == _header(SamplingParams(top_k=torch.full((5,), 900)))
    assert _header(SamplingParams(top_k=900)) == _header(SamplingParams(top_k=torch.full((5,), 900, dtype=torch.int32)))
    assert _header(SamplingParams(top_k=9)) != _header(
        SamplingParams(top_k=torch.full((5,), 9))
    )  # which is found in other rounds
    zeros = torch.zeros(5)
    assert _header(SamplingParams(presence_penalty=-zeros)) == _header(SamplingParams(presence_penalty=zeros))
    given = [
        _header(SamplingParams(counts=counts, bias=torch.randn(9)))
        for counts in torch.ones(2, 5, 70, dtype=torch.int32)
    ]
    assert given[0] == given[1] != _header(DEFAULT_PARAMS)  # a rank reads its shard's


def test_ranks_compare_all_of_a_request_whatever_their_shards_are():
    """A mask's bits and biases of other ranks' tokens too."""
    hashes = Hashes(2, torch.device("cpu"))

    class Seen:
        def begin(self, step: SampleInputs) -> None:
            self.hash = int(hashes.of_request(step))

    def hash_of(rank: int, params: SamplingParams) -> int:
        ranges, transport = [(0, 10), (10, 70)], Seen()
        part: Any = Part(transport, BACKENDS["streaming"], ranges, rank, 70)  # type: ignore[arg-type]
        with filtered_sampling.rounds(part, flat(2, ranges[rank][1] - ranges[rank][0], params)):
            return transport.hash

    mask, bias = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(70)
    other_mask, other_bias = mask.clone(), bias.clone()
    other_mask[1, 2], other_bias[69] = 1 << 5, 1.0
    for params, other in (
        (SamplingParams(token_mask=mask), SamplingParams(token_mask=other_mask)),
        (SamplingParams(dense_bias=bias), SamplingParams(dense_bias=other_bias)),
    ):
        assert hash_of(0, params) == hash_of(1, params)
        assert len({hash_of(rank, one) for rank in (0, 1) for one in (params, other)}) == 2


def test_a_header_is_plain_again():
    header, hashes = torch.zeros(HEADER, dtype=torch.int64), Hashes(8, torch.device("cpu"))
    hashes.write(header, flat(5, 70, SamplingParams(**USUAL)))
    assert header[FIRST_PARAM:].any()
    hashes.write(header, flat(5, 70, SamplingParams(top_k=9)))
    assert header[:HEADER].tolist() == _header(SamplingParams(top_k=9))
    hashes.clear(header)
    hashes.write(header, flat(5, 70, DEFAULT_PARAMS))
    assert not header[FIRST_PARAM:].any()


def test_shards_of_a_vocabulary_wider_than_the_hash_s_factors():
    """Every word counts, wherever it stands."""
    hashes = Hashes(2, torch.device("cpu"))
    mask = torch.zeros(1, 20_000, dtype=torch.int32)
    seen = set()
    for place in (None, 0, 8191, 8192, 16_384, 19_999):
        words = mask.clone()
        if place is not None:
            words[0, place] = 1
        step = flat(1, 640_000, SamplingParams(token_mask=words))
        seen.add(int(hashes.of_request(step)))
    assert len(seen) == 6


# -- on a GPU, without one


class Stub(DryRun):
    """A transport and a backend of tensors without values."""

    def __init__(self, hashes: Hashes) -> None:
        super().__init__(3, 2048)
        self.module, self.shard_limits, self.shard_parts, self.hashes = self, cutoffs, outputs, hashes

    def begin(self, step: SampleInputs) -> None:
        self.hashes.of_request(step)

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        return super().all_gather(words, step).clone()

    def end(self, error: BaseException | None = None) -> Tensor:  # type: ignore[override]
        return torch.zeros((), dtype=torch.bool, device="meta")

    def shard_logits(self, step: SampleInputs) -> tuple[Tensor, Tensor]:
        logits = torch.randn(len(step.hidden_states), step.vocab_size, device="meta")
        return logits, logits + 1

    def shard_winners(
        self, step: SampleInputs, processed: Tensor, limit: Tensor, known: Tensor | None = None
    ) -> Tensor:
        assert limit.shape == (len(processed),)
        return torch.ones(len(processed) * step.num_samples, dtype=torch.int64, device="meta")


@pytest.mark.parametrize("few", [False, True])
def test_nothing_is_read_on_the_host_and_all_is_on_the_device(few):
    """Tensors without values raise if a value is read or two devices meet. A CUDA graph could hold neither."""
    hashes: Any = Hashes(8, torch.device("cpu"))
    with FakeTensorMode():
        device = torch.device("meta")
        hashes.factors, hashes.along = (torch.ones(count, dtype=torch.int64, device=device) for count in (16, 8192))

        def moved(value: Any) -> Any:
            return torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value

        params = SamplingParams(
            **{name: moved(value) for name, value in USUAL.items()}, bias=torch.randn(20, device=device)
        )
        params = params._replace(counts=torch.ones(5, 70, dtype=torch.int32, device=device))
        if few:
            params = params._replace(top_k=7)
        states, weight = torch.randn(5, 8, device=device), torch.randn(20, 8, device=device)
        rows = (torch.ones(5, device=device), torch.arange(5, device=device), torch.arange(5, device=device))
        step = SampleInputs(states, weight, *rows, 2, 20, Shard(33, PACKED), params)
        stub: Any = Stub(hashes)
        part = Part(stub, stub, [(0, 33), (33, 53), (53, 70)], 1, 70)
        drawn = filtered_sampling.draw(part, step)
        assert drawn.ids.device == drawn.values.device == device
        expected = layout(5, 2, params)
        assert (drawn.ids.numel(), drawn.values.numel()) == (expected.num_ids, expected.num_values)
