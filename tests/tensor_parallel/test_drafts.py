"""Rejection of drafts where several ranks have a shard each: the oracle's answer for any cut. The ranks are threads, as
in ``tests/tensor_parallel/test_filters.py``; with transports and processes the scenarios of
``tests/tensor_parallel/scenarios.py`` do it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flashsampling import VerifyOutput, ops, sample, verify
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.inputs import DraftChains, SampleInputs
from flashsampling.outputs import SampleResult, layout
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from flashsampling.tensor_parallel import TensorParallel, filtered_sampling
from flashsampling.tensor_parallel.filtered_sampling import Part
from flashsampling.tensor_parallel.message import Hashes
from flashsampling.tensor_parallel.p2p import PeerToPeer
from flashsampling.tensor_parallel.transport import DryRun
from tests.conftest import DEVICE
from tests.mixes import Mix
from tests.problems import fit
from tests.speculative.drafting import DraftChains as Problem
from tests.speculative.drafting import make_drafted, sure_of
from tests.speculative.test_verify import differences
from tests.tensor_parallel.test_filters import (
    USUAL,
    Peer,
    Transport,
    cut,
    flat,
    run,
    shared_memory,  # noqa: F401 (a fixture)
)

Ranges = list[tuple[int, int]]
REJECT: dict[str, Any] = {"method": "rejection"}


class Whole(TensorParallel):
    """A group as ``verify`` sees it, of a whole weight, which ``ranks`` cuts."""

    def __init__(self, rows: int, vocab_size: int, impl: str) -> None:
        self.num_rows, self.impl = rows, impl
        self.first_token, self.last_token, self.vocab_size, self.shard = 0, vocab_size, vocab_size, Shard(0, PACKED)


@pytest.fixture
def ranks(monkeypatch, shared_memory):  # noqa: F811
    """Makes a group whose steps are taken by threads, with shards of these ranges."""

    def of(
        weight: Tensor,
        ranges: Ranges,
        vocab_size: int | None = None,
        impl: str = "streaming",
        room: int = 2048,
        transport: type[Transport | Peer] = Transport,
    ) -> Whole:
        def step_of_all(step: SampleInputs, tp: TensorParallel) -> SampleResult:
            assert step.drafted is not None
            return run(step, ranges, impl, room, transport)[0]

        monkeypatch.setattr(ops, "sample_sharded", step_of_all)
        return Whole(len(weight), vocab_size or len(weight), impl)

    return of


def of_ranks(problem: Problem, ranks: Any, ranges: Ranges, flat: bool = False, **options: Any) -> VerifyOutput:
    assert problem.weight is not None
    tp = ranks(problem.weight, ranges, problem.step.vocab_size, **options)
    return problem.verify("rejection", flat=flat, vocab_size=None, tp=tp)


def rows_of(rows: Tensor, *outs: VerifyOutput) -> Iterator[VerifyOutput]:
    """Some requests of each output."""
    for out in outs:
        yield VerifyOutput(*(None if part is None else part[rows] for part in vars(out).values()))


def assert_oracle(problem: Problem, ours: VerifyOutput) -> tuple[VerifyOutput, Tensor]:
    """Ours is the oracle's output, but of requests where a last bit of p decides. Returns that, and which are sure."""
    expected = problem.verify("rejection", impl="reference")
    sure = sure_of(problem, expected)
    assert not differences(*rows_of(sure, ours, expected)), (problem, ours, expected, sure)
    return expected, sure


