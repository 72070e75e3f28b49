import array
import contextlib
import math
import operator
import typing
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import numpy
import pytest
import torch
from torch.overrides import BaseTorchFunctionMode
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

import flashsampling
from flashsampling import (
    SampleOutput,
    noise,
    ops,
    sample,
    sample_from_logits,
    sampling,
    verify,
    verify_from_logits,
)
from flashsampling.outputs import SampleResult
from flashsampling.reference import streaming
from flashsampling.sampling_params import SamplingOptions
from flashsampling.tensor_parallel import capabilities
from tests.conftest import DEVICE, run_python
from tests.operators import Operators
from tests.problems import IMPLEMENTATIONS, make_problem

STATES = torch.ones(3, 8)
WEIGHT = torch.ones(20, 8)

# ruff: noqa: E501
BAD_CALLS = [
    (TypeError, "hidden_states must be a torch.Tensor, got list", {"hidden_states": [[1.0]]}),
    (TypeError, "weight must be a torch.Tensor", {"weight": None}),
    (ValueError, r"hidden_states must have 2 dimensions, got shape \(1, 3, 8\).*hidden_states\[:, -1\]", {"hidden_states": STATES[None]}),
    (ValueError, r"weight must have 2 dimensions, got shape \(20,\)", {"weight": WEIGHT[:, 0]}),
    (TypeError, "hidden_states must be bfloat16, float16 or float32, got torch.float64", {"hidden_states": STATES.double()}),
    (TypeError, "weight must have the dtype of hidden_states, torch.float32, got torch.bfloat16", {"weight": WEIGHT.bfloat16()}),
    (ValueError, "weight must be on the device of hidden_states", {"weight": WEIGHT.to("meta")}),
    (ValueError, r"weight must have the 8 columns of hidden_states, got shape \(20, 7\)", {"weight": WEIGHT[:, :7]}),
    (TypeError, r"weight must be a dense tensor, got torch.sparse_coo; pass weight.to_dense\(\)", {"weight": WEIGHT.to_sparse()}),
    (TypeError, r"^hidden_states must be a dense tensor, got torch.sparse_coo; pass hidden_states.to_dense\(\)$", {"hidden_states": STATES.to_sparse()}),
    (ValueError, "weight must have at least one row", {"weight": WEIGHT[:0]}),
    (ValueError, r"weight must have at least one row and one column, got shape \(20, 0\)", {"hidden_states": STATES[:, :0], "weight": WEIGHT[:, :0]}),
    (TypeError, "weight must be bfloat16, float16 or float32, got torch.int8; of a quantised head pass the dequantised weight", {"weight": WEIGHT.to(torch.int8)}),
    (TypeError, "weight must be a plain tensor, got TwoTensor; of a quantised head pass the dequantised weight", {"weight": TwoTensor(WEIGHT, WEIGHT)}),
    (ValueError, r"weight must have at most 2\*\*31 - 1 rows that can be sampled, got 2147483648", {"weight": WEIGHT[:1].expand(2**31, 8)}),
    (ValueError, "temperature must be at least 0, got -1", {"temperature": -1}),
    (ValueError, "temperature must be at least 0, got nan", {"temperature": float("nan")}),
    (TypeError, "temperature must be a number or numbers, one per row, got bool", {"temperature": True}),
    (TypeError, "temperature must be a tensor of floating-point numbers or integers, got torch.bool", {"temperature": STATES[:, 0] > 0}),
    (ValueError, r"temperature must be a number or have shape \(\), \(1,\) or \(3,\), one per row, got shape \(4,\)", {"temperature": torch.ones(4)}),
    (ValueError, r"temperature must be a number or have shape .*, got shape \(0,\)", {"temperature": []}),
    (ValueError, "temperature must be at least 0, got -1", {"temperature": [1.0, -1, 2.0]}),
    (ValueError, "temperature must be on the device", {"temperature": torch.ones(3, device="meta")}),
    (TypeError, "seed must be an int or integers, one per row, got float", {"seed": 1.0}),
    (TypeError, "seed must be an int or integers, one per row, got bool", {"seed": True}),
    (TypeError, "seed must be .* got list that holds Tensor; torch.stack makes one", {"seed": [torch.tensor(1)] * 3}),
    (TypeError, "seed must be an int or integers, one per row, got set", {"seed": {1, 2, 3}}),
    (ValueError, "seed must be .* got ndarray of more than one dimension", {"seed": numpy.ones((3, 1), dtype=int)}),
    (ValueError, r"offset must be a number or have shape \(\), \(1,\) or \(3,\), one per row, got shape \(2,\)", {"offset": [1, 2]}),
    (TypeError, "seed must be an integer tensor, got torch.float32", {"seed": torch.ones(3)}),
    (ValueError, "seed must be on the device", {"seed": torch.ones((), dtype=torch.int64, device="meta")}),
    (ValueError, "seed must fit in 64 bits", {"seed": 2**64}),
    (ValueError, "offset must fit in 64 bits", {"offset": -(2**63) - 1}),
    (ValueError, r"num_samples must be from 1 to 2\*\*24, got 0", {"num_samples": 0}),
    (ValueError, r"num_samples must be from 1 to 2\*\*24, got 16777217", {"num_samples": 2**24 + 1}),
    (ValueError, "vocab_size must be from 1 to the 20 rows of weight, got 21", {"vocab_size": 21}),
    (ValueError, "impl must be None or one of cute, triton, streaming, reference, got 'cuda'", {"impl": "cuda"}),
    (TypeError, "impl must be None or a str", {"impl": 5}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "change"), BAD_CALLS)
