"""``verify``: section 7 of the contract written out draft by draft, decoding without drafts, layouts, rows that fail."""

from typing import Any

import pytest
import torch
from torch import Tensor

from flashsampling import LMHeadSampler, TokenCounts, VerifyOutput, acceptance, sample, verify
from tests.conftest import DEVICE
from tests.drafting import Drafted, make_drafted, one_by_one

CASES = [("match", False), ("match", True), ("rejection", False)]


def differences(ours: VerifyOutput, theirs: VerifyOutput) -> list[str]:
    names = ("token_ids", "num_accepted", "num_emitted", "accepted_drafts")
    pairs = [(name, getattr(ours, name), getattr(theirs, name)) for name in names]
    return [name for name, a, b in pairs if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))]


def written_out(drafted: Drafted, method: str) -> tuple[VerifyOutput, float]:
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


@pytest.mark.parametrize(("method", "tree"), CASES)
@pytest.mark.parametrize("head", [False, True])
def test_draft_by_draft(method, tree, head):
    """The contract one draft after the other; both layouts give it."""
    requests, seen, near, accepted, failed, seed = 0, set(), 0, 0, 0, 0
    while requests < (1700 if DEVICE.type == "cuda" else 400):  # on a GPU's host 10,000 in all
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
        seen |= set(drafted.step.asked.names())
        accepted += int(expected.num_accepted.sum())
        failed += int((expected.num_emitted == expected.num_accepted).sum())
    assert near <= 2
    assert len(seen) >= 13  # of what a request may ask for
    assert accepted > requests / 4  # all outcomes are there
    assert requests / 100 < failed < requests / 2


@pytest.mark.parametrize("head", [False, True])
def test_rejection_by_kernels(head, monkeypatch):
    """The same by Triton's kernels, whose masses are float32: what is closer than that to another outcome is left out."""
    pytest.importorskip("triton")
    monkeypatch.setattr(
        acceptance, "_by_kernels", lambda target, given: given.batch > 0 and target.states.device.type == DEVICE.type
    )
    requests, seen, near, accepted, failed, seed = 0, set(), 0, 0, 0, 0
    while requests < (1000 if DEVICE.type == "cuda" else 5):  # the interpreter takes seconds for each, and 5,000 took minutes
        seed += 1
        drafted = make_drafted(seed + 10**6 * head, "rejection", False, head=head)
        expected, margin = written_out(drafted, "rejection")
        if margin < 1e-4:
            near += 1
            continue
        ours = drafted.verify("rejection", flat=seed % 2 == 0, device=DEVICE)
        assert not differences(ours, expected), (seed, ours, expected)
        requests += len(drafted.ids)
        seen |= set(drafted.step.asked.names())
        accepted += int(expected.num_accepted.sum())
        failed += int((expected.num_emitted == expected.num_accepted).sum())
    assert near <= max(requests / 20, 2)
    assert accepted > requests / 10
    if DEVICE.type == "cuda":
        assert len(seen) >= 13
        assert failed > 0


class Counter(torch.nn.Module):
    """A language model whose states are small integers, so that no order of any sum changes a logit."""

    def __init__(self, vocab: int = 40, dim: int = 8) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.embedding = torch.randint(0, 9, (vocab, dim), generator=generator)
        self.weight = torch.randint(-4, 5, (vocab, dim), generator=generator).float() / 8
        self.mixing = torch.randint(0, 9, (dim, dim), generator=generator)

    def next(self, state: Tensor, token_ids: Tensor) -> Tensor:
        """(B, dim) int64 after a token more."""
        return (state @ self.mixing + self.embedding[token_ids.clamp(min=0)]) % 9

    def hidden(self, state: Tensor) -> Tensor:
        return state.float() - 4


def decode(model: Counter, start: Tensor, tokens: int, seeds: Tensor, counts: TokenCounts | None, **request: Any) -> Tensor:
    state, out = start, []
    for position in range(tokens):
        drawn = sample(model.hidden(state), model.weight, seed=seeds, offset=position, token_counts=counts, **request).token_ids
        out.append(drawn)
        state = model.next(state, drawn)
    return torch.stack(out, dim=1)


def propose(model: Counter, state: Tensor, seeds: Tensor, offsets: Tensor, n: int, chance: torch.Generator) -> Tensor:
    """(B, n) by the same noise and a head that is not quite the target's; a few of any; some requests have fewer, or none."""
    weight = (model.weight * 4).round() / 4
    out = []
    for position in range(n):
        drawn = sample(model.hidden(state), weight, seed=seeds, offset=offsets + position).token_ids
        drawn = torch.where(torch.rand(len(drawn), generator=chance) < 0.1, 3, drawn)
        out.append(drawn)
        state = model.next(state, drawn)
    drafts = torch.stack(out, dim=1)
    lengths = torch.randint(0, n + 1, (len(drafts), 1), generator=chance).clamp(max=n)
    lengths = torch.where(torch.rand(len(drafts), 1, generator=chance) < 0.7, n, lengths)
    return torch.where(torch.arange(n) < lengths, drafts, -1)


