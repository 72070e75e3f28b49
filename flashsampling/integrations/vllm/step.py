"""The fused step of a batch: what ``flashsampling.sample`` is called with, and in which mixes, so that all can be warmed up.

A mix is what kernels are compiled for. There are few, because what is off for a row is exactly off: where one row has a filter
all have all three, and so on. The Hopper kernel adds biases, masks and penalises in the launch that draws, so there a batch is
asked for no more than it wants, unless it has log-probabilities and what changes logits; then, and in all else that Triton
does, it is drawn from logits in memory, and has masks and filters too.

Between ranks a filter, or log-probabilities, are rounds of messages, and a mask and a bias are hashed, so a batch of several
ranks asks for no more than its rows do, and a top-k that all of them share, one round, is a number. What changes logits is in
one kernel there, of which there may be all mixes. What a call has is decided by what all ranks know alike: requests as the
scheduler sends them to every worker.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ... import ops
from ...exchange_protocol import WHOLE
from ...inputs import SampleInputs, example
from ...outputs import SampleOutput, SampleResult, make_output
from ...param_parsers import MAX_BIASED, batch_shape
from ...sampling import sample
from ...sampling_params import SamplingParams, parse_sampling_params
from ...speculative.acceptance import sample_with_draft_hash, verify_by_match
from ...speculative.drafts import DraftBatch
from ...tensor_parallel.cutoffs import FEW
from ...token_counts import Counted
from ...warmup import warmup_mixes
from ..engine.common import bias_of_rows, biases_now, sanitize_token_ids, to_device
from .device_state import Rows, counts_of, rows_in, rows_of
from .drafts import example_of_drafts, with_stops_ended
from .graphs import Graphs, size_of
from .head import Head
from .request_info import Needs, Slots

_FEW = 64  # biased tokens
_MOST_WORKS = 1024  # kinds of steps that are remembered
_IN_REGISTERS = ("cute",)  # implementations that bias, mask and penalise in the launch that draws


class KernelVariant(NamedTuple):
    """What a batch's call asks for beside what the head does."""

    filters: bool = False  # top-k, top-p and min-p
    biases: int = 0  # tokens with one, of a row
    mask: bool = False
    penalties: bool = False
    logprobs: bool = False


PLAIN_VARIANT = KernelVariant()
ALL_PARAMS = KernelVariant(True, MAX_BIASED, True, True, True)


def in_registers(weight: Tensor) -> bool:
    """Whether the implementation that is chosen for a head biases, masks and penalises in the launch that draws."""
    return ops.choose(example(weight), "").name in _IN_REGISTERS


def variant_of(wanted: KernelVariant, in_registers: bool) -> KernelVariant:
    """The mix that serves a batch of which any row wants so much; ``in_registers`` as the function says."""
    changed = wanted.mask or wanted.penalties or wanted.biases > 0
    if not changed:
        return wanted._replace(filters=wanted.filters or wanted.logprobs)
    if wanted.biases > _FEW:
        return ALL_PARAMS._replace(logprobs=wanted.logprobs or not in_registers)
    if in_registers and not wanted.logprobs:
        return wanted._replace(biases=_FEW if wanted.biases else 0)
    return KernelVariant(True, _FEW, True, wanted.penalties, wanted.logprobs)


def variant_of_ranks(wanted: KernelVariant) -> KernelVariant:
    """The mix that serves a batch of several ranks of which any row wants so much; of filters see ``FusedStep._filters``."""
    if wanted.biases > _FEW:
        return ALL_PARAMS._replace(logprobs=wanted.logprobs)
    return wanted._replace(biases=_FEW if wanted.biases else 0)


def mixes(in_registers: bool) -> tuple[KernelVariant, ...]:
    """All of them, the plain one first."""
    either = (False, True)
    wanted = itertools.starmap(KernelVariant, itertools.product(either, (0, 1, MAX_BIASED), either, either, either))
    return tuple(dict.fromkeys(variant_of(each, in_registers) for each in wanted))


