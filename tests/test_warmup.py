"""``warmup``: nothing is compiled after it, and nothing of the caller's changes."""

import itertools
import logging
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
import torch.distributed as dist

import flashsampling
from flashsampling.distributed import TensorParallel
from flashsampling.requests import Problem, asked_of
from flashsampling.step import Step
from flashsampling.warmup import Plan, compile_ahead, side_by_side
from tests.problems import KERNELS, make_problem

KINDS = list(itertools.product((False, True), repeat=3))


def draw(problem, batch, numbers, num_samples=1, impl="triton", tp=None):
    """A draw of the first rows, with those of (temperature, seed, offset) that ``numbers`` names as numbers."""
    rows = {name: getattr(problem, name)[:batch] for name in ("temperature", "seed", "offset")}
    rows |= {name: value[0].item() for (name, value), number in zip(rows.items(), numbers) if number}
    return flashsampling.sample(
        problem.hidden_states[:batch], problem.weight, **rows, num_samples=num_samples, impl=impl, tp=tp
    ).token_ids


class _Keys:
    """Stands in for the kernel: collects what Triton would look up in its cache, and runs nothing."""

    def __init__(self, kernel):
        from triton.backends.compiler import GPUTarget
        from triton.compiler import make_backend
        from triton.runtime.jit import JITFunction, create_function_from_signature

        jit = kernel if isinstance(kernel, JITFunction) else JITFunction(kernel.fn, **kernel.kwargs)
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self.bind = create_function_from_signature(jit.signature, jit.params, backend)
        self.seen = set()

    def __getitem__(self, grid):
        return self

    def __call__(self, *arguments, **named):
        _, specialization, options = self.bind(*arguments, **named)
        self.seen.add(str((specialization, options)))


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize(
    ("dtype", "dim"), [(torch.bfloat16, 264), (torch.bfloat16, 61), (torch.bfloat16, 1), (torch.float32, 24)]
)
@pytest.mark.parametrize("num_samples", [1, 2])
def test_keys_of_the_cache_after_warmup(use_tma, dtype, dim, num_samples, monkeypatch, device):
    """Every batch size, kind of parameter, alignment and stride of what changes between calls: the keys that warmup made."""
    from flashsampling.impl.triton import config, kernel, launch

    keys = _Keys(kernel.sample_kernel)
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
    problem.hidden_states, problem.seed, problem.offset = torch.zeros(300, dim, dtype=dtype, device=device), moved, moved
    problem.temperature = torch.zeros(303, device=device)[3:]
    draw(problem, 17, KINDS[0], num_samples)
    assert keys.seen == made


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 8)


@pytest.mark.parametrize("in_turn", [False, True])
def test_one_draw_after_another_or_at_once(in_turn, device, eight_cores):
    """At once, in threads that stand where the caller stands, after the one call before; or in the caller's own, in order."""
    together = threading.Barrier(6)
    drawn: list[tuple] = []
    begun: list[int] = []

    def draw(states, temperature, zeros):
        if not in_turn:
            together.wait(timeout=60)
        modes = threading.get_ident(), torch.is_inference_mode_enabled()
        stream = torch.cuda.current_stream() if states.is_cuda else None
        drawn.append((len(states), isinstance(temperature, torch.Tensor), *modes, stream))
        assert len(zeros) == len(states)

    own = torch.cuda.Stream() if device.type == "cuda" else None
    with torch.inference_mode(), torch.cuda.stream(own):
        plan = Plan(["a", "b", "c", "d", "e", "f"], [[1], [17], [33]], lambda: begun.append(len(drawn)))
        plan.draw(torch.zeros(9, 8, device=device), draw, in_turn=in_turn)
    assert begun == ([] if in_turn else [0])
    calls = [(batch, per_row) for batch in (1, 17, 33) for per_row in (True, False)]
    assert [call[:2] for call in drawn] == calls if in_turn else sorted(call[:2] for call in drawn) == sorted(calls)
    threads = {call[2] for call in drawn}
    assert threads == {threading.get_ident()} if in_turn else len(threads) == 6
    assert all(call[3:] == (True, own) for call in drawn)


