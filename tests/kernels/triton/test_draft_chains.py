"""The two small kernels behind ``verify`` on a GPU, beside the torch operations that everything else goes through."""

import functools

import pytest
import torch

import flashsampling
from flashsampling import verify, verify_from_logits
from flashsampling.kernels.triton.speculative import draft_chains, rejection
from flashsampling.speculative import acceptance
from flashsampling.speculative.drafts import DraftBatch
from tests.conftest import DEVICE
from tests.kernels.triton.target import output_of
from tests.operators import Operators


@pytest.fixture
def kernels(monkeypatch):
    """Drafts on a CPU go by kernels too."""
    monkeypatch.setattr(acceptance, "_runs_kernels", lambda states, given: states.device.type == DEVICE.type)


def random_given(generator: torch.Generator, batch: int, n: int, is_ragged: bool) -> DraftBatch:
    """Few token ids, so that drafts are matched; some requests end early, one draft behind the last request."""

    def integers(low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator).to(DEVICE)

    if not is_ragged:
        return DraftBatch(integers(-1, 3, (batch, n)), None, None, batch, n)
    lengths = integers(0, n + 2, (batch,))  # one more than are looked at
    bounds = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    return DraftBatch(integers(-1, 3, (int(bounds[-1]) + 1,)), None, bounds, batch, n)


def random_numbers(generator: torch.Generator, batch: int) -> list:
    """``step.NUMBERS``, each of all requests or of one, some."""
    numbers: list = [1.5, 0.25, 0.5, 20, 0.9, 0.1, 1, 0.01, 2.0]
    for place, number in enumerate(numbers):
        if torch.rand((), generator=generator) < 0.5:
            dtypes = (torch.int32, torch.int64) if isinstance(number, int) else (torch.float32,)
            dtype = dtypes[int(torch.randint(len(dtypes), (), generator=generator))]
            numbers[place] = (torch.rand(batch, generator=generator) * 100).to(DEVICE, dtype)
    return numbers


@pytest.mark.every_triton
@pytest.mark.parametrize("is_ragged", [False, True])
@pytest.mark.parametrize(("batch", "n"), [(1, 0), (1, 1), (2, 3), (9, 7), (130, 1), (33, 4)])
def test_as_the_torch_operations(batch, n, is_ragged):
    generator = torch.Generator().manual_seed(batch + n)
    for _ in range(5):
        given = random_given(generator, batch, n, is_ragged)
        drafts = given.drafts()
        nodes = drafts.nodes()
        temperature = torch.rand(batch, generator=generator).to(DEVICE)
        seed, offset = torch.randint(-(2**63), 2**63 - 1, (2, batch), generator=generator).to(DEVICE)
        for rows in [(temperature, seed, offset), (0.5, seed, 2**63 - 1), (temperature, 7, offset), (1.0, -3, 0)]:
            numbers = random_numbers(generator, batch)
            ours = draft_chains.expand(
                *given[2:], *rows, numbers, DEVICE, positions=given.positions, with_requests=True
            )
            for value, ours_of_it in zip((*rows[:2], *numbers), (*ours[:2], *ours[3]), strict=True):
                expected = value[nodes.request] if isinstance(value, torch.Tensor) else value
                assert torch.equal(ours_of_it, expected) if isinstance(value, torch.Tensor) else ours_of_it == expected
            expected = (
                rows[2][nodes.request] if isinstance(rows[2], torch.Tensor) else torch.full_like(nodes.depth, rows[2])
            )
            assert torch.equal(ours[2], expected + nodes.depth)  # wraps around, as seeds do
            assert torch.equal(ours[4], nodes.request)
        tokens = torch.randint(-1, 3, (given.positions,), generator=generator).to(DEVICE)
        at_nodes = tokens[drafts.rows]
        accepted = drafts.matched(at_nodes)
        expected = torch.where(accepted.nodes < 0, -1, at_nodes.gather(1, accepted.nodes.clamp(min=0)))
        token_ids, num_accepted, num_emitted = draft_chains.match(given.token_ids, *given[2:], tokens)
        assert torch.equal(token_ids, expected)
        assert torch.equal(num_accepted, accepted.num_accepted)
        last = at_nodes.gather(1, num_accepted[:, None])[:, 0]
        assert torch.equal(num_emitted, num_accepted + (last >= 0))
        assert torch.equal(draft_chains.hashed(given.token_ids, *given[2:]), drafts.hash())


