import copy
import io
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from flashsampling import LMHeadSampler, SampleOutput, sample
from flashsampling.tensor_parallel import TensorParallel
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
        out = sampler(x, num_samples=2).token_ids
        request = {"temperature": 0.9, "seed": seeds[:5], "offset": step, "num_samples": 2}
        assert torch.equal(out, sample(x, head.weight, **request).token_ids)
    assert sampler.offsets.tolist() == [4, 4, 4, 4, 4, 0, 0, 0]
    assert torch.equal(sampler.seeds, seeds)


def test_the_head_s_scale_and_soft_cap_are_every_step_s():
    head, x = make_head(), 9 * states()
    transform = {"logit_scale": 0.5, "soft_cap": 2.0}
    sampler = LMHeadSampler(head, max_batch_size=8, seed=3, **transform)
    expected = sample(x, head.weight, seed=sampler.seeds[:5].clone(), return_logprobs=True, **transform)
    out = sampler(x, return_logprobs=True)
    assert torch.equal(out.token_ids, expected.token_ids)
    assert torch.equal(out.logprobs, expected.logprobs)
    sampler.reset(sampler.seeds.clone())
    assert torch.equal(sampler(x, logit_scale=None, soft_cap=None).token_ids, expected.token_ids)  # not given
    without = sampler(x, logit_scale=1.0, soft_cap=0.0, logprob_ids=out.token_ids[:, None]).given_logprobs[:, 0]
    assert torch.allclose(
        without, (x @ head.weight.T).log_softmax(1).gather(1, out.token_ids[:, None])[:, 0], atol=1e-4
    )
    assert not torch.allclose(without, expected.logprobs, atol=1e-2)


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
    assert [*bare.state_dict(), *sampler.state_dict(), *LMHeadSampler(head).state_dict()] == []


@pytest.mark.parametrize(
    ("error", "message", "make"),
    [
        (ValueError, "at most max_batch_size = 4 rows, got 5", states),
        (TypeError, r"hidden_states must be a torch\.Tensor, got list", lambda: [[1.0]]),
        (ValueError, r"must have 2 dimensions, got shape \(\d+,\)", lambda: states()[0]),  # more columns than rows
        (ValueError, "hidden_states must be on the sampler's device", lambda: states(4).to("meta")),
    ],
)
def test_hidden_states_are_checked(error, message, make):
    with pytest.raises(error, match=message):
        LMHeadSampler(make_head(), max_batch_size=4)(make())


# ruff: noqa: E501
WEIGHT = torch.randn(500, 16)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "vocab_size must be from 1 to the 500 rows of weight, got 501", {"vocab_size": 501}),
        (ValueError, "temperature must be at least 0, got -1", {"temperature": -1}),
        (ValueError, r"temperature must be a number or have shape .*\(4,\).*, got shape \(3,\)", {"temperature": [1.0, 2.0, 3.0]}),
        (ValueError, "max_batch_size must be at least 1, got 0", {"max_batch_size": 0}),
        (TypeError, "max_batch_size must be an int, got float", {"max_batch_size": 4.0}),
        (ValueError, r"seed must be one number or have shape \(4,\), one per row, got shape \(1,\)", {"seed": [7]}),
        (ValueError, r"seed must be one number or have shape \(4,\), one per row, got shape \(4, 1\)", {"seed": numpy.ones((4, 1), int)}),
        (TypeError, "weight must be .* got torch.int8; of a quantised head pass the dequantised weight", {"lm_head": WEIGHT.to(torch.int8)}),
        (ValueError, "lm_head must hold values, got a weight on the meta device", {"lm_head": nn.Linear(16, 500, bias=False, device="meta")}),
        (TypeError, r"tp must be a flashsampling\.tensor_parallel\.TensorParallel, got str", {"tp": "tp"}),
        (ValueError, r"soft_cap must be at least 0 and finite, got -1\.0", {"soft_cap": -1.0}),
        (ValueError, "logit_scale must be finite, got nan", {"logit_scale": float("nan")}),
        (TypeError, r"nn\.Linear or its weight, got str", {"lm_head": "lm_head"}),
    ],
)  # fmt: skip
def test_the_constructor_checks_what_it_can(error, message, change):
    with pytest.raises(error, match=message):
        LMHeadSampler(**({"lm_head": WEIGHT, "max_batch_size": 4} | change))


