"""The arguments by which a request asks for more, as users write them: what is taken, what is refused and in which words, what
comes back, and that tracers, exporters and modules see it."""

import inspect
import io
from dataclasses import fields
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import flashsampling
from flashsampling import (
    LMHeadSampler,
    SampleOutput,
    TokenCounts,
    ops,
    sample,
    sample_from_logits,
    verify,
    verify_from_logits,
)
from flashsampling.param_parsers import BatchShape
from flashsampling.row_params import integers, reals
from flashsampling.sampling_params import DEFAULT_PARAMS, PARAMS, SamplingOptions, SamplingParams, parse_sampling_params
from tests.mixes import Mix

STATES = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
WEIGHT = torch.randn(70, 8, generator=torch.Generator().manual_seed(2))
SEEDS = torch.arange(3)
PROBLEM = BatchShape(3, 72, 70, torch.device("cpu"), 1)
MASK = torch.full((3, 3), -1, dtype=torch.int32)
COUNTS = torch.zeros(3, 70, dtype=torch.int32)
ALL = {
    "bias": torch.linspace(-1, 1, 70), "logit_scale": 1.5, "soft_cap": 20.0, "logit_bias": ([[1, 2]] * 3, [[1.0, -1.0]] * 3),
    "token_counts": COUNTS, "repetition_penalty": 1.2, "frequency_penalty": 0.1, "presence_penalty": [0.1, 0.2, 0.3],
    "token_mask": MASK, "top_k": [0, 5, 50], "top_p": torch.tensor([0.9, 0.99, 1.0]), "min_p": 0.01, "joint_top_p": [False, True, True],
    "epsilon_cutoff": 1e-4, "top_n_sigma": 2.5,
    "return_logprobs": True,
    "top_logprobs": 4, "logprob_ids": [[1, 2, 3]] * 3, "return_logsumexp": True,
    "return_kept": True,
}  # fmt: skip

SCHEMA = (
    "Tensor? bias=None, float logit_scale=1., float soft_cap=0., Tensor? dense_bias=None, Tensor? bias_ids=None, "
    "Tensor? bias_values=None, Tensor? counts=None, Tensor? repetition_penalty=None, float repetition_penalty_value=1., "
    "Tensor? frequency_penalty=None, float frequency_penalty_value=0., Tensor? presence_penalty=None, "
    "float presence_penalty_value=0., Tensor? token_mask=None, Tensor? top_k=None, SymInt top_k_value=0, "
    "Tensor? top_p=None, float top_p_value=1., Tensor? min_p=None, float min_p_value=0., Tensor? joint_top_p=None, "
    "SymInt joint_top_p_value=0, Tensor? epsilon_cutoff=None, float epsilon_cutoff_value=0., "
    "Tensor? top_n_sigma=None, float top_n_sigma_value=0., bool logprobs=False, SymInt top_logprobs=0, Tensor? logprob_ids=None, "
    "bool logsumexp=False, Tensor? seen=None"
)