@pytest.mark.parametrize("bounds", [[5, 3, -7], [0, 2**40, 1], [-1, -1, -1], [9, 9, 9]])
def test_bounds_of_nonsense(bounds):
    """Nothing is read or written out of range."""
    given = DraftBatch(torch.tensor([1, 2, 1], device=DEVICE), None, torch.tensor(bounds, device=DEVICE), 2, 2)
    top_k = torch.tensor([7, 8], device=DEVICE)
    rows = 1.0, 0, 0, [1.0, 0.0, 0.0, top_k, 1.0, 0.0, 0, 0.0, 0.0]
    _, _, offsets, numbers, requests = draft_chains.expand(*given[2:], *rows, DEVICE, positions=5, with_requests=True)
    assert requests is not None
    assert ((requests >= 0) & (requests < 2)).all()
    assert torch.equal(numbers[3], top_k[requests])
    assert ((offsets >= 0) & (offsets <= 2)).all()
    token_ids, num_accepted, _ = draft_chains.match(
        given.token_ids, *given[2:], torch.tensor([1, 2, 1, 2, 1], device=DEVICE)
    )
    assert token_ids.shape == (2, 3)
    assert ((num_accepted >= 0) & (num_accepted <= 2)).all()
    assert torch.equal(draft_chains.hashed(given.token_ids, *given[2:]), given.drafts().hash())