def test_moves_with_the_model():
    sampler = LMHeadSampler(make_head().cpu(), seed=1).to(DEVICE, torch.bfloat16)
    assert sampler.seeds.dtype == torch.int64
    assert sampler(states().bfloat16()).token_ids.device.type == DEVICE.type


def test_a_head_moved_on_its_own_is_said_so():
    head = make_head()
    sampler = LMHeadSampler(head)
    head.to("meta")
    with pytest.raises(ValueError, match="weight must be on the device of hidden_states"):
        sampler(states())


class Model(nn.Module):
    def __init__(self, sampler=True, bare=False):
        super().__init__()
        self.lm_head = make_head()
        if sampler:
            self.sampler = LMHeadSampler(self.lm_head.weight if bare else self.lm_head, max_batch_size=8, seed=1)

    def forward(self, x) -> SampleOutput:
        return self.sampler(x)


@pytest.mark.parametrize("bare", [False, True])
def test_checkpoints_are_the_same_with_and_without_a_sampler(bare):
    model, plain = Model(bare=bare), Model(sampler=False)
    assert list(model.state_dict()) == list(plain.state_dict()) == ["lm_head.weight"]
    assert [name for name, _ in model.named_parameters()] == ["lm_head.weight"]
    model.load_state_dict(plain.state_dict())
    assert torch.equal(model.sampler.weight, plain.lm_head.weight)
    assert model.sampler.weight is model.lm_head.weight
    plain.load_state_dict(Model(bare=bare).state_dict())


def test_follows_a_parameter_that_is_replaced():
    model = Model()
    model.load_state_dict({"lm_head.weight": torch.zeros(500, 16, device=DEVICE)}, assign=True)
    assert model.sampler.weight is model.lm_head.weight
    x = states()
    model.lm_head.weight = nn.Parameter(torch.randn(500, 16, device=DEVICE))
    expected = sample(x, model.lm_head.weight, seed=model.sampler.seeds[:5], offset=0).token_ids
    assert torch.equal(model(x).token_ids, expected)
    bare = Model(bare=True)
    with pytest.raises(RuntimeError, match="replaces the parameter that an LMHeadSampler was made with"):
        bare.load_state_dict({"lm_head.weight": torch.zeros(500, 16)}, assign=True)


@pytest.mark.parametrize("bare", [False, True])
def test_stays_tied_through_moves_and_copies(bare):
    model = Model(bare=bare)
    x = states()
    expected = copy.deepcopy(model)(x).token_ids
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert other.sampler.weight is other.lm_head.weight
        assert other.sampler.weight is not model.lm_head.weight
        assert torch.equal(other(x).token_ids, expected)
    assert torch.equal(model(x).token_ids, expected)  # the copies advanced offsets of their own
    model.to(torch.bfloat16)
    assert model.sampler.weight is model.lm_head.weight
    assert model.sampler.weight.dtype == torch.bfloat16
    model.requires_grad_(False)
    assert not model.sampler.weight.requires_grad
    model.sampler.float()  # the head of a sampler moves with it
    assert model.lm_head.weight.dtype == torch.float32


@pytest.mark.parametrize("bare", [False, True])
def test_exports_and_compiles_within_a_model(bare):
    model = Model(bare=bare)
    x = states()
    exported = torch.export.export(copy.deepcopy(model), (x,)).module()
    copies: list[Any] = [exported, torch.compile(copy.deepcopy(model), fullgraph=True)]
    for _ in range(2):
        expected = model(x).token_ids
        for other in copies:
            out = other(x)
            assert type(out) is SampleOutput
            assert torch.equal(out.token_ids, expected)
            assert torch.equal(other.sampler.pool.offsets, model.sampler.offsets)