def test_errors_name_the_argument(error, message, change):
    with pytest.raises(error, match=message):
        sample(**{"hidden_states": STATES, "weight": WEIGHT, "seed": 0} | change)
    if not change.keys() & {"hidden_states", "weight", "vocab_size"}:
        with pytest.raises(error, match=message):
            sample_from_logits(**{"logits": STATES, "seed": 0} | change)


def test_a_named_implementation_never_falls_back(device):
    if device.type == "cpu":
        code = (
            "import torch, flashsampling\n"
            "for impl in ('triton', 'cute'):\n"
            "    try: flashsampling.sample(torch.ones(1, 8), torch.ones(9, 8), impl=impl)\n"
            "    except ValueError as error: print(error)"
        )
        said = run_python(code, TRITON_INTERPRET="")
        assert "impl='triton' cannot do this: tensors on the CPU" in said
        assert "impl='cute' cannot do this: tensors on cpu, it runs on NVIDIA GPUs" in said
    else:
        columns_apart = torch.ones(8, 20, device=device).T
        with pytest.raises(ValueError, match="weight must be contiguous along D"):
            sample(torch.ones(3, 8, device=device), columns_apart, impl="triton")
        assert (sample(torch.ones(3, 8, device=device), columns_apart).token_ids >= 0).all()  # None chooses


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_empty_batch(impl, device):
    states, weight = torch.ones(0, 8, device=device), torch.ones(20, 8, device=device)
    for seed in (None, 3, torch.zeros(0, dtype=torch.int64, device=device)):
        assert sample(states, weight, seed=seed, impl=impl).token_ids.shape == (0,)
    out = sample(states, weight, num_samples=4, impl=impl).token_ids
    assert out.shape == (0, 4)
    assert out.dtype == torch.int64


def drawn(problem, **arguments):
    """Tokens of the problem's head for these arguments."""
    return sample(problem.hidden_states, problem.weight, **arguments).token_ids


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_numbers_and_tensors_mean_the_same(impl, device):
    problem = make_problem(4, 300, 16, device, impl=impl)
    for temperature, seed, offset in ((0.7, 5, 0), (3, -1, 7), (0.7, 2**64 - 1, 2**40 + 3), (0.0, 2**33, -9)):
        numbers = {"temperature": temperature, "seed": seed, "offset": offset}
        signed = {"temperature": float(temperature), "seed": (seed + 2**63) % 2**64 - 2**63, "offset": offset}
        tensors = {name: torch.full((4,), value, device=device) for name, value in signed.items()}
        assert torch.equal(drawn(problem, **numbers, impl=impl), drawn(problem, **tensors, impl=impl))