class Grammar(NamedTuple):
    """A mask for each row of the requests that have a grammar."""

    requests: NDArray[np.int64]  # (n,): of the batch
    rows: NDArray[np.int64]  # (n,)
    masks: NDArray[np.int32]  # (n, ceil(V / 32))


class Batch(NamedTuple):
    """Rows of a step, each the last position of a request, or with drafts one of its last ones."""

    hidden_states: Tensor  # (B, D)
    positions: Tensor  # (B,) int64, of the token that is read: the offset
    slots: NDArray[np.int32]  # (B,)
    slots_there: Tensor  # (B,) int32, on the device
    lengths: NDArray[np.int32]  # (B,) tokens of the request up to that position; where there may be drafts, at most
    grammar: Grammar | None
    drafts: DraftBatch | None = None
    buffers: tuple[Tensor, Tensor] | None = (
        None  # at whose beginning hidden states and positions lie, in other steps too
    )


class _BatchCache(NamedTuple):
    """Of the rows of a step, what stays as it is while their requests do."""

    slots: bytes
    wants: int  # of all rows together
    top_logprobs: int | None  # of the row with the most; None: no row asked for any, not for its token's either
    rows: Rows
    filters: dict[str, Any] | None  # of several ranks, which ask for no more: see ``FusedStep._filters``
    is_checked: bool = False  # ``sample`` has drawn for them
    params: SamplingParams | None = None  # what that makes of the request, for ``FusedStep._draw_cached``


class _CapturedStep(NamedTuple):
    """What a graph records."""

    params: SamplingParams
    draw: Callable[[], SampleResult]