# ruff: noqa: E501
BAD = [
    (ValueError, r"bias must have shape \(70,\), one value per row of the head, got shape \(69,\)", {"bias": torch.zeros(69)}),
    (TypeError, "bias must be a plain torch.Tensor, got list", {"bias": [0.0] * 70}),
    (TypeError, "bias must be a plain torch.Tensor, got TwoTensor", {"bias": TwoTensor(torch.zeros(70), torch.zeros(70))}),
    (TypeError, "bias must be float32, bfloat16 or float16, got torch.float64", {"bias": torch.zeros(70).double()}),
    (ValueError, "logit_scale must be finite, got inf", {"logit_scale": float("inf")}),
    (TypeError, "logit_scale must be a number, got list", {"logit_scale": [1.0, 2.0]}),
    (TypeError, "logit_scale must be a number, got Tensor", {"logit_scale": torch.tensor([1.0], device="meta")}),
    (ValueError, "soft_cap must be at least 0 and finite, got -1", {"soft_cap": -1}),
    (ValueError, "soft_cap must be at least 0 and finite, got nan", {"soft_cap": float("nan")}),
    (ValueError, r"logit_bias must be a tensor \(70,\), for all rows, or ids and values, \(3, n\) each, got shape \(3, 70\)", {"logit_bias": torch.zeros(3, 70)}),
    (TypeError, "logit_bias's ids must be int32 or int64, got torch.float32", {"logit_bias": ([[0.5]] * 3, [[1.0]] * 3)}),
    (TypeError, "logit_bias's values must be float32, bfloat16 or float16, got torch.complex64", {"logit_bias": ([[1]] * 3, torch.zeros(3, 1) * 1j)}),
    (ValueError, r"logit_bias's ids and values must have the same shape, got \(3, 2\) and \(3, 1\)", {"logit_bias": ([[1, 2]] * 3, [[1.0]] * 3)}),
    (ValueError, r"logit_bias's ids must have shape \(3, n\), or \(n,\) for all rows, got shape \(2, 1\)", {"logit_bias": ([[1]] * 2, [[1.0]] * 2)}),
    (TypeError, r"logit_bias's ids must be a tensor \(3, n\), or lists of as many numbers", {"logit_bias": ([[1], [1, 2], []], [[1.0]] * 3)}),
    (ValueError, "logit_bias must have at most 1024 ids per row, got 1025", {"logit_bias": (torch.zeros(3, 1025).long(), torch.zeros(3, 1025))}),
    (ValueError, "token_counts must be given with repetition_penalty", {"repetition_penalty": 1.1}),
    (ValueError, "repetition_penalty must be above 0 and finite, got -1", {"repetition_penalty": [1, 1, -1], "token_counts": COUNTS}),
    (TypeError, "token_counts must be a TokenCounts or int32, got torch.int64", {"token_counts": COUNTS.long(), "frequency_penalty": 1}),
    (ValueError, r"token_counts must have shape \(3, 70\), got shape \(3, 69\)", {"token_counts": COUNTS[:, :69]}),
    (ValueError, "token_counts must have a row for each of 3 rows, got 2", {"token_counts": TokenCounts(2, 70)}),
    (ValueError, "token_counts must be of at least 70 tokens, got 69", {"token_counts": TokenCounts(3, 69)}),
    (ValueError, "num_samples must be 1 with a TokenCounts, which counts one token per row, got 2", {"token_counts": TokenCounts(3, 70), "num_samples": 2}),
    (TypeError, "token_mask must be int32: bit t & 31 of word t >> 5 .*, got torch.bool", {"token_mask": torch.ones(3, 70, dtype=torch.bool)}),
    (ValueError, r"token_mask must have shape \(3, 3\) or \(3,\), a bit for each of 70 tokens, got shape \(3, 2\)", {"token_mask": MASK[:, :2]}),
    (ValueError, r"token_mask must have shape .*, got shape \(3, 2\)", {"token_mask": MASK[0, :2]}),
    (TypeError, "top_k must be an int or integers, one per row, got float", {"top_k": 5.0}),
    (TypeError, "top_k must be an integer tensor, got torch.float32", {"top_k": torch.ones(3)}),
    (ValueError, r"top_k must be a number or have shape \(\), \(1,\) or \(3,\), one per row, got shape \(2,\)", {"top_k": [1, 2]}),
    (ValueError, "top_p must be from 0 to 1, got 95", {"top_p": 95}),
    (ValueError, "min_p must be from 0 to 1, got 1.5", {"min_p": 1.5}),
    (ValueError, "epsilon_cutoff must be at least 0 and below 1, got 1", {"epsilon_cutoff": 1}),
    (ValueError, "top_n_sigma must be finite, got nan", {"top_n_sigma": [1.0, float("nan"), 0.0]}),
    (TypeError, "joint_top_p must be a bool or bools, one per row, got int", {"joint_top_p": 1}),
    (TypeError, "joint_top_p must be a bool .*, got ndarray that holds int", {"joint_top_p": numpy.array([1, 0, 1], numpy.int32)}),
    (TypeError, "joint_top_p must be a bool, bools or int32, .*, got a tensor of torch.int64", {"joint_top_p": torch.ones(3).long()}),
    (TypeError, "return_logprobs must be a bool, got int", {"return_logprobs": 1}),
    (ValueError, "top_logprobs must be from 0 to 20, got 21", {"top_logprobs": 21}),
    (TypeError, "top_logprobs must be an int, got bool", {"top_logprobs": True}),
    (TypeError, "logprob_ids must be int32 or int64, got torch.float32", {"logprob_ids": torch.ones(3, 2)}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "change"), BAD)