def test_a_draw_that_fails_at_once_with_others_is_the_callers_error():
    def draw(states, temperature, zeros):
        if len(states) == 17:
            raise ValueError("no room for 17")

    with pytest.raises(ValueError, match="no room for 17"):
        Plan(["a"], [[1], [17], [33]], lambda: None).draw(torch.zeros(9, 8), draw)


def test_draws_of_one_kernel_are_one_threads(eight_cores):
    """A kernel that another thread has compiled may not be loaded yet."""
    threads: dict[tuple[int, bool], int] = {}
    together = threading.Barrier(2)  # of both kernels of the second shape, however slow the machine

    def draw(states, temperature, zeros):
        if len(states) == 17:
            together.wait(timeout=60)
        threads[len(states), isinstance(temperature, float)] = threading.get_ident()

    plan = Plan([], [[1, 40], [17, 33, 65], [129]], lambda: None)
    plan.draw(torch.zeros(9, 8), draw)
    assert len(threads) == 12
    assert threading.get_ident() not in threads.values()
    for kind in (False, True):
        assert threads[17, kind] == threads[33, kind] == threads[65, kind]
        assert threads[1, kind] == threads[40, kind]
    assert threads[17, False] != threads[17, True]
    in_turn: list[int] = []
    plan.draw(torch.zeros(9, 8), lambda states, *_: in_turn.append(len(states)), in_turn=True)
    assert in_turn == [1, 1, 17, 17, 33, 33, 40, 40, 65, 65, 129, 129]


