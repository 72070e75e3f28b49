"""``warmup``: nothing is compiled after it, and nothing of the caller's changes."""

import contextlib
import itertools
import logging
import warnings
from types import SimpleNamespace

import pytest
import torch

import flashsampling
from flashsampling import ops
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import PACKED, Shard
from flashsampling.tensor_parallel import TensorParallel
from flashsampling.tensor_parallel.transport import SingleRank
from flashsampling.warmup import warmup_mixes
from tests.kernels.triton.target import LaunchKeys, output_of
from tests.problems import KERNELS, make_problem

KINDS = list(itertools.product((False, True), repeat=3))


def draw(problem, batch, numbers, num_samples=1, impl="triton", tp=None):
    """A draw of the first rows, with those of (temperature, seed, offset) that ``numbers`` names as numbers."""
    rows = {name: getattr(problem, name)[:batch] for name in ("temperature", "seed", "offset")}
    rows |= {name: value[0].item() for (name, value), number in zip(rows.items(), numbers) if number}
    return flashsampling.sample(
        problem.hidden_states[:batch], problem.weight, **rows, num_samples=num_samples, impl=impl, tp=tp
    ).token_ids


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 264), (torch.bfloat16, 61), (torch.bfloat16, 1), (torch.float32, 24)]
)
@pytest.mark.parametrize("num_samples", [1, 2])
def test_keys_of_the_cache_after_warmup(use_tma, dtype, dim, num_samples, monkeypatch, device):
    """Every batch size, kind of parameter, alignment and stride of what changes between calls: the keys that warmup
    made."""
    from flashsampling.kernels.triton.fused import config, kernel, launch

    keys = LaunchKeys(kernel.sample_kernel)
    monkeypatch.setattr(launch, "sample_kernel", keys)
    if use_tma:

        def choose(states, weight, num_samples):
            on = config._tma_addressable(weight) and dtype != torch.float32
            return config.shape_for(states.shape[0], states.shape[1], states.dtype, num_samples, on)

        monkeypatch.setattr(launch, "choose_config", choose)
        monkeypatch.setattr(config, "choose_config", choose)
    problem = make_problem(300, 5, dim, device, dtype)
    names = flashsampling.warmup(problem.weight, max_batch_size=300, num_samples=num_samples, impl="triton")
    made = set(keys.seen)
    assert len(made) == len(names) >= 2
    for batch in range(1, 301):
        for numbers in KINDS if batch < 20 else KINDS[::7]:
            draw(problem, batch, numbers, num_samples)
    wide = torch.zeros(300, 3, dim + 3, dtype=dtype, device=device)
    for states in (
        wide[:, -1, :dim],
        wide[:, 1, 3:],
        wide[1:2, 0, 1 : 1 + dim],
        torch.zeros(dim, 9, dtype=dtype, device=device).T,
    ):
        problem.hidden_states = states
        draw(problem, len(states), KINDS[0], num_samples)
    moved = torch.zeros(303, dtype=torch.int64, device=device)[3:]  # not at a multiple of 16 bytes
    problem.hidden_states, problem.seed, problem.offset = (
        torch.zeros(300, dim, dtype=dtype, device=device),
        moved,
        moved,
    )
    problem.temperature = torch.zeros(303, device=device)[3:]
    draw(problem, 17, KINDS[0], num_samples)
    assert keys.seen == made


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_the_triton_kernels_shapes_up_to_a_batch(use_tma, dtype, num_samples, monkeypatch):
    """All that batches up to it need, of weights that are TMA's and of others, and the names of this weight's."""
    from flashsampling.kernels.triton.fused import config

    def shape(batch, use_tma):
        return config.shape_for(batch, 4096, dtype, num_samples, use_tma and dtype != torch.float32)

    monkeypatch.setattr(config, "choose_config", lambda states, *_: shape(states.shape[0], use_tma))
    names, batches = config.compiled_for(torch.zeros(5, 4096, dtype=dtype), 600, num_samples)
    for on in (False, True):
        assert {shape(batch, on) for batch in batches} == {shape(batch, on) for batch in range(1, 601)}
    assert batches == sorted(set(batches))
    wanted = {str(shape(batch, use_tma)) for batch in range(1, 601)}
    assert len(names) == len(set(names)) == 2 * len(wanted)
    assert {name.split(" ", 2)[2].split("), ")[0] + ")" for name in names} == wanted


