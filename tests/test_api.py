import subprocess
import sys
from dataclasses import FrozenInstanceError

import pytest
import torch

import flashsampling
from flashsampling import sample
from tests.conftest import DEVICE
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
    (ValueError, "weight must have at least one row", {"weight": WEIGHT[:0]}),
    (ValueError, "temperature must be at least 0, got -1", {"temperature": -1}),
    (ValueError, "temperature must be at least 0, got nan", {"temperature": float("nan")}),
    (TypeError, "temperature must be a float or a tensor, got str", {"temperature": "hot"}),
    (TypeError, "temperature must be a float or a tensor, got bool", {"temperature": True}),
    (TypeError, "temperature must be floating point, got torch.int64", {"temperature": torch.ones(3, dtype=torch.int64)}),
    (ValueError, r"temperature must be a number or have shape \(3,\), got shape \(4,\)", {"temperature": torch.ones(4)}),
    (ValueError, "temperature must be on the device", {"temperature": torch.ones(3, device="meta")}),
    (TypeError, "seed must be an int or an integer tensor, got float", {"seed": 1.0}),
    (TypeError, "seed must be an integer tensor, got torch.float32", {"seed": torch.ones(3)}),
    (TypeError, "seed must be an integer tensor, got torch.bool", {"seed": torch.ones(3, dtype=torch.bool)}),
    (ValueError, r"seed must be a number or have shape \(3,\), got shape \(3, 1\)", {"seed": torch.ones(3, 1, dtype=torch.int64)}),
    (ValueError, "seed must fit in 64 bits", {"seed": 2**64}),
    (ValueError, "offset must fit in 64 bits", {"offset": -(2**63) - 1}),
    (ValueError, r"num_samples must be from 1 to 2\*\*24, got 0", {"num_samples": 0}),
    (ValueError, r"num_samples must be from 1 to 2\*\*24, got 16777217", {"num_samples": 2**24 + 1}),
    (ValueError, "vocab_size must be from 1 to the 20 rows of weight, got 21", {"vocab_size": 21}),
    (ValueError, "vocab_size must be from 1 to the 20 rows of weight, got 0", {"vocab_size": 0}),
    (ValueError, "impl must be None or one of reference, streaming, triton, cute, got 'cuda'", {"impl": "cuda"}),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "change"), BAD_CALLS)
def test_errors_name_the_argument(error, message, change):
    arguments = {"hidden_states": STATES, "weight": WEIGHT, "seed": 0} | change
    with pytest.raises(error, match=message):
        sample(**arguments)


def test_a_named_implementation_never_falls_back(device):
    if device.type == "cpu":
        code = (
            "import torch, flashsampling\n"
            "for impl in ('triton', 'cute'):\n"
            "    try: flashsampling.sample(torch.ones(1, 8), torch.ones(9, 8), impl=impl)\n"
            "    except ValueError as error: print(error)"
        )
        # without the interpreter
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": ""}, check=True)
        assert "impl='triton' cannot do this: tensors on the CPU" in run.stdout
        assert "impl='cute' cannot do this: tensors on cpu, it runs on NVIDIA GPUs" in run.stdout
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


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_numbers_and_tensors_mean_the_same(impl, device):
    problem = make_problem(4, 300, 16, device, impl=impl)
    for temperature in (0.0, 0.7, 3):
        for seed, offset in ((5, 0), (-1, 7), (2**64 - 1, 2**40 + 3), (2**33, -9)):
            numbers = sample(
                problem.hidden_states, problem.weight, temperature=temperature, seed=seed, offset=offset, impl=impl
            )
            signed = (seed + 2**63) % 2**64 - 2**63
            tensors = sample(
                problem.hidden_states,
                problem.weight,
                temperature=torch.full((4,), float(temperature), device=device),
                seed=torch.full((4,), signed, device=device),
                offset=torch.full((4,), offset, device=device),
                impl=impl,
            )
            assert torch.equal(numbers.token_ids, tensors.token_ids)


def test_low_precision_and_strided_row_parameters(device):
    problem = make_problem(4, 300, 16, device)
    problem.seed, problem.offset = torch.arange(4, device=device), torch.arange(4, device=device) * 3
    problem.temperature = torch.tensor([0.5, 1.0, 0.0, 2.0], device=device)
    expected = problem.sample(None)
    problem.temperature = problem.temperature.bfloat16()
    problem.seed = problem.seed.to(torch.int32)
    problem.offset = torch.arange(8, device=device)[::2] * 3 // 2
    assert torch.equal(problem.sample(None), expected)


def test_seed_none_draws_anew_per_call_and_per_row(device):
    states, weight = torch.zeros(64, 8, device=device), torch.ones(1000, 8, device=device)
    torch.manual_seed(7)
    first, second = sample(states, weight).token_ids, sample(states, weight).token_ids
    assert len(first.unique()) > 50
    assert not torch.equal(first, second)
    torch.manual_seed(7)
    assert torch.equal(sample(states, weight).token_ids, first)