def test_errors_name_the_argument(error, message, change):
    with pytest.raises(error, match=message):
        sample(STATES, WEIGHT, seed=SEEDS, **change)
    with pytest.raises(error, match=message):
        sample_from_logits(STATES @ WEIGHT.T, seed=SEEDS, **change)


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (TypeError, "logits must be a torch.Tensor, got list", {"logits": [[1.0]]}),
        (ValueError, r"logits must have 2 dimensions, got shape \(5,\); .*logits\[:, -1\]", {"logits": torch.zeros(5)}),
        (
            TypeError,
            "logits must be bfloat16, float16 or float32, got torch.float64",
            {"logits": torch.zeros(3, 5).double()},
        ),
        (ValueError, r"logits must have at least one column, got shape \(3, 0\)", {"logits": torch.zeros(3, 0)}),
        (ValueError, "vocab_size must be from 1 to the 5 columns of logits, got 6", {"vocab_size": 6}),
        (TypeError, "unexpected keyword argument 'tp'|unexpected argument 'tp'", {"tp": None}),
    ],
)
def test_errors_of_logits(error, message, change):
    with pytest.raises(error, match=message):
        sample_from_logits(**({"logits": torch.zeros(3, 5), "seed": SEEDS} | change))


def asked_by(**request):
    return parse_sampling_params(request, PROBLEM)


def test_what_asks_for_nothing_is_nothing():
    """The very object that calls look for, so that such a call takes the unfiltered way, in kernels too."""
    request: dict[str, Any]
    for request in (
        dict.fromkeys(SamplingOptions.__annotations__), {"top_k": 0}, {"top_k": -1}, {"top_k": 70}, {"top_k": numpy.int64(100)},
        {"top_p": 1}, {"top_p": [1.0]}, {"min_p": 0.0}, {"epsilon_cutoff": 0}, {"top_n_sigma": 0.0}, {"repetition_penalty": 1, "frequency_penalty": 0.0}, {"soft_cap": 0},
        {"logit_scale": 1}, {"return_logprobs": False, "top_logprobs": 0}, {"token_counts": COUNTS}, {"logit_bias": ([], [])},
    ):  # fmt: skip
        assert asked_by(**request) is DEFAULT_PARAMS, request
    assert asked_by(top_k=torch.zeros(3, dtype=torch.int32)).names() == ["top_k"]  # what a tensor holds is not read
    assert asked_by(**ALL | {"bias": torch.zeros(72)}).names() == [
        name
        for name in SamplingParams._fields
        if name not in ("stream", "dense_bias", "seen", "counts_rows", "scored_ids", "ranks")
    ]
    assert asked_by(logit_bias=torch.zeros(70)).names() == ["dense_bias"]


def test_a_call_without_parameters_holds_the_default_object(monkeypatch):
    seen: list[SamplingParams] = []
    run = ops._sample

    def watched(inputs, impl):
        seen.append(inputs.params)
        return run(inputs, impl)

    monkeypatch.setattr(ops, "_sample", watched)
    sample(STATES, WEIGHT, seed=SEEDS)
    sample_from_logits(STATES, seed=SEEDS)
    assert all(params is DEFAULT_PARAMS for params in seen)


@pytest.mark.parametrize(
    "function", [sample, sample_from_logits, verify, verify_from_logits, LMHeadSampler.forward, flashsampling.warmup]
)
def test_signatures_show_every_parameter(function):
    """Explicit ones and completed ones: names, in the order of the declaration, and defaults that are off."""
    shown = {
        name: each
        for name, each in inspect.signature(function).parameters.items()
        if name in SamplingOptions.__annotations__
    }
    declared = dict.fromkeys(param.argument or name for name, param in PARAMS.items())
    assert list(shown) == list(SamplingOptions.__annotations__) == list(declared)
    assert "top_p" in shown
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in shown.values())
    assert parse_sampling_params({name: each.default for name, each in shown.items()}, PROBLEM) is DEFAULT_PARAMS
    assert {name: each.annotation for name, each in shown.items()} == SamplingOptions.__annotations__