WHO_RUNS = """
import threading
import torch
from tests.kernels.triton.target import compile_only
from triton.runtime.jit import JITFunction
from flashsampling.kernels.triton import jit
from flashsampling.kernels.triton.speculative.draft_chains import hashed

compiled = compile_only(80)
launch, said = JITFunction.run, []

def run(self, *arguments, grid, warmup, **options):
    said.append((threading.current_thread().name, "compiles" if warmup else "runs"))
    if warmup == "never":
        raise RuntimeError
    launch(self, *arguments, grid=grid, warmup=warmup, **options)

JITFunction.run = run
draw = lambda: hashed(torch.zeros(8, dtype=torch.int64), None, 2, 4)
with jit.compiling(2):
    draw()
    other = threading.Thread(target=draw, name="other")
    other.start()
    other.join()
draw()
try:
    with jit.compiling(2):
        raise KeyError
except KeyError:
    draw()
print(*(f"{who}:{what}" for who, what in said), len({kernel.hash for kernel in compiled[1:]}))
"""


INTERRUPTED = """
import torch
from concurrent.futures import Future
from tests.kernels.triton.target import compile_only
from triton.runtime import _async_compile
from flashsampling.kernels.triton import jit
from flashsampling.kernels.triton.speculative.draft_chains import hashed

compile_only(80)
draw = lambda: hashed(torch.zeros(8, dtype=torch.int64), None, 2, 4)
result = Future.result

def interrupted(*_):
    raise KeyboardInterrupt

Future.result = interrupted
try:
    with jit.compiling(1):
        draw()
except KeyboardInterrupt:
    Future.result = result
print(_async_compile.active_mode.get(), jit._only_compiles.get())
with jit.compiling(1):
    draw()
draw()
print("as ever")
"""


FAILS = """
import time
from flashsampling.kernels.triton import jit
from triton.runtime import _async_compile

for error in (ValueError, KeyboardInterrupt):
    made = []
    try:
        with jit.compiling(1):
            for key in range(9):
                compile = lambda: (time.sleep(0.5), made.append(1))
                mode = _async_compile.active_mode.get()
                callbacks = mode.submit.__code__.co_argcount - 3  # Triton 3.6 has one
                mode.submit((error, key), compile, *[lambda kernel: None] * callbacks)
            time.sleep(0.1)
            raise error
    except error:
        print(len(made), _async_compile.active_mode.get(), jit._only_compiles.get())
"""


CANNOT = """
import torch
import triton
from tests.kernels.triton.target import compile_only
from flashsampling.kernels.triton import jit
from flashsampling.kernels.triton.speculative.draft_chains import hashed
import triton.backends.nvidia.compiler as backend

compile_only(80)
backend.CUDABackend.make_ptx = lambda *_, **__: 1 / 0
draw = lambda: hashed(torch.zeros(8, dtype=torch.int64), None, 2, 4)
with jit.compiling(2):
    draw()
try:
    draw()
except ZeroDivisionError:
    print("raised")
with jit.compiling(2):
    print("again")
"""


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("script", "printed"),
    [
        # and all others run, other threads too, and it again behind that or an error
        pytest.param(
            WHO_RUNS,
            "MainThread:compiles other:runs MainThread:runs MainThread:runs 1",
            id="who compiles runs nothing meanwhile",
        ),
        pytest.param(INTERRUPTED, "None False as ever", id="an interrupt leaves nothing behind"),
        pytest.param(FAILS, "1 None False 1 None False", id="an error does not wait for what has not begun"),
        pytest.param(CANNOT, "raised again", id="what cannot be compiled is the launch's error"),
    ],
)
def test_compiling(script, printed, tmp_path):
    assert output_of(script, cache=tmp_path).split() == printed.split()


