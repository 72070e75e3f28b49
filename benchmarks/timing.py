"""How every figure here is taken: CUDA-graph replays, interleaved, medians; the machine beside the numbers."""

import importlib.metadata
import platform
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]


def graph_of(step: Call) -> torch.cuda.CUDAGraph:
    """One call of step, captured after three eager ones."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def shuffled(names: Iterable[str], rounds: int) -> Iterator[list[str]]:
    """Yields the names in another order each round, the same orders in every process, so that a hot GPU meets all
    alike."""
    generator, names = random.Random(0), list(names)
    for _ in range(rounds):
        yield generator.sample(names, len(names))


def interleaved_medians(
    steps: Mapping[str, Call], rounds: int, offsets: Tensor | None = None, rest: Call | None = None
) -> dict[str, float]:
    """Returns the median milliseconds of a graph replay of every step, interleaved so that drifting clocks meet all
    alike.

    ``offsets``, the steps' own, advance before each replay, in place and untimed, so that a median is over different
    draws: of the same draw over and over, a step that a Philox word of 0 makes longer, one in a hundred, would be all
    that is seen. ``rest`` runs before each replay, untimed: what a decoder does between its steps, so that the GPU is
    as hot as there."""
    graphs = {name: graph_of(step) for name, step in steps.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in steps}
    for names in shuffled(graphs, rounds):
        for name in names:
            if offsets is not None:
                offsets += len(offsets)
            if rest is not None:
                rest()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graphs[name].replay()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}


def host_microseconds(step: Call, calls: int = 300) -> float:
    """Returns the median host time of an eager call in microseconds. The device must be faster than the host."""
    for _ in range(20):
        step()
    times = []
    for _ in range(calls):
        torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        times.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def read_bandwidth(rounds: int = 30) -> float:
    """Read-only bandwidth, TB/s: the sum of 2 GiB, the best of torch's reductions over a few shapes."""
    data: Tensor = torch.ones(1 << 29, dtype=torch.float32, device="cuda")
    steps = {str(rows): (lambda rows=rows: data.view(rows, -1).sum(dim=1)) for rows in (1, 1 << 10, 1 << 13, 1 << 16)}
    return data.numel() * 4 / min(interleaved_medians(steps, rounds).values()) * 1e3 / 1e12


def quartiles(name: str, ms: Iterable[float]) -> dict[str, Any]:
    """Returns the median of a result's row with the quartiles beside it."""
    found = [round(each, 4) for each in statistics.quantiles(ms)]
    return {name: found[1], f"{name}_quartiles": found}


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the libraries."""
    found = {"python": platform.python_version()}
    for package in (
        "torch",
        "triton",
        "nvidia-cutlass-dsl",
        "apache-tvm-ffi",
        "flashinfer-python",
        "vllm",
        "sglang",
        "numpy",
    ):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found | {"torch": torch.__version__}


def machine() -> dict[str, str]:
    """GPU, driver side and library versions."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "multiprocessors": str(torch.cuda.get_device_properties(0).multi_processor_count),
        "cuda": torch.version.cuda or "",
        **versions(),
    }
