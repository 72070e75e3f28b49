"""Parts of vLLM's ``InputBatch``: the rows that are drawn here, and those that are left to vLLM."""

import dataclasses
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..engine.common import to_device
from .drafts import given_of
from .step import Batch, Grammar


def rows_of_requests(input_batch: Any, requests: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Which of the logits' rows are of these requests of a batch, one request's behind the other's, and how many of each."""
    bounds = input_batch.cu_num_logits_np.astype(np.int64)
    counts = bounds[requests + 1] - bounds[requests]
    behind = counts.cumsum()
    return np.repeat(bounds[requests] - behind + counts, counts) + np.arange(counts.sum()), counts


def grammar_of(input_batch: Any, grammar_output: Any) -> Grammar | None:
    """Which requests have a grammar, and what it allows; None: no request has."""
    if grammar_output is None or not grammar_output.structured_output_request_ids:
        return None
    place = {request: row for row, request in enumerate(input_batch.req_ids)}
    requests = np.array([place[request] for request in grammar_output.structured_output_request_ids], np.int64)
    rows, counts = rows_of_requests(input_batch, requests)
    return Grammar(np.repeat(requests, counts), rows, grammar_output.grammar_bitmask)


def buffers_of(runner: Any) -> tuple[Tensor, Tensor] | None:
    """Where vLLM's own CUDA graphs leave hidden states, and where positions are, in every step; None: nowhere."""
    states = getattr(getattr(runner, "cudagraph_manager", None), "hidden_states", None)
    positions = getattr(getattr(runner, "input_buffers", None), "positions", None)
    return None if states is None or positions is None else (states, positions)


def batch_of(
    hidden_states: Tensor,
    input_batch: Any,
    grammar: Grammar | None,
    most_drafts: int = 0,
    buffers: tuple[Tensor, Tensor] | None = None,
) -> Batch:
    """The rows of a batch: the last position of each request, and as many before it as it has drafts. ``buffers``: see
    ``buffers_of``."""
    count, there = int(input_batch.cu_num_logits_np[-1]), None
    if input_batch.num_tokens == count:  # all of them, in order: nothing has to be gathered
        states, positions = hidden_states[:count], input_batch.positions[:count]
        if buffers is not None and [each.data_ptr() for each in buffers] == [states.data_ptr(), positions.data_ptr()]:
            there = buffers
    else:
        states = hidden_states.index_select(0, input_batch.logits_indices)
        positions = input_batch.positions.index_select(0, input_batch.logits_indices)
    slots, lengths = input_batch.idx_mapping_np, input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
    drafts = None
    if input_batch.num_draft_tokens:
        bounds = input_batch.cu_num_logits_np
        counts = bounds[1:] - bounds[:-1]
        slots, lengths = np.repeat(slots, counts), np.repeat(lengths - bounds[1:], counts) + np.arange(1, count + 1)
        drafts = given_of(input_batch, most_drafts)
    return Batch(states, positions, slots, input_batch.expanded_idx_mapping, lengths, grammar, drafts, there)


def part_of(input_batch: Any, requests: NDArray[np.int64]) -> Any:
    """The batch of these requests alone. Tokens and positions stay those of the whole batch, where ``logits_indices`` point."""
    device, count = input_batch.logits_indices.device, len(requests)
    rows, counts = rows_of_requests(input_batch, requests)
    bounds = np.concatenate(([0], counts.cumsum()))
    drafts, packed = len(rows) - count, np.concatenate((requests, rows, bounds))
    those, there, cu_num_logits = to_device(packed, device).split([count, len(rows), count + 1])
    return dataclasses.replace(
        input_batch,
        req_ids=[input_batch.req_ids[request] for request in requests],
        num_reqs=count,
        num_reqs_after_padding=count,
        idx_mapping=input_batch.idx_mapping.index_select(0, those),
        idx_mapping_np=input_batch.idx_mapping_np[requests],
        expanded_idx_mapping=input_batch.expanded_idx_mapping.index_select(0, there),
        expanded_local_pos=input_batch.expanded_local_pos.index_select(0, there),
        num_scheduled_tokens=input_batch.num_scheduled_tokens[requests],
        num_draft_tokens=drafts,
        num_draft_tokens_per_req=(counts - 1).astype(np.int32) if drafts else None,
        num_computed_tokens_np=input_batch.num_computed_tokens_np[requests],
        seq_lens=input_batch.seq_lens.index_select(0, those),
        logits_indices=input_batch.logits_indices.index_select(0, there),
        cu_num_logits=cu_num_logits.int(),
        cu_num_logits_np=bounds.astype(np.int32),
    )


def part_of_grammar(grammar_output: Any, grammar: Grammar | None, requests: NDArray[np.int64], part: Any) -> Any:
    """vLLM's ``GrammarOutput`` of these requests of the batch, which are a part of it, alone; None: none of them has one."""
    if grammar is None:
        return None
    mine = np.flatnonzero(np.isin(grammar.requests, requests))
    if not len(mine):
        return None
    names = set(part.req_ids)
    return dataclasses.replace(
        grammar_output,
        structured_output_request_ids=[name for name in grammar_output.structured_output_request_ids if name in names],
        grammar_bitmask=np.ascontiguousarray(grammar.masks[mine]),
    )
