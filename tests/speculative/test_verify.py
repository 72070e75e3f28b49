"""``verify``: section 7 of the contract written out draft by draft, decoding without drafts, layouts, rows that
fail."""

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor

from flashsampling import LMHeadSampler, TokenCounts, VerifyOutput, sample
from flashsampling.speculative import acceptance
from tests.conftest import DEVICE
from tests.problems import KERNELS
from tests.speculative.drafting import DraftChains, make_drafted, one_by_one

if TYPE_CHECKING:
    from flashsampling.tensor_parallel import TensorParallel

CASES = [("match", False), ("match", True), ("rejection", False)]


def differences(ours: VerifyOutput, theirs: VerifyOutput) -> list[str]:
    names = ("token_ids", "num_accepted", "num_emitted", "accepted_drafts")
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    return [name for name, a, b in pairs if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]


def written_out(drafted: DraftChains, method: str) -> tuple[VerifyOutput, float]:
    """By ``one_by_one``, and the least of its margins."""
    (batch, n), margin = drafted.ids.shape, 1.0
    token_ids, path = torch.full((batch, n + 1), -1), torch.full((batch, n), -1)
    for request in range(batch):
        tokens, drafts, near = one_by_one(drafted, request, method)
        token_ids[request, : len(tokens)] = torch.tensor(tokens)
        path[request, : len(drafts)] = torch.tensor(drafts).long()
        margin = min(margin, near)
    accepted, emitted = (path >= 0).sum(1), (token_ids >= 0).sum(1)
    return VerifyOutput(token_ids, accepted, emitted, None if drafted.parents is None else path), margin


@pytest.mark.quick(3)
@pytest.mark.parametrize(("method", "tree"), CASES)
@pytest.mark.parametrize("head", [False, True])
def test_draft_by_draft(method, tree, head):
    """The contract one draft after the other; both layouts give it."""
    requests, seen, near, accepted, failed, seed = 0, set(), 0, 0, 0, 0
    while requests < (1700 if DEVICE.type == "cuda" else 200):  # on a GPU's host 10,000 in all
        seed += 1
        drafted = make_drafted(seed + 10**6 * head, method, tree, head=head)
        expected, margin = written_out(drafted, method)
        if margin < 1e-12:
            near += 1
            continue
        impl = ("reference", "streaming")[seed % 2]
        assert not differences(drafted.verify(method, impl=impl), expected), seed
        assert not differences(drafted.verify(method, flat=True, impl=impl), expected), seed
        requests += len(drafted.ids)
        seen |= set(drafted.step.params.names())
        accepted += int(expected.num_accepted.sum())
        failed += int((expected.num_emitted == expected.num_accepted).sum())
    assert near <= 2
    assert len(seen) >= 13  # of what a request may ask for
    assert accepted > requests / 4  # all outcomes are there
    assert requests / 100 < failed < requests / 2


@pytest.mark.quick(1)
@pytest.mark.parametrize("head", [False, True])
def test_rejection_by_kernels(head, monkeypatch):
    """The same by Triton's kernels, whose masses are float32: what is closer than that to another outcome is left
    out."""
    pytest.importorskip("triton")
    monkeypatch.setattr(
        acceptance, "_runs_kernels", lambda states, given: given.batch > 0 and states.device.type == DEVICE.type
    )
    requests, near, accepted, seed = 0, 0, 0, 0
    # each mix is kernels of its own, seconds to compile or interpret: tests/speculative/test_verify_kernels.py has
    # thousands of a few mixes
    while requests < (30 if DEVICE.type == "cuda" else 5):
        seed += 1
        drafted = make_drafted(seed + 10**6 * head, "rejection", False, head=head)
        expected, margin = written_out(drafted, "rejection")
        if margin < 1e-4:
            near += 1
            continue
        ours = drafted.verify("rejection", flat=seed % 2 == 0, device=DEVICE, impl="triton")
        assert not differences(ours, expected), (seed, ours, expected)
        requests += len(drafted.ids)
        accepted += int(expected.num_accepted.sum())
    assert near <= max(requests / 20, 2)
    assert accepted > requests / 10