def test_operators_take_the_parameters_as_exported_programs_pass_them():
    """Names, types, order and defaults, written out: a program that was exported before still runs."""
    for operator in ("sample", "sample_from_logits", "sample_sharded", "accept", "recover"):
        schema = str(getattr(torch.ops.flashsampling, operator).default._schema)
        assert f" *, {SCHEMA}" in schema
        assert f" *, {SCHEMA}" in str(getattr(torch.ops.flashsampling, operator).on_host._schema)
        assert "stream, SymInt num_samples" in schema


def test_one_meaning_however_it_is_written():
    """Real numbers per row are parsed as temperatures, of which ``test_sampling`` has all forms."""
    same, numbers = torch.tensor([5, 5, 5]), {"seed": SEEDS, "return_logprobs": True}
    for name, value, ways, others in (
        ("top_k", 5, [numpy.int32(5), [5], same, same.to(torch.int32), torch.tensor(5), (5, 5, 5)], {}),
        ("joint_top_p", True, [[True] * 3, torch.tensor(True), same > 0, same.int()], {"top_k": 2, "top_p": 0.6}),
    ):
        expected = sample(STATES, WEIGHT, **numbers, **others, **{name: value})
        plain = sample(STATES, WEIGHT, **numbers, **others)
        assert not torch.equal(expected.processed_logprobs, plain.processed_logprobs)
        for way in ways:
            out = sample(STATES, WEIGHT, **numbers, **others, **{name: way})
            assert torch.equal(out.token_ids, expected.token_ids), (name, way)
            assert torch.equal(out.processed_logprobs, expected.processed_logprobs), (name, way)
    assert asked_by(top_k=same.to(torch.int32)).top_k.dtype == torch.int32  # as it is: no copy


def test_biases_and_masks_however_they_are_written():
    def draw(**request):
        return sample(STATES, WEIGHT, temperature=0.0, return_logprobs=True, **request)

    ids, values = torch.tensor([[3, 9, 3]] * 3), torch.tensor([[4.0, 50.0, 4.0]] * 3)
    dense = torch.zeros(70)
    dense[3], dense[9] = 8.0, 50.0
    expected = draw(logit_bias=dense)
    assert expected.token_ids.tolist() == [9, 9, 9]
    wide = torch.stack([ids, ids], 2)[:, :, 0]
    for way in (
        (ids, values), (ids[0], values[0]), (ids.int(), values.half()), (ids.tolist(), values.tolist()), (wide, values),
        [ids.numpy(), values.numpy()], ([3, 9, 3], [4, 50, 4]), dense.bfloat16(), torch.stack([dense, dense], 1)[:, 0],
        (torch.tensor([3, 9, 3, -1, 70, 2**32 + 5, 5 - 2**32]), torch.tensor([4.0, 50.0, 4.0, 1e9, 1e9, 1e9, 1e9])),
        ([3, 9, 3] + [5] * 1021, [4.0, 50.0, 4.0] + [0.0] * 1021),  # as many as a row takes
    ):  # fmt: skip
        out = draw(logit_bias=way)
        assert torch.equal(out.token_ids, expected.token_ids)
        assert torch.allclose(out.processed_logprobs, expected.processed_logprobs, atol=1e-6)
    mask = torch.zeros(3, 3, dtype=torch.int32)
    mask[:, 2] = 1 << 5
    for masks in (mask, mask[0], torch.cat([mask, mask], 1), torch.stack([mask, mask], 2)[:, :, 0]):
        assert draw(token_mask=masks).token_ids.tolist() == [69, 69, 69]