def as_users_write(values, device):
    """One value per row, in everything that holds numbers."""
    dtype = torch.int64 if isinstance(values[0], int) else torch.float32
    wide = torch.zeros(2 * len(values), dtype=dtype, device=device)
    wide[::2] = torch.tensor(values, dtype=dtype)
    array_of = numpy.array(values)
    yield list(values)
    yield tuple(values)
    yield array_of
    yield array_of[::-1].copy()[::-1]  # negative stride
    yield array_of.astype(array_of.dtype.newbyteorder())
    yield array.array("q" if dtype == torch.int64 else "d", values)
    yield [numpy.asarray(value)[()] for value in values]
    yield torch.tensor(values, dtype=dtype, device=device)
    yield wide[::2]


@pytest.mark.parametrize("name", ["seed", "offset", "temperature"])
def test_one_value_per_row_however_it_is_written(name, device):
    problem = make_problem(4, 1000, 16, device, logit_std=0.5)
    values = {"seed": [-5, 7, 2**62, -(2**63)], "offset": [0, 3, 2**40, 1], "temperature": [0.0, 0.5, 4.0, 1.25]}[name]
    arguments = {"seed": problem.seed, "offset": problem.offset, "temperature": torch.ones(4, device=device)}
    expected = drawn(problem, **arguments | {name: torch.tensor(values, device=device)})
    assert not torch.equal(expected, drawn(problem, **arguments))
    for written in as_users_write(values, device):
        assert torch.equal(drawn(problem, **arguments | {name: written}), expected), type(written)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("name", "value"), [("seed", -9), ("offset", 3), ("temperature", 0.25), ("temperature", 2)])
def test_one_value_for_all_rows_however_it_is_written(name, value, batch, device):
    problem = make_problem(batch, 1000, 16, device, logit_std=0.5)
    arguments = {"seed": problem.seed, "offset": problem.offset, "temperature": torch.ones(batch, device=device)}
    filled = torch.full((batch,), value, device=device, dtype=torch.float32 if name == "temperature" else torch.int64)
    expected = drawn(problem, **arguments | {name: filled})
    one = numpy.array(value)
    ways = [value, one, one[()], one[None], [value], (value,), torch.tensor(value, device=device), torch.tensor(value)]
    narrow = torch.float16 if one.dtype.kind == "f" else torch.int16
    ways += [torch.tensor([value], device=device), torch.tensor(value, dtype=narrow)]
    if name == "temperature":
        ways.append(numpy.float32(value))
    for way in ways:
        assert torch.equal(drawn(problem, **arguments | {name: way}), expected), (type(way), way)


def test_64_bits_are_two_s_complement_in_every_form(device):
    problem = make_problem(2, 1000, 16, device, logit_std=0.5)

    def draw(seed):
        return drawn(problem, seed=seed, offset=[0, 0])

    if device.type == "cpu":
        expected = draw([-1, -(2**63)])
        assert torch.equal(draw([2**64 - 1, 2**63]), expected)
        assert torch.equal(draw(numpy.array([2**64 - 1, 2**63], dtype=numpy.uint64)), expected)
        assert torch.equal(draw(torch.tensor([2**64 - 1, 2**63], dtype=torch.uint64)), expected)
    assert torch.equal(draw(numpy.uint64(2**64 - 1)), draw(-1))


@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_a_temperature_beyond_float32_is_infinite(impl, device):
    problem = make_problem(3, 300, 16, device)
    draw = torch.zeros(1, dtype=torch.int64, device=device)
    expected = noise.gumbel(problem.seed, problem.offset, draw, 0, 300)[:, 0].argmax(-1)
    rows = {"seed": problem.seed, "offset": problem.offset, "impl": impl}
    for temperature in (1e300, 10**400, math.inf, [1e39] * 3, numpy.full(3, 1e300)):
        assert torch.equal(drawn(problem, temperature=temperature, **rows), expected)


def test_numpy_is_not_imported_for_it():
    code = "import sys; sys.modules['numpy'] = None; import torch, flashsampling;"
    code += "print(flashsampling.sample(torch.ones(2, 8), torch.ones(9, 8), seed=[1, 2], temperature=[1, 0.5]).token_ids.tolist())"
    assert run_python("-W", "ignore", "-c", code).count(",") == 1


