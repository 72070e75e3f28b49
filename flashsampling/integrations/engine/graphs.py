"""CUDA graphs of a batch's fused step: the host copies what is new and replays one graph instead of launching each
kernel.

    inputs      hidden states and positions are read where the engine's own graphs leave them, or are copied, as slots
                and masks are, to where the graphs read them; sampling parameters are copied when requests or rows
                change
    sizes       a batch is padded to the next of few sizes (``graph_size``). Padding rows are computed and ignored; a
                row's token does not depend on its batch mates
    recording   a step of a size and a kind is run once as it is, which compiles and loads what it needs, then captured
    memory      all graphs share a pool, since they run one after the other on one stream. The pool holds the largest
                step's logits, on top of what the engine has measured for a step without graphs, and outside of what the
                engine may use. Where so much is not free nothing is recorded: memory that runs out in a capture would
                be missing in the engine's next step too

Each of several ranks has its graphs, of the same steps. A group's promises hold for replays too
(docs/tensor_parallel.md).
"""

import dataclasses
import gc
import logging
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from ...outputs import SampleResult
from ...sampling_params import SamplingParams
from .transfer import PACKED_ROWS, aligned_width

MAX_GRAPHS = 256  # steps of further kinds are launched
_LOGITS_SIZED = 3  # tensors of float32 logits' size in a step at most: logits, counts, and what accompanies them
# numbers of a row, each in three such tensors, whatever the vocabulary: candidates and block statistics
_CANDIDATES = 11_264
_logger = logging.getLogger("vllm.flashsampling")


@dataclasses.dataclass
class CapturedStep:
    """A step of a kind, which reads nothing but fixed memory."""

    params: SamplingParams
    draw: Callable[[], SampleResult]  # holds all that a replay reads
    may_record: bool = True
    replay: Callable[[], None] | None = None
    result: SampleResult | None = None  # each replay writes to it


def graph_size(batch: int, most: int) -> int:
    """Returns the rows of the graph for a batch: 1, 2, 4, multiples of 8 up to 64, of 16 above; not more than
    ``most``."""
    step = 16 if batch > 64 else 8
    size = -(-batch // step) * step if batch > 4 else 1 << (batch - 1).bit_length()
    return min(size, most)


class Graphs:
    """Recorded steps of up to ``most`` rows (B, ``dim``), and the memory that they read. ``vocab_size``: V, of all
    ranks of ``group``, since each has memory for all counts."""

    def __init__(
        self, most: int, dim: int, dtype: torch.dtype, device: torch.device, vocab_size: int, group: Any = None
    ) -> None:
        self.most, self._device, self._group = most, device, group
        self._needed = 4 * most * (vocab_size + _CANDIDATES) * _LOGITS_SIZED  # bytes of the pool at most
        self._taken = 0  # bytes that the pool has
        self.hidden_states = torch.zeros((most, dim), dtype=dtype, device=device)
        self.positions = torch.zeros(most, dtype=torch.int64, device=device)
        self.slots = torch.zeros(most, dtype=torch.int32, device=device)
        self._masks: Tensor | None = None
        self._packed: dict[int, Tensor] = {}
        self._steps: dict[Hashable, CapturedStep] = {}
        self._weight = 0  # the address of the weight that they read
        self._pool: Any = None
        self._stream: Any = None

    def packed_rows(self, size: int) -> Tensor:
        """(PACKED_ROWS, ``size`` up to a multiple of 4) int32: where graphs of a size read their rows' parameters."""
        if size not in self._packed:
            shape = PACKED_ROWS, aligned_width(size)
            self._packed[size] = torch.zeros(shape, dtype=torch.int32, device=self._device)
        return self._packed[size]

    def masks(self, words: int) -> Tensor:
        """(``most``, ``words``) int32: token masks."""
        if self._masks is None:
            self._masks = torch.full((self.most, words), -1, dtype=torch.int32, device=self._device)
        return self._masks

    def step(self, kind: Hashable, weight: Tensor, make: Callable[[], CapturedStep]) -> CapturedStep:
        """Returns the step of a kind, which ``make`` makes once. Forgets all steps of another weight."""
        if weight.data_ptr() != self._weight:
            self.forget()
            self._weight = weight.data_ptr()
        step = self._steps.get(kind)
        if step is None:
            step = make()
            step.may_record = len(self._steps) < MAX_GRAPHS
            if step.may_record:
                self._steps[kind] = step
        return step

    def draw(self, step: CapturedStep) -> SampleResult:
        """Returns what the step draws. The next replay overwrites it: work on this stream before that may read it."""
        if step.replay is not None and step.result is not None:
            step.replay()
            return step.result
        result = step.draw()
        if step.may_record:
            step.may_record = False
            self._record_if_possible(step)
        return result

    def forget(self) -> None:
        """Drops all steps and recordings, once the device is done with them."""
        if self._steps and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._steps.clear()
        self._pool, self._taken = None, 0  # torch records nothing into a pool whose graphs are gone

    def _record_if_possible(self, step: CapturedStep) -> None:
        """Leaves a step to be launched where memory runs out, or another error comes. Other ranks see no difference."""
        skipped_calls = 0 if self._group is None else self._group.skipped_calls
        try:
            step.replay, step.result = self._record(step.draw)
        except Exception as error:
            if self._group is not None and self._group.skipped_calls != skipped_calls:
                self._group.skipped_calls = skipped_calls  # a recording is no step that other ranks wait for
            is_known = isinstance(error, torch.OutOfMemoryError)
            text = "flashsampling: no CUDA graph of a step, whose kernels go on to be launched: %s"
            _logger.warning(text, error, exc_info=not is_known)

    def _record(self, draw: Callable[[], SampleResult]) -> tuple[Callable[[], None], SampleResult]:
        """Captures ``draw``. Returns the replay, and the result that it writes to. ``torch.cuda.graph`` would wait for
        the device and empty its cache while requests are served."""
        free, _ = torch.cuda.mem_get_info(self._device)
        needed = self._needed - self._taken
        if free < needed:
            raise torch.OutOfMemoryError(f"a graph may need {needed >> 20} MiB, of which {free >> 20} are free")
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        collects = gc.isenabled()
        gc.disable()  # the collector may free what must not be freed in a capture
        try:
            with torch.cuda.stream(self._stream):
                # other threads copy tokens to the host meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    result = draw()
                finally:
                    graph.capture_end()
        finally:
            if collects:
                gc.enable()
        left, _ = torch.cuda.mem_get_info(self._device)
        self._taken += max(free - left, 0)
        return graph.replay, result