def test_implementations_get_contiguous_rows():
    """Kernels know how far apart rows are, and of what is in a row nothing."""

    def apart(tensor):
        return torch.stack([tensor, tensor], -1)[..., 0]

    ids = torch.ones(3, 2, dtype=torch.int32)
    request = {
        "bias": torch.ones(72), "logit_bias": (ids, ids.float()), "token_counts": COUNTS, "frequency_penalty": torch.ones(3),
        "repetition_penalty": torch.ones(3).half(), "token_mask": MASK, "top_k": SEEDS, "top_p": torch.ones(3),
        "min_p": torch.ones(3).double(), "logprob_ids": ids,
    }  # fmt: skip
    strided: dict[str, Any] = {
        name: tuple(map(apart, value)) if isinstance(value, tuple) else apart(value) for name, value in request.items()
    }
    for params in (asked_by(**strided), asked_by(logit_bias=apart(torch.ones(72))), asked_by(top_k=apart(SEEDS.int()))):
        for name in params.names():
            assert getattr(params, name).stride(-1) == 1, name
    for value in (apart(SEEDS), apart(SEEDS.int()), SEEDS[:1].expand(3)):
        for of_rows in (
            integers("seed", value, 3, PROBLEM.device),
            reals("temperature", value.float(), 3, PROBLEM.device),
        ):
            assert isinstance(of_rows, torch.Tensor)
            assert of_rows.is_contiguous()


def test_what_comes_back():
    plain = sample(STATES, WEIGHT, seed=SEEDS)
    assert [field.name for field in fields(SampleOutput) if getattr(plain, field.name) is not None] == ["token_ids"]
    out = sample(STATES, WEIGHT, seed=SEEDS, **ALL)
    flat = {"token_ids", "logprobs", "processed_logprobs", "ranks"}
    shapes: dict[str, tuple[int, ...]] = {name: (3,) for name in flat | {"logsumexp", "kept_counts"}}
    shapes |= {"top_token_ids": (3, 4), "top_logprobs": (3, 4), "given_logprobs": (3, 3), "kept_mask": (3, 3)}
    assert {field.name: tuple(getattr(out, field.name).shape) for field in fields(SampleOutput)} == shapes
    several = sample(STATES, WEIGHT, seed=SEEDS, num_samples=5, **ALL)
    shapes |= {name: (3, 5) for name in flat}
    assert {field.name: tuple(getattr(several, field.name).shape) for field in fields(SampleOutput)} == shapes
    for name in flat:
        assert torch.equal(getattr(several, name)[:, 0], getattr(out, name)), name
    for impl in ("streaming", "reference"):
        for num_samples in (1, 5):
            nothing = sample(STATES[:0], WEIGHT, impl=impl, num_samples=num_samples, **ALL | {
                "logit_bias": None, "token_counts": COUNTS[:0], "token_mask": MASK[:0], "presence_penalty": 0.1, "top_k": 3,
                "top_p": 0.5, "joint_top_p": [], "logprob_ids": torch.ones(0, 3).long()})  # fmt: skip
            wanted: dict[str, tuple[int, ...]] = {name: (0, *shape[1:]) for name, shape in shapes.items()}
            if num_samples == 1:
                wanted |= {name: (0,) for name in flat}
            assert {field.name: tuple(getattr(nothing, field.name).shape) for field in fields(SampleOutput)} == wanted


def test_logits_of_every_dtype_and_stride():
    logits = torch.randn(4, 2, 300)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows = logits.to(dtype)[:, 1]
        assert rows.stride(0) == 600
        request = {"seed": torch.arange(4), "top_p": 0.9, "return_logprobs": True}
        expected = sample_from_logits(rows.float().contiguous(), impl="reference", **request)
        for impl in (None, "streaming", "reference"):
            for given in (rows, rows.T.contiguous().T):
                out = sample_from_logits(given, impl=impl, **request)
                assert torch.equal(out.token_ids, expected.token_ids)
                assert torch.equal(out.logprobs, expected.logprobs)
        plain = sample_from_logits(rows, seed=torch.arange(4)).token_ids
        states, weight = torch.eye(4, dtype=dtype), rows.T.contiguous()
        assert torch.equal(plain, sample(states, weight, seed=torch.arange(4)).token_ids)


# -- tracers


