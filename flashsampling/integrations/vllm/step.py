"""The fused step of a batch: what ``flashsampling.sample`` is called with, and in which mixes, so that all can be warmed up.

A mix is what kernels are compiled for. There are few: where one row has a filter all have all three, where one has a bias or a
mask all have both, and what is off for a row is exactly off.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...api import SampleOutput, sample
from ...requests import MAX_BIASED
from ...warmup import warmup
from .head import Head
from .slots import Biases, Slots, Wants
from .state import Rows, counts_of, plain_rows_of, rows_of, settle, to_device

_FEW = 64  # biased tokens


class Mix(NamedTuple):
    """What a batch's call asks for. None of it: filters."""

    biases: int = 0  # tokens with one, of a row; with them a mask
    penalties: bool = False
    logprobs: bool = False


EVERYTHING = Mix(MAX_BIASED, True, True)  # also what any batch with many biases is
MIXES = (*(Mix(n, p, lp) for n, p in ((0, False), (_FEW, False), (_FEW, True)) for lp in (False, True)), EVERYTHING)


class Batch(NamedTuple):
    """Rows of a step, each the last position of a request."""

    hidden_states: Tensor  # (B, D)
    positions: Tensor  # (B,) int64, of the token that is read: the offset
    slots: NDArray[np.int32]  # (B,)
    slots_there: Tensor  # (B,) int32, on the device
    lengths: NDArray[np.int32]  # (B,) tokens of the request up to that position
    grammar: tuple[NDArray[np.int64], NDArray[np.int32]] | None  # rows (n,), and masks (n, ceil(V / 32)) of theirs