def test_seeds_of_none_come_from_torch_s_generator():
    head = make_head()
    torch.manual_seed(5)
    a, b = LMHeadSampler(head).seeds, LMHeadSampler(head).seeds
    assert len(torch.cat([a, b]).unique()) == 512
    torch.manual_seed(5)
    assert torch.equal(LMHeadSampler(head).seeds, a)
    torch.manual_seed(5)
    sampler = LMHeadSampler(head, seed=1)
    torch.manual_seed(5)
    sampler.reset()
    assert torch.equal(sampler.seeds, a)


@pytest.mark.parametrize(
    "rows", [[1, 3], torch.tensor([1, 3]), slice(1, 4, 2), numpy.array([1, -1]), [False, True, False, True]]
)
def test_reset_leaves_the_other_rows(rows):
    sampler = LMHeadSampler(make_head(), max_batch_size=4, seed=1)
    before = sampler.seeds.clone()
    sampler.offsets.copy_(torch.arange(4) + 10)
    sampler.reset([7, -8], numpy.array([5, 6]), rows=rows)
    assert sampler.seeds.tolist() == [int(before[0]), 7, int(before[2]), -8]
    assert sampler.offsets.tolist() == [10, 5, 12, 6]
    sampler.reset(9, rows=rows)
    assert sampler.seeds[[0, 2]].tolist() == before[[0, 2]].tolist()
    assert len(sampler.seeds.unique()) == 4
    assert sampler.offsets.tolist() == [10, 0, 12, 0]


def test_reset_of_one_row_and_of_none():
    sampler = LMHeadSampler(make_head(), max_batch_size=4, seed=1)
    before = sampler.seeds.clone()
    sampler.reset([7], offset=3, rows=2)
    assert sampler.seeds.tolist() == [*before[:2].tolist(), 7, int(before[3])]
    assert sampler.offsets.tolist() == [0, 0, 3, 0]
    sampler.reset([], offset=5, rows=[])
    assert sampler.offsets.tolist() == [0, 0, 3, 0]
    for rows in ([4], [0, -5], torch.tensor([9])):
        with pytest.raises(ValueError, match="rows must be from 0 to max_batch_size - 1 = 3, got"):
            sampler.reset(1, rows=rows)
    with pytest.raises(TypeError, match="rows must be integers or a mask, got torch"):
        sampler.reset(1, rows=[0.5])  # type: ignore[list-item]