MIXES: list[dict[str, Any]] = [
    {"temperature": 0.8},
    {"temperature": [0.0, 1.0, 1.7, 0.4, 1e-6], "top_k": [0, 5, 3, 40, 1], "top_p": [1.0, 0.9, 1.0, 0.5, 0.99], "min_p": 0.02},
    {"repetition_penalty": [1.3, 1.0, 0.8, 2.0, 1.1], "frequency_penalty": 0.4, "presence_penalty": [0.0, 0.5, -0.5, 1.0, 0.2]},
    {"temperature": 1.3, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "soft_cap": 5.0,
     "logit_bias": ([[1, 2]] * 5, [[2.0, -3.0]] * 5), "token_mask": torch.tensor([-2, 0xEF], dtype=torch.int32)},
]  # fmt: skip


def rows_of(request: dict[str, Any], times: int) -> dict[str, Any]:
    """For five rows so many times over."""
    of_rows: dict[str, Any] = {name: value * times for name, value in request.items() if isinstance(value, list)}
    if "logit_bias" in request:
        of_rows["logit_bias"] = tuple(part * times for part in request["logit_bias"])
    return request | of_rows


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("mix", range(len(MIXES)))
def test_match_is_decoding_without_drafts(mix, tree):
    """Bit for bit, 1000 sequences in all, whatever is drafted; the module keeps offsets, a ``TokenCounts`` what came."""
    batch, rounds, n = 125, 7, 4
    longest = rounds * (n + 1)
    model, seeds, chance = Counter(), torch.arange(batch) * 977 - 3, torch.Generator().manual_seed(mix)
    state = torch.randint(0, 9, (batch, 8), generator=chance)
    request = rows_of(MIXES[mix], batch // 5)
    temperature = request.pop("temperature", 1.0)
    prompts = torch.randint(0, 40, (batch, 6), generator=chance)
    counts, plainly = TokenCounts(batch, 40), TokenCounts(batch, 40)
    if "frequency_penalty" in request:
        for one in (counts, plainly):
            one.reset(None, prompts)
    expected = decode(model, state, longest, seeds, plainly, temperature=temperature, **request)

    sampler = LMHeadSampler(model.weight, max_batch_size=batch + 1, seed=[*seeds.tolist(), 0])
    got, here, accepted = torch.full((batch, longest + 1), -1), torch.zeros(batch, dtype=torch.int64), 0
    for _ in range(rounds):
        drafts = propose(model, state, seeds, here, n, chance)
        parents, options = torch.arange(-1, n - 1).expand(batch, n), {}
        if tree:  # two ways from the root, the first of them any token, the second the chain
            any_token = torch.randint(0, 40, (batch, 1), generator=chance)
            drafts = torch.where(drafts[:, :1] < 0, -1, torch.cat([any_token, drafts[:, : n - 1]], dim=1))
            parents = options["parents"] = torch.tensor([-1, -1, 1, 2]).expand(batch, n)
        states = [state]
        for j in range(n):
            before = torch.stack(states, dim=1)[torch.arange(batch), parents[:, j] + 1]
            states.append(model.next(before, drafts[:, j]))
        hidden = model.hidden(torch.stack(states, dim=1))
        out = sampler.verify(hidden, drafts, temperature, token_counts=counts, **options, **request)
        where = torch.where(out.token_ids >= 0, here[:, None] + torch.arange(n + 1), longest)
        got.scatter_(1, where, out.token_ids)
        for token_ids in out.token_ids.T:
            state = torch.where(token_ids[:, None] >= 0, model.next(state, token_ids), state)
        here = here + out.num_emitted
        accepted += int(out.num_accepted.sum())
        assert torch.equal(sampler.offsets, torch.cat([here, torch.zeros(1, dtype=torch.int64)]))
    there = torch.arange(longest) < here[:, None]
    assert torch.equal(got[:, :longest].masked_fill(~there, -1), expected.masked_fill(~there, -1))
    assert int(here.min()) >= rounds
    assert accepted > 0.4 * rounds * batch  # drafts were worth something
    assert int((counts.counts & 0x7FFFFFFF).sum()) == int(here.sum())


def test_counts_after_a_round_are_those_of_what_was_emitted():
    states, weight = torch.zeros(2, 3, 8), torch.zeros(50, 8)
    drafts = torch.stack([sample(states[:, 0], weight, seed=torch.arange(2), offset=i).token_ids for i in range(2)], dim=1)
    drafts[1, 0] = (drafts[1, 0] + 1) % 50
    counts = TokenCounts(3, 50)
    out = verify(states, weight, drafts, seed=torch.arange(2), token_counts=counts)
    assert out.num_emitted.tolist() == [3, 1]
    expected = torch.zeros(3, 50, dtype=torch.int32)
    for row, tokens in enumerate(out.token_ids.tolist()):
        for token in tokens:
            if token >= 0:
                expected[row, token] += 1
    assert torch.equal(counts.counts, expected)
