"""Sizes of CUDA graphs, and the memory that they take, without a GPU."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from flashsampling.integrations.engine.graphs import Graphs, graph_size
from flashsampling.outputs import SampleResult

V, D = 331, 16


def test_sizes_of_graphs():
    sizes = [graph_size(batch, 250) for batch in range(1, 251)]
    assert all(size >= batch for batch, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert sorted(set(sizes)) == [1, 2, 4, *range(8, 65, 8), *range(80, 250, 16), 250]


def test_no_graph_is_recorded_where_memory_is_short(monkeypatch):
    """Before anything is captured: less than the largest step may need, but for what the pool has already."""

    class Recording:
        def capture_begin(self, pool, **how):
            pools.append(pool)
            free[0] -= 1000  # what the graphs' pool takes

        def capture_end(self):
            pass

        def replay(self):
            pass

    def work():
        return drawn

    graphs, needed, free = Graphs(8, D, torch.float32, torch.device("cpu"), V), 3 * 4 * 8 * (V + 11_264), [0]
    stream, handles = SimpleNamespace(wait_stream=lambda other: None), iter(range(9))
    drawn = SampleResult(torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int32))
    pools: list[int] = []
    for name, value in {
        "mem_get_info": lambda device: (free[0], 1 << 40),
        "graph_pool_handle": lambda: next(handles),
        "Stream": lambda device: stream,
        "current_stream": lambda device: stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "CUDAGraph": Recording,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for free[0], is_enough in ((needed - 1, False), (needed, True), (needed - 1000, True), (needed - 2001, False)):
        with contextlib.nullcontext() if is_enough else pytest.raises(torch.OutOfMemoryError, match="free"):
            assert graphs._record(work)[1] is drawn
    graphs.forget()
    free[0] = needed - 1
    with pytest.raises(torch.OutOfMemoryError, match="free"):
        graphs._record(work)
    free[0] = needed
    graphs._record(work)
    assert pools == [0, 0, 1]  # torch records nothing into a pool whose graphs are gone