@pytest.mark.parametrize("dim", [64, 1792, 2048, 4096])
@pytest.mark.parametrize("most", [1, 64, 193, 256, 600])
def test_the_hopper_kernels_shapes_up_to_a_batch(dim, most):
    """All that batches up to it need, and no others: each is seconds of compiling."""
    from flashsampling.kernels.hopper.config import choose_config, compiled_for

    names, batches = compiled_for(torch.empty(1, dim, dtype=torch.float16), most, 1)
    wanted = {choose_config(batch, dim) for batch in range(1, most + 1)}
    assert {choose_config(batch, dim) for batch in batches} == wanted
    assert len(batches) == len(wanted)
    assert names == [f"cute float16 {choose_config(batch, dim)}" for batch in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("num_samples", [1, 3])
def test_compiles_nothing_after_warmup(num_samples, device):
    from flashsampling.kernels.triton.fused.kernel import sample_kernel

    problem = make_problem(300, 3000, 264, device, torch.bfloat16)
    flashsampling.warmup(problem.weight, max_batch_size=300, num_samples=num_samples, impl="triton")
    cache = sample_kernel.device_caches[device.index][0]
    made = set(cache)
    for batch in range(1, 301):
        for numbers in KINDS:
            draw(problem, batch, numbers, num_samples)
    flashsampling.warmup(problem.weight, max_batch_size=300, num_samples=num_samples, impl="triton")
    assert set(cache) == made


@pytest.mark.parametrize("impl", ["reference", "streaming", *KERNELS, None])
def test_says_what_it_makes_and_changes_nothing(impl, device, caplog):
    warnings.simplefilter("error", UserWarning)  # that rows share a seed, say; pytest puts the filters back
    problem = make_problem(3, 300, 16, device, torch.bfloat16)
    weight, state = problem.weight.clone(), torch.get_rng_state()
    on_device = torch.cuda.get_rng_state() if device.type == "cuda" else None
    with caplog.at_level(logging.INFO, logger="flashsampling"):
        names = flashsampling.warmup(problem.weight, max_batch_size=20, impl=impl)
    assert torch.equal(problem.weight, weight)
    assert torch.equal(torch.get_rng_state(), state)
    assert on_device is None or torch.equal(torch.cuda.get_rng_state(), on_device)
    compiled = impl in KERNELS or (impl is None and device.type == "cuda")
    assert bool(names) == compiled == bool(caplog.messages)
    assert len(set(names)) == len(names)
    for name in names:
        assert name in caplog.messages[0]
    assert flashsampling.warmup(problem.weight, max_batch_size=20, impl=impl) == names


def test_with_a_group_no_more_rows_than_it_has_room_for(process_group):
    """Before the first step: else this rank had made some, and counted one that it left out."""
    weight = torch.zeros(300, 16)
    with TensorParallel(None, weight, max_batch_size=4) as tp:
        assert flashsampling.warmup(weight, tp=tp, max_batch_size=4) == flashsampling.warmup(weight, tp=tp) == []
        with pytest.raises(ValueError, match=r"max_batch_size must be at most tp\.max_batch_size = 4, got 5"):
            flashsampling.warmup(weight, tp=tp, max_batch_size=5)
        assert tp.skipped_calls == 1


@pytest.mark.parametrize(
    ("error", "message", "change"),
    [
        (ValueError, "max_batch_size must be at least 1, got 0", {"max_batch_size": 0}),
        (TypeError, "max_batch_size must be an int", {"max_batch_size": 2.5}),
        (ValueError, "weight must have 2 dimensions", {"weight": torch.zeros(16)}),
        (TypeError, "weight must be a", {"weight": [1.0]}),
        (TypeError, r"weight must be bfloat16, .* got torch\.float64", {"weight": torch.zeros(300, 16).double()}),
        (TypeError, "tp must be a", {"tp": "tp"}),
        (ValueError, "impl must be None or one of", {"impl": "magic"}),
        (ValueError, "num_samples must be from 1", {"num_samples": 0}),
        (ValueError, "vocab_size must be from 1 to the 300", {"vocab_size": 301}),
        (TypeError, "unexpected argument 'top_n'", {"top_n": 3}),
    ],
)
def test_refuses_what_sample_refuses(error, message, change):
    with pytest.raises(error, match=message):
        flashsampling.warmup(**{"weight": torch.zeros(300, 16)} | change)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params", [{"top_k": (50, 404)}, {"top_k": (404, 1)}, {"min_p": (0.5, 1e-6)}, {"top_p": (0.5, 0.9)}]
)
def test_a_number_of_another_value_compiles_nothing(params, device):
    """Also where the Hopper kernel leaves out blocks for the one value and not for the other."""
    if device.type != "cuda":
        pytest.skip("nothing is compiled")
    from flashsampling.kernels.triton.filtered import filtered_sample_kernel

    problem = make_problem(20, 3000, 16, device, torch.bfloat16)
    ((name, (first, second)),) = params.items()
    flashsampling.warmup(problem.weight, max_batch_size=20, **{name: first})
    made = set(filtered_sample_kernel.filtered_sample_kernel.device_caches[device.index][0])
    flashsampling.sample(problem.hidden_states, problem.weight, temperature=0.7, **{name: second})
    assert set(filtered_sample_kernel.filtered_sample_kernel.device_caches[device.index][0]) == made


