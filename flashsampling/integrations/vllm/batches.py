"""vLLM's ``InputBatch`` as a ``Batch``, and the part of it that is drawn here where vLLM samples the others."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...speculative.drafts import DraftBatch
from ..engine.step import Batch
from ..engine.transfer import to_device
from .step import Grammar


def rows_of_requests(input_batch: Any, requests: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Returns the logits' rows of these requests, one request after the other, and how many each has."""
    bounds = input_batch.cu_num_logits_np.astype(np.int64)
    counts = bounds[requests + 1] - bounds[requests]
    ends = counts.cumsum()
    return np.repeat(bounds[requests] - ends + counts, counts) + np.arange(counts.sum()), counts


def find_grammar(input_batch: Any, grammar_output: Any) -> Grammar | None:
    """Returns the requests that have a grammar, and its masks; None without any."""
    if grammar_output is None or not grammar_output.structured_output_request_ids:
        return None
    index = {request: row for row, request in enumerate(input_batch.req_ids)}
    requests = np.array([index[request] for request in grammar_output.structured_output_request_ids], np.int64)
    rows, counts = rows_of_requests(input_batch, requests)
    return Grammar(np.repeat(requests, counts), rows, grammar_output.grammar_bitmask)


def find_buffers(runner: Any) -> tuple[Tensor, Tensor] | None:
    """Returns where vLLM's own CUDA graphs leave hidden states, and where positions are, in every step; None without
    graphs."""
    states = getattr(getattr(runner, "cudagraph_manager", None), "hidden_states", None)
    positions = getattr(getattr(runner, "input_buffers", None), "positions", None)
    return None if states is None or positions is None else (states, positions)


def convert_batch(
    hidden_states: Tensor,
    input_batch: Any,
    grammar: Grammar | None,
    most_drafts: int = 0,
    buffers: tuple[Tensor, Tensor] | None = None,
) -> Batch:
    """Returns the rows of a batch: the last position of each request, and as many before it as it has drafts.
    ``buffers``: see ``find_buffers``."""
    count, fixed = int(input_batch.cu_num_logits_np[-1]), None
    if input_batch.num_tokens == count:  # all tokens, in order: nothing has to be gathered
        states, positions = hidden_states[:count], input_batch.positions[:count]
        if buffers is not None and [each.data_ptr() for each in buffers] == [states.data_ptr(), positions.data_ptr()]:
            fixed = buffers
    else:
        states = hidden_states.index_select(0, input_batch.logits_indices)
        positions = input_batch.positions.index_select(0, input_batch.logits_indices)
    slots, lengths = input_batch.idx_mapping_np, input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
    drafts = None
    if input_batch.num_draft_tokens:
        bounds = input_batch.cu_num_logits_np
        counts = bounds[1:] - bounds[:-1]
        slots, lengths = np.repeat(slots, counts), np.repeat(lengths - bounds[1:], counts) + np.arange(1, count + 1)
        drafts = _convert_drafts(input_batch, most_drafts)
    device_slots = input_batch.expanded_idx_mapping
    return Batch(states, positions, slots, lengths, grammar, slots=device_slots, drafts=drafts, buffers=fixed)


def _convert_drafts(input_batch: Any, most_drafts: int) -> DraftBatch:
    """Returns the drafts, which the model has read: a request with n of them has them at the last n of its n + 1
    logits."""
    batch, bounds = input_batch.num_reqs, input_batch.cu_num_logits_np.astype(np.int64)
    rows = np.delete(np.arange(bounds[-1]), bounds[:-1])
    packed = to_device(np.concatenate((bounds - np.arange(batch + 1), rows)), input_batch.logits_indices.device)
    positions = input_batch.logits_indices.index_select(0, packed[batch + 1 :])
    ids = input_batch.input_ids.index_select(0, positions).long()
    return DraftBatch(ids, None, packed[: batch + 1], batch, most_drafts)


def select_requests(input_batch: Any, requests: NDArray[np.int64]) -> Any:
    """Returns the batch of these requests, as far as it is read here. Tokens and positions stay those of the whole
    batch, where ``logits_indices`` point."""
    device, count = input_batch.logits_indices.device, len(requests)
    rows, counts = rows_of_requests(input_batch, requests)
    bounds = np.concatenate(([0], counts.cumsum()))
    packed = to_device(np.concatenate((requests, rows, bounds)), device)
    device_requests, device_rows, cu_num_logits = packed.split([count, len(rows), count + 1])
    on_host = ("idx_mapping_np", "num_scheduled_tokens", "num_computed_tokens_np")
    return dataclasses.replace(
        input_batch,
        num_reqs=count,
        num_draft_tokens=len(rows) - count,
        cu_num_logits=cu_num_logits.int(),
        cu_num_logits_np=bounds.astype(np.int32),
        **{name: getattr(input_batch, name)[requests] for name in on_host},
        **{name: getattr(input_batch, name).index_select(0, device_requests) for name in ("idx_mapping", "seq_lens")},
        **{
            name: getattr(input_batch, name).index_select(0, device_rows)
            for name in ("expanded_idx_mapping", "logits_indices")
        },
    )


def select_grammar(input_batch: Any, grammar: Grammar | None, requests: NDArray[np.int64]) -> Grammar | None:
    """Returns the grammar of these requests of the batch, with their rows numbered in ``select_requests``; None if none
    of them has one."""
    if grammar is None:
        return None
    rows, _ = rows_of_requests(input_batch, requests)
    chosen = np.isin(grammar.rows, rows)
    if not chosen.any():
        return None
    return Grammar(
        np.searchsorted(requests, grammar.requests[chosen]),
        np.searchsorted(rows, grammar.rows[chosen]),
        grammar.masks[chosen],
    )