def test_no_more_than_2_to_the_31_less_1_tokens(monkeypatch):
    """Ids stay below the one that says that there is none. Stride 0: no memory."""
    weight = WEIGHT[:1].expand(2**31, 8)
    assert (sample(STATES, weight, vocab_size=5, seed=1, offset=torch.arange(3)).token_ids < 5).all()
    seen = []

    def draw(step, impl):
        seen.append(step.vocab_size)
        return SampleResult(torch.zeros(3, dtype=torch.int64))

    monkeypatch.setattr(ops, "sample", draw)
    sample(STATES, weight, vocab_size=2**31 - 1, seed=1, temperature=0.0)
    sample(STATES, weight[: 2**31 - 1], seed=1, temperature=0.0)
    assert seen == [2**31 - 1] * 2


@pytest.mark.parametrize(("rows", "message"), [(2**31 - 1, None), (2**31, "got 2147483648")])
def test_no_more_tokens_over_all_shards(rows, message):
    member = capabilities.RankCapabilities(
        (rows - 4, 8), "torch.float32", "cpu", "", (), "", None, None, 1, 1, None, None, 1.0, "", cannot={}
    )
    members = [member, replace(member, shape=(4, 8))]
    if message is None:
        assert capabilities.check(members)[-1] == (rows - 4, rows)
    else:
        with pytest.raises(ValueError, match=message):
            capabilities.check(members)


ZEROS, HEAD, NOTHING = torch.zeros(64, 1000), torch.zeros(1000, 8), torch.zeros(64, 0, dtype=torch.int64)
OF_ZEROS: dict[str, Callable[..., Any]] = {  # 64 rows in which all of 1000 tokens are equally likely
    "sample": lambda **options: sample(ZEROS[:, :8], HEAD, **options),
    "sample_from_logits": lambda **options: sample_from_logits(ZEROS, **options),
    "verify": lambda **options: verify(ZEROS[:, None, :8], HEAD, NOTHING, **options),
    "verify_from_logits": lambda **options: verify_from_logits(ZEROS[:, None], NOTHING, **options),
    "verify, by rejection": lambda **options: OF_ZEROS["verify"](method="rejection", **options),
    "verify_from_logits, by rejection": lambda **options: OF_ZEROS["verify_from_logits"](method="rejection", **options),
}


@pytest.mark.parametrize("call", OF_ZEROS)
def test_seed_none_draws_anew_per_call_and_per_row(call):
    torch.manual_seed(7)
    first, second = (OF_ZEROS[call]().token_ids for _ in range(2))
    assert len(first.unique()) > 50
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(OF_ZEROS[call]().token_ids, first)
    with pytest.raises(ValueError, match="impl='cute' cannot do this"):
        OF_ZEROS[call](impl="cute")
    seeds = torch.arange(64)
    moved = OF_ZEROS[call](seed=seeds, offset=seeds + 3).token_ids
    assert torch.equal(moved.flatten(), OF_ZEROS["sample"](seed=seeds, offset=seeds + 3).token_ids)


def test_output_is_frozen_and_the_inputs_untouched(device):
    problem = make_problem(4, 300, 16, device)
    names = ("hidden_states", "weight", "temperature", "seed", "offset")
    given = {name: getattr(problem, name) for name in names}
    before = {name: tensor.clone() for name, tensor in given.items()}
    out = sample(**given)
    assert all(torch.equal(given[name], before[name]) for name in names)
    with pytest.raises(FrozenInstanceError):
        out.token_ids = None  # type: ignore[misc, assignment]


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_opcheck(impl):
    problem = make_problem(4, 300, 16, DEVICE, impl=impl)
    arguments = (problem.hidden_states, problem.weight)
    rows = (problem.temperature, 0.0, problem.seed, 0, problem.offset, 0)
    numbers = (None, 0.7, None, 5, None, 6)
    for case in ((*rows, 0, 1, 300, impl), (*numbers, 0, 3, 299, impl)):
        torch.library.opcheck(torch.ops.flashsampling.sample.default, (*arguments, *case))


def test_import_needs_neither_triton_nor_cutlass():
    code = "import sys; import flashsampling; flashsampling.warmup;"
    run_python(code + "assert not {'triton', 'cutlass', 'transformers'} & {name.split('.')[0] for name in sys.modules}")