@pytest.mark.parametrize("use_tma", [False, True])
def test_keys_of_the_cache_for_what_requests_ask_for(use_tma, monkeypatch, device):
    """Of the kernels behind a request, where parts of one allocation lie too: any batch has the keys that warmup
    made."""
    from flashsampling.kernels.triton.filtered import dispatch
    from flashsampling.kernels.triton.fused import config, logits_gemm

    kernels = {}
    for module, name in (
        (dispatch, "block_stats_kernel"),
        (dispatch, "filtered_sample_kernel"),
        (dispatch, "logprobs_kernel"),
        (logits_gemm, "logits_gemm_kernel"),
    ):
        kernels[name] = LaunchKeys(getattr(module, name))
        monkeypatch.setattr(module, name, kernels[name])

    def choose(states, weight, num_samples):
        return config.shape_for(states.shape[0], states.shape[1], states.dtype, num_samples, use_tma)

    monkeypatch.setattr(logits_gemm, "choose_config", choose)
    monkeypatch.setattr(config, "choose_config", choose)
    problem = make_problem(70, 300, 16, device, torch.bfloat16)
    counts = flashsampling.TokenCounts(70, 300, device)
    request = {
        "top_k": torch.full((70,), 5, device=device),
        "top_p": 0.9,
        "token_counts": counts,
        "presence_penalty": 0.5,
        "token_mask": torch.full((70, 10), -1, dtype=torch.int32, device=device),
        "return_logprobs": True,
        "top_logprobs": 3,
        "logprob_ids": torch.zeros(70, 5, dtype=torch.int64, device=device),
    }
    names = flashsampling.warmup(problem.weight, max_batch_size=70, impl="triton", **request)
    asked_for = "token_counts, presence_penalty, token_mask, top_k, top_p, return_logprobs, top_logprobs, logprob_ids"
    assert all(name.endswith(f" with {asked_for}") for name in names)
    assert not counts.counts.any()  # no count of the caller's is advanced
    made = {name: set(keys.seen) for name, keys in kernels.items()}
    for batch in range(1, 71):
        rows = {name: x[:batch] if isinstance(x, torch.Tensor) else x for name, x in request.items()}
        rows["seed"] = torch.arange(batch, device=device)
        flashsampling.sample(problem.hidden_states[:batch], problem.weight, temperature=0.7, impl="triton", **rows)
    assert {name: keys.seen for name, keys in kernels.items()} == made


