"""``RequestPool``: requests in any slots of any batches draw what they draw alone."""

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import flashsampling
from flashsampling import LMHeadSampler, TokenCounts, request_pool
from flashsampling.backends import BACKENDS
from flashsampling.request_pool import RequestPool
from tests.conftest import DEVICE
from tests.problems import require

VOCAB, DIM = 300, 16


def make_head(dtype: torch.dtype = torch.float32) -> nn.Linear:
    return nn.Linear(DIM, VOCAB, bias=False, device=DEVICE, dtype=dtype)


def random_params(rng: random.Random) -> dict[str, Any]:
    """Sampling parameters of a request; half of the requests have a few, the others none."""
    words = -(-VOCAB // 32)
    choices: dict[str, Callable[[], Any]] = {
        "top_p": lambda: rng.choice([0.3, 0.9, 1.0]),
        "top_k": lambda: rng.choice([-1, 1, 5, 50, VOCAB]),
        "min_p": lambda: rng.choice([0.0, 0.05]),
        "joint_top_p": lambda: True,
        "epsilon_cutoff": lambda: 0.01,
        "top_n_sigma": lambda: rng.choice([0.0, 1.5]),
        "repetition_penalty": lambda: 1.3,
        "frequency_penalty": lambda: 0.4,
        "presence_penalty": lambda: -0.5,
        "logit_bias": lambda: (torch.tensor([[3, 7, -1]]), torch.tensor([[2.0, -1.0, 9.0]])),
        "token_mask": lambda: torch.randint(-(2**31), 2**31 - 1, (1, words), dtype=torch.int32, device="cpu"),
    }
    names = rng.sample(sorted(choices), rng.choice([0, 0, 0, 1, 2, 4]))
    return {name: choices[name]() for name in names}


class Request:
    """A request with hidden states of its own at every position."""

    def __init__(self, number: int, rng: random.Random) -> None:
        self.seed, self.length = number - 2**40 * (number % 3), rng.randint(1, 9)
        self.temperature = rng.choice([0.0, 0.6, 1.0, 3.0])
        self.params = random_params(rng)
        self.prompt = [rng.randrange(VOCAB) for _ in range(4)]
        self.states = 2 * torch.randn(self.length + 4, DIM, generator=torch.Generator().manual_seed(number))
        self.tokens: list[int] = []
        self.expected: list[int] = []

    def admit(self, pool: RequestPool, slot: int) -> None:
        own = {"seed": self.seed, "temperature": self.temperature, "prompt_token_ids": self.prompt}
        pool.admit(slot, **own, **self.params)

    def alone(self, head: nn.Linear, impl: str | None) -> list[int]:
        """Draws the tokens one after the other in batches of one."""
        options = dict(self.params)
        for name in ("logit_bias", "token_mask"):
            if name in options:
                given = options[name]
                on_device = given.to(DEVICE) if isinstance(given, Tensor) else tuple(x.to(DEVICE) for x in given)
                options[name] = on_device
        if any(name.endswith("_penalty") for name in options):
            options["token_counts"] = TokenCounts(1, VOCAB, DEVICE)
            options["token_counts"].reset([0], self.prompt)
        tokens = []
        for offset in range(self.length):
            out = flashsampling.sample(
                self.states[offset : offset + 1].to(DEVICE, head.weight.dtype),
                head.weight.detach(),
                temperature=self.temperature,
                seed=torch.tensor([self.seed], device=DEVICE),
                offset=offset,
                impl=impl,
                **options,
            )
            tokens.append(int(out.token_ids))
        return tokens


class Server:
    """Admits requests at random, and draws for a random part of them, in random order, with padding between."""

    def __init__(self, head: nn.Linear, impl: str | None, rng: random.Random, drafts: bool) -> None:
        self.head, self.rng, self.drafts = head, rng, drafts
        self.sampler = LMHeadSampler(head, max_batch_size=5, impl=impl)
        self.requests: dict[int, Request] = {}
        self.begun = 0

    def step(self) -> list[Request]:
        """Returns the requests that have ended."""
        pool, rng = self.sampler.pool, self.rng
        free = [slot for slot in range(pool.max_requests) if slot not in self.requests]
        if free and rng.random() < 0.5:
            slot = rng.choice(free)
            self.begun += 1
            self.requests[slot] = request = Request(self.begun, rng)
            request.expected = request.alone(self.head, self.sampler.impl)
            request.admit(pool, slot)
        batch = rng.sample(sorted(self.requests), rng.randint(0, len(self.requests)))
        slots = batch + [-1] * rng.randint(0, pool.max_requests - len(batch))
        rng.shuffle(slots)
        if not slots:
            return []
        dtype = torch.int32 if rng.random() < 0.5 else torch.int64
        on_device = torch.tensor(slots, dtype=dtype, device=DEVICE)
        tokens = self._verify(slots, on_device) if self.drafts else self._draw(slots, on_device)
        ended = []
        for slot, emitted in zip(slots, tokens):
            if slot < 0:
                assert emitted == []
                continue
            request = self.requests[slot]
            request.tokens += emitted
            if len(request.tokens) >= request.length:
                request.tokens = request.tokens[: request.length]
                ended.append(self.requests.pop(slot))
                pool.release(slot)
        return ended

    def _states(self, slot: int, positions: int) -> Tensor:
        if slot < 0:
            return torch.full((positions, DIM), torch.nan)
        first = len(self.requests[slot].tokens)
        return self.requests[slot].states[first : first + positions]

    def _draw(self, slots: list[int], on_device: Tensor) -> list[list[int]]:
        states = torch.cat([self._states(slot, 1) for slot in slots]).to(DEVICE, self.sampler.weight.dtype)
        drawn = self.sampler(states, slots=on_device).token_ids.tolist()
        return [[token] if token != -1 else [] for token in drawn]

    def _verify(self, slots: list[int], on_device: Tensor) -> list[list[int]]:
        states = torch.stack([self._states(slot, 3) for slot in slots]).to(DEVICE, self.sampler.weight.dtype)
        drafts = torch.randint(0, VOCAB, (len(slots), 2), device=DEVICE)
        for row, slot in enumerate(slots):
            if slot >= 0 and self.rng.random() < 0.5:  # what the target draws, so that it is accepted
                request = self.requests[slot]
                drafts[row] = torch.tensor((request.expected + [0, 0])[len(request.tokens) :][:2])
        out = self.sampler.verify(states, drafts, slots=on_device)
        return [ids[:count] for ids, count in zip(out.token_ids.tolist(), out.num_emitted.tolist())]


def serve(impl: str | None, steps: int, seed: int, dtype: torch.dtype = torch.float32, drafts: bool = False) -> int:
    """Returns how many requests ended; each has the tokens of its run alone."""
    server = Server(make_head(dtype), impl, random.Random(seed), drafts)
    ended = 0
    for _ in range(steps):
        for request in server.step():
            assert request.tokens == request.expected, (request.params, request.temperature)
            ended += 1
    return ended


@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("impl", [None, "reference", "triton"])
def test_requests_in_any_order_draw_what_they_draw_alone(impl, drafts):
    assert serve(impl and require(impl), 60 if impl == "triton" else 200, 1, drafts=drafts) > 10


@pytest.mark.parametrize("drafts", [False, True])
def test_the_kernel_reads_the_slots_of_a_server(drafts, monkeypatch):
    require("triton")
    monkeypatch.setattr(request_pool, "runs_small_kernels", lambda tensor: True)
    assert serve(None, 60, 3, drafts=drafts) > 5


@pytest.mark.gpu
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("impl", ["cute", "triton"])
def test_requests_on_a_gpu_draw_what_they_draw_alone(impl, drafts):
    assert serve(require(impl), 500, 2, torch.bfloat16, drafts) > 50


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_a_server_of_many_steps_draws_what_requests_draw_alone(seed):
    assert serve(None, 1000, seed) > 100


def make_pool(slots: int = 6) -> RequestPool:
    """A pool whose slots 0, 1, 2 and 4 hold requests, 4 with a top-p, a bias and a mask."""
    pool = RequestPool(slots, VOCAB, DEVICE)
    pool.admit([1, 2, 0], seed=[5, -6, 9], offset=[3, 2**40, 8], temperature=[0.5, 0.0, 1.0])
    mask = torch.full((-(-VOCAB // 32),), 0x5555, dtype=torch.int32, device="cpu")
    pool.admit(4, seed=2**63, top_p=0.5, logit_bias=([[1, 2]], [[0.5, -1.0]]), token_mask=mask)
    return pool


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", ["all", "bias", "none"])
def test_the_kernel_reads_what_torch_reads(dtype, width):
    """Rows whose slot is padding, out of range, free or an earlier row's have no request."""
    if BACKENDS["triton"].missing:
        pytest.skip(BACKENDS["triton"].missing)
    from flashsampling.kernels.triton.request_pool import read_slots

    listed = [4, 1, -1, 3, 6, 2**30, -7, 1, 2, 4, *[-1] * 600, 2, 5, 0, -1]
    pool = make_pool(len(listed))
    assert pool.matrices is not None
    slots = torch.tensor(listed, dtype=dtype, device=DEVICE)
    columns = {"all": pool.matrices.shape[1], "bias": 600, "none": 0}[width]
    inactive = ~pool._flags if width == "all" else -1
    offsets = pool.offsets.clone()
    rows, seeds, befores, words, matrices = read_slots(
        slots, pool.seeds, offsets, pool.words, pool.matrices, columns, inactive, 7
    )
    there = torch.zeros(len(slots), dtype=torch.bool, device=DEVICE)
    there[[1, 8, -2, *([0] if width == "all" else [])]] = True
    assert torch.equal(~words[1].view(torch.float32).isnan(), there)
    assert (offsets - pool.offsets).tolist()[:6] == [7, 7, 7, 0, 7 if width == "all" else 0, 0]
    # a row without a request reads nothing that another row advances: ranks compare the values
    assert torch.equal(seeds, torch.where(there, pool.seeds[rows], 0))
    assert torch.equal(befores, torch.where(there, pool.offsets[rows], 0))
    assert torch.equal(words[2:], pool.words[2:, rows])
    assert torch.equal(words[1, there], pool.words[1, rows[there]])
    assert torch.equal(rows[there], slots[there].long())
    assert columns == 0 if matrices is None else torch.equal(matrices, pool.matrices[rows, :columns])


COMPILE = """
import sys
import torch
from flashsampling.kernels.triton.request_pool import read_slots
from tests.kernels.triton.target import compile_only

compiled = compile_only(int(sys.argv[1]))
for slots, requests, width in ((1, 16, 0), (7, 9, 600), (256, 300, 5300)):
    longs, words = torch.zeros(2, requests, dtype=torch.int64), torch.zeros(11, requests, dtype=torch.int32)
    matrices = torch.zeros(requests, width + 1, dtype=torch.int32)
    for dtype in (torch.int32, torch.int64):
        read_slots(torch.zeros(slots, dtype=dtype), *longs, words, matrices, width, -1, 1)
print("kernels", len(set(map(id, compiled))))
"""


@pytest.mark.every_triton
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles_once_for_int32_and_once_for_int64(capability):
    """Whatever the sizes are."""
    require("triton")
    from tests.kernels.triton.target import output_of

    assert output_of(COMPILE, capability).split()[-2:] == ["kernels", "2"]


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the host sees slots on a CPU")
def test_slots_that_only_the_device_sees_have_no_token_and_harm_nobody():
    head = make_head()
    sampler = LMHeadSampler(head, max_batch_size=8)
    sampler.pool.admit([1, 2], seed=[5, 6])
    slots = torch.tensor([2, 3, 2, 8, -5, 1], device=DEVICE)
    states = torch.randn(6, DIM, device=DEVICE)
    out = sampler(states, slots=slots).token_ids
    alone = flashsampling.sample(states[[0, 5]], head.weight, seed=torch.tensor([6, 5], device=DEVICE)).token_ids
    assert out[1:5].tolist() == [-1] * 4
    assert torch.equal(out[[0, 5]], alone)
    assert sampler.offsets.tolist() == [0, 1, 1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("slots", "error", "message"),
    [
        ([3], ValueError, "slot 3 holds no request"),
        ([1, 2, 1], ValueError, "slots must differ"),
        ([6], ValueError, "slots must be from 0 to max_requests - 1 = 5, got 6"),
        ([-1] * 7, ValueError, "B up to max_requests = 6"),
        ([[1]], TypeError, "slots must be an int, got list"),
        ([1.0], TypeError, "slots must be an int, got float"),
        ([True], TypeError, "slots must be an int, got bool"),
        ("12", TypeError, "slots must be integers, one per row, got str"),
        (1, TypeError, "slots must be integers, one per row, got int"),
        (numpy.array([1, 1]), ValueError, "slots must differ"),
        (torch.tensor(1, device="cpu"), TypeError, "slots must be integers, one per row, got Tensor"),
        (torch.tensor([1.0], device="cpu"), TypeError, "slots must be int32 or int64, got torch.float32"),
        (torch.tensor([True], device="cpu"), TypeError, "slots must be int32 or int64, got torch.bool"),
    ],
)
def test_slots_that_the_host_sees_are_checked(slots, error, message):
    pool = make_pool()
    before = pool.offsets.clone()
    with pytest.raises(error, match=message):
        pool.read(slots, 1)
    assert torch.equal(pool.offsets, before)


@pytest.mark.parametrize(
    ("slots", "options", "error", "message"),
    [
        (1, {}, ValueError, "slot 1 holds a request; release it first"),
        ([3, 3], {}, ValueError, "slots must differ"),
        (-1, {}, ValueError, "slots must be from 0"),
        (0.5, {}, TypeError, "slots must be an int"),
        ([5, 3], {"seed": 1}, ValueError, "seed must be one per slot, 2 of them"),
        ([5, 3], {"top_p": [0.5, 0.6, 0.7]}, ValueError, "top_p must be a number or have shape"),
        (3, {"top_p": 1.5}, ValueError, "top_p must be from 0 to 1"),
        (3, {"temperature": -1.0}, ValueError, "temperature must be at least 0"),
        (3, {"logit_bias": torch.zeros(VOCAB)}, TypeError, "logit_bias must be a pair"),
        (3, {"logit_bias": ([range(301)], [[0.0] * 301])}, ValueError, "at most 300 entries per request, got 301"),
        ([5, 3], {"seed": torch.tensor([5])}, ValueError, "seed must be one per slot, 2 of them, got 1"),
        (["a"], {}, TypeError, "slots must be an int, got str"),
        (3, {"token_mask": torch.zeros(2, dtype=torch.int32, device="cpu")}, ValueError, "token_mask must have shape"),
    ],
)
def test_admission_is_checked(slots, options, error, message):
    pool = make_pool()
    before = [tensor.clone() for tensor in pool.buffers()]
    with pytest.raises(error, match=message):
        pool.admit(slots, **options)
    assert all(map(torch.equal, pool.buffers(), before))
    assert pool.live == [1, 2, 0, 4]


def test_a_released_slot_serves_another_request_without_the_old_one_s_parameters():
    head = make_head()
    sampler = LMHeadSampler(head, max_batch_size=2)
    pool, states = sampler.pool, torch.randn(1, DIM, device=DEVICE)
    pool.admit(0, seed=1, repetition_penalty=2.0, prompt_token_ids=[3], logit_bias=([[7]], [[50.0]]), top_k=1)
    assert pool.params_in_use == {"repetition_penalty", "logit_bias", "top_k"}
    assert sampler(states, slots=[0]).token_ids.tolist() == [7]
    pool.release(0)
    assert pool.params_in_use == set()
    with pytest.raises(ValueError, match="slot 0 holds no request"):
        pool.release(0)
    pool.reserve("logit_bias", "repetition_penalty", "top_k", "token_mask")
    pool.admit(0, seed=2)
    out = sampler(states, slots=[0]).token_ids
    assert torch.equal(out, flashsampling.sample(states, head.weight, seed=torch.tensor([2], device=DEVICE)).token_ids)
    with pytest.raises(ValueError, match=r"names must be of .*, got 'top_kk'"):
        pool.reserve("top_kk")


def test_a_call_that_raises_draws_nothing():
    sampler = LMHeadSampler(make_head(), max_batch_size=2)
    sampler.pool.admit([0, 1], presence_penalty=1.0)
    good = torch.zeros(2, DIM, device=DEVICE)
    for states, options, message in (
        (torch.zeros(2, DIM + 1, device=DEVICE), {}, "columns"),
        (good[:1], {}, "slots must be one for each of 1 rows, got 2"),
        (good, {"temperature": 1.0}, "temperature must be None with slots"),
        (good, {"num_samples": 2}, "num_samples must be 1 with penalties"),
        (good, {"top_p": 2.0}, "top_p must be from 0 to 1"),
        (good, {"repetition_penalty": 2.0}, "repetition_penalty must be given to pool.admit"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler(states, slots=[0, 1], **options)
        assert sampler.offsets.tolist() == [0, 0]
    assert int(sampler.pool.counts.counts.sum()) == 0


def test_nothing_advances_if_the_tokens_cannot_be_counted(monkeypatch):
    sampler = LMHeadSampler(make_head(), max_batch_size=2)
    sampler.pool.admit([0, 1], presence_penalty=1.0)

    def fails(*_: Any) -> None:
        raise RuntimeError("out of memory")

    for name in ("read", "add_to_rows"):
        with monkeypatch.context() as patch:
            patch.setattr(TokenCounts, name, fails)
            with pytest.raises(RuntimeError, match="out of memory"):
                sampler(torch.zeros(2, DIM, device=DEVICE), slots=[0, 1])
        assert sampler.offsets.tolist() == [0, 0]


def test_a_call_s_parameters_replace_those_of_its_requests():
    head = make_head()
    sampler = LMHeadSampler(head, max_batch_size=1)
    sampler.pool.admit(0, temperature=2.0, seed=3, top_k=1)
    states = torch.randn(1, DIM, device=DEVICE)
    first = (states @ head.weight.T).argmax(1)
    assert torch.equal(sampler(states, slots=[0], top_k=None).token_ids, first)
    others = [int(sampler(states, slots=[0], top_k=0).token_ids) for _ in range(8)]
    assert set(others) - {int(first)}


def test_a_default_device_an_empty_admission_and_a_move():
    pool = make_pool()
    with torch.device("meta"):
        pool.admit(3, seed=1, frequency_penalty=1.0)
    pool.release(3)
    pool.admit([])
    pool.release([])
    pool.to("meta")
    assert pool.counts is not None
    assert {x.device.type for x in (*pool.buffers(), pool.counts.counts)} == {"meta"}


def test_exports_with_any_batch():
    sampler, eager = (LMHeadSampler(make_head(), max_batch_size=8) for _ in range(2))
    eager._owner = sampler._owner
    for each in (sampler, eager):
        each.pool.admit([0, 1, 2, 3], seed=[1, 2, 3, 4], top_p=0.7)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sampler = sampler

        def forward(self, states: Tensor, slots: Tensor) -> Tensor:
            return self.sampler(states, slots=slots).token_ids

    batch = torch.export.Dim("batch", min=2, max=8)
    arguments = torch.zeros(3, DIM, device=DEVICE), torch.tensor([0, 1, 2], device=DEVICE)
    exported = torch.export.export(Model(), arguments, dynamic_shapes=({0: batch}, {0: batch})).module()
    for slots in ([3, 1], [0, -1, 2, 1]):
        states = torch.randn(len(slots), DIM, device=DEVICE)
        out = exported(states, torch.tensor(slots, device=DEVICE))
        assert torch.equal(out, eager(states, slots=slots).token_ids)


def test_rows_and_slots_share_seeds_and_offsets():
    sampler = LMHeadSampler(make_head(), max_batch_size=3, seed=4)
    states = torch.randn(3, DIM, device=DEVICE)
    sampler.pool.admit([0, 1, 2], seed=sampler.seeds.tolist())
    by_row = sampler(states).token_ids
    sampler.reset(sampler.seeds.clone())
    assert torch.equal(sampler(states, slots=[0, 1, 2]).token_ids, by_row)
    assert sampler.offsets.tolist() == [1, 1, 1]


def test_compiled_steps_take_other_slots_without_another_graph():
    sampler, eager = (LMHeadSampler(make_head(), max_batch_size=4) for _ in range(2))
    eager.load_state_dict(sampler.state_dict())
    eager._owner = sampler._owner
    graphs = []

    def backend(module: Any, _: Any) -> Any:
        graphs.append(module)
        return module.forward

    step = torch.compile(lambda states, slots: sampler(states, slots=slots), fullgraph=True, backend=backend)
    for each in (sampler, eager):
        each.pool.admit([0, 1, 3], seed=[1, 2, 3], top_p=[0.5, 1.0, 0.9], frequency_penalty=[0.0, 1.0, 0.0])
    for slots in ([0, 1, 3], [3, -1, 0], [1, 0, -1]):
        states = torch.randn(3, DIM, device=DEVICE)
        out = step(states, torch.tensor(slots, device=DEVICE)).token_ids
        assert torch.equal(out, eager(states, slots=slots).token_ids)
    assert len(graphs) == 1
    assert step(states, torch.tensor([2, 9, 1], device=DEVICE)).token_ids[:2].tolist() == [-1, -1]
    assert torch.equal(sampler.pool.counts.counts[[0, 3]], eager.pool.counts.counts[[0, 3]])


@pytest.mark.gpu
def test_a_captured_graph_reads_slots_anew_and_refuses_requests_with_other_parameters():
    sampler, eager = (LMHeadSampler(make_head(torch.bfloat16), max_batch_size=4) for _ in range(2))
    eager._owner = sampler._owner
    for each in (sampler, eager):
        each.pool.admit([0, 1], seed=[1, 2], top_k=[5, 0])
    states = torch.randn(3, DIM, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.tensor([0, -1, 1], device=DEVICE)
    sampler(states, slots=torch.full_like(slots, -1))  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler(states, slots=slots).token_ids
    sampler.pool.admit(2, seed=3, top_k=7)
    sampler.pool.admit(3, seed=4, min_p=0.1)
    eager.pool.admit(2, seed=3, top_k=7)
    for batch in ([0, -1, 1], [1, 2, 0], [2, -1, -1]):
        states.normal_()
        slots.copy_(torch.tensor(batch))
        graph.replay()
        assert torch.equal(captured, eager(states, slots=batch).token_ids)
    slots.copy_(torch.tensor([3, 2, 3]))
    graph.replay()
    assert captured[[0, 2]].tolist() == [-1, -1]
    assert sampler.offsets.tolist() == [2, 2, 3, 0]
