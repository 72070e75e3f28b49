"""Rejection of drafts over ranks (contract, section 7), row by row: the rank that has a row's logits says all of it.

A row is a position, and at most one draft follows it. Its word says whether the row accepts that draft, the token in
the draft's place, from max(p - q, 0), and the token without a draft. All ranks then find each request's end from its
rows' words. A token in a draft's place is drawn in every row that refuses a draft, also behind a request's end, so that
results cross ranks once. Every rank has all of q, and messages hold a hash of it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..backends import Backend, runs_small_kernels
from ..inputs import DraftChains, SampleInputs
from ..noise import Stream
from ..outputs import SampleResult
from ..reference import rejection

_BITS = 31  # of a token in a word, which holds ids from -1 on


class RowDrafts(NamedTuple):
    """The draft that follows each row."""

    token_ids: Tensor  # (R,) int64; -1: none
    places: Tensor  # (R,) int64: its row of q, any valid one where there is none

    def part(self, first: int, last: int) -> "RowDrafts":
        """Returns those of the rows [first, last)."""
        return RowDrafts(self.token_ids[first:last], self.places[first:last])


def drafts_of_rows(drafted: DraftChains, rows: int) -> RowDrafts:
    """Returns the draft that follows each of ``rows`` rows."""
    ids = drafted.token_ids
    index = torch.where(ids >= 0, drafted.rows[:, :-1], rows).flatten()  # what is no draft goes beyond the last row
    token_ids = torch.full((rows + 1,), -1, dtype=torch.int64, device=ids.device)
    token_ids.index_copy_(0, index, torch.where(ids >= 0, ids, -1).flatten())
    places = torch.zeros_like(token_ids).index_copy_(0, index, drafted.places.flatten())
    return RowDrafts(token_ids[:rows], places[:rows])


def verify_rows(
    backend: Backend,
    step: SampleInputs,  # of stored logits
    drafts: RowDrafts,
    probs: Tensor | None,  # (N, V or more): q; None: each draft was certain
) -> Tensor:
    """Returns the rows' words, (R, 1) int64."""
    if backend.records and runs_small_kernels(step.hidden_states):
        from ..kernels.triton.speculative.rejection import verify_rows as verify_by_kernels

        return verify_by_kernels(step, backend.recorded(step), *drafts, probs)[:, None]
    drawn = backend.run(step).ids
    is_accepted = rejection.accept(step, drafts.token_ids, probs, drafts.places)
    recovery = step._replace(params=step.params._replace(stream=Stream.RECOVERY))
    recovered = rejection.recover(recovery, drafts.token_ids, probs, drafts.places)
    return pack(drawn, recovered, is_accepted)[:, None]


def pack(drawn: Tensor, recovered: Tensor, is_accepted: Tensor) -> Tensor:
    """Returns a row's word: the tokens without and in place of a draft, and whether the draft is accepted."""
    return (drawn + 1) | (recovered + 1) << _BITS | is_accepted.long() << 2 * _BITS


def finish(
    words: Tensor,  # (R, 1) int64
    drafted: DraftChains,
    vocab_size: int,
) -> SampleResult:
    """Returns the requests' last tokens, then their numbers of accepted drafts, (2 * B,) int64. Words of a failed step
    are negative, and give -1 and 0."""
    ids, rows = drafted.token_ids, drafted.rows
    of_rows = words[:, 0][rows]  # (B, n + 1)
    is_accepted = (of_rows[:, :-1] >> 2 * _BITS == 1) & (ids >= 0)
    num_accepted = is_accepted.cumprod(dim=1).sum(dim=1)
    last = num_accepted[:, None]
    word = of_rows.gather(1, last)[:, 0]
    refused = torch.nn.functional.pad(ids, (0, 1), value=-1).gather(1, last)[:, 0]
    was_refused = (refused >= 0) & (refused < vocab_size)  # an id that is no token is no draft
    mask = (1 << _BITS) - 1
    token_ids = torch.where(was_refused, word >> _BITS & mask, word & mask) - 1
    token_ids = token_ids.masked_fill(word < 0, -1)
    return SampleResult(torch.cat([token_ids, num_accepted]))