@pytest.mark.parametrize("method", ["match", "rejection"])
def test_lengths_of_drafts_that_are_not_there(method, kernels):
    """Of no drafts at all none is read, whatever the lengths on the device say."""
    states, weight = torch.randn(2, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    drafts, bounds = torch.zeros(0, dtype=torch.int64, device=DEVICE), torch.tensor([0, 3, 3], device=DEVICE)
    probs = {"draft_probs": torch.zeros(0, 5, device=DEVICE)} if method == "rejection" else {}
    rows = {"seed": torch.arange(2, device=DEVICE), "method": method, "max_draft_length": 3, **probs}
    out = flashsampling.verify(states, weight, drafts, cu_draft_lengths=bounds, impl="triton", **rows)
    assert torch.equal(out.num_accepted, torch.zeros_like(out.num_accepted))
    assert out.token_ids.shape == (2, 4)
    assert ((out.token_ids >= -1) & (out.token_ids < 5)).all()
    assert (out.token_ids[:, 0] >= 0).all()


@pytest.mark.parametrize("name", ["contiguous", "transposed", "every other column"])
def test_rejection_refuses_weights_that_triton_cannot_read(name, kernels):
    """By name, as ``sample`` does; without a name others do it, and the tokens are the oracle's."""
    states, weight = torch.randn(2, 3, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    every_other = torch.stack([weight, weight], 2).flatten(1)[:, ::2]
    given = {"transposed": weight.T.contiguous().T, "every other column": every_other}.get(name, weight)
    assert torch.equal(given, weight)
    drafts = torch.tensor([[1, 2], [3, 0]], device=DEVICE)
    rows = {"seed": torch.arange(2, device=DEVICE), "method": "rejection"}
    expected = flashsampling.verify(states, weight, drafts, impl="reference", **rows).token_ids
    assert torch.equal(flashsampling.verify(states, given, drafts, **rows).token_ids, expected)
    if name != "contiguous":
        with pytest.raises(ValueError, match="weight must be contiguous along D"):
            flashsampling.verify(states, given, drafts, impl="triton", **rows)


@pytest.mark.every_triton
@pytest.mark.parametrize("method", ["match", "rejection"])
def test_drafts_of_any_stride(method, kernels):
    """What is not contiguous is read as what it is, by kernels too."""
    seed = torch.arange(2, device=DEVICE)
    verify = functools.partial(flashsampling.verify, impl="triton", method=method, seed=seed)
    states, weight = torch.randn(2, 3, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    drafts = torch.tensor([[1, 9, 2, 9], [3, 9, 0, 9]], device=DEVICE)[:, ::2]
    out = verify(states, weight, drafts)
    assert torch.equal(out.token_ids, verify(states, weight, drafts.contiguous()).token_ids)
    bounds = torch.tensor([0, 9, 2, 9, 4, 9], device=DEVICE)[::2]
    flat = verify(states.flatten(0, 1), weight, drafts.flatten(), cu_draft_lengths=bounds, max_draft_length=2)
    assert torch.equal(out.token_ids, flat.token_ids)


@pytest.mark.parametrize("method", ["match", "rejection"])
def test_numbers_of_requests_take_no_launch_of_their_own(method, kernels):
    """All that are asked for are spread by the one that spreads temperatures and seeds."""
    batch, n, vocab = 3, 2, 40
    states, weight = torch.randn(batch, n + 1, 8, device=DEVICE), torch.randn(vocab, 8, device=DEVICE)
    drafts = torch.randint(vocab, (batch, n), device=DEVICE)
    parts = {"top_k": [0, 3, 7], "top_p": [0.3, 1.0, 0.8], "min_p": [0.0, 0.2, 0.01], "temperature": [0.9, 0.0, 1.2]}
    parts |= {"epsilon_cutoff": [0.02, 0.0, 0.1], "top_n_sigma": [0.0, 2.0, 2.5], "seed": [0, 1, 2]}
    parts = {name: torch.tensor(values, device=DEVICE) for name, values in parts.items()}
    parts["joint_top_p"] = torch.tensor([1, 0, 1], dtype=torch.int32, device=DEVICE)
    penalties = {"repetition_penalty": [1.5, 0.7, 1.0], "frequency_penalty": [0.5, 0.0, -0.5]}
    penalties |= {"presence_penalty": [0.0, 2.0, 1.0]}
    request = parts | {name: torch.tensor(values, device=DEVICE) for name, values in penalties.items()}
    with Operators() as ran:
        verify(states, weight, drafts, method=method, impl="triton", **parts)
    assert ran.names
    assert not any("index" in name or "gather" in name for name in ran.names)
    counts = torch.randint(3, (batch, vocab), dtype=torch.int32, device=DEVICE)
    ours, theirs = (
        verify(states, weight, drafts, method=method, impl=impl, token_counts=counts, **request)
        for impl in ("triton", "reference")
    )
    assert torch.equal(ours.token_ids, theirs.token_ids)


def test_a_name_never_falls_back(monkeypatch):
    """Rejection by an implementation that is named is not Triton's; one that cannot is an error, also where its logits
    would be all that is asked of it."""
    monkeypatch.setattr(acceptance, "_runs_kernels", lambda states, given: True)
    monkeypatch.setattr(rejection, "run", lambda *_: pytest.fail("by kernels"))
    states, weight, drafts = torch.randn(2, 3, 8), torch.randn(5, 8), torch.tensor([[1, 2], [3, 0]])
    rows = {"method": "rejection", "seed": torch.arange(2)}
    for impl in ("reference", "streaming"):
        assert verify(states, weight, drafts, impl=impl, **rows).token_ids.shape == (2, 3)
    with pytest.raises(ValueError, match="impl='cute' cannot do this"):
        verify(states, weight, drafts, impl="cute", **rows)
    with pytest.raises(ValueError, match="impl='cute' cannot do this"):
        verify_from_logits(states, drafts, impl="cute", **rows)


# the launches themselves, with a driver that names a target and has no device; compiled and not run
COMPILE = """
import sys
import torch
from tests.kernels.triton.target import compile_only
from flashsampling.kernels.triton.speculative import draft_chains, rejection
from flashsampling.kernels.triton.filtered import dispatch
from flashsampling.kernels.triton import recorded
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams

compiled = compile_only(int(sys.argv[1]))
bounds, rows, cpu = torch.zeros(3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64), torch.device("cpu")
ones = torch.ones(2)
numbers = [ones, ones, ones, rows, ones, ones, rows.int(), ones, ones]
draft_chains.expand(bounds, 2, 3, ones, rows, rows, numbers, cpu, positions=8, with_requests=True)
numbers = [1.0, 0.0, 0.0, rows.int(), 1.0, ones, 1, 0.0, ones]
draft_chains.expand(None, 2, 3, 1.0, 0, 2**63 - 1, numbers, cpu, positions=8, with_requests=False)
draft_chains.match(torch.zeros(6, dtype=torch.int64), bounds, 2, 3, torch.zeros(8, dtype=torch.int64))
draft_chains.match(torch.zeros(2, 3, dtype=torch.int64), None, 2, 3, torch.zeros(8, dtype=torch.int64))
if sys.argv[1] == "90":
    draft_chains.hashed(torch.zeros(6, dtype=torch.int64), bounds, 2, 3)
    draft_chains.hashed(torch.zeros(2, 3, dtype=torch.int64), None, 2, 3)
    ids, eight = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(8, dtype=torch.int64)
    states = torch.zeros(8, 72)[:, :70]
    top_p = SamplingParams(top_p=torch.ones(8))
    step = SampleInputs(states, states, torch.ones(8), eight, eight, 1, 70, params=top_p, logits=states)
    rejection.run(step, recorded(step), ids, None, 2, 3, torch.zeros(6, 70, dtype=torch.bfloat16))
    counts = torch.zeros(8, 70, dtype=torch.int32)
    params = SamplingParams(
        bias=torch.zeros(70), soft_cap=3.0, bias_ids=counts, bias_values=states, counts=counts, repetition_penalty=2.0,
        token_mask=counts,
    )
    step = step._replace(params=params)
    rejection.run(step, recorded(step), ids.flatten(), bounds, 2, 3, None)
    # behind the Hopper kernel
    block_stats = dispatch.BlockStats(torch.zeros(8, 4, dtype=torch.int32), torch.zeros(8, 4))
    for params in (SamplingParams(), SamplingParams(top_k=3)):
        dispatch.draw(step._replace(params=params), block_stats, eight, records=dispatch.empty_records(8, cpu))
print(*(len(kernel.asm["cubin"]) for kernel in compiled))
"""


@pytest.mark.quick(0)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_compiles(capability):
    sizes = [int(size) for size in output_of(COMPILE, capability).split()]
    assert len(sizes) == 4 + (2 + 2 * 5 + 2) * (capability == 90)
    assert min(sizes) > 0


def test_ids_that_no_token_has_are_one_to_the_hash():
    hashes = set()
    for draft in (2**31 - 1, 2**31, 2**62, 2**63 - 1):
        given = DraftBatch(torch.tensor([[3, draft]], device=DEVICE), None, None, 1, 2)
        hashes |= {int(draft_chains.hashed(given.token_ids, *given[2:])), int(given.drafts().hash())}
    assert len(hashes) == 1