def test_one_number_in_any_form_gives_each_row_a_seed_of_its_own():
    """Trap 37."""
    head = make_head()
    expected = LMHeadSampler(head, max_batch_size=4, seed=-3).seeds
    assert len(expected.unique()) == 4
    for seed in (2**64 - 3, numpy.int64(-3), numpy.array(-3), torch.tensor(-3), torch.tensor(-3, device=DEVICE)):
        assert torch.equal(LMHeadSampler(head, max_batch_size=4, seed=seed).seeds, expected)
    # the draw that 0.1.0 made of an int
    drawn = torch.randint(-(2**63), 2**63 - 1, (4,), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    assert torch.equal(LMHeadSampler(head, max_batch_size=4, seed=3).seeds, drawn)


@pytest.mark.parametrize(("seed", "offset"), [([1, 2, 3, 4], 1.5), ([1, 2, 3], 1), (2**70, 5), ([1, 2, 3, "4"], 5)])
def test_a_reset_that_fails_changes_nothing(seed, offset):
    sampler = LMHeadSampler(make_head(), max_batch_size=4, seed=1)
    sampler.offsets.fill_(9)
    before = sampler.seeds.clone()
    with pytest.raises((TypeError, ValueError)):
        sampler.reset(seed, offset)
    assert torch.equal(sampler.seeds, before)
    assert sampler.offsets.tolist() == [9] * 4


class FirstRank(TensorParallel):
    """Another rank's view of a group whose first rank gave 7 for everything."""

    def __init__(self, weight):
        self.first_token, self.last_token, self.impl = 0, weight.shape[0], "streaming"
        self.weight_shape, self.dtype, self.device = weight.shape, weight.dtype, weight.device
        self.max_batch_size, self.max_num_samples, self.vocab_size = 8, 1, weight.shape[0]

    def broadcast(self, values, error=None, must_match=None):
        if error is not None:
            raise error
        assert values.seeds.device.type == "cpu"
        for value in values:
            if isinstance(value, torch.Tensor):
                assert value.device.type == "cpu"
        seven = values.temperature if values.temperature is None else 7.0
        return values._replace(seeds=torch.full_like(values.seeds, 7), offset=7, temperature=seven)


@pytest.mark.parametrize("expanded", [False, True])
def test_never_writes_into_its_arguments(expanded):
    """Trap 35: tensors of the right dtype and device, which nothing needs to copy, and some that cannot be written to."""

    def values(dtype):
        if expanded:
            return torch.full((1,), 3, device=DEVICE, dtype=dtype).expand(4)
        return torch.full((4,), 3, device=DEVICE, dtype=dtype)

    head = make_head()
    for tp in (None, FirstRank(head.weight)):
        seeds, offsets, temperature = values(torch.int64), values(torch.int64), values(torch.float32)
        sampler = LMHeadSampler(head, max_batch_size=4, seed=seeds, temperature=temperature, tp=tp)
        if tp is not None:
            assert sampler.temperature == 7
            sampler.temperature = torch.ones(4, device=DEVICE)
        sampler.reset(seeds, offsets, temperature=temperature)
        expected = 3 if tp is None else 7
        for state in (sampler.seeds, sampler.offsets, sampler.temperature):
            assert state.tolist() == [expected] * 4
            state.fill_(9)
        for argument in (seeds, offsets, temperature):
            assert argument.tolist() == [3] * 4


def test_reset_of_temperatures():
    sampler = LMHeadSampler(make_head(), max_batch_size=4, seed=1, temperature=[0.0, 0.5, 1.0, 1.5])
    storage = sampler.temperature.data_ptr()
    sampler.reset(rows=[1, 3], temperature=[2.0, 0.25])
    assert sampler.temperature.tolist() == [0.0, 2.0, 1.0, 0.25]
    sampler.reset(rows=slice(0, 2), temperature=1)
    sampler.reset(3)
    assert sampler.temperature.tolist() == [1.0, 1.0, 1.0, 0.25]
    assert sampler.temperature.data_ptr() == storage  # a captured graph sees it
    before = sampler.seeds.clone()
    for temperature, message in (
        (-1.0, "temperature must be at least 0"),
        ([1.0] * 3, "temperature must be a number or have"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.reset(4, temperature=temperature)
    number = LMHeadSampler(make_head(), max_batch_size=4, seed=1)
    with pytest.raises(ValueError, match="temperature can be reset in a sampler that was made with one per row"):
        number.reset(temperature=2.0)
    assert torch.equal(sampler.seeds, before)


def test_a_default_temperature_per_row():
    values = [0.0, 3.0, 0.5, 0.1]
    sampler = LMHeadSampler(make_head(), max_batch_size=4, seed=1, temperature=values).to(torch.bfloat16).float()
    # 0.1 is no bfloat16, and this is no weight
    assert torch.equal(sampler.temperature, torch.tensor(values, device=DEVICE))
    for batch in (4, 2, 0):
        x = states(batch)
        temperature = torch.tensor(values[:batch], device=DEVICE)
        expected = sample(
            x, sampler.weight, temperature=temperature, seed=sampler.seeds[:batch], offset=sampler.offsets[:batch]
        )
        assert torch.equal(sampler(x).token_ids, expected.token_ids)


def test_hands_the_vocabulary_size_on():
    weight = torch.randn(500, 16, device=DEVICE)
    weight[60:] = float("nan")
    assert (LMHeadSampler(weight, vocab_size=60, seed=1, temperature=9.0)(states(50)).token_ids >= 0).all()


def test_is_made_under_a_default_device():
    with torch.device("meta"):  # wherever factories put their tensors
        sampler = LMHeadSampler(WEIGHT, max_batch_size=4, seed=3)
        sampler.reset(None, rows=[1])
    assert sampler.seeds.device.type == "cpu"