@pytest.mark.parametrize("problems", [40, pytest.param(600, marks=pytest.mark.slow)])
def test_any_cut_is_the_oracle_s(problems, ranks):
    """In both layouts, by messages of any size."""
    requests, unsure, accepted, refused, seen, cuts, failed = 0, 0, 0, 0, set(), set(), 0
    for seed in range(10**6, 10**6 + problems):
        random = Mix(seed).random
        sizes = (random.randrange(1, 7), random.randrange(5), random.choice((2, 5, 33, 130, 300))) if seed % 3 else None
        problem = make_drafted(seed, "rejection", head=True, sizes=sizes)
        assert problem.weight is not None
        if seed % 4:  # flat: more drafts are refused, by a token that is not sure
            problem = replace(problem, weight=problem.weight / 8)
        ranges = cut(Mix(seed), problem.step.vocab_size)
        transport = random.choice((Transport, Peer))
        ours = of_ranks(problem, ranks, ranges, flat=seed % 2 == 0, room=random.choice((64, 4096)), transport=transport)
        expected, sure = assert_oracle(problem, ours)
        requests, unsure = requests + len(sure), unsure + int((~sure).sum())
        accepted += int(expected.num_accepted.sum())
        refused += int((expected.num_accepted < torch.tensor(problem.lengths))[sure].sum())
        failed += int((expected.num_emitted == expected.num_accepted).sum())
        seen |= set(problem.step.params.names())
        cuts.add((len(ranges), any(first == last for first, last in ranges)))
    assert unsure < requests / 10
    assert accepted > requests / 5
    assert refused > requests / 6
    assert failed > requests / 100
    assert len(seen) >= 13  # of what a request may ask for
    assert cuts >= {(2, False), (3, False), (4, False), (3, True)}


@pytest.mark.skipif(DEVICE.type != "cpu", reason="ranks are played on the CPU")
def test_kernels_do_it_too(ranks):
    """Few problems: Triton's interpreter takes a second for each. It has the drafts of ``cute`` as well, whose logits
    ``test_filters.py`` exchanges."""
    pytest.importorskip("triton")
    requests = accepted = 0
    for seed in (1, 2, 5):
        kind: dict[str, Any] = {"poisoned": False, "sizes": (2, 2, 150), "wanted": ("top_k",)}
        problem = make_drafted(seed + 10**7, "rejection", head=True, **kind)
        assert problem.weight is not None
        states = fit("triton", problem.states.flatten(0, 1)).unflatten(0, problem.states.shape[:2])
        problem = replace(problem, states=states, weight=fit("triton", problem.weight))
        expected, sure = assert_oracle(problem, of_ranks(problem, ranks, [(0, 70), (70, 150)], impl="triton"))
        requests, accepted = requests + int(sure.sum()), accepted + int(expected.num_accepted.sum())
    assert requests >= 4
    assert accepted >= 2


# -- edges


WEIGHT = torch.randn(70, 8, generator=torch.Generator().manual_seed(2))
STATES = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(1))
DRAFTS = torch.tensor([[5, 6], [7, -1], [-1, -1]])
THREE: Ranges = [(0, 33), (33, 33), (33, 70)]


def test_q_and_temperatures_with_a_gradient(ranks):
    """q may come from a drafter with gradients: its graph is not kept, and q is not written to."""
    q, temperature = torch.full((3, 2, 70), 1 / 70, requires_grad=True), torch.ones(3, requires_grad=True)
    for options in ({"draft_probs": q}, {"temperature": temperature}):
        out = verify(STATES, WEIGHT, DRAFTS, seed=torch.arange(3), **options, tp=ranks(WEIGHT, THREE), **REJECT)
        bare = {name: value.detach() for name, value in options.items()}
        assert not differences(out, verify(STATES, WEIGHT, DRAFTS, seed=torch.arange(3), **bare, **REJECT))


@pytest.mark.parametrize("absent", [-1, 70])
def test_an_id_that_is_no_token_is_no_draft(absent, ranks):
    """The chain ends before it, with the token that ``sample`` draws."""
    seeds = torch.arange(3)
    drawn = torch.stack([sample(STATES[:, i], WEIGHT, seed=seeds, offset=i).token_ids for i in range(2)], dim=1)
    drafts = torch.stack([drawn[:, 0], torch.full((3,), absent)], dim=1)
    out = verify(
        STATES, WEIGHT, drafts, draft_probs=torch.zeros(3, 2, 70), seed=seeds, tp=ranks(WEIGHT, THREE), **REJECT
    )
    assert out.token_ids.tolist() == torch.nn.functional.pad(drawn, (0, 1), value=-1).tolist()