def test_output_is_frozen_and_the_inputs_untouched(device):
    problem = make_problem(4, 300, 16, device)
    before = [t.clone() for t in (problem.hidden_states, problem.weight, problem.temperature, problem.seed, problem.offset)]
    out = sample(
        problem.hidden_states, problem.weight, temperature=problem.temperature, seed=problem.seed, offset=problem.offset
    )
    after = (problem.hidden_states, problem.weight, problem.temperature, problem.seed, problem.offset)
    assert all(torch.equal(a, b) for a, b in zip(before, after))
    with pytest.raises(FrozenInstanceError):
        out.token_ids = None


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_opcheck(impl):
    problem = make_problem(4, 300, 16, DEVICE, impl=impl)
    arguments = (problem.hidden_states, problem.weight)
    rows = (problem.temperature, 0.0, problem.seed, 0, problem.offset, 0)
    numbers = (None, 0.7, None, 5, None, 6)
    for case in ((*rows, 1, 300, impl, ""), (*numbers, 3, 299, impl, "")):
        torch.library.opcheck(torch.ops.flashsampling.sample.default, (*arguments, *case))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic, device):
    problem = make_problem(6, 300, 16, device)

    def step(states, seed, offset):
        return sample(states * 2, problem.weight, temperature=0.8, seed=seed, offset=offset).token_ids + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for offset in (2, 3, 2**40):
        expected = step(problem.hidden_states, problem.seed, offset)
        assert torch.equal(compiled(problem.hidden_states, problem.seed, offset), expected)
    for batch in (3, 5):
        rows = problem.hidden_states[:batch], problem.seed[:batch], 9
        assert torch.equal(compiled(*rows), step(*rows))


def test_import_needs_neither_triton_nor_cutlass():
    code = (
        "import sys; import flashsampling;"
        "assert not [m for m in sys.modules if m.split('.')[0] in ('triton', 'cutlass', 'transformers')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("impl", "setup", "reason"),
    [
        (
            "cute",
            "import importlib.util as u; f = u.find_spec;"
            "u.find_spec = lambda n, p=None: None if n == 'nvidia_cutlass_dsl' else f(n, p)",
            "nvidia-cutlass-dsl is not installed (pip install flashsampling[cute])",
        ),
        (
            "cute",
            "import importlib.util as u, importlib.metadata as m; f, v = u.find_spec, m.version;"
            "u.find_spec = lambda n, p=None: n if n in ('nvidia_cutlass_dsl', 'tvm_ffi') else f(n, p);"
            "m.version = lambda n: '4.5.0' if n == 'nvidia-cutlass-dsl' else v(n)",
            "nvidia-cutlass-dsl 4.5.0 is installed, it needs 4.8.1 or newer",
        ),
        (
            "triton",
            "import sys; sys.modules['triton'] = None; import importlib.util as u; f = u.find_spec;"
            "u.find_spec = lambda n, p=None: None if n == 'triton' else f(n, p)",
            "triton is not installed",
        ),
        ("triton", "import triton; triton.__version__ = '3.4.0'", "triton 3.4.0 is installed, it needs 3.6 or newer"),
    ],
)
def test_works_without_a_kernel_that_serves(impl, setup, reason):
    code = (
        f"{setup}\nimport torch, flashsampling; x = torch.ones(2, 8); w = torch.ones(9, 8);"
        "print(flashsampling.sample(x, w, seed=1).token_ids)\n"
        f"try: flashsampling.sample(x, w, seed=1, impl={impl!r})\n"
        "except ValueError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert reason in run.stdout


def test_version_is_stated_once():
    assert flashsampling.__version__.count(".") == 2


@pytest.mark.parametrize("batch", [1, 8])
def test_streaming_never_holds_the_logits(batch):
    """Extra memory is O(B x chunk): the largest tensor that any operation returns has no vocabulary in it."""
    from torch.utils._python_dispatch import TorchDispatchMode

    vocab = 100_000
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for value in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() != weight_storage:
                    largest = max(largest, value.numel())
            return out

    problem = make_problem(batch, vocab, 8, torch.device("cpu"))
    weight_storage = problem.weight.untyped_storage().data_ptr()
    with Watch():
        sample(problem.hidden_states, problem.weight, seed=1, impl="streaming")
    assert 0 < largest <= batch * vocab / 4


def test_whoever_watches_sees_the_operator():
    """A plain call goes past the dispatcher; modes, tracers and the profiler still find one operator."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.profiler import ProfilerActivity, profile
    from torch.utils._python_dispatch import TorchDispatchMode

    class Names(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen.append(str(function))
            return function(*args, **(kwargs or {}))

    def draw(states):
        return sample(states, WEIGHT, seed=3).token_ids

    expected = draw(STATES)
    with Names() as mode:
        tokens = draw(STATES)
    assert torch.equal(tokens, expected)
    assert mode.seen == ["flashsampling.sample.default"]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        draw(STATES)
    assert "flashsampling::sample" in {event.key for event in profiler.key_averages()}
    traced = make_fx(draw)(STATES)
    assert [str(node.target) for node in traced.graph.nodes if node.op == "call_function"] == ["flashsampling.sample.default"]
    assert torch.equal(traced(STATES), expected)
