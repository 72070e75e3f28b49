"""The fused step of a batch. Its sampling parameters are those of ``flashsampling.sample``, without checks: an engine's
subclass reads them as backends take them.

What a batch keeps from step to step is read once (``BatchCache``); masks, counts and biases are read in every step. A
step with parameters replays a CUDA graph where there are graphs. A plain step is one launch and needs none; drafts,
biases and a head's bias have shapes or values of their own in every step, and are launched.
"""

import contextlib
import functools
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import ops
from ...exchange_protocol import WHOLE
from ...inputs import SampleInputs
from ...outputs import SampleOutput, SampleResult, make_output
from ...param_parsers import MAX_BIASED
from ...sampling import sample
from ...sampling_params import DEFAULT_PARAMS, SamplingParams
from ...speculative.acceptance import hash_drafts, verify_by_match
from ...speculative.drafts import DraftBatch
from ...token_counts import Counted
from ...warmup import warmup_mixes
from .graphs import CapturedStep, Graphs, graph_size
from .head import Head
from .kernel_variants import FEW_BIASES, FILTERS, PENALTIES, Rows, default_rows, example_calls
from .request_info import BiasRow, Needs, stack_biases
from .transfer import sanitize_token_ids, to_device, unpack_rows


class Batch(NamedTuple):
    """Rows of a step, each the last position of a request; with drafts, one of its last positions."""

    hidden_states: Tensor  # (B, D)
    positions: Tensor  # (B,) int64, index of the token that is read, its sequence's length - 1; the offset
    requests: Any  # (B,) slots, int32 on the host (vLLM), or a tuple of ``RequestInfo`` (SGLang)
    lengths: Any  # (B,) on the host, positions + 1; where there may be drafts an upper bound, which no step reads
    grammar: Any = None  # the engine's masks for some or all rows
    top_logprobs: int | None = None  # of the row with the most, where the batch and not its requests say it
    slots: Tensor | None = None  # (B,) int32, vLLM's slots on the device
    drafts: DraftBatch | None = None
    buffers: tuple[Tensor, Tensor] | None = None  # hidden states and positions lie at their beginning in every step


class BatchCache(NamedTuple):
    """Everything that stays while a batch has the same slots, or the same requests, in the same rows."""

    key: Hashable  # of these; slots do not tell requests apart: ``FusedStep.forget_batch``
    needs: int  # of all rows together
    top_logprobs: int | None  # of the row with the most; None: no row asks for any, its token's included
    rows: Rows
    filters: tuple[str, ...]  # of a step: all; over several ranks those that any row has