def test_whatever_is_on_the_device(ranks):
    """Bounds, drafts and q of nonsense: no index out of range, and no id."""
    generator = torch.Generator().manual_seed(3)
    ends = (-(2**62), -7, -2, -1, 0, 1, 2, 3, 5, 69, 70, 71, 2**62)
    tp = ranks(WEIGHT, THREE)
    for _ in range(20):
        pick = [ends[i] for i in torch.randint(0, len(ends), (20,), generator=generator).tolist()]
        options: dict[str, Any] = {
            "seed": torch.arange(3),
            "cu_draft_lengths": torch.tensor(pick[6:10]),
            "max_draft_length": 4,
        }
        if pick[0] > 0:
            options["draft_probs"] = torch.randn(6, 70, generator=generator)
        out = verify(torch.randn(9, 8), WEIGHT, torch.tensor(pick[10:16]), **options, tp=tp, **REJECT)
        assert ((out.token_ids >= -1) & (out.token_ids < 70)).all()
        assert ((out.num_accepted >= 0) & (out.num_accepted <= 4)).all()
        assert torch.equal((out.token_ids >= 0).sum(1), out.num_emitted)


def test_p2p_compares_what_its_kernels_do_not_know(monkeypatch):
    """A step before the kernel's compares the rest and fails if ranks differ; the kernel finds the failure in
    memory."""
    transport: Any = object.__new__(PeerToPeer)
    transport._device, transport._hashes = DEVICE, Hashes(16, DEVICE)
    transport._table, transport._ranks = 0, 2
    swapped = []

    def all_gather(words: Tensor, request: tuple[int, Tensor], step: SampleInputs) -> None:
        assert request == (0, words)
        assert step.params is DEFAULT_PARAMS
        swapped.append(words.item())

    monkeypatch.setattr(transport, "_all_gather", all_gather)
    out, step = torch.tensor([4, 5, 6]), flat(3, 70, DEFAULT_PARAMS)
    mask = torch.ones(3, 3, dtype=torch.int32, device=DEVICE)
    drafts = torch.tensor(2**40 + 7, device=DEVICE)
    requests = [
        step._replace(draft_hash=drafts),
        step._replace(params=SamplingParams(token_mask=mask)),
        step._replace(params=SamplingParams(token_mask=mask * 2)),
        step._replace(params=SamplingParams(token_mask=mask), draft_hash=drafts),
    ]
    for request in requests:
        transport.compare(request)
        assert transport.finish(out, request) is out
    assert swapped[0] == 2**40 + 7
    assert len(set(swapped)) == len(requests)


# -- on a GPU, without one


class Stub(DryRun):
    """A transport and a backend of tensors without values."""

    records, for_logits = False, property(lambda self: self)

    def __init__(self, hashes: Hashes) -> None:
        self.hashes = hashes

    def begin(self, step: SampleInputs) -> None:
        self.hashes.of_request(step)

    def end(self, error: BaseException | None = None) -> Tensor:  # type: ignore[override]
        return torch.zeros((), dtype=torch.bool, device="meta")

    def shard_logits(self, step: SampleInputs) -> Tensor:
        return torch.randn(len(step.hidden_states), step.vocab_size, device="meta")

    def run(self, step: SampleInputs) -> SampleResult:
        assert step.logits is not None
        assert step.logits.shape == (len(step.hidden_states), 70)
        sizes = layout(len(step.logits), step.num_samples, step.params)
        return SampleResult(
            torch.ones(sizes.num_ids, dtype=torch.int64, device="meta"), torch.ones(sizes.num_values, device="meta")
        )


