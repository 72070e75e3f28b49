"""vLLM's requests as rows of the fused step: parameters, masks and counts that its sampler keeps by slot."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...token_counts import IN_PROMPT, Counted, num_token_groups
from ..engine.graphs import Graphs
from ..engine.head import Head
from ..engine.kernel_variants import FILTERS, PENALTIES, Rows
from ..engine.request_info import NO_BIASES, BiasRow, Needs, RequestState
from ..engine.step import Batch, FusedStep
from ..engine.transfer import aligned_width, pack_rows, to_device, unpack_rows
from .request_info import parse_request

_BLOCK = 4096  # tokens of a program


class Grammar(NamedTuple):
    """A mask for each row of the requests that have a grammar."""

    requests: NDArray[np.int64]  # (n,) indices of requests in the batch
    rows: NDArray[np.int64]  # (n,) their rows in the step
    masks: NDArray[np.int32]  # (n, ceil(V / 32))


class VllmStep(FusedStep):
    """Steps of one of vLLM's model runners, whose sampler's state is read."""

    row_names = ("temperature", *FILTERS, *PENALTIES)

    def __init__(
        self,
        head: Head,
        sampler: Any,
        request_state: RequestState,
        device: torch.device,
        tp: Any = None,
        most_drafts: int = 0,
        graphs: Graphs | None = None,
    ) -> None:
        super().__init__(head, device, tp, most_drafts, graphs)
        self.sampler, self.request_state = sampler, request_state
        self._masks: Tensor | None = None  # (slots, words), all bits set where a request has none
        self._has_mask = np.zeros(len(request_state.reasons), bool)  # (slots,)

    def add(self, slot: int, params: Any, prompt_len: int) -> None:
        """Reads a request that takes a slot, once vLLM's sampler has read it. No hook runs when a request ends: this
        overwrites all that the slot's last one left, and a batch of the same slots is another."""
        self.forget_batch()
        info = parse_request(params, prompt_len, self.request_state.rules)
        self.request_state.set(slot, info)
        if info.mask is None and not self._has_mask[slot]:
            return
        if self._masks is None:
            self._masks = torch.full((len(self._has_mask), self.words), -1, dtype=torch.int32, device=self.device)
        self._has_mask[slot] = info.mask is not None
        # on the stream of the steps that read the last request's mask
        if info.mask is None:
            self._masks[slot].fill_(-1)  # read if a batch mate has a mask
        else:
            self._masks[slot].copy_(to_device(info.mask, self.device))

    def read_requests(self, slots: NDArray[np.int32], out: Tensor | None) -> tuple[int, int | None, Rows]:
        """Returns what the rows need together, their top log-probabilities, and parameters.

        vLLM writes to its sampler's state of a slot when a request takes it, and then no more. The host's copies are
        read: vLLM makes those on the device of them before every step, and gathering from them would be a launch each,
        over PCIe.
        """
        needs = int(np.bitwise_or.reduce(self.request_state.needs[slots]))
        sampling, penalties = self.sampler.sampling_states, self.sampler.penalties_state
        held = [getattr(penalties if name in PENALTIES else sampling, name) for name in self.row_names]
        columns = [each.np[slots] for each in held]
        width = aligned_width(len(slots)) if out is None else out.shape[1]
        packed = to_device(pack_rows(sampling.seeds.np[slots], columns, width), self.device, out)
        top = int(sampling.num_logprobs[slots].max()) if needs & Needs.LOGPROBS else None
        return needs, top, unpack_rows(packed, len(slots), self.row_names)

    def read_filters(self, slots: NDArray[np.int32]) -> tuple[str, ...]:
        """Returns the filters that any row has. A greedy row's token is the same with all of them."""
        sampling = self.sampler.sampling_states
        drawn = slots[sampling.temperature.np[slots] > 0.0]
        has = (
            sampling.top_k.np[drawn] < self.head.vocab_size,  # the size of the vocabulary where there is none
            sampling.top_p.np[drawn] < 1.0,
            sampling.min_p.np[drawn] > 0.0,
        )
        return tuple(name for name, rows in zip(FILTERS, has) if rows.any())

    def read_biases(self, batch: Batch) -> tuple[Sequence[BiasRow], NDArray[np.int64] | None]:
        """With drafts stop tokens are forbidden everywhere, until ``device_bias_values`` allows them."""
        slots, lengths, index = batch.requests, batch.lengths, None
        if self.most_drafts:
            slots, index = np.unique(slots, return_inverse=True)
            lengths = np.full(len(slots), -1, np.int32)
        held = [self.request_state.biases[slot] for slot in slots]
        return [NO_BIASES if each is None else each.at(int(n)) for each, n in zip(held, lengths)], index

    def device_bias_values(self, batch: Batch, values: NDArray[np.float32]) -> Tensor:
        """Returns values on the device, 0 of stop tokens that may be drawn. With drafts the device alone knows the
        lengths: when vLLM's host schedules a step, it takes all drafts of the step before for accepted. -inf marks a
        stop token: a user's bias is finite (``Biases.fallback_reason``)."""
        on_device = super().device_bias_values(batch, values)
        if not self.most_drafts or not np.isneginf(values).any():
            return on_device
        min_lengths = to_device(self.request_state.min_lengths[batch.requests], self.device)
        may_stop = (batch.positions + 1 >= min_lengths)[:, None]
        return on_device.masked_fill(may_stop & on_device.isneginf(), 0.0)

    def read_mask(self, batch: Batch, out: Tensor | None = None) -> Tensor:
        """Returns the masks of requests and of the batch's grammar."""
        grammar, count = batch.grammar, len(batch.positions)
        if self._masks is None and grammar is not None and len(grammar.rows) == count:  # the grammar has all rows
            masks = grammar.masks
            if masks.shape[1] != self.words:  # copied: to NumPy one row is contiguous, whatever its stride
                masks = masks[:, : self.words].copy()
            if (np.diff(grammar.rows) != 1).any():
                masks = masks[np.argsort(grammar.rows)]
            return to_device(np.ascontiguousarray(masks), self.device, out)
        if self._masks is None:
            mask = torch.full((count, self.words), -1, dtype=torch.int32, device=self.device)
        else:
            assert batch.slots is not None
            mask = self._masks.index_select(0, batch.slots)
        if grammar is not None:
            index = to_device(grammar.rows, self.device)
            masks = to_device(np.ascontiguousarray(grammar.masks), self.device)
            mask.index_copy_(0, index, mask.index_select(0, index) & masks[:, : self.words])
        return mask if out is None else out.copy_(mask)

    def read_counts(self, slots: Tensor, rows: Rows) -> Counted:
        """Returns token counts of slots (B,) int32 on the device. vLLM keeps counts of the output and bits of the
        prompt by slot. Counts of rows without a penalty may be anything: they change nothing."""
        penalties, vocab_size = self.sampler.penalties_state, self.head.vocab_size
        batch, device = len(slots), slots.device
        output_counts, prompt_mask = penalties.output_bin_counts, penalties.prompt_bin_mask
        stride = -(-vocab_size // 4) * 4
        counts = torch.empty((batch, stride), dtype=torch.int32, device=device)[:, :vocab_size]
        if device.type != "cuda":
            shifts = torch.arange(32, dtype=torch.int32)
            in_prompt = (prompt_mask[slots][:, :, None] >> shifts & 1).flatten(1)[:, :vocab_size].bool()
            counts.copy_(output_counts[slots][:, :vocab_size] | torch.where(in_prompt, IN_PROMPT, 0).to(torch.int32))
            return Counted(counts, None)
        from .kernels import counts_kernel

        seen = torch.empty((batch, num_token_groups(vocab_size)), dtype=torch.uint8, device=device)
        state = output_counts, output_counts.stride(0), prompt_mask, prompt_mask.stride(0)
        out = counts, stride, seen, seen.stride(0)
        values = [rows[name] for name in PENALTIES]
        counts_kernel[batch, -(-vocab_size // _BLOCK)](*state, slots, *values, *out, vocab_size, BLOCK=_BLOCK)
        return Counted(counts, seen)