@pytest.mark.parametrize("use_tma", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_batches_of_one_kernel_stand_together(use_tma, dtype, num_samples, monkeypatch):
    from flashsampling.impl.triton import config

    def choose(states, weight, num_samples):
        on = use_tma and dtype != torch.float32
        return config.shape_for(states.shape[0], states.shape[1], states.dtype, num_samples, on)

    monkeypatch.setattr(config, "choose_config", choose)
    weight = torch.zeros(5, 4096, dtype=dtype)
    names, batches = config.compiled_for(weight, 600, num_samples)
    shapes = [{choose(torch.zeros(batch, 4096, dtype=dtype), weight, num_samples) for batch in some} for some in batches]
    assert all(len(some) == 1 for some in shapes)
    assert len(set().union(*shapes)) == len(batches) == len(names) / 2


AT_ONCE = """
import sys
import torch
from tests.triton_target import compile_only
from flashsampling.impl.triton import jit, launch
from flashsampling.step import Step
from flashsampling.warmup import Plan

compiled = compile_only(int(sys.argv[1]))
launch.multiprocessors = lambda device: 100
weight = torch.zeros(500, 264, dtype=torch.bfloat16)

def draw(states, temperature, zeros):
    launch.run(Step(states, weight, temperature, zeros, zeros, 1, 500))

plan = Plan([], [[1], [17], [33]], lambda: jit.begin(torch.device("cuda", 0)))
for _ in range(2):
    plan.draw(weight, draw)
print(len(compiled), len({kernel.hash for kernel in compiled}), len({id(kernel) for kernel in compiled}))
"""


def test_triton_compiles_at_once_what_it_compiles_in_turn(tmp_path):
    """Each kernel once, and found again."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", AT_ONCE, "80"]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert said.returncode == 0, said.stderr
    assert said.stdout.split() == ["12", "6", "6"]


@pytest.mark.parametrize("dim", [64, 1792, 2048, 4096])
@pytest.mark.parametrize("most", [1, 64, 193, 256, 600])
def test_the_hopper_kernels_shapes_up_to_a_batch(dim, most):
    """All that batches up to it need, and no others: each is seconds of compiling."""
    from flashsampling.impl.cute.config import choose_config, compiled_for

    names, batches = compiled_for(torch.empty(1, dim, dtype=torch.float16), most, 1)
    wanted = {choose_config(batch, dim) for batch in range(1, most + 1)}
    assert {choose_config(batch, dim) for (batch,) in batches} == wanted
    assert len(batches) == len(wanted)
    assert names == [f"cute float16 {choose_config(batch, dim)}" for (batch,) in batches]


@pytest.mark.gpu
@pytest.mark.parametrize("num_samples", [1, 3])
def test_compiles_nothing_after_warmup(num_samples, device):
    from flashsampling.impl.triton.kernel import sample_kernel

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


def test_with_a_group_no_more_rows_than_it_has_room_for():
    """Before the first step: else this rank had made some, and counted one that it left out."""
    weight = torch.zeros(300, 16)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with TensorParallel(None, weight, max_batch_size=4) as tp:
            assert flashsampling.warmup(weight, tp=tp, max_batch_size=4) == flashsampling.warmup(weight, tp=tp) == []
            with pytest.raises(ValueError, match=r"max_batch_size must be at most tp\.max_batch_size = 4, got 5"):
                flashsampling.warmup(weight, tp=tp, max_batch_size=5)
            assert tp.left_out == 1
    finally:
        dist.destroy_process_group()


def test_refuses_what_sample_refuses(device):
    weight = torch.zeros(300, 16, device=device)
    with pytest.raises(ValueError, match="max_batch_size must be at least 1, got 0"):
        flashsampling.warmup(weight, max_batch_size=0)
    with pytest.raises(ValueError, match="weight must have 2 dimensions"):
        flashsampling.warmup(weight[0])
    with pytest.raises(TypeError, match="weight must be a"):
        flashsampling.warmup([1.0])
    with pytest.raises(TypeError, match="tp must be a"):
        flashsampling.warmup(weight, tp="tp")
    with pytest.raises(ValueError, match="impl must be None or one of"):
        flashsampling.warmup(weight, impl="magic")
    with pytest.raises(ValueError, match="num_samples must be from 1"):
        flashsampling.warmup(weight, num_samples=0)
    with pytest.raises(ValueError, match="vocab_size must be from 1 to the 300"):
        flashsampling.warmup(weight, vocab_size=301)


def test_the_package_imports_no_compiler():
    check = "import sys, flashsampling; flashsampling.warmup; assert not {'triton', 'cutlass'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_with_what_requests_ask_for(device):
    """Of its kinds: for any batch nothing is compiled after it, and no count of the caller's is advanced."""
    problem = make_problem(20, 300, 16, device, torch.bfloat16)
    counts = flashsampling.TokenCounts(20, 300, device)
    request = {
        "top_k": torch.full((20,), 5, device=device),
        "top_p": 0.9,
        "token_counts": counts,
        "presence_penalty": 0.5,
        "token_mask": torch.full((20, 10), -1, dtype=torch.int32, device=device),
        "return_logprobs": True,
    }
    names = flashsampling.warmup(problem.weight, max_batch_size=20, **request)
    assert not counts.counts.any()
    asked_for = "token_counts, presence_penalty, token_mask, top_k, top_p, return_logprobs"
    assert all(name.endswith(f" with {asked_for}") for name in names)
    assert bool(names) == (device.type == "cuda")
    with pytest.raises(TypeError, match="unexpected argument 'top_n'"):
        flashsampling.warmup(problem.weight, top_n=3)
    if device.type == "cuda":
        from flashsampling.impl.triton import logits_pick, logits_scan, products

        kernels = [logits_pick.pick_kernel, logits_scan.scan_kernel, products.products_kernel]
        made = [set(kernel.device_caches[device.index][0]) for kernel in kernels]
        for batch in range(1, 21):
            rows = {name: value[:batch] if isinstance(value, torch.Tensor) else value for name, value in request.items()}
            seeds = torch.arange(batch, device=device)
            flashsampling.sample(problem.hidden_states[:batch], problem.weight, temperature=0.7, seed=seeds, **rows)
        assert [set(kernel.device_caches[device.index][0]) for kernel in kernels] == made


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [{"top_k": (50, 404)}, {"top_k": (404, 1)}, {"min_p": (0.5, 1e-6)}, {"top_p": (0.5, 0.9)}])
def test_a_number_of_another_value_compiles_nothing(asked, device):
    """Also where the kernel before ``pick`` leaves out chunks for the one and not for the other."""
    if device.type != "cuda":
        pytest.skip("nothing is compiled")
    from flashsampling.impl.triton import logits_pick

    problem = make_problem(20, 3000, 16, device, torch.bfloat16)
    ((name, (first, second)),) = asked.items()
    flashsampling.warmup(problem.weight, max_batch_size=20, **{name: first})
    made = set(logits_pick.pick_kernel.device_caches[device.index][0])
    flashsampling.sample(problem.hidden_states, problem.weight, temperature=0.7, **{name: second})
    assert set(logits_pick.pick_kernel.device_caches[device.index][0]) == made


