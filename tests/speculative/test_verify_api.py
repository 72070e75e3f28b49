"""``verify`` as users call it: what is refused and in which words, layouts, rows of nonsense on the device, tracers,
graphs."""

import copy
from typing import Any

import numpy
import pytest
import torch

from flashsampling import LMHeadSampler, TokenCounts, sample, verify, verify_from_logits
from tests.conftest import DEVICE

WEIGHT = torch.randn(70, 8, generator=torch.Generator().manual_seed(2))
STATES = torch.randn(3, 3, 8, generator=torch.Generator().manual_seed(1))
DRAFTS = torch.tensor([[5, 6], [7, -1], [-1, -1]])
FLAT = {
    "hidden_states": torch.zeros(6, 8),
    "draft_token_ids": torch.tensor([5, 6, 7]),
    "cu_draft_lengths": [0, 2, 3, 3],
}
PROBS = torch.full((3, 2, 70), 1 / 70)
REJECT = {"method": "rejection"}

# ruff: noqa: E501
BAD = [
    (TypeError, "hidden_states must be a torch.Tensor, got list", {"hidden_states": [1.0]}),
    (TypeError, "hidden_states must be a dense tensor, got torch.sparse_coo", FLAT | {"hidden_states": torch.zeros(6, 8).to_sparse()}),
    (TypeError, "draft_token_ids must be a plain torch.Tensor, got torch.sparse_coo", {"draft_token_ids": DRAFTS.to_sparse()}),
    (TypeError, "draft_probs must be a dense tensor, got a nested", {"draft_probs": torch.nested.nested_tensor([PROBS, PROBS]), **REJECT}),
    (ValueError, r"hidden_states must have shape \(3, 3, ...\), one more than drafts, got shape \(3, 2, 8\)", {"hidden_states": STATES[:, :2]}),
    (ValueError, r"hidden_states must have shape \(3, 3, ...\), .* got shape \(9, 8\)", {"hidden_states": STATES.flatten(0, 1)}),
    (TypeError, "draft_token_ids must be a plain torch.Tensor, got list", {"draft_token_ids": [[1, 2]]}),
    (ValueError, "draft_token_ids must be on the device of the step, cpu, got meta", {"draft_token_ids": DRAFTS.to("meta")}),
    (ValueError, r"draft_token_ids must have shape \(B, n\), or \(N,\) with cu_draft_lengths, got shape \(6,\)", {"draft_token_ids": DRAFTS.flatten()}),
    (ValueError, r"draft_token_ids must have shape \(N,\) with cu_draft_lengths, got shape \(3, 2\)", {"cu_draft_lengths": [0, 1, 2, 3]}),
    (ValueError, "max_draft_length must be None without cu_draft_lengths", {"max_draft_length": 2}),
    (ValueError, r"cu_draft_lengths must go up from 0 to the 3 of draft_token_ids at most, got \[0, 2, 4\]", FLAT | {"cu_draft_lengths": [0, 2, 4]}),
    (TypeError, r"cu_draft_lengths must be B \+ 1 integers, got int", FLAT | {"cu_draft_lengths": 3}),
    (TypeError, "cu_draft_lengths must be an int, got float", FLAT | {"cu_draft_lengths": [0, 1.5]}),
    (ValueError, r"cu_draft_lengths must have shape \(B \+ 1,\), got shape \(\)", FLAT | {"cu_draft_lengths": torch.tensor(3)}),
    (ValueError, "max_draft_length must be given with a tensor of cu_draft_lengths", FLAT | {"cu_draft_lengths": torch.tensor([0, 2, 3, 3])}),
    (ValueError, r"max_draft_length must be from 0 to 2\*\*31 - 1, got -1", FLAT | {"max_draft_length": -1}),
    (ValueError, r"hidden_states must have shape \(6, ...\), a row for each of 3 drafts and 3 requests, got shape \(5, 8\)", FLAT | {"hidden_states": torch.zeros(5, 8)}),
    (ValueError, r"parents must have the shape of draft_token_ids, \(3, 2\), got \(3, 3\)", {"parents": torch.zeros(3, 3).long()}),
    (ValueError, "parents must be None with method='rejection', which knows chains alone", {"parents": DRAFTS, **REJECT}),
    (ValueError, "method must be one of match, rejection, got 'typical'", {"method": "typical"}),
    (ValueError, "draft_probs must be None with method='match', which does not need it", {"draft_probs": PROBS}),
    (TypeError, "draft_probs must be float32, bfloat16 or float16, got torch.float64", {"draft_probs": PROBS.double(), **REJECT}),
    (ValueError, r"draft_probs must have shape \(3, 2, 70\), got shape \(3, 2, 69\)", {"draft_probs": PROBS[..., :69], **REJECT}),
    (ValueError, r"draft_probs must have shape \(3, 70\), got shape \(2, 70\)", FLAT | {"draft_probs": PROBS[0], **REJECT}),
    (ValueError, "draft_probs must be on the device of the step, cpu, got meta", {"draft_probs": PROBS.to("meta"), **REJECT}),
    (ValueError, r"temperature must be a number or have shape .*\(3,\), one per row, got shape \(9,\)", {"temperature": torch.ones(9)}),
    (ValueError, r"return_logprobs, top_logprobs must be left out: verify returns token ids alone", {"return_logprobs": True, "top_logprobs": 2}),
    (ValueError, r"logprob_ids, return_logsumexp must be left out: verify returns token ids alone", {"logprob_ids": [[1]] * 3, "return_logsumexp": True}),
    (ValueError, r"token_mask must have a row per request or per position, got shape \(3, 2, 3\)", {"token_mask": torch.zeros(3, 2, 3, dtype=torch.int32)}),
    (ValueError, r"token_mask must have shape \(9, 3\) or \(3,\), a bit for each of 70 tokens, got shape \(9, 2\)", {"token_mask": torch.zeros(3, 3, 2, dtype=torch.int32)}),
    (TypeError, "tp must be a flashsampling.tensor_parallel.TensorParallel, got str", {"tp": "all", "seed": 1}),
]  # fmt: skip