class FusedStep:
    """Steps of one model runner.

    Args:
        head: the model's.
        sampler: vLLM's, whose state is read.
        slots: what requests ask for.
        device: where.
        tp: a group of ranks, or None.
        most_drafts: how many a request may have in a step; 0: there are none.
        graphs: of steps, or None.
    """

    def __init__(
        self,
        head: Head,
        sampler: Any,
        slots: Slots,
        device: torch.device,
        tp: Any = None,
        most_drafts: int = 0,
        graphs: Graphs | None = None,
    ) -> None:
        self.head, self.sampler, self.slots, self.device, self.tp = head, sampler, slots, device, tp
        self.most_drafts, self.graphs = most_drafts, graphs
        self.words = -(-head.vocab_size // 32)
        self.in_registers = tp is None and in_registers(head.weight)
        self.tokens = None if tp is None else (tp.first_token, tp.last_token)  # of this rank
        self.undefined = torch.zeros(1, dtype=torch.int64, device=device)
        self._known: _BatchCache | None = None  # of the last step
        self._works: dict[Hashable, _CapturedStep] = {}  # by what makes another graph
        self._recorded_weight = 0  # the address of the weight that they are of
        self._masks: Tensor | None = None  # (slots, words), all bits set where a request has none
        self._masked = np.zeros(len(slots.reasons), bool)

    def add(self, slot: int, params: Any, prompt_len: int) -> None:
        """A request takes a slot; vLLM's sampler has noted it."""
        self._known = None
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
        """Draws for every row; -1 where there is no score: see ``sanitize_token_ids``. With graphs the next step
        writes where these tokens and values are.

        Returns:
            what ``sample`` returns, and how many top log-probabilities were asked for by the row with the most; None: no row
            asked for any, not for its token's either.
        """
        known = self._of_rows(batch.slots)
        rows, count = known.rows, known.top_logprobs
        wants = known.wants | (0 if batch.grammar is None else Needs.MASK)
        is_alike = batch.drafts is None and not wants & Needs.BIASES and self.head.bias() is None
        if is_alike and wants and self.graphs is not None:  # a plain step is one launch
            return self._replay_graph(batch, known, wants, self.graphs), count
        is_same = is_alike and not wants & Needs.MASK
        if is_same and known.is_checked:
            return self._draw_cached(batch, known), count
        states, weight = batch.hidden_states, self.head.weight
        request = self._request(batch, known, wants)
        request |= {"temperature": rows.temperature, "seed": rows.seed, "offset": batch.positions}
        if self.tp is not None and batch.drafts is not None:
            out = sample_with_draft_hash(self.tp, batch.drafts, states, weight, **request)
        else:
            out = sample(states, weight, **self._whole(), **request)
        if is_same:
            self._known = known._replace(is_checked=True)
        return out, count

    def _draw_cached(self, batch: Batch, known: _BatchCache) -> SampleOutput:
        """``sample`` of a batch that asks for what it asked for in the last step, but for counts. What that checks and makes of
        its arguments takes the host 20 us of 110 (an EPYC core, min-p and penalties)."""
        if known.params is None:
            self._known = known = known._replace(params=self._asked(batch, known, known.wants))
        assert known.params is not None
        return make_output(self._drawn(batch, known.rows, known.params), len(batch.slots), 1, known.params, None)

    def _replay_graph(self, batch: Batch, known: _BatchCache, wants: int, graphs: Graphs) -> SampleOutput:
        """Likewise, by a CUDA graph. ``wants``: a grammar's mask too."""
        count = len(batch.slots)
        size = size_of(count, graphs.most)
        filters = () if known.filters is None else known.filters.items()
        numbers = tuple((name, None if isinstance(value, Tensor) else value) for name, value in filters)
        inputs = self._inputs(batch, size, graphs)
        states, positions = inputs
        weight = self.head.weight.data_ptr()
        if weight != self._recorded_weight:  # no graph of the old one is of use
            graphs.forget()
            self._works.clear()
            self._recorded_weight = weight
        kind = size, wants, known.top_logprobs, numbers, states.data_ptr(), positions.data_ptr()
        if kind not in self._works:
            if len(self._works) > _MOST_WORKS:
                self._works.clear()
            self._works[kind] = self._work(batch, known, wants, size, inputs, graphs)
        work = self._works[kind]
        if inputs is not batch.buffers:
            states[:count].copy_(batch.hidden_states)
            positions[:count].copy_(batch.positions)
        if work.params.counts is not None:
            graphs.slots[:count].copy_(batch.slots_there)
        if work.params.token_mask is not None:  # some mixes have one that nobody wants
            self._mask(batch, graphs.masks(self.words)[:count])
        if self.tp is not None:
            self._check_group()
        out = make_output(graphs.draw(kind, work.draw), size, 1, work.params, None)
        return SampleOutput(**{name: part[:count] for name, part in vars(out).items() if part is not None})

    def _inputs(self, batch: Batch, size: int, graphs: Graphs) -> tuple[Tensor, Tensor]:
        """Where a graph of so many rows reads hidden states and positions: where they are, or where they have to be copied to.
        Ranks have to have the same in rows that nobody looks at, too."""
        if batch.buffers is not None and self.tp is None and size <= min(map(len, batch.buffers)):
            return batch.buffers
        return graphs.hidden_states, graphs.positions

    def _work(
        self, batch: Batch, known: _BatchCache, wants: int, size: int, inputs: tuple[Tensor, Tensor], graphs: Graphs
    ) -> _CapturedStep:
        """A step of any batch of this kind: of its rows it has nothing but where they will be."""
        slots = np.resize(batch.slots, size)
        there = inputs[0][:size], inputs[1][:size], slots, graphs.slots[:size]
        filled, rows = Batch(*there, slots, None), rows_in(graphs.room(size), size)
        filters = known.filters and {
            name: getattr(rows, name) if isinstance(value, Tensor) else value for name, value in known.filters.items()
        }
        params = self._asked(filled, known._replace(rows=rows, filters=filters), wants)
        if params.token_mask is not None:
            params = params._replace(token_mask=graphs.masks(self.words)[:size])
        return _CapturedStep(params, functools.partial(self._drawn, filled, rows, params))

    def _asked(self, batch: Batch, known: _BatchCache, wants: int) -> SamplingParams:
        """To be kept: in place of counts, which are as large as the logits and of one step, an empty tensor."""
        weight = self.head.weight
        problem = batch_shape(len(batch.slots), len(weight), self.head.vocab_size, self.device, 1, self.tp)
        params = parse_sampling_params(self._request(batch, known, wants), problem)  # type: ignore[arg-type]
        return params if params.counts is None else params._replace(counts=params.counts.new_empty(0))

    def _drawn(self, batch: Batch, rows: Rows, params: SamplingParams) -> SampleResult:
        if params.counts is not None:
            params = params._replace(**self._counts(batch.slots_there, rows)._asdict())
        tokens, shard = (self.head.vocab_size, WHOLE) if self.tp is None else self.tp.part
        step = SampleInputs(
            batch.hidden_states,
            self.head.weight,
            rows.temperature,
            rows.seed,
            batch.positions,
            1,
            tokens,
            shard,
            params,
        )
        return ops.sample(step, "") if self.tp is None else ops.sample_sharded(step, self.tp)

    def _check_group(self) -> None:
        """What every call with a group does before its step, and a replay cannot."""
        try:
            self.tp.raise_if_unusable()
        except BaseException as error:
            ops.count_skipped_call(self.tp, error)
            raise

    def _of_rows(self, slots: NDArray[np.int32]) -> _BatchCache:
        """vLLM writes to its sampler's state of a slot when a request takes it, and then no more: while a batch has the same
        requests in the same rows, nothing is looked up or copied again."""
        same = slots.tobytes()
        if self._known is None or self._known.slots != same:
            wants = int(np.bitwise_or.reduce(self.slots.wants[slots]))
            has_logprobs = wants & Needs.LOGPROBS
            count = int(self.sampler.sampling_states.num_logprobs[slots].max()) if has_logprobs else None
            room = None
            if self.graphs is not None and len(slots) <= self.graphs.most:
                room = self.graphs.room(size_of(len(slots), self.graphs.most))
            rows = rows_of(self.sampler, slots, self.device, room)
            self._known = _BatchCache(same, wants, count, rows, None if self.tp is None else self._filters(slots, rows))
        return self._known

    def sanitize_token_ids(self, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        """See ``engines.sanitize_token_ids``."""
        return sanitize_token_ids(token_ids, self.undefined)

    def _request(self, batch: Batch, known: _BatchCache, wants: int) -> dict[str, Any]:
        request = self.head.request()
        if not wants:
            return request
        rows, (mix, biases) = known.rows, self._mix(batch, wants)
        if known.filters is not None:
            request |= known.filters
        elif mix.filters:
            request |= {"top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p}
        if biases is not None:
            ids, values = biases
            request["logit_bias"] = to_device(ids, self.device), self._values(batch, values)
        if mix.mask:
            request["token_mask"] = self._mask(batch)
        if mix.penalties:
            counts = self._counts(batch.slots_there, rows)
            request["token_counts"] = counts
            if batch.drafts is not None:
                drafts = batch.drafts.drafts()
                request["token_counts"] = drafts.counted(counts.counts, drafts.nodes(), self.head.vocab_size)
            for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
                request[name] = getattr(rows, name)
        if mix.logprobs:
            request |= {"return_logprobs": True, "top_logprobs": max(known.top_logprobs or 0, 1)}
        return request

    def _mix(
        self, batch: Batch, wants: int
    ) -> tuple[KernelVariant, tuple[NDArray[np.int32], NDArray[np.float32]] | None]:
        """And the rows' biases, if the mix has any: ids (B, n), -1 behind a row's last, and values (B, n)."""
        of_slots, slots, row = [], batch.slots, None
        if wants & Needs.BIASES:
            lengths = batch.lengths
            if self.most_drafts:  # stop tokens are there as if none could be drawn yet, until ``_values`` ends them
                slots, row = np.unique(slots, return_inverse=True)
                lengths = np.full(len(slots), -1, np.int32)
            biases = (self.slots.biases[slot] for slot in slots)
            of_slots = [biases_now(each, int(length)) for each, length in zip(biases, lengths)]
        most = max((len(ids) for ids, _ in of_slots), default=0)
        others = (bool(wants & want) for want in (Needs.MASK, Needs.PENALTIES, Needs.LOGPROBS))
        wanted = KernelVariant(bool(wants & Needs.FILTERS), most, *others)
        mix = variant_of(wanted, self.in_registers) if self.tp is None else variant_of_ranks(wanted)
        if not mix.biases:
            return mix, None
        ids, values = bias_of_rows(of_slots, len(slots), mix.biases)
        return mix, (ids, values) if row is None else (ids[row], values[row])

    def _values(self, batch: Batch, values: NDArray[np.float32]) -> Tensor:
        """Biases on the device."""
        there = to_device(values, self.device)
        if not self.most_drafts or not np.isneginf(values).any():
            return there
        return with_stops_ended(there, to_device(self.slots.least[batch.slots], self.device), batch.positions)

    def _mask(self, batch: Batch, room: Tensor | None = None) -> Tensor:
        """(B, words) int32, in ``room`` if there is one."""
        grammar = batch.grammar
        if (
            self._masks is None and grammar is not None and len(grammar.rows) == len(batch.slots)
        ):  # it alone says it all
            masks = grammar.masks
            if masks.shape[1] != self.words:  # copied: to NumPy one row is contiguous, whatever its stride
                masks = masks[:, : self.words].copy()
            if (np.diff(grammar.rows) != 1).any():
                masks = masks[np.argsort(grammar.rows)]
            return to_device(np.ascontiguousarray(masks), self.device, room)
        if self._masks is None:
            mask = torch.full((len(batch.slots), self.words), -1, dtype=torch.int32, device=self.device)
        else:
            mask = self._masks.index_select(0, batch.slots_there)
        if grammar is not None:
            index = to_device(grammar.rows, self.device)
            theirs = to_device(np.ascontiguousarray(grammar.masks), self.device)
            mask.index_copy_(0, index, mask.index_select(0, index) & theirs[:, : self.words])
        return mask if room is None else room.copy_(mask)

    def warm_up(self, hidden_states: Tensor) -> list[str]:
        """Compiles what any batch of up to as many rows needs, and takes as much memory as the largest will: vLLM looks at the
        peak meanwhile. Returns the kernels' names.

        With several ranks all make this call, and what one raises is an error on all of them."""
        if self.tp is None:
            return self._warm_up(hidden_states)
        with contextlib.ExitStack() as failing:
            failing.push(self.tp)
            names = self._warm_up(hidden_states)
            self.tp.check(collective=True)
            failing.pop_all()  # the group stays open
        return names

    def _warm_up(self, hidden_states: Tensor) -> list[str]:
        batch, weight = len(hidden_states), self.head.weight
        self.sanitize_token_ids(torch.zeros(batch, dtype=torch.int64, device=self.device))
        if self.most_drafts:
            given, ids = example_of_drafts(self.most_drafts, self.device)
            verify_by_match(given, ids)
            if self.tp is not None:
                states, rows = hidden_states.new_zeros(len(ids), hidden_states.shape[1]), no_rows(len(ids), self.device)
                sample_with_draft_hash(
                    self.tp, given, states, weight, temperature=rows.temperature, seed=rows.seed, offset=ids
                )
        of_head, whole, rows = self.head.request(), self._whole(), no_rows(batch, self.device)
        slots = torch.zeros(batch, dtype=torch.int32, device=self.device)
        # a penalty, so that the kernel has something to do
        counts = self._counts(slots, rows._replace(presence_penalty=rows.top_p))
        requests: Any = [of_head | request for request in self._examples(rows, counts)]
        names = warmup_mixes(weight, requests, max_batch_size=batch, **whole)
        everything = of_head | whole | example_of(ALL_PARAMS, rows, counts)
        sample(hidden_states, weight, temperature=rows.temperature, seed=rows.seed, offset=rows.seed, **everything)
        return names

    def _examples(self, rows: Rows, counts: Counted) -> list[dict[str, Any]]:
        """What calls ask for, so that nothing else compiles. ``counts``: of B rows."""
        if self.tp is not None:
            return examples_of_ranks(rows, counts)
        return [example_of(mix, rows, counts) for mix in mixes(self.in_registers)]

    def _whole(self) -> dict[str, Any]:
        """What a call has of the whole vocabulary."""
        return {"vocab_size": self.head.vocab_size} if self.tp is None else {"tp": self.tp}

    def _counts(self, slots: Tensor, rows: Rows) -> Counted:
        return counts_of(self.sampler.penalties_state, slots, rows, self.head.vocab_size, self.tokens)

    def _filters(self, slots: NDArray[np.int32], rows: Rows) -> dict[str, Any]:
        """Those that any row has. A greedy row's token is the same with all of them."""
        states = self.sampler.sampling_states
        drawn = slots[states.temperature.np[slots] > 0.0]
        top_k: NDArray[np.int32] = states.top_k.np[drawn]  # the size of the vocabulary where there is none
        request: dict[str, Any] = {}
        if (top_k < self.head.vocab_size).any():
            is_shared = top_k[0] <= FEW and (top_k == top_k[0]).all()
            request["top_k"] = int(top_k[0]) if is_shared else rows.top_k
        if (states.top_p.np[drawn] < 1.0).any():
            request["top_p"] = rows.top_p
        if (states.min_p.np[drawn] > 0.0).any():
            request["min_p"] = rows.min_p
        return request


def example_of(mix: KernelVariant, rows: Rows, counts: Counted) -> dict[str, Any]:
    """What a call of this mix has, as ``warmup`` takes it. ``counts``: of B rows."""
    device, (batch, vocab_size) = counts.counts.device, counts.counts.shape
    request: dict[str, Any] = {}
    if mix.filters:
        request |= {"top_k": rows.top_k, "top_p": rows.top_p, "min_p": rows.min_p}
    if mix.biases:
        ids = torch.full((batch, mix.biases), -1, dtype=torch.int32, device=device)
        request["logit_bias"] = ids, torch.zeros(ids.shape, device=device)
    if mix.mask:
        request["token_mask"] = torch.full((batch, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    if mix.penalties:
        request["token_counts"] = counts
        request |= {name: getattr(rows, name) for name in Rows._fields if name.endswith("penalty")}
    if mix.logprobs:
        request |= {"return_logprobs": True, "top_logprobs": 1}
    return request


def examples_of_ranks(rows: Rows, counts: Counted) -> list[dict[str, Any]]:
    """What calls of several ranks have, so that nothing else compiles: all that changes logits, with log-probabilities, behind
    which it may be another kernel's, and without, filters together, and each way of theirs. ``counts``: of B rows."""
    either = (False, True)
    changes = (KernelVariant(False, *each) for each in itertools.product((0, _FEW), either, either, either))
    mask = example_of(KernelVariant(mask=True), rows, counts)
    few = {"top_k": 1, "top_p": rows.top_p}
    return [
        *(example_of(mix, rows, counts) for mix in (*changes, KernelVariant(filters=True))),
        *(example_of(ALL_PARAMS._replace(logprobs=logprobs), rows, counts) for logprobs in either),
        {"top_p": rows.top_p},
        few,
        few | mask,
    ]


def no_rows(batch: int, device: torch.device) -> Rows:
    """Parameters that ask for nothing."""
    zeros, ones = torch.zeros(batch, device=device), torch.ones(batch, device=device)
    none = torch.zeros(batch, dtype=torch.int64, device=device)
    return Rows(none, ones, torch.zeros(batch, dtype=torch.int32, device=device), ones, zeros, ones, zeros, zeros)