class _OnGpu(torch.Tensor):
    is_cuda = True  # type: ignore[assignment] # as far as the host looks


@pytest.fixture
def on_gpu(monkeypatch, device):
    """A weight on a GPU that does nothing."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    return torch.zeros(64, 16, device=device).as_subclass(_OnGpu)


@pytest.mark.parametrize("impl", ["streaming", "reference", None])
def test_a_request_of_what_compiles_nothing(impl, on_gpu, monkeypatch):
    """On a GPU too."""
    monkeypatch.setattr(ops, "_run_on_device", lambda inputs, run: run(inputs))
    monkeypatch.setattr(BACKENDS["triton"], "missing", "is not there")
    assert flashsampling.warmup(on_gpu, max_batch_size=3, impl=impl, top_p=0.5) == []


def test_ranks_rehearse_what_requests_ask_for(device, on_gpu, monkeypatch):
    """Each by itself, while others wait for it, once for all mixes, the widest first. Then all make the steps."""
    pytest.importorskip("triton")
    from flashsampling.kernels import triton as backend

    inside: list[str] = []
    calls: list[tuple[str, tuple[str, ...], object, tuple[str, ...]]] = []

    @contextlib.contextmanager
    def within(name):
        inside.append(name)
        yield
        inside.remove(name)

    class Group(TensorParallel):
        impl, part, shard, vocab_size, num_rows = "triton", (64, Shard(64, PACKED)), Shard(64, PACKED), 128, 128
        name, max_batch_size, max_num_samples, _transport = "", 4, 1, SingleRank()

        def __init__(self):
            pass

        def busy(self):
            return within("busy")

    def noted(kind):
        def call(step, **group):
            assert step.shard == Group.shard
            calls.append((kind, tuple(step.params.names()), step.params.top_k, tuple(inside)))

        return call

    monkeypatch.setattr(backend.fused.config, "capability", lambda device: (9, 0))
    monkeypatch.setattr(backend, "compiling", lambda at_once: within("compiling"))
    monkeypatch.setattr(ops, "dry_run", noted("rehearsed"))
    monkeypatch.setattr(ops, "sample_sharded", noted("drawn"))
    ones = torch.ones(1, device=device)
    requests = [{}, {"top_p": ones}, {"top_p": 1.0}, {"top_k": 5, "top_p": ones}]
    names = warmup_mixes(on_gpu, requests, max_batch_size=1, tp=Group())  # type: ignore[arg-type]
    both = [(("top_k", "top_p"), 5)]
    top_p = [(("top_p",), 0)]
    assert calls == [
        *(("rehearsed", *each, ("busy", "compiling")) for each in both + top_p),
        *(("drawn", *each, ()) for each in [((), 0)] * 2 + top_p + [((), 0)] * 2 + both),
    ]
    assert sum(name.endswith("with top_p") for name in names) == 1
    assert len(names) == 6


@pytest.mark.gpu
def test_what_was_compiled_ahead_is_not_compiled_again(device):
    """Of one row, whose keys are those of most other batch sizes; and another thread's first draw finds it whole."""
    if device.type != "cuda":
        pytest.skip("nothing is compiled")
    from flashsampling.integrations.engine.kernel_variants import default_rows, example_calls
    from flashsampling.kernels.triton.filtered.filtered_sample_kernel import filtered_sample_kernel

    def calls(batch):
        counts = flashsampling.TokenCounts(batch, 320, device).read(batch)
        return example_calls(default_rows(batch, device), 320, counts)

    weight = torch.zeros(320, 64, dtype=torch.bfloat16, device=device)
    warmup_mixes(weight, calls(1), max_batch_size=1, vocab_size=320)
    made = set(filtered_sample_kernel.device_caches[device.index][0])
    for request in calls(20):
        flashsampling.warmup(weight, max_batch_size=20, vocab_size=320, **request)
    assert set(filtered_sample_kernel.device_caches[device.index][0]) == made