class Counter:
    """A language model whose state is a row of small integers, the same however it is computed.

    ``width`` 0: hidden states are these integers, and no order of any sum changes a logit. Else they are sums of as
    many real numbers, in bfloat16 as the weight: a logit's last bits are the order of its sum.
    """

    def __init__(self, vocab: int = 40, width: int = 0, device: str | torch.device = "cpu", dim: int = 8) -> None:
        generator = torch.Generator().manual_seed(5)
        self.vocab, self.dim, self.device = vocab, dim, torch.device(device)
        self.embedding = torch.randint(0, 9, (vocab, dim), generator=generator).to(device)
        self.mixing = torch.randint(0, 9, (dim, dim), generator=generator).double().to(device)
        self.features = (torch.randn(dim, 9, width, generator=generator) * dim**-0.5).to(device) if width else None
        if width:
            self.weight = (torch.randn(vocab, width, generator=generator) * 2.8 * width**-0.5).to(
                device, torch.bfloat16
            )
        else:
            self.weight = torch.randint(-4, 5, (vocab, dim), generator=generator).float().to(device) / 8

    def next(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """(B, dim) int64 after a token more."""
        return ((state.double() @ self.mixing).long() + self.embedding[token_ids.clamp(min=0)]) % 9

    def hidden(self, state: Tensor) -> Tensor:
        if self.features is None:
            return state.float() - 4
        hidden = self.features[0][state[..., 0]]
        for i in range(1, self.dim):
            hidden = hidden + self.features[i][state[..., i]]
        return hidden.bfloat16()


PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def decode(
    model: Counter,
    weight: Tensor,
    start: Tensor,
    tokens: int,
    seeds: Tensor,
    counts: TokenCounts | None,
    **request: Any,
) -> Tensor:
    state, out = start, []
    for position in range(tokens):
        drawn = sample(
            model.hidden(state), weight, seed=seeds, offset=position, token_counts=counts, **request
        ).token_ids
        out.append(drawn)
        state = model.next(state, drawn)
    return torch.stack(out, dim=1)


def propose(
    model: Counter, state: Tensor, seeds: Tensor, offsets: Tensor, n: int, chance: torch.Generator, **request: Any
) -> Tensor:
    """(B, n) by the same noise and a head that is not quite the target's, without penalties; a few of any; some
    requests have fewer, or none."""
    weight, device = ((model.weight.float() * 4).round() / 4).to(model.weight.dtype), model.device
    request = {name: value for name, value in request.items() if name not in PENALTIES}
    out = []
    for position in range(n):
        drawn = sample(model.hidden(state), weight, seed=seeds, offset=offsets + position, **request).token_ids
        drawn = torch.where(torch.rand(len(drawn), generator=chance).to(device) < 0.1, 3, drawn)
        out.append(drawn)
        state = model.next(state, drawn)
    drafts = torch.stack(out, dim=1)
    lengths = torch.randint(0, n + 1, (len(drafts), 1), generator=chance).clamp(max=n)
    lengths = torch.where(torch.rand(len(drafts), 1, generator=chance) < 0.7, n, lengths)
    return torch.where(torch.arange(n, device=device) < lengths.to(device), drafts, -1)


VARIANTS: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": [0.0, 1.0, 1.7, 0.4, 1e-6], "top_k": [0, 5, 3, 40, 1], "top_p": [1.0, 0.9, 1.0, 0.5, 0.99],
     "min_p": 0.02},
    {"repetition_penalty": [1.3, 1.0, 0.8, 2.0, 1.1], "frequency_penalty": 0.4,
     "presence_penalty": [0.0, 0.5, -0.5, 1.0, 0.2]},
    {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "soft_cap": 5.0,
     "logit_bias": ([[1, 2]] * 5, [[2.0, -3.0]] * 5), "token_mask": -2},  # in every word of 32 tokens
]  # fmt: skip