@pytest.mark.parametrize("what", ["filters", "certain drafts", "drafts with q"])
def test_nothing_is_read_on_the_host_and_all_is_on_the_device(what):
    """Tensors without values raise if a value is read or two devices meet. A CUDA graph could hold neither."""
    hashes: Any = Hashes(16, torch.device("cpu"))
    with FakeTensorMode():
        device, batch = torch.device("meta"), 5 if what == "filters" else 9

        def moved(value: Any) -> Any:
            return torch.empty(value.shape, dtype=value.dtype, device=device) if isinstance(value, Tensor) else value

        hashes.factors, hashes.along = moved(hashes.factors), moved(hashes.along)
        rows = map(moved, (torch.ones(batch), torch.arange(batch), torch.arange(batch)))
        step = SampleInputs(moved(torch.ones(batch, 8)), moved(torch.ones(20, 8)), *rows, 1, 20, Shard(33, PACKED))
        if what == "filters":
            params = SamplingParams(**USUAL, bias=torch.ones(20), counts=torch.ones(5, 70, dtype=torch.int32))
            step = step._replace(num_samples=2)
        else:
            ids, probs = torch.ones(3, 2).long(), torch.ones(6, 70) if what == "drafts with q" else None
            step = step._replace(drafted=DraftChains(*map(moved, (ids, torch.ones(3, 3).long(), ids, probs))))
            params = SamplingParams(top_p=torch.ones(9), top_k=torch.arange(9))
        step = step._replace(params=SamplingParams(*map(moved, params)))
        stub: Any = Stub(hashes)
        drawn = filtered_sampling.draw(Part(stub, stub, [(0, 33), (33, 53), (53, 70)], 1, 70), step)
        assert drawn.ids.device == device
        if what == "filters":
            assert drawn.values.device == device
            expected = layout(5, 2, params)
            assert (drawn.ids.numel(), drawn.values.numel()) == (expected.num_ids, expected.num_values)
        else:
            assert drawn.ids.shape == (6,)


@pytest.mark.quick(1)
@pytest.mark.parametrize("impl", ["streaming", "triton"] if DEVICE.type == "cpu" else ["streaming"])
def test_a_failed_step_has_no_token(impl):
    """Nor a number, whatever words it receives."""

    class Failed(DryRun):
        def gather_logits(self, logits: Tensor, *_: Any) -> Tensor:
            bits = torch.randint(-(2**31), 2**31 - 1, (len(logits), 72), generator=generator, dtype=torch.int32)
            return bits.view(torch.float32)[:, :70]

        def gather_results(self, words: Tensor, *_: Any) -> Tensor:
            return torch.randint(-(2**63), 2**63 - 1, words.shape, generator=generator)

        def end(self, error: BaseException | None = None) -> Tensor:  # type: ignore[override]
            return torch.tensor(True)

    generator = torch.Generator().manual_seed(1)
    ids, rows = torch.tensor([[5, 6], [7, 69], [1, 2]]), torch.arange(9).view(3, 3)
    drafted = DraftChains(ids, rows, torch.arange(6).view(3, 2), torch.rand(6, 70))
    steps = [
        flat(9, 70, params, drafted=drafted)
        for params in (DEFAULT_PARAMS, SamplingParams(top_p=0.5), SamplingParams(top_k=3))
    ]
    if impl == "streaming":
        numbers: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "logprob_ids": ids[:1].expand(9, 2)}
        steps.append(flat(9, 70, SamplingParams(top_p=0.5, logsumexp=True, **numbers)))
    for step in steps:
        transport: Any = Failed()
        states, weight = fit(impl, step.hidden_states), fit(impl, step.weight[:40])
        own = step._replace(hidden_states=states, weight=weight, vocab_size=40)
        for _ in range(3 if impl == "streaming" else 1):
            part = Part(transport, BACKENDS[impl], [(0, 40), (40, 60), (60, 70)], 0, 70)
            drawn = filtered_sampling.draw(part, own)
            if step.drafted is not None:
                assert drawn.ids.tolist() == [-1] * 3 + [0] * 3
            else:
                assert drawn.values is not None
                assert (drawn.ids == -1).all()
                assert drawn.values.isnan().all()
