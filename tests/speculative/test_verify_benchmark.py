"""The gate before ``benchmarks.verify`` times a peer: it lets a sampler pass that does what theory says, and no
other."""

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("typer")
pytest.importorskip("matplotlib")

from benchmarks.verify import check_sampler, rejected_by_torch

BATCH, N, VOCAB = 12, 3, 50
P = torch.softmax(torch.randn(BATCH, N + 1, VOCAB, generator=torch.Generator().manual_seed(1)) * 2, dim=-1)
Q = torch.softmax(P[:, :-1].log() + torch.randn(BATCH, N, VOCAB, generator=torch.Generator().manual_seed(2)), dim=-1)
IDS = torch.multinomial(Q.flatten(0, 1), 1, generator=torch.Generator().manual_seed(3)).view(BATCH, N)


def test_a_sampler_that_is_right():
    check_sampler("right", lambda: rejected_by_torch(P, Q, IDS), P, Q, IDS, slack=1e-3)


def accepts_all():
    token = P[:, -1].argmax(dim=1, keepdim=True)
    return torch.cat([IDS, token], dim=1)


def of_the_target_alone():
    return rejected_by_torch(P, torch.full_like(Q, 1.0 / VOCAB), IDS)


def recovers_from_p():
    out = rejected_by_torch(P, Q, IDS)
    count = (out >= 0).sum(dim=1, keepdim=True) - 1
    return out.scatter(1, count, torch.multinomial(P[torch.arange(BATCH), count[:, 0]], 1))


def says_too_much():
    return rejected_by_torch(P, Q, IDS).clamp(min=0)


def other_drafts():
    out = rejected_by_torch(P, Q, IDS)
    return torch.where((out >= 0) & (torch.arange(N + 1) < N), (out + 1) % VOCAB, out)


@pytest.mark.parametrize("wrong", [accepts_all, of_the_target_alone, recovers_from_p, says_too_much, other_drafts])
def test_samplers_that_are_wrong(wrong):
    with pytest.raises(AssertionError):
        check_sampler("wrong", wrong, P, Q, IDS, slack=1e-3)