class FusedStep:
    """Steps of one model runner.

    Args:
        head: the model's.
        sampler: vLLM's, whose state is read.
        slots: what requests ask for.
        device: where.
        tp: a group of ranks, or None.
    """

    def __init__(self, head: Head, sampler: Any, slots: Slots, device: torch.device, tp: Any = None) -> None:
        self.head, self.sampler, self.slots, self.device, self.tp = head, sampler, slots, device, tp
        self.words = -(-head.vocab_size // 32)
        self.undefined = torch.zeros(1, dtype=torch.int64, device=device)
        self._masks: Tensor | None = None  # (slots, words), all bits set where a request has none
        self._masked = np.zeros(len(slots.reasons), bool)

    def add(self, slot: int, params: Any, prompt_len: int) -> None:
        """A request takes a slot."""
        noted = self.slots.add(slot, params, prompt_len)
        if noted.mask is None and not self._masked[slot]:
            return
        if self._masks is None:
            self._masks = torch.full((len(self._masked), self.words), -1, dtype=torch.int32, device=self.device)
        self._masked[slot] = noted.mask is not None
        if noted.mask is None:
            self._masks[slot].fill_(-1)
        else:  # behind the steps that read the row's last request, on the same stream
            self._masks[slot].copy_(to_device(noted.mask, self.device))

    def draw(self, batch: Batch) -> tuple[SampleOutput, int | None]:
        """Draws for every row, -1 nowhere.

        Returns:
            what ``sample`` returns, and how many top log-probabilities were asked for by the row with the most; None: no row
            asked for any, not for its token's either.
        """
        wants = Wants(int(np.bitwise_or.reduce(self.slots.wants[batch.slots])))
        if batch.grammar is not None:
            wants |= Wants.MASK
        count = None
        if wants & Wants.LOGPROBS:
            count = int(self.sampler.sampling_states.num_logprobs[batch.slots].max())
        if wants:
            rows = rows_of(self.sampler, batch.slots, self.device)
            seed, temperature = rows.seed, rows.temperature
            request = self._request(batch, rows, wants, count or 0)
        else:
            seed, temperature = plain_rows_of(self.sampler, batch.slots, self.device)
            request = self.head.request()
        out = sample(
            batch.hidden_states,
            self.head.weight,
            temperature=temperature,
            seed=seed,
            offset=batch.positions,
            vocab_size=self.head.vocab_size if self.tp is None else None,
            tp=self.tp,
            **request,
        )
        settle(out.token_ids, self.undefined)
        return out, count

    def _request(self, batch: Batch, rows: Rows, wants: Wants, top_logprobs: int) -> dict[str, Any]:
        mix, ids, values = self._mix(batch, wants)
        request: dict[str, Any] = {"top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p, **self.head.request()}
        if mix.biases:
            request["logit_bias"] = to_device(ids, self.device), to_device(values, self.device)
            request["token_mask"] = self._mask(batch)
        if mix.penalties:
            request["token_counts"] = counts_of(self.sampler.penalties_state, batch.slots_there, rows, self.head.vocab_size)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                request[name] = getattr(rows, name)
        if mix.logprobs:
            request |= {"return_logprobs": True, "top_logprobs": max(top_logprobs, 1)}
        return request

    def _mix(self, batch: Batch, wants: Wants) -> tuple[Mix, NDArray[np.int32], NDArray[np.float32]]:
        """And the rows' biases: ids (B, n), -1 behind a row's last, and values (B, n)."""
        biases = [self.slots.biases[slot] for slot in batch.slots] if wants & Wants.BIASES else [None] * len(batch.slots)
        of_rows = [_biases_now(each, int(length)) for each, length in zip(biases, batch.lengths)]
        most = max(len(ids) for ids, _ in of_rows)
        penalties, logprobs = bool(wants & Wants.PENALTIES), bool(wants & Wants.LOGPROBS)
        if most > _FEW:
            mix = EVERYTHING
        elif wants & (Wants.BIASES | Wants.MASK | Wants.PENALTIES):
            mix = Mix(_FEW, penalties, logprobs)
        else:
            mix = Mix(0, penalties, logprobs)
        ids = np.full((len(of_rows), mix.biases), -1, np.int32)
        values = np.zeros((len(of_rows), mix.biases), np.float32)
        for row, (some, theirs) in enumerate(of_rows):
            ids[row, : len(some)], values[row, : len(some)] = some, theirs
        return mix, ids, values

    def _mask(self, batch: Batch) -> Tensor:
        """(B, words) int32."""
        if self._masks is None:
            mask = torch.full((len(batch.slots), self.words), -1, dtype=torch.int32, device=self.device)
        else:
            mask = self._masks.index_select(0, batch.slots_there)
        if batch.grammar is not None:
            rows, masks = batch.grammar
            index, theirs = to_device(rows, self.device), to_device(np.ascontiguousarray(masks), self.device)
            mask.index_copy_(0, index, mask.index_select(0, index) & theirs[:, : self.words])
        return mask

    def warm_up(self, hidden_states: Tensor) -> list[str]:
        """Compiles what any batch of up to as many rows needs, and takes as much memory as the largest will: vLLM looks at the
        peak meanwhile. Returns the kernels' names."""
        batch, weight, vocab_size = len(hidden_states), self.head.weight, self.head.vocab_size
        settle(torch.zeros(batch, dtype=torch.int64, device=self.device), self.undefined)
        if self.tp is not None:
            return warmup(weight, max_batch_size=batch, tp=self.tp)
        head, rows = self.head.request(), no_rows(batch, self.device)
        slots = torch.zeros(batch, dtype=torch.int32, device=self.device)
        # a penalty, so that the kernel has something to do
        counts = counts_of(self.sampler.penalties_state, slots, rows._replace(presence_penalty=rows.top_p), vocab_size)
        names = warmup(weight, max_batch_size=batch, vocab_size=vocab_size, **head)  # type: ignore[arg-type]
        for mix in MIXES:
            request = head | example_of(mix, rows, counts)
            names += warmup(weight, max_batch_size=batch, vocab_size=vocab_size, **request)  # type: ignore[arg-type]
        parameters = {"temperature": rows.temperature, "seed": rows.seed, "offset": rows.seed, "vocab_size": vocab_size}
        sample(hidden_states, weight, **parameters, **(head | example_of(EVERYTHING, rows, counts)))  # type: ignore[arg-type]
        return names


def example_of(mix: Mix, rows: Rows, counts: Tensor) -> dict[str, Any]:
    """What a call of this mix has, as ``warmup`` takes it. ``counts`` (B, V) int32."""
    device, (batch, vocab_size) = counts.device, counts.shape
    request: dict[str, Any] = {"top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p}
    if mix.biases:
        ids = torch.full((batch, mix.biases), -1, dtype=torch.int32, device=device)
        request["logit_bias"] = ids, torch.zeros(ids.shape, device=device)
        request["token_mask"] = torch.full((batch, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    if mix.penalties:
        request["token_counts"] = counts
        request |= {name: getattr(rows, name) for name in Rows._fields if name.endswith("penalty")}
    if mix.logprobs:
        request |= {"return_logprobs": True, "top_logprobs": 1}
    return request


def _biases_now(biases: Biases | None, length: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Ids and values of a request that has so many tokens."""
    if biases is None:
        return np.empty(0, np.int32), np.empty(0, np.float32)
    if length >= biases.least or not len(biases.stops):
        return biases.ids, biases.values
    minus_infinity = np.full(len(biases.stops), -np.inf, np.float32)
    return np.concatenate((biases.ids, biases.stops)), np.concatenate((biases.values, minus_infinity))


def no_rows(batch: int, device: torch.device) -> Rows:
    """Parameters that ask for nothing."""
    zeros, ones = torch.zeros(batch, device=device), torch.ones(batch, device=device)
    none = torch.zeros(batch, dtype=torch.int64, device=device)
    return Rows(none, ones, torch.zeros(batch, dtype=torch.int32, device=device), ones, zeros, ones, zeros, zeros)