@pytest.mark.quick(2)
@pytest.mark.parametrize("impl", ["reference", "streaming"])
@pytest.mark.parametrize("seed", [0, 7])  # values hold no NaN: opcheck takes none for another
def test_opcheck(seed, impl):
    mix = Mix(seed, poisoned=False)
    step = mix.make(batch=3)
    head = mix.of_a_head(step)
    assert not any(ops.sample(one, impl).values.isnan().any() for one in (step, head))
    params, operators = ops._flatten_params(step.params), torch.ops.flashsampling
    for one, operator in ((step, operators.sample_from_logits.default), (head, operators.sample.default)):
        torch.library.opcheck(operator, (*ops._flatten_inputs(one), one.vocab_size, impl), params)


def test_an_operator_is_passed_only_what_is_asked_for():
    arguments = torch.ops.flashsampling.sample.default._schema.arguments
    assert all(argument.kwarg_only == argument.has_default_value() for argument in arguments)
    assert ops._flatten_params(DEFAULT_PARAMS) == {}
    for seed in range(200):
        step = Mix(seed).make()
        apart = ops._flatten_params(step.params)
        again = ops._unflatten_inputs(ops._flatten_inputs(step), apart, step.vocab_size)
        assert all(a is b or a == b for a, b in zip(again, step) if not isinstance(a, SamplingParams))
        assert all(a is b or a == b for a, b in zip(again.params, step.params))
        assert len(apart) == len(step.params.names())


@pytest.mark.quick(1)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    def step(states, seeds, top_p, mask, k):
        request = {
            "top_p": top_p,
            "token_mask": mask,
            "top_k": k,
            "return_logprobs": True,
            "top_logprobs": 2,
            "min_p": 0.01,
        }
        fused = sample(states * 2, WEIGHT, seed=seeds, soft_cap=30.0, **request)
        unfused = sample_from_logits(states @ WEIGHT.T, seed=seeds, return_logsumexp=True, **request)
        return fused, unfused.token_ids + 1, unfused.logsumexp

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for batch, k in ((3, 5), (2, 7), (2, 0)):
        arguments = STATES[:batch], SEEDS[:batch], torch.full((batch,), 0.9), MASK[:batch], k
        (fused, *others), (expected, *more) = compiled(*arguments), step(*arguments)
        assert type(fused) is SampleOutput
        for one, other in zip(torch.utils._pytree.tree_leaves(fused), torch.utils._pytree.tree_leaves(expected)):
            assert torch.equal(one, other)
        for one, other in zip(others, more):
            assert torch.allclose(one, other)


def test_exports():
    class Module(nn.Module):
        def forward(self, states, seeds, top_k):
            return sample(states, WEIGHT, seed=seeds, top_k=top_k, top_p=0.9, return_logprobs=True)

    arguments = STATES, SEEDS, torch.tensor([1, 5, 0])
    exported = torch.export.export(Module(), arguments)
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    out, expected = torch.export.load(file).module()(*arguments), Module()(*arguments)
    assert type(out) is SampleOutput
    assert torch.equal(out.token_ids, expected.token_ids)
    assert torch.equal(out.logprobs, expected.logprobs)
    assert out.top_token_ids is None


# -- the module


def test_the_sampler_takes_it_all():
    sampler = LMHeadSampler(WEIGHT, max_batch_size=4, seed=3)
    seeds = sampler.seeds[:3].clone()
    request = ALL | {"token_counts": COUNTS}
    for step in range(3):
        out = sampler(STATES, **request)
        expected = sample(STATES, WEIGHT, seed=seeds, offset=step, **request)
        for one, other in zip(torch.utils._pytree.tree_leaves(out), torch.utils._pytree.tree_leaves(expected)):
            assert torch.equal(one, other)
    assert sampler.offsets.tolist() == [3, 3, 3, 0]
    with pytest.raises(TypeError, match="unexpected argument 'topk'"):
        sampler(STATES, topk=3)
    assert sampler.offsets.tolist() == [3, 3, 3, 0]


