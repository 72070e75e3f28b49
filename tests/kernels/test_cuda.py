"""What only a GPU can show: graphs, streams, synchronisation, devices, and what the kernel writes."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import flashsampling
from flashsampling import LMHeadSampler, workspace
from tests.conftest import run_python
from tests.problems import KERNELS, NEEDS_CUTE, assert_agreement, make_problem

pytestmark = pytest.mark.gpu


@pytest.fixture(params=KERNELS)
def kernel(request):
    return request.param


def capture(step):
    """A graph of step(), after an eager call that makes the workspace."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    return graph, out


@pytest.mark.parametrize(("batch", "num_samples"), [(1, 1), (70, 1), (5, 3)])
def test_graph_replays_draw_anew_and_give_the_eager_tokens(kernel, batch, num_samples, device):
    """Trap 5 and 12."""
    problem = make_problem(batch, 5000, 256, device, torch.bfloat16, num_samples, logit_std=0.5)
    graph, tokens = capture(lambda: problem.sample(kernel))
    seen = []
    for step in range(50):
        problem.offset.fill_(step)
        problem.hidden_states.copy_(torch.randn_like(problem.hidden_states))
        graph.replay()
        assert torch.equal(tokens, problem.sample(kernel))
        if step % 10 == 0:
            assert_agreement(tokens.clone(), problem)
        seen.append(tokens.clone())
    assert len(torch.stack(seen).unique(dim=0)) > 40


def test_module_in_a_graph_advances_its_own_offset(device):
    weight = torch.randn(5000, 64, device=device, dtype=torch.bfloat16) * 0.01
    x = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    captured, eager = (LMHeadSampler(weight, max_batch_size=8, seed=1) for _ in range(2))
    graph, tokens = capture(lambda: captured(x).token_ids)
    captured.reset(1)
    steps = []
    for _ in range(10):
        graph.replay()
        assert torch.equal(tokens, eager(x).token_ids)
        steps.append(tokens.clone())
    assert len(torch.stack(steps).unique(dim=0)) == 10


def kernel_nodes(graph, tmp_path):
    """Kinds of the nodes of a captured graph, from CUDA's own dump."""
    graph.debug_dump(str(tmp_path / "graph.dot"))
    dump = (tmp_path / "graph.dot").read_text()
    return dump.count("KERNEL"), dump.count("MEMSET") + dump.count("MEMCPY")


def test_a_step_is_one_kernel_node(kernel, device, tmp_path):
    problem = make_problem(70, 5000, 256, device, torch.bfloat16)
    problem.sample(kernel)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        problem.sample(kernel)
    kernels, others = kernel_nodes(graph, tmp_path)
    assert (kernels, others) == (1, 0)


def test_first_call_captured(kernel, device):
    """Without the arena the workspace comes from the graph's pool, zeroed by a node of the graph."""
    saved = dict(workspace._arenas)
    problem = make_problem(33, 3000, 128, device, torch.bfloat16)
    expected = problem.sample(kernel)
    workspace._arenas.clear()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tokens = problem.sample(kernel)
        for _ in range(3):
            tokens.fill_(-7)
            graph.replay()
            assert torch.equal(tokens, expected)
    finally:
        workspace._arenas.update(saved)


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
@pytest.mark.parametrize("what", ["sample", "module"])
def test_compile_modes_that_capture_graphs(mode, what, kernel, device):
    """Trap 28: several graphs alive, and shapes that change. A workspace made in the runs before a recording is no
    leak."""
    torch._dynamo.reset()
    workspace._per_stream.clear()
    workspace._arenas.clear()
    problem = make_problem(40, 3000, 128, device, torch.bfloat16)
    traced, eager = (LMHeadSampler(problem.weight, max_batch_size=64, seed=3, impl=kernel) for _ in range(2))

    def draw(states, seed, offset):
        tokens = flashsampling.sample(
            states * 2, problem.weight, temperature=0.7, seed=seed, offset=offset, impl=kernel
        )
        return tokens.token_ids + 1

    def step(states):
        return traced(states * 2, temperature=0.7).token_ids + 1

    compiled = torch.compile(draw if what == "sample" else step, mode=mode)
    outputs = []
    for batch in (40, 7, 40, 33):
        for turn in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            rows = problem.hidden_states[:batch].clone(), problem.seed[:batch].clone(), problem.offset[:batch] + turn
            if what == "sample":
                tokens, expected = compiled(*rows), draw(*rows)
            else:
                tokens, expected = compiled(rows[0]), eager(rows[0] * 2, temperature=0.7).token_ids + 1
            assert torch.equal(tokens, expected), (batch, turn)
            outputs.append(tokens.clone())
    assert not torch.equal(outputs[0], outputs[1])  # offsets move on
    assert all(int(buffer.count_nonzero()) == 0 for buffer in workspace._per_stream.values())
    torch._dynamo.reset()