def rows_of(request: dict[str, Any], times: int, model: Counter) -> dict[str, Any]:
    """For five rows so many times over."""
    of_rows: dict[str, Any] = {name: value * times for name, value in request.items() if isinstance(value, list)}
    if "logit_bias" in request:
        of_rows["logit_bias"] = tuple(part * times for part in request["logit_bias"])
    if "token_mask" in request:
        words = -(-model.vocab // 32)
        of_rows["token_mask"] = torch.full((words,), request["token_mask"], dtype=torch.int32, device=model.device)
    return request | of_rows


def both_ways(
    model: Counter,
    mix: int,
    batch: int,
    tree: bool,
    impl: str | None = None,
    *,
    tp: "TensorParallel | None" = None,
    shard: Tensor | None = None,
    seed: int = 0,
) -> float:
    """Sequences with drafts and without, bit for bit the same, whatever is drafted; the module keeps offsets, a
    ``TokenCounts`` what came. How many drafts a round's request has accepted. With ``tp`` the target has a shard of the
    model's weight; ``seed``: of other sequences."""
    weight = model.weight if shard is None else shard
    rounds, n, vocab, device = 7, 4, model.vocab, model.device
    longest = rounds * (n + 1)
    chance = torch.Generator().manual_seed(mix + 100 * seed)
    seeds = torch.arange(batch, device=device) * 977 - 3 + 10**6 * seed
    state = torch.randint(0, 9, (batch, model.dim), generator=chance).to(device)
    request = rows_of(VARIANTS[mix], batch // 5, model)
    temperature = request.pop("temperature", 1.0)
    prompts = torch.randint(0, vocab, (batch, 6), generator=chance).to(device)
    counts, plainly = TokenCounts(batch, vocab, device), TokenCounts(batch, vocab, device)
    if "frequency_penalty" in request:
        for one in (counts, plainly):
            one.reset(None, prompts)
    expected = decode(
        model, weight, state, longest, seeds, plainly, temperature=temperature, impl=impl, tp=tp, **request
    )
    if tp is not None and not request:  # edges of filters may be others on one rank
        alone = decode(model, model.weight, state, longest, seeds, None, temperature=temperature, impl=impl, **request)
        assert torch.equal(expected, alone)

    sampler = LMHeadSampler(weight, max_batch_size=batch + 1, seed=[*seeds.tolist(), 0], impl=impl, tp=tp)
    got = torch.full((batch, longest + 1), -1, device=device)
    here, accepted = torch.zeros(batch, dtype=torch.int64, device=device), 0
    for _ in range(rounds):
        drafts = propose(model, state, seeds, here, n, chance, temperature=temperature, impl=impl, **request)
        parents, options = torch.arange(-1, n - 1).expand(batch, n), {}
        if tree:  # two ways from the root, the first of them any token, the second the chain
            any_token = torch.randint(0, vocab, (batch, 1), generator=chance).to(device)
            drafts = torch.where(drafts[:, :1] < 0, -1, torch.cat([any_token, drafts[:, : n - 1]], dim=1))
            parents = options["parents"] = torch.tensor([-1, -1, 1, 2], device=device).expand(batch, n)
        states = [state]
        for j in range(n):
            before = torch.stack(states, dim=1)[torch.arange(batch, device=device), parents[:, j].to(device) + 1]
            states.append(model.next(before, drafts[:, j]))
        hidden = model.hidden(torch.stack(states, dim=1))
        out = sampler.verify(hidden, drafts, temperature, token_counts=counts, **options, **request)
        where = torch.where(out.token_ids >= 0, here[:, None] + torch.arange(n + 1, device=device), longest)
        got.scatter_(1, where, out.token_ids)
        for token_ids in out.token_ids.T:
            state = torch.where(token_ids[:, None] >= 0, model.next(state, token_ids), state)
        here = here + out.num_emitted
        accepted += int(out.num_accepted.sum())
        assert torch.equal(sampler.offsets, torch.nn.functional.pad(here, (0, 1)))
    there = torch.arange(longest, device=device) < here[:, None]
    assert torch.equal(got[:, :longest].masked_fill(~there, -1), expected.masked_fill(~there, -1))
    assert int(here.min()) >= rounds
    assert int((counts.counts & 0x7FFFFFFF).sum()) == int(here.sum())
    return accepted / rounds / batch


@pytest.mark.quick(2)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("mix", range(len(VARIANTS)))
def test_match_is_decoding_without_drafts(mix, tree):
    """1000 sequences in all."""
    assert 0.4 < both_ways(Counter(), mix, 125, tree) < 3.5  # drafts were worth something, and some were not


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("mix", range(len(VARIANTS)))
def test_match_is_decoding_without_drafts_on_a_gpu(mix, impl):
    """1000 sequences of each mix, in chains and in trees, 5000 rows in one batch where decoding has 1000: with logits
    that are no integers."""
    model = Counter(2011, 64, DEVICE)
    for tree in (False, True):
        assert 0.4 < both_ways(model, mix, 1000, tree, impl) < 3.5