@pytest.mark.parametrize("use_tma", [False, True])
def test_keys_of_the_cache_for_what_requests_ask_for(use_tma, monkeypatch, device):
    """Of the three kernels behind a request, where parts of one allocation lie too: any batch has the keys that warmup made."""
    from flashsampling.impl.triton import config, logits, products

    kernels = {
        name: _Keys(getattr(module, name))
        for module, name in ((logits, "scan_kernel"), (logits, "pick_kernel"), (products, "products_kernel"))
    }
    for module, name in ((logits, "scan_kernel"), (logits, "pick_kernel"), (products, "products_kernel")):
        monkeypatch.setattr(module, name, kernels[name])

    def choose(states, weight, num_samples):
        return config.shape_for(states.shape[0], states.shape[1], states.dtype, num_samples, use_tma)

    monkeypatch.setattr(products, "choose_config", choose)
    monkeypatch.setattr(config, "choose_config", choose)
    problem = make_problem(70, 300, 16, device, torch.bfloat16)
    request = {
        "top_k": torch.full((70,), 5, device=device),
        "top_p": 0.9,
        "token_counts": flashsampling.TokenCounts(70, 300, device),
        "presence_penalty": 0.5,
        "token_mask": torch.full((70, 10), -1, dtype=torch.int32, device=device),
        "return_logprobs": True,
        "top_logprobs": 3,
        "logprob_ids": torch.zeros(70, 5, dtype=torch.int64, device=device),
    }
    flashsampling.warmup(problem.weight, max_batch_size=70, impl="triton", **request)
    made = {name: set(keys.seen) for name, keys in kernels.items()}
    for batch in range(1, 71):
        rows = {name: value[:batch] if isinstance(value, torch.Tensor) else value for name, value in request.items()}
        seed = torch.arange(batch, device=device)
        hidden_states = problem.hidden_states[:batch]
        flashsampling.sample(hidden_states, problem.weight, temperature=0.7, seed=seed, impl="triton", **rows)
    assert {name: keys.seen for name, keys in kernels.items()} == made


def _mixes(batch, vocab, device):
    from flashsampling.integrations.vllm.step import example_of, mixes, no_rows

    counts = torch.zeros(batch, vocab, dtype=torch.int32, device=device)
    for in_registers in (False, True):
        for mix in mixes(in_registers):
            if request := example_of(mix, no_rows(batch, device), counts):
                yield request


@pytest.mark.parametrize("name", ["triton", "cute"])
def test_what_is_compiled_apart_shares_no_kernel(name, monkeypatch, device):
    """Of the mixes that an engine warms up, in groups: two threads never compile the same kernel."""
    pytest.importorskip("triton")
    if name == "cute":
        pytest.importorskip("cutlass")
    from flashsampling.impl.cute import asked as of_cute
    from flashsampling.impl.cute import launch
    from flashsampling.impl.triton import logits as of_triton

    keys = {each: _Keys(getattr(of_triton, each)) for each in ("scan_kernel", "pick_kernel")}
    for each, stand_in in keys.items():
        monkeypatch.setattr(of_triton, each, stand_in)
    vocab = 300

    def with_logits(step, draws, masses, *_):
        wanted = [torch.zeros(1, 12, device=device) if part else None for part in masses or (False, False)]
        of_chunks = torch.zeros(1, 12, dtype=torch.int32, device=device), *wanted
        return torch.zeros(1, vocab, device=device), of_chunks, torch.zeros(1, dtype=torch.int64, device=device)

    monkeypatch.setattr(of_cute, "with_logits", with_logits)
    monkeypatch.setattr(launch, "run", lambda *_: None)
    states, weight = torch.zeros(1, 16, device=device), torch.zeros(vocab, 16, device=device)
    zeros, logits = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, vocab, device=device)
    groups: dict[object, set[str]] = {}
    for request in _mixes(1, vocab, device):
        asked = asked_of(request, Problem(1, vocab, vocab, weight.device, 1))
        step = Step(states, weight, torch.ones(1, device=device), zeros, zeros, 1, vocab, asked=asked)
        for stand_in in keys.values():
            stand_in.seen = set()
        if name == "cute":
            of_cute.run(step)
        else:
            of_triton.run(step._replace(logits=logits))
        kernels = {f"{each} {key}" for each, stand_in in keys.items() for key in stand_in.seen}
        groups.setdefault((of_cute if name == "cute" else of_triton).compiled_apart(asked), set()).update(kernels)
    for one, other in itertools.combinations(groups.values(), 2):
        assert not one & other
    assert len([kernels for kernels in groups.values() if kernels]) >= 7