class Verifies(torch.nn.Module):
    """What is exported."""

    def __init__(self, method: str, ragged: bool, sampler: bool) -> None:
        super().__init__()
        self.options = {"method": method}
        self.ragged = ragged
        self.sampler = LMHeadSampler(WEIGHT, max_batch_size=9, seed=3) if sampler else None

    def forward(self, states, drafts, seeds):
        options, batch, most = dict(self.options), drafts.shape[0], drafts.shape[1]
        if self.ragged:
            bounds = torch.arange(batch + 1) * most
            options |= {"cu_draft_lengths": bounds, "max_draft_length": most}
            states, drafts = states.flatten(0, 1), drafts.flatten()
        if self.sampler is not None:
            return self.sampler.verify(states, drafts, **options)
        return verify(states, WEIGHT, drafts, seed=seeds, **options)


@pytest.mark.quick(1)
@pytest.mark.parametrize("sampler", [False, True])
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("method", ["match", "rejection"])
def test_exports_for_any_batch(method, ragged, sampler):
    module = Verifies(method, ragged, sampler)
    batch = torch.export.Dim("batch", min=2, max=8)
    arguments = STATES, DRAFTS, torch.arange(3)
    dynamic = {0: batch}, {0: batch}, None if sampler else {0: batch}
    exported = torch.export.export(copy.deepcopy(module), arguments, dynamic_shapes=dynamic).module()
    for size in (3, 2, 7):
        states, drafts = torch.randn(size, 3, 8), torch.randint(70, (size, 2))
        seeds = torch.arange(3 if sampler else size)
        ours, theirs = exported(states, drafts, seeds), module(states, drafts, seeds)
        for name in ("token_ids", "num_accepted", "num_emitted"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize(("error", "message", "wrong"), BAD)
def test_what_is_refused(error, message, wrong):
    arguments = {"hidden_states": STATES, "weight": WEIGHT, "draft_token_ids": DRAFTS, "seed": torch.arange(3)} | wrong
    with pytest.raises(error, match=f"^{message}"):
        verify(**arguments)


def test_what_is_refused_from_logits():
    for message, states in (("3 dimensions|shape", STATES[0]), ("at least one column", STATES[..., :0])):
        with pytest.raises(ValueError, match=message):
            verify_from_logits(states, DRAFTS)
    with pytest.raises(TypeError, match="unexpected argument 'tp'"):  # logits are no shard's
        verify_from_logits(torch.zeros(3, 3, 70), DRAFTS, seed=1, tp=None)
    logits: Any
    for message, logits in (("a torch.Tensor, got NoneType", None), ("bfloat16, float16 or", STATES.double())):
        with pytest.raises(TypeError, match=f"target_logits must be {message}"):
            verify_from_logits(logits, DRAFTS)


@pytest.mark.parametrize("method", ["match", "rejection"])
def test_no_requests_and_no_drafts(method):
    for n in (0, 2):
        out = verify(torch.zeros(0, n + 1, 8), WEIGHT, torch.zeros(0, n).long(), method=method)
        assert out.token_ids.shape == (0, n + 1)
        assert out.num_accepted.shape == out.num_emitted.shape == (0,)
    empty = {"cu_draft_lengths": torch.tensor([0]), "max_draft_length": 2}
    assert verify(torch.zeros(3, 8), WEIGHT, torch.tensor([1, 2, 3]), **empty, method=method).token_ids.shape == (0, 3)
    seeds = torch.arange(3)
    plain = sample(STATES[:, 0], WEIGHT, seed=seeds).token_ids
    out = verify(STATES[:, :1], WEIGHT, torch.zeros(3, 0).long(), seed=seeds, method=method)
    assert torch.equal(out.token_ids, plain[:, None])
    out = verify(STATES[:, 0], WEIGHT, torch.zeros(0).long(), cu_draft_lengths=[0, 0, 0, 0], seed=seeds, method=method)
    assert torch.equal(out.token_ids, plain[:, None])


@pytest.mark.parametrize("method", ["match", "rejection"])
def test_no_requests_and_masks_of_positions(method):
    words = -(-len(WEIGHT) // 32)
    mask = torch.zeros(0, 4, words, dtype=torch.int32)
    out = verify(torch.zeros(0, 4, 8), WEIGHT, torch.zeros(0, 3).long(), method=method, token_mask=mask)
    assert out.token_ids.shape == (0, 4)
    with pytest.raises(ValueError, match="token_mask must have a row per request or per position"):
        verify(torch.zeros(0, 4, 8), WEIGHT, torch.zeros(0, 3).long(), method=method, token_mask=mask[:, :3])


@pytest.mark.parametrize("method", ["match", "rejection"])
def test_room_that_nobody_uses(method):
    """Drafts behind the last request's, and behind a request's n-th, change nothing: a graph captured with room for
    more."""
    flat = torch.tensor([5, 6, 7, 60, 61])
    states = torch.cat([STATES[0], STATES[1, :2], STATES[2, :1], torch.full((2, 8), torch.nan)])
    options = {"seed": torch.arange(3), "method": method}
    expected = verify(STATES, WEIGHT, DRAFTS, **options)
    for bounds in (
        torch.tensor([0, 2, 3, 3]),
        [0, 2, 3, 3],
        numpy.array([0, 2, 3, 3]),
        torch.tensor([0, 2, 3, 3]).int(),
    ):
        out = verify(states, WEIGHT, flat, cu_draft_lengths=bounds, max_draft_length=2, **options)
        assert torch.equal(out.token_ids, expected.token_ids)
    shorter = verify(states, WEIGHT, flat, cu_draft_lengths=[0, 2, 3, 3], max_draft_length=1, **options)
    assert torch.equal(shorter.token_ids, verify(STATES[:, :2], WEIGHT, DRAFTS[:, :1], **options).token_ids)


@pytest.mark.parametrize("method", ["match", "rejection"])
def test_whatever_is_on_the_device(method):
    """Bounds, drafts and parents of nonsense: no index out of range, and no id."""
    generator = torch.Generator().manual_seed(3)
    ends = (-(2**62), -7, -2, -1, 0, 1, 2, 3, 5, 69, 70, 71, 2**62)
    for _ in range(60):
        pick = [ends[i] for i in torch.randint(0, len(ends), (20,), generator=generator).tolist()]
        options = {"seed": torch.arange(3), "method": method, "impl": "reference"}
        if method == "match":
            options["parents"] = torch.tensor(pick[:6])
        elif pick[0] > 0:
            options["draft_probs"] = torch.randn(6, 70, generator=generator)
        bounds = torch.tensor(pick[6:10])
        out = verify(
            torch.randn(9, 8), WEIGHT, torch.tensor(pick[10:16]), cu_draft_lengths=bounds, max_draft_length=4, **options
        )
        assert ((out.token_ids >= -1) & (out.token_ids < 70)).all()
        assert ((out.num_accepted >= 0) & (out.num_accepted <= 4)).all()
        emitted = (out.token_ids >= 0).sum(1)
        assert torch.equal(emitted, out.num_emitted)


@pytest.mark.quick(12)
@pytest.mark.parametrize("absent", [-1, 70, 2**40])
@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    ("method", "by"),
    [
        *((method, by) for method in ("match", "rejection") for by in ("torch", "logits", "kernels")),
        ("tree", "torch"),
        ("tree", "logits"),
    ],
)
def test_an_id_that_is_no_token_is_no_draft(method, by, is_flat, absent, monkeypatch):
    """In the middle: a chain ends before it, with the token that ``sample`` draws; in a tree its sibling stands."""
    if by == "kernels":
        pytest.importorskip("triton")
        monkeypatch.setattr("flashsampling.speculative.acceptance._runs_kernels", lambda states, given: given.batch > 0)
    requests, n = 2 if by == "kernels" else 6, 3
    seeds, device = torch.arange(requests), DEVICE if by == "kernels" else torch.device("cpu")
    states = torch.randn(requests, 1, 8, generator=torch.Generator().manual_seed(1)).expand(-1, n + 1, -1) / 2
    drawn = torch.stack([sample(states[:, 0], WEIGHT, seed=seeds, offset=i).token_ids for i in range(n)], dim=1)
    nothing = torch.full((requests, 1), absent)
    options: dict[str, Any] = {"seed": seeds.to(device), "method": "match" if method == "tree" else method}
    if method == "tree":
        drafts, expected = torch.cat([nothing, drawn[:, :2]], dim=1), drawn
        options["parents"] = torch.tensor([-1, -1, 1]).expand(requests, n)
    else:
        drafts, expected = torch.cat([drawn[:, :1], nothing, drawn[:, 2:]], dim=1), drawn[:, :2]
    if method == "rejection":  # so a draft is accepted if p has it at all
        options["draft_probs"] = torch.zeros(requests, n, 70, device=device)
    if is_flat:
        options |= {"cu_draft_lengths": [n * i for i in range(requests + 1)]}
        options |= {name: options[name].flatten(0, 1) for name in ("parents", "draft_probs") if name in options}
        drafts, states = drafts.flatten(), states.flatten(0, 1)
    impl = "triton" if by == "kernels" else None
    if by == "torch":
        out = verify(states, WEIGHT, drafts, impl=impl, **options)
    else:
        out = verify_from_logits((states @ WEIGHT.T).to(device), drafts.to(device), impl=impl, **options)
    assert out.num_accepted.tolist() == [expected.shape[1] - 1] * requests
    assert torch.equal(out.token_ids.cpu(), torch.nn.functional.pad(expected, (0, n + 1 - expected.shape[1]), value=-1))
    if method == "tree":
        assert out.accepted_drafts is not None
        assert out.accepted_drafts.tolist() == [[1, 2, -1]] * requests


def test_a_parent_that_does_not_come_before_its_draft():
    """Such a draft is not accepted, nor what follows it, though the target draws these tokens."""
    weight = torch.zeros(70, 8)
    weight[7] = 1.0
    for parents, path in (
        ([0, -1, 1], [1, 2]), ([1, -1, 1], [1, 2]), ([2, -1, 0], [1]), ([-1, 1, 1], [0]), ([-1, 2, 0], [0, 2]), ([-2, 0, 1], []),
        ([-1, 0, 1], [0, 1, 2]), ([3, 0, 1], []),
    ):  # fmt: skip
        drafts = torch.full((1, 3), 7)
        out = verify(torch.ones(1, 4, 8), weight, drafts, parents=torch.tensor([parents]), temperature=0.0, seed=1)
        assert out.accepted_drafts is not None
        assert out.accepted_drafts[0].tolist() == path + [-1] * (3 - len(path)), parents
        assert out.token_ids[0].tolist() == [7] * (len(path) + 1) + [-1] * (3 - len(path))
        assert [int(out.num_accepted), int(out.num_emitted)] == [len(path), len(path) + 1], parents


def test_a_chain_as_a_tree_of_any_depth():
    """Every node has all drafts before it, for the penalties too: the lowest id that has not come is the likeliest."""
    weight = torch.zeros(70, 8)
    weight[:, 0] = -torch.arange(70.0)
    request = {
        "token_counts": torch.zeros(3, 70, dtype=torch.int32),
        "presence_penalty": 1000.0,
        "temperature": 0.0,
        "seed": 1,
    }
    for n in range(1, 10):
        tokens = torch.arange(n + 1).expand(3, -1)
        for parents in (None, torch.arange(-1, n - 1).expand(3, n)):
            out = verify(torch.ones(3, n + 1, 8), weight, tokens[:, :n], parents=parents, **request)
            assert out.num_accepted.tolist() == [n] * 3, n
            assert torch.equal(out.token_ids, tokens), n


def test_a_position_without_a_token_ends_its_request_alone():
    states, seeds = STATES.clone(), torch.arange(3)
    clean = verify(STATES, WEIGHT, DRAFTS, seed=seeds)
    states[0, 0] = torch.nan
    for method in ("match", "rejection"):
        out = verify(states, WEIGHT, DRAFTS, seed=seeds, method=method)
        assert out.token_ids[0].tolist() == [-1, -1, -1]
        assert [int(out.num_accepted[0]), int(out.num_emitted[0])] == [0, 0]
        assert method == "rejection" or torch.equal(out.token_ids[1:], clean.token_ids[1:])
    drafts = torch.full_like(DRAFTS, -1)  # which is what a row of NaN draws
    assert verify(states, WEIGHT, drafts, seed=seeds).num_emitted.tolist() == [0, 1, 1]
    sampler = LMHeadSampler(WEIGHT, max_batch_size=3, seed=[0, 1, 2])
    sampler.verify(states, drafts)
    assert sampler.offsets.tolist() == [0, 1, 1]


def test_the_module():
    """Its seeds, offsets, temperature, bias and vocabulary; ragged drafts too."""
    head = torch.nn.Linear(8, 70)
    sampler = LMHeadSampler(head, max_batch_size=4, seed=[3, 4, 5, 6], temperature=[0.5, 0.0, 1.0, 1.0], vocab_size=60)
    options = {"seed": [3, 4, 5], "temperature": [0.5, 0.0, 1.0], "bias": head.bias, "vocab_size": 60}
    with torch.no_grad():
        expected = verify(STATES, head.weight, DRAFTS, **options)
    out = sampler.verify(STATES, DRAFTS)
    assert torch.equal(out.token_ids, expected.token_ids)
    assert sampler.offsets.tolist() == [*out.num_emitted.tolist(), 0]
    flat = {"cu_draft_lengths": torch.tensor([0, 2, 3, 3]), "max_draft_length": 2}
    states = torch.cat([STATES[0], STATES[1, :2], STATES[2, :1]])
    sampler.reset([3, 4, 5, 6])
    assert torch.equal(sampler.verify(states, torch.tensor([5, 6, 7]), **flat).token_ids, expected.token_ids)
    with pytest.raises(ValueError, match="drafts must be of at most max_batch_size = 4 requests, got 5"):
        sampler.verify(torch.zeros(5, 2, 8), torch.zeros(5, 1).long())
    with pytest.raises(ValueError, match="bias must be None: the LM head has one of its own"):
        sampler.verify(STATES, DRAFTS, bias=head.bias)
    before = sampler.offsets.tolist()
    for message, wrong, bounds in (
        ("draft_token_ids must be a plain torch.Tensor, got NoneType", None, None),
        ("draft_token_ids must be a plain torch.Tensor, got int", 5, None),
        (
            r"draft_token_ids must have shape \(B, n\), or \(N,\) with cu_draft_lengths, got shape \(\)",
            torch.tensor(5),
            None,
        ),
        (r"cu_draft_lengths must be B \+ 1 integers, got int", DRAFTS[0], 3),
        (r"cu_draft_lengths must be B \+ 1 integers, got list", DRAFTS[0], []),
        (r"cu_draft_lengths must have shape \(B \+ 1,\), got shape \(\)", DRAFTS[0], torch.tensor(3)),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            sampler.verify(STATES, wrong, cu_draft_lengths=bounds)
    assert sampler.offsets.tolist() == before
    counts = TokenCounts(4, 70)
    out = sampler.verify(STATES, DRAFTS, token_counts=counts)
    assert counts.counts.sum() == out.num_emitted.sum()


def test_inputs_are_left_alone():
    counts = torch.zeros(3, 70, dtype=torch.int32)
    given = [STATES.clone(), WEIGHT.clone(), DRAFTS.clone(), PROBS.clone()]
    options = {"seed": torch.arange(3), "frequency_penalty": 1.0, "token_counts": counts}
    verify(given[0], given[1], given[2], **options)
    verify(given[0], given[1], given[2], draft_probs=given[3], **REJECT, **options)
    assert not counts.any()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(given, (STATES, WEIGHT, DRAFTS, PROBS)))


def test_the_operators():
    """What ``torch.library.opcheck`` asks of an operator."""
    head = (STATES.flatten(0, 1), WEIGHT, None, 1.0, torch.arange(9), 0, None, 3)
    q = torch.full((9, 70), 1 / 70)
    checks = ("test_schema", "test_faketensor")
    operators = torch.ops.flashsampling
    drafts = torch.arange(9)
    for probs in (None, q):
        torch.library.opcheck(
            operators.accept.default, (*head, 1, 1, 70, drafts, probs, drafts), {"top_k_value": 5}, test_utils=checks
        )
        torch.library.opcheck(operators.recover.default, (*head, 2, 1, 70, drafts, probs, drafts), test_utils=checks)
    of_logits = (q.log(), None, *head[2:])
    torch.library.opcheck(operators.accept.default, (*of_logits, 1, 1, 70, drafts, q, drafts), test_utils=checks)


# -- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["match", "rejection", "tree"])
def test_a_graph_of_verify(method):
    """Replays verify what is there then, ragged lengths too, advance the offsets, and never make the host wait."""
    generator = torch.Generator().manual_seed(2)
    weight = (torch.randn(4000, 64, generator=generator) * 0.2).to(DEVICE, torch.bfloat16)
    states = torch.randn(12 + 4, 64, generator=generator).to(DEVICE, torch.bfloat16)
    drafts = torch.zeros(12, dtype=torch.int64, device=DEVICE)
    bounds = torch.tensor([0, 3, 6, 9, 12], device=DEVICE)
    options = {"cu_draft_lengths": bounds, "max_draft_length": 3}
    options |= {"parents": torch.tensor([-1, 0, 0] * 4, device=DEVICE)} if method == "tree" else {"method": method}
    if method == "rejection":
        options["draft_probs"] = torch.full((12, 4000), 1 / 4000, device=DEVICE)
    captured, eager = (LMHeadSampler(weight, max_batch_size=4, seed=[1, 2, 3, 4]) for _ in range(2))
    captured.verify(states, drafts, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured.verify(states, drafts, **options)
    captured.reset([1, 2, 3, 4])
    accepted = 0
    for step in range(20):
        states.copy_(torch.randn(16, 64, generator=generator))
        rows = torch.arange(4, device=DEVICE)[:, None] * 4 + torch.arange(3, device=DEVICE)
        for j in range(3):
            row = states[rows[:, j]]
            drafts.view(4, 3)[:, j] = sample(row, weight, seed=eager.seeds, offset=eager.offsets + j).token_ids
        bounds.copy_(torch.tensor([0, 3, 6, 9, 12]) if step % 2 else torch.tensor([0, 3, 6, 9, 9]))
        graph.replay()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = eager.verify(states, drafts, **options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(out.token_ids, expected.token_ids)
        assert torch.equal(captured.offsets, eager.offsets)
        accepted += int(out.num_accepted.sum())
    assert accepted > 20 or method == "rejection"