class FusedStep:
    """Steps of one model runner. ``most_drafts``: drafts of a request in a step at most."""

    row_names: tuple[str, ...]  # parameters that ``read_requests`` packs behind the seed

    def __init__(
        self,
        head: Head,
        device: torch.device,
        tp: Any = None,
        most_drafts: int = 0,
        graphs: Graphs | None = None,
    ) -> None:
        self.head, self.device, self.tp, self.most_drafts, self.graphs = head, device, tp, most_drafts, graphs
        self.words = -(-head.vocab_size // 32)
        self.undefined = torch.zeros(1, dtype=torch.int64, device=device)
        self.batch_cache: BatchCache | None = None  # of the last step

    def forget_batch(self) -> None:
        """Reads the parameters of the next step anew. To be called when a slot gets another request."""
        self.batch_cache = None

    # -- an engine's subclass says

    def read_requests(self, requests: Any, out: Tensor | None) -> tuple[int, int | None, Rows]:
        """Returns what the rows need together, their top log-probabilities, and parameters, in ``out`` if given."""
        raise NotImplementedError

    def read_filters(self, requests: Any) -> tuple[str, ...]:
        """Returns the filters that any row has, for several ranks."""
        raise NotImplementedError

    def read_biases(self, batch: Batch) -> tuple[Sequence[BiasRow], NDArray[np.int64] | None]:
        """Returns biases, and which of them each row has; None: one after the other."""
        raise NotImplementedError

    def device_bias_values(self, batch: Batch, values: NDArray[np.float32]) -> Tensor:
        """Returns values of biases on the device."""
        return to_device(values, self.device)

    def read_mask(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """Returns token masks (B, words) int32 on the device, in ``out`` if given."""
        raise NotImplementedError

    def read_counts(self, slots: Tensor, rows: Rows) -> Counted:
        """Returns token counts (B, V) int32 of slots on the device."""
        raise NotImplementedError

    # -- the step

    def draw(self, batch: Batch) -> tuple[SampleOutput, int | None]:
        """Draws for every row; -1 where there is no score (see ``sanitize_token_ids``). With graphs the next step
        overwrites the tokens and values.

        Returns:
            the output of ``sample``, and the top log-probabilities of the row with the most; None: no row asks for any,
            its token's included.
        """
        try:
            cache = self._cached(batch.requests)
            if batch.top_logprobs is not None:
                cache = cache._replace(needs=cache.needs | Needs.LOGPROBS, top_logprobs=batch.top_logprobs)
            if batch.grammar is not None:
                cache = cache._replace(needs=cache.needs | Needs.MASK)
            is_new = batch.drafts is not None or cache.needs & Needs.BIASES or self.head.bias is not None
            if self.graphs is not None and cache.needs and not is_new:
                return self._replay_graph(batch, cache, self.graphs), cache.top_logprobs
            params = self._params(batch, cache)
            result = self._run(batch, cache.rows, params)
            return make_output(result, len(batch.positions), 1, params), cache.top_logprobs
        except BaseException as error:
            if self.tp is not None:
                ops.count_skipped_call(self.tp, error)
            raise

    def _cached(self, requests: Any) -> BatchCache:
        """Looks up and copies a batch's parameters, unless the last step had its slots or requests in the same rows."""
        key = requests if isinstance(requests, tuple) else requests.tobytes()
        if self.batch_cache is None or self.batch_cache.key != key:
            out, batch = None, len(requests)
            if self.graphs is not None and batch <= self.graphs.most:
                out = self.graphs.packed_rows(graph_size(batch, self.graphs.most))
            needs, top, rows = self.read_requests(requests, out)
            filters = FILTERS if self.tp is None else self.read_filters(requests)
            self.batch_cache = BatchCache(key, needs, top, rows, filters)
        return self.batch_cache

    def _params(self, batch: Batch, cache: BatchCache, mask: Tensor | None = None) -> SamplingParams:
        """Returns the parameters of a step, but for counts: those are as large as logits, and read when it runs.
        ``mask``: token masks that are there already."""
        needs, fields = cache.needs, dict(self.head.transform)
        if self.head.bias is not None:
            fields["bias"] = self.head.bias.detach().float()
        names = cache.filters if needs & Needs.FILTERS else ()
        names += ("joint_top_p",) if needs & Needs.JOINT else ()
        names += PENALTIES if needs & Needs.PENALTIES else ()
        fields |= {name: cache.rows[name] for name in names}
        if needs & Needs.BIASES:
            fields |= self._biases(batch)
        if needs & Needs.MASK:
            fields["token_mask"] = self.read_mask(batch) if mask is None else mask
        if needs & Needs.LOGPROBS:
            fields |= {"logprobs": True, "top_logprobs": max(cache.top_logprobs or 0, 1)}
        return DEFAULT_PARAMS._replace(**fields) if fields else DEFAULT_PARAMS

    def _biases(self, batch: Batch) -> dict[str, Tensor]:
        biases, index = self.read_biases(batch)
        most = max((len(ids) for ids, _ in biases), default=0)
        if most == 0:
            return {}
        ids, values = stack_biases(biases, FEW_BIASES if most <= FEW_BIASES else MAX_BIASED)
        if index is not None:
            ids, values = ids[index], values[index]
        return {"bias_ids": to_device(ids, self.device), "bias_values": self.device_bias_values(batch, values)}

    def _run(self, batch: Batch, rows: Rows, params: SamplingParams) -> SampleResult:
        draft_hash = None
        if isinstance(params.repetition_penalty, Tensor):  # a row has penalties
            assert batch.slots is not None
            counts, seen = self.read_counts(batch.slots, rows)
            if batch.drafts is not None:
                drafts = batch.drafts.drafts()
                counts, seen = drafts.counted(counts, drafts.nodes(), self.head.vocab_size), None
            params = params._replace(counts=counts, seen=seen)
        if batch.drafts is not None and self.tp is not None:
            draft_hash = hash_drafts(batch.drafts)  # ranks with other drafts would accept other numbers of them
        tokens, shard = (self.head.vocab_size, WHOLE) if self.tp is None else self.tp.part
        row = rows["temperature"], rows["seed"], batch.positions
        states, weight = batch.hidden_states, self.head.weight
        inputs = SampleInputs(states, weight, *row, 1, tokens, shard, params, draft_hash=draft_hash)
        return ops.sample(inputs, "") if self.tp is None else ops.sample_sharded(inputs, self.tp)

    def _replay_graph(self, batch: Batch, cache: BatchCache, graphs: Graphs) -> SampleOutput:
        """Draws by a CUDA graph, which reads nothing but memory that has a fixed place."""
        count, needs = len(batch.positions), cache.needs
        size = graph_size(count, graphs.most)
        inputs = graphs.hidden_states, graphs.positions
        # ranks have the same inputs in padding rows too
        if batch.buffers is not None and self.tp is None and size <= min(map(len, batch.buffers)):
            inputs = batch.buffers
        states, positions = inputs
        kind = size, needs, cache.top_logprobs, cache.filters, states.data_ptr(), positions.data_ptr()
        step = graphs.step(kind, self.head.weight, lambda: self._captured_step(batch, cache, graphs, size, inputs))
        if inputs is not batch.buffers:
            states[:count].copy_(batch.hidden_states)
            positions[:count].copy_(batch.positions)
        if needs & Needs.PENALTIES:
            assert batch.slots is not None
            graphs.slots[:count].copy_(batch.slots)
        if needs & Needs.MASK:
            self.read_mask(batch, graphs.masks(self.words)[:count])
        if self.tp is not None:
            self.tp.raise_if_unusable()  # a replay does not
        out = make_output(graphs.draw(step), size, 1, step.params)
        return SampleOutput(**{name: part[:count] for name, part in vars(out).items() if part is not None})

    def _captured_step(
        self, batch: Batch, cache: BatchCache, graphs: Graphs, size: int, inputs: tuple[Tensor, Tensor]
    ) -> CapturedStep:
        """Returns the step of any batch of this kind."""
        states, positions = inputs
        rows = unpack_rows(graphs.packed_rows(size), size, self.row_names)
        mask = graphs.masks(self.words)[:size] if cache.needs & Needs.MASK else None
        params = self._params(batch, cache._replace(rows=rows), mask)
        padded = Batch(states[:size], positions[:size], None, None, slots=graphs.slots[:size])
        return CapturedStep(params, functools.partial(self._run, padded, rows, params))

    # -- warm-up

    def warm_up(self, max_batch_size: int, hidden_states: Tensor | None = None) -> list[str]:
        """Compiles what any batch of up to so many rows needs. Returns the kernels' names.

        With ``hidden_states`` (B, D) it takes as much memory as the largest step, for an engine that reads the peak.
        With several ranks all make this call. An error on one rank is an error on all of them."""
        if self.tp is None:
            return self._warm_up(max_batch_size, hidden_states)
        with contextlib.ExitStack() as failing:
            failing.push(self.tp)
            names = self._warm_up(max_batch_size, hidden_states)
            self.tp.check(collective=True)
            failing.pop_all()  # the group stays open
        return names

    def _warm_up(self, batch: int, hidden_states: Tensor | None) -> list[str]:
        weight, vocab_size = self.head.weight, self.head.vocab_size
        self.sanitize_token_ids(torch.zeros(batch, dtype=torch.int64, device=self.device))
        if self.most_drafts:
            self._warm_up_drafts()
        vocabulary: dict[str, Any] = {"vocab_size": vocab_size} if self.tp is None else {"tp": self.tp}
        of_head, rows = self.head.arguments(), default_rows(batch, self.device)
        counts = None
        if set(PENALTIES) <= set(self.row_names):
            slots = torch.zeros(batch, dtype=torch.int32, device=self.device)
            counts = self.read_counts(slots, rows | {"presence_penalty": rows["top_p"]})  # so that the kernel counts
        calls: Any = example_calls(rows, vocab_size, counts)
        names = warmup_mixes(weight, [of_head | call for call in calls], max_batch_size=batch, **vocabulary)
        if hidden_states is not None:
            everything = of_head | vocabulary | calls[-1]
            inputs: Any = {"temperature": rows["temperature"], "seed": rows["seed"], "offset": rows["seed"]}
            sample(hidden_states, weight, **inputs, **everything)
        return names

    def _warm_up_drafts(self) -> None:
        ids = torch.zeros(self.most_drafts + 1, dtype=torch.int64, device=self.device)
        bounds = torch.tensor([0, self.most_drafts], device=self.device)
        drafts = DraftBatch(ids[1:], None, bounds, 1, self.most_drafts)
        verify_by_match(drafts, ids)
        if self.tp is not None:
            states = self.head.weight.new_zeros(len(ids), self.head.weight.shape[1])
            batch = Batch(states, ids, None, None, drafts=drafts)
            self._run(batch, default_rows(len(ids), self.device), DEFAULT_PARAMS)

    def sanitize_token_ids(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Replaces -1 by 0, and counts the replaced tokens (``transfer.sanitize_token_ids``)."""
        return sanitize_token_ids(token_ids, self.undefined)