def test_a_head_with_a_bias():
    head, states = nn.Linear(8, 70).bfloat16(), STATES.bfloat16()
    with torch.no_grad():
        head.bias[11] = 50.0
    sampler = LMHeadSampler(head, max_batch_size=4, seed=[1, 2, 3, 4])
    out = sampler(states, return_logprobs=True)
    assert out.token_ids.tolist() == [11, 11, 11]
    expected = torch.log_softmax(states.float() @ head.weight.float().T + head.bias.float(), 1)[:, 11]
    assert torch.allclose(out.logprobs, expected, atol=1e-5)
    assert not out.logprobs.requires_grad
    with torch.no_grad():
        head.bias[11] = -50.0  # read at every call
    assert 11 not in sampler(states).token_ids
    assert sampler.bias is head.bias
    assert LMHeadSampler(WEIGHT).bias is None
    with pytest.raises(ValueError, match="bias must be None: the LM head has one of its own"):
        sampler(states, bias=torch.zeros(70))
    assert sampler.state_dict() == {}


def test_the_sampler_hands_all_on():
    """Scale and soft cap besides a bias, and the backend's name, in both of its calls."""
    transform: dict[str, Any] = {"logit_scale": 8.0, "soft_cap": 20.0}
    head, nothing = nn.Linear(8, 70), torch.zeros(3, 0, dtype=torch.int64)
    sampler = LMHeadSampler(head, max_batch_size=3, seed=[4, 5, 6], **transform)
    expected = sample(STATES, head.weight, seed=[4, 5, 6], bias=head.bias, **transform).token_ids
    assert torch.equal(sampler(STATES).token_ids, expected)
    sampler.reset([4, 5, 6])
    assert torch.equal(sampler.verify(STATES[:, None], nothing).token_ids[:, 0], expected)
    named = LMHeadSampler(head, max_batch_size=3, impl="cute")
    for call in (lambda: named(STATES), lambda: named.verify(STATES[:, None], nothing)):
        with pytest.raises(ValueError, match="impl='cute' cannot do this"):
            call()


# -- counts