def test_triton_begins_with_the_kernel_that_all_requests_share(monkeypatch, device):
    """That of the matmul, which threads would compile at once."""
    pytest.importorskip("triton")
    from flashsampling.impl import triton as backend
    from flashsampling.impl.triton import config, products

    keys = _Keys(products.products_kernel)
    monkeypatch.setattr(products, "products_kernel", keys)
    for module in (products, config):
        monkeypatch.setattr(module, "choose_config", lambda *_: config.shape_for(1, 16, torch.bfloat16, 1, False))
    weight = torch.zeros(300, 16, dtype=torch.bfloat16, device=device)
    states, zeros = weight[:1].clone(), torch.zeros(1, dtype=torch.int64, device=device)
    plain = Step(states, weight, torch.ones(1, device=device), zeros, zeros, 1, 300)
    backend.begin(plain)
    assert not keys.seen  # a kernel of its own
    made: set[str] = set()
    for request in _mixes(1, 300, device):
        step = plain._replace(asked=asked_of(request, Problem(1, 300, 300, weight.device, 1)))
        if not made:
            backend.begin(step)
            made = set(keys.seen)
            assert len(made) == 1
        backend.run(step)
    assert keys.seen == made


def test_groups_are_drawn_side_by_side():
    """Of each group in turn, and what one raises is raised."""
    begun: list[str] = []
    threads: dict[str, set[int]] = {}
    barrier = threading.Barrier(4, timeout=30)

    def draw(each):
        begun.append(each)
        threads.setdefault(each[0], set()).add(threading.get_ident())
        barrier.wait()  # passes only if four groups are drawn at once

    side_by_side([["a0", "a1"], ["b0", "b1"], ["c0", "c1"], ["d0", "d1"]], draw, 4, torch.device("cpu"))
    assert sorted(begun) == [f"{group}{n}" for group in "abcd" for n in "01"]
    assert all(begun.index(f"{group}0") < begun.index(f"{group}1") for group in "abcd")
    assert all(len(of_group) == 1 for of_group in threads.values())

    def fails(each):
        if each == "b":
            raise RuntimeError("of b")

    with pytest.raises(RuntimeError, match="of b"):
        side_by_side([["a"], ["b"], ["c"]], fails, 2, torch.device("cpu"))
    side_by_side([], fails, 2, torch.device("cpu"))


@pytest.mark.gpu
def test_what_was_compiled_ahead_is_not_compiled_again(device):
    """Of one row, whose keys are those of most other batch sizes; and another thread's first draw finds it whole."""
    if device.type != "cuda":
        pytest.skip("nothing is compiled")
    from flashsampling.impl.triton.logits_pick import pick_kernel

    weight = torch.zeros(320, 64, dtype=torch.bfloat16, device=device)
    compile_ahead(weight, list(_mixes(1, 320, device)), vocab_size=320)
    made = set(pick_kernel.device_caches[device.index][0])
    for request in _mixes(20, 320, device):
        flashsampling.warmup(weight, max_batch_size=20, vocab_size=320, **request)
    assert set(pick_kernel.device_caches[device.index][0]) == made
