"""CUDA graphs of a batch's fused step: the host copies what is new and replays, where else it launches kernel after kernel.

    inputs      hidden states and positions are read where vLLM's own graphs leave them, or are copied, as slots and masks are,
                to where the graphs read them; sampling parameters are copied when requests or rows change
    sizes       a batch is filled up to the next of few sizes (``size_of``). Rows beyond it draw of what lies there, and nobody
                looks; a row's token does not depend on its batch mates
    recording   a step of a size and a kind is run once as it is, which compiles and loads what it needs, then captured
    memory      all graphs share a pool, since they run one after the other on one stream: it has room for the largest step's
                logits, beside what vLLM has measured for a step without graphs, and outside of what vLLM may use. Where so much
                is not free nothing is recorded: memory that runs out in a capture would be vLLM's next step's too

Of several ranks each has its graphs, of the same steps: what a group promises holds for replays too (docs/tensor_parallel.md).
"""

import gc
import logging
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...outputs import SampleResult
from .device_state import PARAMETERS

MOST_GRAPHS = 256  # more kinds of steps are launched
_AS_LOGITS = 3  # tensors of float32 logits' size in a step at most: logits, counts, and what is beside them
_BESIDE = 11_264  # and as many numbers of a row thrice, whatever the vocabulary: candidates, and those of a made-up row
_logger = logging.getLogger("vllm.flashsampling")


class _Recorded(NamedTuple):
    replay: Callable[[], None]
    drawn: SampleResult  # which each replay writes to
    work: Callable[[], SampleResult]  # with all that a replay reads


def size_of(batch: int, most: int) -> int:
    """Rows of the graph for a batch: 1, 2, 4, multiples of 8 up to 64, of 16 above; not more than ``most``."""
    step = 16 if batch > 64 else 8
    size = -(-batch // step) * step if batch > 4 else 1 << (batch - 1).bit_length()
    return min(size, most)


class Graphs:
    """Recorded steps, and what they read.

    Args:
        most: rows of the largest batch.
        dim: D.
        dtype: of hidden states.
        device: where.
        vocab_size: V, of several ranks all of it: each has room for all counts.
        group: the ``TensorParallel`` that draws, or None.
    """

    def __init__(
        self, most: int, dim: int, dtype: torch.dtype, device: torch.device, vocab_size: int, group: Any = None
    ) -> None:
        self.most, self._device, self._group = most, device, group
        self._needed = 4 * most * (vocab_size + _BESIDE) * _AS_LOGITS  # bytes of the pool, at most
        self._taken = 0  # of these it has
        self.hidden_states = torch.zeros((most, dim), dtype=dtype, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)
        self.slots = torch.zeros(most, dtype=torch.int32, device=device)
        self._masks: Tensor | None = None
        self._rooms: dict[int, Tensor] = {}
        self._recorded: dict[Hashable, _Recorded | None] = {}
        self._pool: Any = None
        self._stream: Any = None

    def room(self, size: int) -> Tensor:
        """(PARAMETERS, ``size`` up to a multiple of 4) int32: where graphs of a size read their rows' parameters."""
        if size not in self._rooms:
            self._rooms[size] = torch.zeros((PARAMETERS, -(-size // 4) * 4), dtype=torch.int32, device=self._device)
        return self._rooms[size]

    def masks(self, words: int) -> Tensor:
        """(``most``, ``words``) int32: token masks."""
        if self._masks is None:
            self._masks = torch.full((self.most, words), -1, dtype=torch.int32, device=self._device)
        return self._masks

    def draw(self, kind: Hashable, work: Callable[[], SampleResult]) -> SampleResult:
        """What ``work`` gives, which reads nothing but what stays where it is, and is the same for a ``kind``. The next replay
        writes there: it is for work on this stream before that."""
        recorded = self._recorded.get(kind)
        if recorded is not None:
            recorded.replay()
            return recorded.drawn
        drawn = work()
        if kind not in self._recorded and len(self._recorded) < MOST_GRAPHS:
            self._recorded[kind] = self._record_if_possible(work)
        return drawn

    def forget(self) -> None:
        """All that was recorded, once the device is done with it."""
        if self._recorded and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._recorded.clear()
        self._pool, self._taken = None, 0  # torch records nothing into a pool whose graphs are gone

    def _record_if_possible(self, work: Callable[[], SampleResult]) -> _Recorded | None:
        """Not where memory runs out, say: then steps of the kind are launched as ever. To other ranks that is the same."""
        skipped_calls = 0 if self._group is None else self._group.skipped_calls
        try:
            return self._record(work)
        except Exception as error:
            if self._group is not None and self._group.skipped_calls != skipped_calls:
                self._group.skipped_calls = skipped_calls  # it is no step of anybody's that this call had no part in
            is_known = isinstance(error, torch.OutOfMemoryError)
            text = "flashsampling: no CUDA graph of a step, whose kernels go on to be launched: %s"
            _logger.warning(text, error, exc_info=not is_known)
            return None

    def _record(self, work: Callable[[], SampleResult]) -> _Recorded:
        """Not ``torch.cuda.graph``, which waits for the device and empties its cache: requests are being served."""
        free, _ = torch.cuda.mem_get_info(self._device)
        needed = self._needed - self._taken
        if free < needed:
            raise torch.OutOfMemoryError(f"a graph may need {needed >> 20} MiB, of which {free >> 20} are free")
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        collects = gc.isenabled()
        gc.disable()  # what it frees may be something that must not be freed in a capture
        try:
            with torch.cuda.stream(self._stream):
                # other threads copy tokens to the host meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    drawn = work()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        left, _ = torch.cuda.mem_get_info(self._device)
        self._taken += max(free - left, 0)
        return _Recorded(graph.replay, drawn, work)