def test_workspace_is_not_taken_from_a_pool_of_the_callers(kernel, device):
    """``torch.cuda.use_mem_pool``: what the workspace keeps must not be the pool's, which ends with it."""
    workspace._per_stream.clear()
    workspace._arenas.clear()
    problem = make_problem(40, 3000, 128, device, torch.bfloat16)
    expected = problem.sample("reference")
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        tokens = problem.sample(kernel)
    assert torch.equal(tokens, expected)
    kept = [*workspace._per_stream.values(), *(arena for arena, _ in workspace._arenas.values())]
    assert len(kept) == 2
    segments = [(part["address"], part["address"] + part["total_size"]) for part in pool.snapshot()]
    assert segments
    assert not [buffer for buffer in kept for first, last in segments if first <= buffer.data_ptr() < last]


def test_captured_without_a_synchronisation(kernel, device):
    """``capture_begin`` by itself, right after the call that makes the workspace."""
    workspace._per_stream.clear()
    workspace._arenas.clear()
    problem = make_problem(40, 3000, 128, device, torch.bfloat16)
    expected = problem.sample("reference")
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda._sleep(100_000_000)  # the current stream is busy, so whatever is queued on it is late
    problem.sample(kernel)
    with torch.cuda.stream(stream):
        graph.capture_begin()
        tokens = problem.sample(kernel)
        graph.capture_end()
        graph.replay()
        assert torch.equal(tokens, expected)
    torch.cuda.synchronize()


def test_the_first_launch_of_a_process_may_be_captured(kernel, device):
    """Before a kernel's module was ever loaded; what is compiled comes from the caches."""
    make_problem(20, 3000, 128, device, torch.bfloat16).sample(kernel)  # fills them
    code = f"""
import torch
from tests.problems import make_problem
problem = make_problem(20, 3000, 128, torch.device("cuda", 0), torch.bfloat16)
expected = problem.sample("reference")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    tokens = problem.sample({kernel!r})
for _ in range(3):
    tokens.fill_(-7)
    graph.replay()
    assert torch.equal(tokens, expected)
"""
    run_python(code)


@NEEDS_CUTE
def test_a_shape_may_be_compiled_while_a_graph_is_captured(device, tmp_path):
    """A batch of another size before met no capture, and the cache is empty."""
    code = """
import torch
from tests.problems import make_problem
problem = make_problem(200, 3000, 128, torch.device("cuda", 0), torch.bfloat16)
expected = problem.sample("triton")
problem.rows(slice(0, 8)).sample("cute")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    tokens = problem.sample("cute")
for _ in range(3):
    tokens.fill_(-7)
    graph.replay()
    assert torch.equal(tokens, expected)
"""
    run_python(code, FLASHSAMPLING_CACHE_DIR=str(tmp_path))
    assert len(list(tmp_path.glob("cute/*/*.o"))) == 2


def test_two_graphs_replayed_at_once_share_nothing(kernel, device):
    problems = [make_problem(64, 60_000, 512, device, torch.bfloat16, seed=s) for s in range(2)]
    expected = [p.sample(kernel) for p in problems]
    graphs = [capture(lambda p=p: p.sample(kernel)) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    for _ in range(100):
        for (graph, _), stream in zip(graphs, streams):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for (_, tokens), tokens_expected in zip(graphs, expected):
        assert torch.equal(tokens, tokens_expected)


def test_two_streams_at_once(kernel, device):
    """Trap 25."""
    problems = [make_problem(64, 60_000, 512, device, torch.bfloat16, seed=s) for s in range(2)]
    expected = [p.sample(kernel) for p in problems]
    streams = [torch.cuda.Stream() for _ in problems]
    torch.cuda.synchronize()
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(100):
        for index, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[index].append(problems[index].sample(kernel))
    torch.cuda.synchronize()
    for rows, tokens in zip(results, expected):
        assert all(torch.equal(row, tokens) for row in rows)


@pytest.mark.parametrize("impl", ["streaming", *KERNELS, None])
def test_no_host_synchronisation(impl, device):
    """Trap 23."""
    problem = make_problem(9, 3000, 128, device, torch.bfloat16)
    sampler = LMHeadSampler(problem.weight, max_batch_size=16, seed=0, impl=impl)
    problem.sample(impl)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        problem.sample(impl)
        flashsampling.sample(problem.hidden_states, problem.weight, temperature=0.5, seed=3, offset=4, impl=impl)
        flashsampling.sample(problem.hidden_states, problem.weight, temperature=problem.temperature, impl=impl)
        sampler(problem.hidden_states, temperature=problem.temperature)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("batch", "vocab"), [(1, 151936), (64, 128256), (256, 151936)])