@pytest.mark.parametrize(
    ("impl", "setup", "reason"),
    [
        (
            "cute",
            "import importlib.util as u; f = u.find_spec;"
            "u.find_spec = lambda n, p=None: None if n == 'nvidia_cutlass_dsl' else f(n, p)",
            "nvidia-cutlass-dsl is not installed (the extra cute: pip install '.[cute]' from a checkout)",
        ),
        (
            "triton",
            "import sys; sys.modules['triton'] = None; import importlib.util as u; f = u.find_spec;"
            "u.find_spec = lambda n, p=None: None if n == 'triton' else f(n, p)",
            "triton is not installed",
        ),
    ],
)
def test_works_without_a_kernel_that_serves(impl, setup, reason):
    code = (
        f"{setup}\nimport torch, flashsampling; x = torch.ones(2, 8); w = torch.ones(9, 8);"
        "print(flashsampling.sample(x, w, seed=1).token_ids)\n"
        f"try: flashsampling.sample(x, w, seed=1, impl={impl!r})\n"
        "except ValueError as error: print(error)"
    )
    assert reason in run_python(code)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor that operations return, by storage."""

    def __init__(self):
        super().__init__()
        self.elements = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage().data_ptr()
                self.elements[storage] = max(self.elements.get(storage, 0), value.numel())
        return out


def watch_streaming(batch, vocab, num_samples):
    """The largest tensor of a call but for the weight and the tokens; a mode would see the operator as one, so without it."""
    problem = make_problem(batch, vocab, 8, torch.device("cpu"), num_samples=num_samples)
    with Largest() as largest:
        tokens = streaming.run(problem.step()).ids
    assert tokens.shape == (batch * num_samples,)
    ours = {matrix.untyped_storage().data_ptr() for matrix in (problem.weight, tokens)}
    return max(elements for storage, elements in largest.elements.items() if storage not in ours)


@pytest.mark.parametrize("batch", [1, 8])
def test_streaming_never_holds_the_logits(batch):
    """Extra memory is O(B x chunk): the largest tensor that any operation returns has no vocabulary in it."""
    assert 2**13 <= watch_streaming(batch, 100_000, 1) <= batch * 100_000 / 4


def test_streaming_holds_a_chunk_whatever_the_number_of_draws():
    assert watch_streaming(2, 1100, 2**8) <= streaming._SCORES_AT_ONCE["cpu"]


def test_streaming_keeps_nothing_for_a_gradient():
    """A trainable weight, as a model's is that nobody froze: no chunk is saved for a backward pass."""
    saved: list[torch.Tensor] = []
    problem = make_problem(2, 40_000, 8, torch.device("cpu"))
    problem.weight.requires_grad_()
    for looks in (contextlib.nullcontext(), BaseTorchFunctionMode()):  # past torch's dispatcher, and through it
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda tensor: tensor), looks:
            tokens = problem.sample("streaming")
        assert not saved
        assert not tokens.requires_grad


@pytest.mark.parametrize("impl", ["streaming", "reference"])
def test_a_few_draws_at_a_time_are_those_of_all_at_once(impl, monkeypatch, device):
    problem = make_problem(3, 300, 16, device, num_samples=50)
    problem.weight[7] = problem.weight[280]  # a tie, where noise is equal: never, and so it stays
    expected = problem.sample("reference")
    monkeypatch.setattr(streaming, "_SCORES_AT_ONCE", {device.type: 3 * 3 * 384})
    assert torch.equal(problem.sample(impl), expected)
    assert len(expected[1].unique()) > 5


