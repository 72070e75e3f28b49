import pytest
import torch
from torch import nn

from flashsampling import LMHeadSampler, sample
from tests.conftest import DEVICE


def make_head(vocab=500, dim=16, bias=False):
    return nn.Linear(dim, vocab, bias=bias, device=DEVICE)


def states(batch=5, dim=16):
    return torch.randn(batch, dim, device=DEVICE)


def test_steps_are_the_function_at_successive_offsets():
    head = make_head()
    sampler = LMHeadSampler(head, max_batch_size=8, seed=3, temperature=0.9)
    seeds = sampler.seeds.clone()
    assert len(seeds.unique()) == 8
    for step in range(4):
        x = states()
        out = sampler(x).token_ids
        assert torch.equal(out, sample(x, head.weight, temperature=0.9, seed=seeds[:5], offset=step).token_ids)
    assert sampler.offsets.tolist() == [4, 4, 4, 4, 4, 0, 0, 0]
    assert torch.equal(sampler.seeds, seeds)


def test_a_request_replays_in_another_row_and_batch():
    sampler = LMHeadSampler(make_head(), max_batch_size=8, seed=0)
    xs = [states(1) for _ in range(5)]
    sampler.reset(torch.tensor([42]), rows=torch.tensor([0]))
    alone = [int(sampler(x).token_ids[0]) for x in xs]
    sampler.reset(torch.tensor([42, 7]), rows=torch.tensor([6, 1]))
    batched = [int(sampler(torch.cat([states(6), x, states(1)])).token_ids[6]) for x in xs]
    assert alone == batched
    sampler.reset(torch.tensor([42]), offset=3, rows=slice(2, 3))  # resumed after three tokens
    assert [int(sampler(torch.cat([states(2), x])).token_ids[2]) for x in xs[3:]] == alone[3:]


def test_shares_the_weight():
    embedding = nn.Embedding(500, 16, device=DEVICE)
    sampler = LMHeadSampler(embedding.weight)
    assert sampler.weight is embedding.weight
    head = make_head()
    assert LMHeadSampler(head).weight is head.weight
    bare = LMHeadSampler(head.weight.detach())
    assert bare.weight.data_ptr() == head.weight.data_ptr()
    assert list(bare.state_dict()) == []
    assert list(sampler.state_dict()) == ["weight"]


def test_several_samples_advance_one_position():
    sampler = LMHeadSampler(make_head(), seed=1)
    x = states()
    assert sampler(x, num_samples=3).token_ids.shape == (5, 3)
    assert sampler.offsets[:5].tolist() == [1] * 5


def test_temperature_per_call_and_per_row():
    sampler = LMHeadSampler(make_head(), seed=1, temperature=5.0)
    x = states()
    greedy = (x @ sampler.weight.T).argmax(-1)
    assert torch.equal(sampler(x, temperature=0.0).token_ids, greedy)
    mixed = torch.tensor([0.0, 50.0, 0.0, 50.0, 0.0], device=DEVICE)
    assert torch.equal(sampler(x, temperature=mixed).token_ids[::2], greedy[::2])


def test_errors():
    with pytest.raises(ValueError, match="without bias"):
        LMHeadSampler(make_head(bias=True))
    with pytest.raises(TypeError, match=r"nn\.Linear or its weight, got str"):
        LMHeadSampler("lm_head")
    with pytest.raises(ValueError, match=r"seed must be an int or have shape \(4,\), got shape \(3,\)"):
        LMHeadSampler(make_head(), max_batch_size=4, seed=torch.arange(3))
    with pytest.raises(ValueError, match="max_batch_size must be at least 1"):
        LMHeadSampler(make_head(), max_batch_size=0)
    with pytest.raises(ValueError, match="at most max_batch_size = 4 rows, got 5"):
        LMHeadSampler(make_head(), max_batch_size=4)(states())
    with pytest.raises(ValueError, match="impl must be None or one of"):
        LMHeadSampler(make_head(), impl="cuda")(states())


def test_same_seed_same_sampler_other_seed_other_tokens():
    head, x = make_head(), states()
    a, b, c = (LMHeadSampler(head, seed=s, temperature=3.0)(x).token_ids for s in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_compiles_without_a_graph_break_and_keeps_its_state():
    head = make_head()
    eager, traced = (LMHeadSampler(head, max_batch_size=8, seed=5) for _ in range(2))
    compiled = torch.compile(traced, fullgraph=True)
    for _ in range(3):
        x = states()
        assert torch.equal(compiled(x).token_ids, eager(x).token_ids)
    assert torch.equal(traced.offsets, eager.offsets)


def test_moves_with_the_model():
    sampler = LMHeadSampler(make_head().cpu(), seed=1).to(DEVICE, torch.bfloat16)
    assert sampler.seeds.dtype == torch.int64
    assert sampler(states().bfloat16()).token_ids.device.type == DEVICE.type
