"""Filters and log-probabilities over several ranks' shards equal the oracle's for any cut.

The ranks are threads that meet on a board. ``tests/tensor_parallel/scenarios.py`` has processes and transports."""

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from flashsampling import ops
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.inputs import SampleInputs
from flashsampling.outputs import SampleResult
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.tensor_parallel import filtered_sampling
from flashsampling.tensor_parallel.filtered_sampling import Part
from flashsampling.tensor_parallel.message import Hashes
from flashsampling.tensor_parallel.p2p import PeerToPeer
from flashsampling.tensor_parallel.transport import Collectives
from tests.conftest import DEVICE
from tests.kernels.test_filters import differences
from tests.mixes import FIELDS, Mix
from tests.problems import KERNELS


class Board:
    """A meeting point of the ranks' threads.

    Only one of them is at work at a time, as Triton's interpreter is not made for several."""

    def __init__(self, ranks: int, vocab_size: int) -> None:
        self.barrier, self.words = threading.Barrier(ranks, timeout=60), [torch.empty(0)] * ranks
        self.vocab_size, self.buffers = vocab_size, torch.full((ranks, 2, -(-vocab_size // 4) * 4), math.nan)
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


class Transport(Collectives):
    """A rank's collectives, which count messages."""

    def __init__(self, board: Board, rank: int, room: int) -> None:
        self.board, self.rank, self.room, self.messages = board, rank, room, 0

    def begin(self, step: SampleInputs) -> None:
        self.messages = 0

    def all_gather(self, words: Tensor, step: SampleInputs) -> Tensor:
        assert words.dtype == torch.int64
        assert words.ndim == 1
        assert 1 <= len(words) <= self.room
        self.messages += 1
        return self.board.all_gather(self.rank, words)


class Peer(PeerToPeer):
    """Transport p2p, over memory that threads share."""

    def __init__(self, board: Board, rank: int, room: int) -> None:
        self.board, self.room, self.messages = board, room, 0
        self._table: Any = board
        self._rank, self._ranks, self._buffer_at, self._row_stride = rank, len(board.words), 0, 0
        self.rows_at_once, self._vocab_size, self._failed = 2 * self._ranks, board.vocab_size, None
        self._buffer, self._request = board.buffers[rank], (0, None)

    def begin(self, step: SampleInputs) -> None:
        self._in_passes = len(step.hidden_states) > self.rows_at_once

    def _all_gather(self, words: Tensor, request: Any, step: SampleInputs) -> Tensor:
        assert 1 <= len(words) <= self.room
        self.messages += 1
        return self.board.all_gather(self._rank, words)


def push_logits(
    board: Any, _: int, logits: Tensor, bias: Tensor | None, place: tuple[int, int], batch: int, first: int, __: int
) -> None:
    """Stands in for the kernel."""
    share = -(-batch // place[1])
    for row in range(batch):
        own = logits[row] if bias is None else logits[row] + bias
        board.buffers[row // share][row % share, first : first + logits.shape[1]] = own


@pytest.fixture
def shared_memory(monkeypatch):
    pytest.importorskip("triton")
    from flashsampling.kernels.triton.sharded import collectives

    monkeypatch.setattr(collectives, "push_logits", push_logits)


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
    step: SampleInputs,
    ranges: list[tuple[int, int]],
    impl: str = "streaming",
    room: int = 2048,
    transport: type[Transport | Peer] = Transport,
) -> tuple[SampleResult, int]:
    """Returns the result, which has the same bits on every rank, and the number of messages."""
    board, outs = Board(len(ranges), step.vocab_size), {}
    transports = [transport(board, rank, room) for rank in range(len(ranges))]

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
        outs[rank] = filtered_sampling.draw(part, local)

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


@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("transport", [Transport, Peer])
def test_any_cut_is_the_oracle_s(transport):
    """Poisoned rows too; messages of one word or of all at once; more ranks than rows."""
    rows, params = 0, set()
    for seed in range(10**6):
        mix = Mix(seed + 4 * 10**7)
        step = mix.of_a_head(mix.make())
        if step.params is DEFAULT_PARAMS or not step.params.names():
            continue
        room = mix.random.choice((128, 300, 4096))
        ours, _ = run(step, cut(mix, step.vocab_size), room=room, transport=transport)
        assert not differences(ours, ops.sample(step, "reference"), step, 2e-6), seed
        rows += len(step.hidden_states)
        params |= set(step.params.names())
        if rows >= 300:
            break
    assert params == FIELDS


@pytest.mark.quick(1)
@pytest.mark.usefixtures("shared_memory")
@pytest.mark.parametrize("impl", KERNELS)
def test_kernels_give_one_rank_s_bits(impl):
    # what the Hopper kernel adds in the emulator are the logits
    rows, wanted = 0, 3000 if DEVICE.type == "cuda" else 8 if impl == "cute" else 16
    pytest.importorskip("triton")
    for seed in range(10**6):
        mix = Mix(seed + 6 * 10**7, poisoned=False, device=DEVICE)
        step = mix.of_a_head(mix.make(vocab=mix.random.choice((70, 130, 300))))
        if not step.params.names():
            continue
        dtype = torch.float32 if impl == "triton" and DEVICE.type == "cpu" else torch.bfloat16
        step = step._replace(hidden_states=step.hidden_states.to(dtype), weight=step.weight.to(dtype))
        transport = Peer if mix.random.random() < 0.5 and DEVICE.type == "cpu" else Transport
        ours, _ = run(step, cut(mix, step.vocab_size), impl, transport=transport)
        one = ops.sample(step, impl)
        assert torch.equal(ours.ids, one.ids), seed
        assert (ours.values is None) == (one.values is None)
        if one.values is not None:
            # the Hopper kernel sums a block's mass in another order: a log-sum-exp below 64 may differ by two ulps
            torch.testing.assert_close(ours.values, one.values, rtol=1e-6, atol=8e-6, equal_nan=True)
        rows += len(step.hidden_states)
        if rows >= wanted:
            break


def flat(batch: int, vocab: int, params: SamplingParams, **others: Any) -> SampleInputs:
    """Rows of equal logits, 0."""
    states, weight = torch.zeros(batch, 8), torch.zeros(vocab, 8)
    return SampleInputs(states, weight, 1.0, torch.arange(batch), 0, 1, vocab, params=params)._replace(**others)


@pytest.mark.parametrize("where", ["begin", "shard_logits"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_call_that_raises_leaves_nothing_to_the_next_step(where, error):
    """A step ends wherever a call raises, in its middle or at its beginning."""
    both = Mock(room=2048, rows_at_once=None)  # transport and backend
    getattr(both, where).side_effect = error(where)
    both.end.side_effect = RuntimeError("the device is broken: says less")
    with pytest.raises(error, match=where):
        filtered_sampling.draw(Part(both, both, [(0, 50), (50, 100)], 0, 100), flat(3, 50, SamplingParams(top_k=5)))
    assert both.mock_calls[-1][0] == "end"


def test_p2p_keeps_no_tensor_of_a_step():
    """Tensors of a recorded graph's pool must end with the recording, or compilers raise."""
    transport: Any = object.__new__(PeerToPeer)
    transport._hashes, transport.rows_at_once = Hashes(8, torch.device("cpu")), 4
    transport._failed = torch.tensor(True)
    transport._request = 0, torch.zeros(1, dtype=torch.int64)
    kept = [weakref.ref(transport._failed), weakref.ref(transport._request[1])]
    assert bool(transport.end())
    assert [one() for one in kept] == [None, None]
    assert transport.end() is None


@pytest.mark.parametrize("fails", [0, 1, 2, 3])
def test_a_message_that_fails_voids_those_before_it(fails, monkeypatch):
    """Results that take several messages, or a step that takes several passes; and words of no step are plausible."""
    pytest.importorskip("triton")
    monkeypatch.setattr("flashsampling.kernels.triton.sharded.collectives.push_logits", push_logits)
    sent = []

    def all_gather(self: Any, words: Tensor, *_: Any) -> Tensor:
        sent.append(len(words))
        return words[None] if len(sent) <= fails else torch.full((1, len(words)), -1)

    monkeypatch.setattr(Peer, "_all_gather", all_gather)
    step = flat(2, 40, SamplingParams(top_p=0.5, logprobs=True, top_logprobs=3))  # 10 words a row
    drawn = filtered_sampling.draw(
        Part(Peer(Board(1, 40), 0, 15), BACKENDS["streaming"], [(0, 40)], 0, 40), step
    )  # a message of 2 words, then 15 and 6
    assert sent == [2, 15, 6]
    assert bool((drawn.ids == -1).all()) == (fails < 3)
    assert drawn.values is not None
    assert bool(drawn.values.isnan().any()) == bool(drawn.values.isnan().all()) == (fails < 3)


def test_how_many_messages():
    """Two logits a word, of the widest shard."""
    for room, messages in ((4096, 1), (300, 1), (299, 2), (100, 3)):
        assert run(flat(4, 200, SamplingParams(top_k=5)), [(0, 50), (50, 200)], room=room)[1] == messages, room


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


def test_ranks_compare_all_of_a_request_whatever_their_shards_are():
    """A mask's bits and biases of other ranks' tokens too."""
    hashes = Hashes(2, torch.device("cpu"))

    class Seen:
        def begin(self, step: SampleInputs) -> None:
            self.hash = int(hashes.of_request(step))

    def hash_of(rank: int, params: SamplingParams) -> int:
        ranges, transport = [(0, 10), (10, 70)], Seen()
        part: Any = Part(transport, BACKENDS["streaming"], ranges, rank, 70)  # type: ignore[arg-type]
        with filtered_sampling._messages(part, flat(2, ranges[rank][1] - ranges[rank][0], params)):
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
