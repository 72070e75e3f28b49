"""Parts of vLLM's ``InputBatch``: the rows that are drawn here, and those that are left to vLLM."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .state import to_device
from .step import Batch


class Grammar(NamedTuple):
    """vLLM's ``GrammarOutput`` by rows of a batch."""

    rows: NDArray[np.int64]  # (n,)
    masks: NDArray[np.int32]  # (n, ceil(V / 32))


def grammar_of(input_batch: Any, grammar_output: Any) -> Grammar | None:
    """Which rows have a grammar, and what it allows; None: no row has."""
    if grammar_output is None or not grammar_output.structured_output_request_ids:
        return None
    place = {request: row for row, request in enumerate(input_batch.req_ids)}
    rows = [place[request] for request in grammar_output.structured_output_request_ids]
    return Grammar(np.array(rows, np.int64), grammar_output.grammar_bitmask)


def batch_of(hidden_states: Tensor, input_batch: Any, grammar: Grammar | None) -> Batch:
    """The rows of a batch without drafts: one position of each request."""
    count = input_batch.num_reqs
    if input_batch.num_tokens == count:  # one token of each, in order: nothing has to be gathered
        states, positions = hidden_states[:count], input_batch.positions[:count]
    else:
        states = hidden_states.index_select(0, input_batch.logits_indices)
        positions = input_batch.positions.index_select(0, input_batch.logits_indices)
    lengths = input_batch.num_computed_tokens_np + input_batch.num_scheduled_tokens
    return Batch(states, positions, input_batch.idx_mapping_np, input_batch.idx_mapping, lengths, grammar)


def part_of(input_batch: Any, rows: NDArray[np.int64]) -> Any:
    """The batch of these rows alone. Tokens and positions stay those of the whole batch, where ``logits_indices`` point."""
    device, count = input_batch.logits_indices.device, len(rows)
    there = to_device(rows, device)
    slots = input_batch.idx_mapping.index_select(0, there)
    return dataclasses.replace(
        input_batch,
        req_ids=[input_batch.req_ids[row] for row in rows],
        num_reqs=count,
        num_reqs_after_padding=count,
        idx_mapping=slots,
        idx_mapping_np=input_batch.idx_mapping_np[rows],
        expanded_idx_mapping=slots,
        expanded_local_pos=torch.zeros(count, dtype=torch.int32, device=device),
        num_scheduled_tokens=input_batch.num_scheduled_tokens[rows],
        num_computed_tokens_np=input_batch.num_computed_tokens_np[rows],
        seq_lens=input_batch.seq_lens.index_select(0, there),
        logits_indices=input_batch.logits_indices.index_select(0, there),
        cu_num_logits=torch.arange(count + 1, dtype=torch.int32, device=device),
        cu_num_logits_np=np.arange(count + 1, dtype=np.int32),
    )


def part_of_grammar(grammar_output: Any, grammar: Grammar | None, rows: NDArray[np.int64]) -> Any:
    """vLLM's ``GrammarOutput`` of these rows of the batch alone; None: none of them has one."""
    if grammar is None:
        return None
    mine = np.flatnonzero(np.isin(grammar.rows, rows))
    if not len(mine):
        return None
    requests = grammar_output.structured_output_request_ids
    return dataclasses.replace(
        grammar_output,
        structured_output_request_ids=[requests[i] for i in mine],
        grammar_bitmask=np.ascontiguousarray(grammar.masks[mine]),
    )