def test_counts_of_prompts_and_of_what_is_drawn():
    state = TokenCounts(4, 70)
    state.reset(prompt_token_ids=[[1, 2, 2], [], [69, 70, -1, 5], [0]])
    seen = state.counts < 0
    assert [row.nonzero().flatten().tolist() for row in seen] == [[1, 2], [], [5, 69], [0]]
    drawn = []
    for offset in range(5):
        request = {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": torch.full((3,), 0.25)}
        before = state.counts[:3].clone()
        out = sample(STATES, WEIGHT, seed=SEEDS, offset=offset, token_counts=state, **request).token_ids
        assert torch.equal(
            out, sample(STATES, WEIGHT, seed=SEEDS, offset=offset, token_counts=before, **request).token_ids
        )
        drawn.append(out)
        expected = torch.zeros(3, 70, dtype=torch.int32)
        for token_ids in drawn:
            expected[torch.arange(3), token_ids] += 1
        assert torch.equal(state.counts[:3] & 0x7FFFFFFF, expected)
        assert torch.equal(state.counts < 0, seen)
    assert not (state.counts[3] & 0x7FFFFFFF).any()
    state.reset(rows=[1], prompt_token_ids=[7])
    assert state.counts[1].nonzero().tolist() == [[7]]
    assert torch.equal(state.counts[0] & 0x7FFFFFFF, expected[0])
    state.reset()
    assert not state.counts.any()


@pytest.mark.gpu
def test_a_graph_replays_it_all_and_counts():
    """Nothing waits for the host: filters, masks, penalties and log-probabilities of rows in a CUDA graph; every replay draws
    anew, and counts what it draws."""
    states, weight = STATES.cuda(), WEIGHT.cuda()
    request: dict[str, Any] = {
        "top_k": torch.tensor([0, 5, 50]), "top_p": torch.tensor([0.9, 0.99, 1.0]), "min_p": torch.tensor([0.0, 0.01, 0.02]),
        "token_mask": MASK, "presence_penalty": torch.tensor([0.1, 0.2, 0.3]), "logit_bias": (torch.tensor([[1, 2]] * 3), torch.ones(3, 2)),
        "logprob_ids": torch.tensor([[1, 2, 3]] * 3),
    }  # fmt: skip
    request = {
        name: tuple(part.cuda() for part in value) if isinstance(value, tuple) else value.cuda()
        for name, value in request.items()
    }
    request |= {
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "soft_cap": 20.0,
        "return_logprobs": True,
        "top_logprobs": 3,
    }

    def make():
        return LMHeadSampler(weight, max_batch_size=3, seed=[1, 2, 3]), TokenCounts(3, 70, "cuda")

    (sampler, counts), (captured, its_counts) = make(), make()
    with torch.cuda.stream(torch.cuda.Stream()):
        captured(states, token_counts=its_counts, **request)
    torch.cuda.synchronize()
    captured.reset([1, 2, 3])
    its_counts.reset()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = captured(states, token_counts=its_counts, **request)
    for _ in range(4):
        graph.replay()
        expected = sampler(states, token_counts=counts, **request)
        for one, other in zip(torch.utils._pytree.tree_leaves(out), torch.utils._pytree.tree_leaves(expected)):
            assert torch.equal(one, other)
        assert torch.equal(counts.counts, its_counts.counts)
    assert int(counts.counts.sum()) == 12


def test_counts_leave_out_what_is_no_token():
    state = TokenCounts(3, 70)
    state.add(torch.tensor([-1, 70, 5]))
    assert state.counts.nonzero().tolist() == [[2, 5]]
    state.add(torch.tensor([[5, 5, -1], [1, 2, 3]], dtype=torch.int32), rows=torch.tensor([2, 0]))
    assert state.counts[2, 5] == 3
    assert state.counts[0].nonzero().flatten().tolist() == [1, 2, 3]
    logits = torch.full((1, 70), float("nan"))
    before = state.counts.clone()
    assert sample_from_logits(logits, token_counts=state, presence_penalty=1.0).token_ids.tolist() == [-1]
    assert torch.equal(state.counts, before)
    sample_from_logits(torch.zeros(1, 70), token_counts=state, temperature=0.0)  # no penalty: counted all the same
    assert state.counts[0, 0] == 1


def test_counts_in_a_compiled_step():
    eager, traced = TokenCounts(3, 70), TokenCounts(3, 70)

    def step(state, offset):
        return sample(STATES, WEIGHT, seed=SEEDS, offset=offset, token_counts=state, frequency_penalty=2.0).token_ids

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for offset in range(3):
        assert torch.equal(compiled(traced, torch.full((3,), offset)), step(eager, torch.full((3,), offset)))
    assert torch.equal(eager.counts, traced.counts)
    assert int(traced.counts.sum()) == 9


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, "max_batch_size must be at least 1, got 0", lambda state: TokenCounts(0, 5)),
        (ValueError, "vocab_size must be at least 1, got 0", lambda state: TokenCounts(5, 0)),
        (ValueError, "rows must be from 0 to max_batch_size - 1 = 2", lambda state: state.reset(rows=[3])),
        (ValueError, r"prompt_token_ids must have one row for each of 3 rows, got shape \(2, 1\)", lambda state: state.reset(prompt_token_ids=[[1], [2]])),
        (TypeError, "prompt_token_ids must be integers, got torch.float32", lambda state: state.reset([0], [0.5])),
        (TypeError, "prompt_token_ids must be token ids, or a list of them per row", lambda state: state.reset([0], ["a"])),
        (TypeError, "token_ids must be a tensor of integers, got torch.float32", lambda state: state.add(torch.ones(3))),
        (TypeError, "token_ids must be a tensor of integers, got list", lambda state: state.add([1, 2])),
        (ValueError, r"token_ids must have shape \(B,\) or \(B, n\), B up to max_batch_size = 3, got shape \(4,\)", lambda state: state.add(torch.arange(4))),
        (ValueError, r"token_ids must have a row for each of 2 rows, got shape \(3,\)", lambda state: state.add(torch.arange(3), rows=[0, 1])),
    ],
)  # fmt: skip
def test_counts_say_what_does_not_fit(error, message, call):
    state = TokenCounts(3, 70)
    with pytest.raises(error, match=message):
        call(state)
    assert not state.counts.any()