def test_whoever_watches_sees_the_operator():
    """A plain call goes past the dispatcher; modes, tracers and the profiler still find one operator."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.profiler import ProfilerActivity, profile

    def draw(states):
        return sample(states, WEIGHT, seed=3).token_ids

    expected = draw(STATES)
    with Operators() as ran:
        tokens = draw(STATES)
    assert torch.equal(tokens, expected)
    assert ran.names == ["flashsampling.sample.default"]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        draw(STATES)
    assert "flashsampling::sample" in {event.key for event in profiler.key_averages()}
    traced = make_fx(draw)(STATES)
    called = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert [str(target) for target in called if target is not operator.getitem] == ["flashsampling.sample.default"]
    assert torch.equal(traced(STATES), expected)


@pytest.fixture
def warns_anew(monkeypatch):
    monkeypatch.setattr(sampling, "_warned_of_shared_noise", False)


@pytest.mark.parametrize("call", OF_ZEROS)
def test_warns_once_where_rows_share_their_noise(call, warns_anew):
    """Trap 37."""
    with pytest.warns(UserWarning, match="one seed and one offset for 64 rows.*LMHeadSampler") as caught:
        _ = [OF_ZEROS[call](seed=seed) for seed in (7, 8)]
    assert len(caught) == 1
    assert caught[0].filename == __file__  # the caller's line, not ours
    assert len(OF_ZEROS[call](seed=7).token_ids.unique()) == 1  # which is what it warns of


@pytest.mark.parametrize(
    "arguments",
    [
        {"seed": torch.full((64,), 7)},
        {"seed": torch.tensor(7)},
        {"seed": list(range(64))},
        {"seed": 7, "offset": torch.arange(64)},
        {"seed": 7, "temperature": 0.0},
        {"seed": None},
    ],
)
def test_does_not_warn_where_they_do_not_or_where_it_is_meant(arguments, warns_anew):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for call in OF_ZEROS.values():
            call(**arguments)
        sample(STATES[:1], WEIGHT, seed=7, num_samples=5)
        sample(STATES[:0], WEIGHT, seed=7)
        flashsampling.LMHeadSampler(WEIGHT, max_batch_size=4, seed=7)(STATES)


def test_the_warning_breaks_no_graph(warns_anew):
    torch._dynamo.reset()
    compiled = torch.compile(lambda states: sample(states, WEIGHT, seed=7).token_ids, fullgraph=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="one seed and one offset")
        tokens = compiled(STATES)
    with pytest.warns(UserWarning, match="one seed"):
        assert torch.equal(tokens, sample(STATES, WEIGHT, seed=7).token_ids)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_with_every_kind_of_row_parameter(dynamic, device):
    problem = make_problem(5, 300, 16, device)

    def step(states, seed, offset, temperature):
        rows = {"temperature": temperature, "seed": seed, "offset": offset}
        return sample(states * 2, problem.weight, **rows).token_ids + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    one = torch.tensor(3, device=device)
    rows = [1, 2, 3, 4, 5], one, [0.0, 0.5, 1.0, 1.5, 2.0]
    for batch, *arguments in (
        (5, 4, 2**40, 0.5), (5, 5, 2**41, 0.75), (5, one, one[None], 2), (5, *rows),
        (5, problem.seed, problem.offset, 0.8), (3, problem.seed[:3], 9, 0.8),
    ):  # fmt: skip
        states = problem.hidden_states[:batch]
        assert torch.equal(compiled(states, *arguments), step(states, *arguments)), arguments


def test_output_is_a_pytree():
    from torch.utils import _pytree

    out = sample(STATES, WEIGHT, seed=torch.arange(3))
    leaves, spec = _pytree.tree_flatten(out)
    assert len(leaves) == 1
    assert leaves[0] is out.token_ids
    assert type(_pytree.tree_unflatten(leaves, spec)) is SampleOutput
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec


def test_dtensors_are_refused_in_words(process_group):
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))
    weight, states = (DTensor.from_local(matrix, mesh, [Replicate()]) for matrix in (WEIGHT, STATES))
    with pytest.raises(TypeError, match=r"weight must be a plain tensor, got a DTensor; .*to_local.*tp=.*full_tensor"):
        sample(STATES, weight)
    with pytest.raises(TypeError, match=r"weight must be a plain tensor, got a DTensor"):
        flashsampling.LMHeadSampler(torch.nn.Parameter(weight))
    with pytest.raises(TypeError, match=r"hidden_states must be a plain tensor, got a DTensor; .*full_tensor"):
        sample(states, WEIGHT)


@pytest.mark.parametrize("name", typing.get_type_hints(SamplingOptions))
def test_no_parameter_is_ignored_where_it_is_the_only_one(name):
    """``sample`` parses nothing if all parameters are left out: its condition names each of them."""
    with pytest.raises((TypeError, ValueError), match=name):
        flashsampling.sample(torch.zeros(2, 8), torch.zeros(16, 8), seed=torch.arange(2), **{name: object()})