def test_no_logits_in_memory(kernel, batch, vocab, device):
    problem = make_problem(batch, vocab, 256, device, torch.bfloat16)
    problem.sample(kernel)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    problem.sample(kernel)
    assert torch.cuda.max_memory_allocated() - before <= 64 * 1024


def test_configuration_is_decided_without_running_anything(device):
    """Trap 22: no autotuner, and a batch size never seen before compiles nothing new within its tile shape."""
    from flashsampling.kernels.triton.fused.kernel import sample_kernel

    problem = make_problem(64, 5000, 256, device, torch.bfloat16)
    problem.rows(slice(0, 40)).sample("triton")
    cache = sample_kernel.device_caches[device.index][0]
    before = len(cache)
    for batch in (33, 41, 47, 48, 63, 64):
        problem.rows(slice(0, batch)).sample("triton")
    assert len(cache) == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_any_device_index(kernel):
    problem = make_problem(5, 3000, 128, torch.device("cuda", 1), torch.bfloat16)
    assert torch.cuda.current_device() == 0
    assert_agreement(problem.sample(kernel), problem)


@NEEDS_CUTE
def test_cute_compiles_nothing_after_warmup(device, monkeypatch):
    """No batch size does; and what is on disk is not compiled again."""
    from flashsampling.kernels.hopper import cache, launch

    problem = make_problem(600, 300, 64, device, torch.bfloat16)
    expected = problem.sample("cute")
    flashsampling.warmup(problem.weight, max_batch_size=600, impl="cute")

    def refuse(*_):
        raise AssertionError("compiled while serving")

    monkeypatch.setattr(cache, "_compile", refuse)
    for batch in (1, 9, 17, 47, 50, 90, 100, 191, 193, 300, 385, 600):
        assert torch.equal(problem.rows(slice(0, batch)).sample("cute"), expected[:batch])
    assert list(cache.folder().glob("bfloat16_*.o"))
    monkeypatch.setattr(cache, "_kernels", {})
    launch._plan.cache_clear()
    assert torch.equal(problem.sample("cute"), expected)


@NEEDS_CUTE
def test_cute_from_many_threads_at_once(device):
    """The first calls race for the cache, all of them for the stream's workspace; each has its own stream."""
    from flashsampling.kernels.hopper import cache, launch

    problems = [make_problem(batch, 3000, 64, device, torch.float16, seed=batch) for batch in (1, 7, 33, 100, 250, 300)]
    expected = [problem.sample("triton") for problem in problems]
    torch.cuda.synchronize()
    cache._kernels.clear()
    launch._plan.cache_clear()

    def draw(problem):
        with torch.cuda.stream(torch.cuda.Stream()):
            tokens = [problem.sample("cute") for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return tokens

    with ThreadPoolExecutor(len(problems)) as pool:
        for tokens, problem, triton_tokens in zip(pool.map(draw, problems), problems, expected):
            assert all(torch.equal(row, tokens[0]) for row in tokens)
            if not torch.equal(tokens[0], triton_tokens):
                assert_agreement(tokens[0], problem)


@pytest.mark.slow
@pytest.mark.parametrize("batch", [3, 70, 200])
def test_a_hundred_thousand_replays(kernel, batch, device):
    """Fresh offsets every replay; a sample of them against the oracle, all of them in range."""
    problem = make_problem(batch, 20_000, 64, device, torch.bfloat16, logit_std=0.5)
    graph, tokens = capture(lambda: problem.sample(kernel))
    least, most = torch.full((2, batch, 1), 10_000, device=device)
    for step in range(100_000):
        problem.offset.add_(1)
        graph.replay()
        least, most = torch.minimum(least, tokens), torch.maximum(most, tokens)
        if step % 5000 == 0:
            assert_agreement(tokens.clone(), problem)
    assert least.min() >= 0
    assert most.max() < 20_000
