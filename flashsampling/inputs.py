"""A step as a value: what one call asks for, and what comes back.

``api`` builds it, once, from checked arguments; ``ops`` takes it apart for torch's dispatcher and puts it together again; an
implementation (``backends``) reads what it needs. A new parameter is a field here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .exchange_protocol import WHOLE, Shard
from .noise import Stream
from .row_params import is_symbolic


class RowParams(NamedTuple):
    """A value for every row."""

    temperature: Tensor  # (B,) float32
    seed: Tensor  # (B,) int64
    offset: Tensor  # (B,) int64


class SamplingParams(NamedTuple):
    """What a step may be asked for beside one plain draw. A backend does of it what its ``DOES`` names; else it refuses.

    Shapes and dtypes are checked, and the numbers, but not what tensors hold: nothing in them makes an id out of range. A row
    whose ``top_p`` or ``min_p`` is NaN gives -1. V is the step's ``vocab_size``; a tensor may be wider, and what is beyond is
    not read. A dimension of 1 or V elements is contiguous; rows may be any stride apart, 0 too.
    """

    stream: Stream = Stream.TOKEN  # of the noise
    # the head's: soft_cap * tanh(logit_scale * (hidden_states @ weight.T + bias) / soft_cap)
    bias: Tensor | None = None  # (V,) float32
    logit_scale: float = 1.0
    soft_cap: float = 0.0  # 0: none
    # the request's, in this order
    dense_bias: Tensor | None = None  # (V,) float32, added in all rows
    bias_ids: Tensor | None = None  # (B, n) int32; -1 or out of range: no entry; of an id named twice the sum is added
    bias_values: Tensor | None = None  # (B, n) float32
    counts: Tensor | None = None  # (B, V) int32: low 31 bits: how often in the output; bit 31: it is in the prompt
    repetition_penalty: Tensor | float = 1.0  # (B,) float32, or one number; as are the following
    frequency_penalty: Tensor | float = 0.0
    presence_penalty: Tensor | float = 0.0
    token_mask: Tensor | None = None  # (B, ceil(V / 32)) int32; bit t & 31 of word t >> 5: token t is allowed
    top_k: Tensor | int = 0  # (B,) int32 or int64; <= 0 or >= V: off
    top_p: Tensor | float = 1.0  # >= 1: off
    min_p: Tensor | float = 0.0  # <= 0: off
    joint_top_p: Tensor | int = 0  # (B,) int32; not 0: the share of top_p is of all tokens, not of what top_k kept
    # what comes back beside token ids
    logprobs: bool = False  # raw and processed logprob and rank of every drawn token
    top_logprobs: int = 0  # that many ids with the highest raw logits, the lowest of equal ones, and their raw logprobs
    logprob_ids: Tensor | None = None  # (B, m) int64: raw logprobs of these; NaN if out of range
    logsumexp: bool = False  # of the raw logits
    # (B, 8 ceil(V / 128)) uint8, beside ``counts``, contiguous: 0 where none of 16 tokens has a count. It changes no token, but
    # how many counts are read. None: all may have some
    seen: Tensor | None = None

    def names(self) -> list[str]:
        """Fields that are not as they are where nothing is asked for, but for ``seen``."""
        symbolic = is_symbolic if is_dynamo_compiling() else None  # once, not for every field
        return [
            name
            for name, value, plain in zip(_NAMED, self, DEFAULT_PARAMS)
            if value is not plain and (isinstance(value, Tensor) or (symbolic and symbolic(value)) or value != plain)
        ]

    def filters(self) -> tuple[bool, bool, bool]:
        """Whether a row may have a top-k, a top-p, a min-p."""
        by_top_k = isinstance(self.top_k, Tensor) or self.top_k > 0
        by_top_p = isinstance(self.top_p, Tensor) or not self.top_p >= 1
        return by_top_k, by_top_p, isinstance(self.min_p, Tensor) or not self.min_p <= 0

    def may_filter(self) -> bool:
        """Whether a row may have one of these."""
        return any(self.filters())

    def needs_raw_mass(self) -> bool:
        """Whether the log-sum-exp of the raw logits is needed."""
        return self.logprobs or self.top_logprobs > 0 or self.logprob_ids is not None or self.logsumexp

    def needs_mass(self, vocab_size: int) -> bool:
        """Whether a row may need the mass of all its processed logits: for log-probabilities, or a top-p that is not of what a
        top-k kept."""
        of_top_k = isinstance(self.top_k, int) and 0 < self.top_k < vocab_size and not self.may_be_joint()
        return self.logprobs or (not of_top_k and (isinstance(self.top_p, Tensor) or not self.top_p >= 1.0))

    def may_be_joint(self) -> bool:
        """Whether a row may have a top-k and a top-p of all tokens."""
        if not isinstance(self.joint_top_p, Tensor) and self.joint_top_p == 0:
            return False
        by_top_k, by_top_p, _ = self.filters()
        return by_top_k and by_top_p

    def rows(self, first: int, last: int) -> "SamplingParams":
        """Of the rows from ``first`` up to ``last``."""
        return self._replace(**_rows_of(self, (*NUMBERS, *MATRICES, "seen"), first, last))


_NAMED = SamplingParams._fields[:-1]  # less ``seen``
DEFAULT_PARAMS = SamplingParams()  # this very object, where nothing is asked for: a call looks no further
NUMBERS = (  # of all, or one per row
    *("repetition_penalty", "frequency_penalty", "presence_penalty", "top_k", "top_p", "min_p", "joint_top_p"),
)
MATRICES = ("bias_ids", "bias_values", "counts", "token_mask", "logprob_ids")  # a row of it per row
_WIDEST_PICKED = 2**20
ARGUMENTS = {  # of ``sample``, where a field has another name
    "dense_bias": "logit_bias",
    "bias_ids": "logit_bias",
    "bias_values": "logit_bias",
    "counts": "token_counts",
    "logprobs": "return_logprobs",
    "logsumexp": "return_logsumexp",
}


def arguments(names: list[str]) -> str:
    """Fields of ``SamplingParams`` as ``sample`` calls them, in a sentence."""
    return ", ".join(dict.fromkeys(ARGUMENTS.get(name, name) for name in names))


def row_argument(value: Tensor | float) -> tuple[int, float]:
    """A parameter of rows as kernels take it: an address and 0, or 0 and the number for all rows."""
    return (value.data_ptr(), 0) if isinstance(value, Tensor) else (0, value)


def _rows_of(whole: Any, names: Sequence[str], first: int, last: int) -> dict[str, Any]:
    """Of its fields that are tensors these rows."""
    return {name: value[first:last] for name in names if isinstance(value := getattr(whole, name), Tensor)}


class DraftChains(NamedTuple):
    """Drafts of B requests in chains, at positions that are the rows of a step, (R,); ``drafts`` makes it. No index is out of
    range."""

    token_ids: Tensor  # (B, n) int64; -1: there is none, nor behind it
    rows: Tensor  # (B, n + 1) int64: the row of the position before each draft, and of the one behind the last
    places: Tensor  # (B, n) int64: each draft's row of ``probs``
    probs: Tensor | None  # (N, V or more) float: what they were drawn from; None: each was certain


class SampleInputs(NamedTuple):
    """One sampling step of a whole LM head, or of a shard. Arguments are checked: shapes, dtypes, ranges, devices."""

    hidden_states: Tensor  # (B, D)
    weight: Tensor  # (V, D), same dtype and device
    temperature: Tensor | float  # (B,) float32, or one number for all rows
    seed: Tensor | int  # (B,) int64, or one number
    offset: Tensor | int  # (B,) int64, or one number
    num_samples: int  # draws per row
    vocab_size: int  # only that many of the weight's rows are tokens; 0 of an empty shard
    shard: Shard = WHOLE  # of which the weight is a part, and what becomes of its winners
    params: SamplingParams = DEFAULT_PARAMS
    logits: Tensor | None = (
        None  # (B, V) any float dtype: there is no head; hidden_states and weight are this tensor too
    )
    drafted: DraftChains | None = None  # of several ranks: what is drawn is what rejection makes of these
    draft_hash: Tensor | None = (
        None  # () int64, of several ranks: a hash of what else is the same on all, or none has a token
    )

    def rows(self) -> RowParams:
        """Its rows' parameters as tensors, numbers too."""
        batch, device = self.hidden_states.shape[0], self.hidden_states.device

        def column(value: Tensor | float, dtype: torch.dtype) -> Tensor:
            return value if isinstance(value, Tensor) else torch.full((batch,), value, dtype=dtype, device=device)

        return RowParams(
            column(self.temperature, torch.float32), column(self.seed, torch.int64), column(self.offset, torch.int64)
        )

    def too_wide_to_pick(self) -> str | None:
        """Why ``kernels.triton.filtered.filtered_sample_kernel`` is not compiled for it, or None: its code grows with
        the vocabulary."""
        if self.vocab_size > _WIDEST_PICKED and (self.params.may_filter() or self.params.needs_raw_mass()):
            return (
                f"{self.vocab_size} tokens with filters or log-probabilities, of which it takes up to {_WIDEST_PICKED}"
            )
        return None

    def row_arguments(self) -> tuple[int, float, int, int, int, int]:
        """Its rows' parameters as kernels take them: of each the address and 0, or 0 and the number for all rows."""
        temperature, seed, offset = self.temperature, self.seed, self.offset
        temperature_at = seed_at = offset_at = 0
        if isinstance(temperature, Tensor):
            temperature_at, temperature = temperature.data_ptr(), 0.0
        if isinstance(seed, Tensor):
            seed_at, seed = seed.data_ptr(), 0
        if isinstance(offset, Tensor):
            offset_at, offset = offset.data_ptr(), 0
        return temperature_at, temperature, seed_at, seed, offset_at, offset

    def part(self, first: int, last: int) -> "SampleInputs":
        """Of the rows from ``first`` up to ``last``."""
        names = ("hidden_states", "logits", "temperature", "seed", "offset")
        return self._replace(**_rows_of(self, names, first, last), params=self.params.rows(first, last))


DEFERRED_DRAW = -2  # in place of a token, between two kernels of a step: the second one draws without it
DEFERRED_TOP_K = 512  # rows with a greater one, or none, are drawn by the first


class SampleResult(NamedTuple):
    """What a step gives. ``layout`` says where in it what lies."""

    ids: Tensor  # int64: (B * num_samples,) token ids, row by row, or what ``SampleInputs.shard`` says; behind them other ids
    values: Tensor | None = None  # float32: what else was asked for; None or empty: nothing


class FilteredLogits(NamedTuple):
    """What a step of one draw per row leaves for ``kernels/triton/speculative/rejection``: its tokens, and what they
    were drawn from."""

    ids: Tensor  # (B,) int64
    logits: (
        Tensor  # (B, V), of which the request's processed ones are made: ``SampleInputs.logits``, or float32 products
    )
    limits: Tensor  # (B,) int64: the place of a row's last kept token. ``logits_pick`` says what these two hold
    masses: Tensor  # (B, 4) float32


class OutputSlice(NamedTuple):
    """A part of ``SampleResult.ids`` or ``SampleResult.values``: row after row."""

    first: int  # element
    columns: int  # per row


class OutputLayout(NamedTuple):
    """What ``SampleResult`` holds, in this order, by the name that ``SampleOutput`` has for it."""

    ids: dict[str, OutputSlice]
    values: dict[str, OutputSlice]
    num_ids: int  # elements in all
    num_values: int

    def split(self, drawn: SampleResult, batch: int) -> dict[str, Tensor]:
        """Every part of it, (B, columns)."""
        values = (
            drawn.ids.new_empty(0, dtype=torch.float32) if drawn.values is None else drawn.values
        )  # None: of no rows
        return {
            name: tensor[first : first + batch * columns].view(batch, columns)
            for parts, tensor in ((self.ids, drawn.ids), (self.values, values))
            for name, (first, columns) in parts.items()
        }

    def join(self, parts: dict[str, Tensor]) -> SampleResult:
        """The opposite: of parts (B, columns), int64 and float32."""
        ids, values = ([parts[name].flatten() for name in names] for names in (self.ids, self.values))
        return SampleResult(torch.cat(ids) if len(ids) > 1 else ids[0], torch.cat(values) if values else None)


def layout(batch: int, num_samples: int, params: SamplingParams) -> OutputLayout:
    """What a step of so many rows gives."""
    if not params.needs_raw_mass():  # which costs the host least, and is most calls
        return OutputLayout({"token_ids": OutputSlice(0, num_samples)}, {}, batch * num_samples, 0)
    draws = num_samples if params.logprobs else 0
    given = 0 if params.logprob_ids is None else params.logprob_ids.shape[1]
    ids = [("token_ids", num_samples, True), ("top_token_ids", params.top_logprobs, params.top_logprobs)]
    ids += [("ranks", draws, draws)]
    values = [("logprobs", draws, draws), ("processed_logprobs", draws, draws)]
    values += [("top_logprobs", params.top_logprobs, params.top_logprobs)]
    values += [("given_logprobs", given, params.logprob_ids is not None), ("logsumexp", 1, params.logsumexp)]

    def place(wanted: list[Any]) -> tuple[dict[str, OutputSlice], int]:
        parts, first = {}, 0
        for name, columns, is_there in wanted:
            if is_there:
                parts[name] = OutputSlice(first, columns)
                first = first + batch * columns  # not in place: to torch.jit.trace these are tensors
        return parts, first

    (id_parts, num_ids), (value_parts, num_values) = place(ids), place(values)
    return OutputLayout(id_parts, value_parts, num_ids, num_values)


def example(weight: Tensor) -> SampleInputs:
    """A step of one row for a weight, to ask what an implementation takes. Its values are nobody's."""
    return SampleInputs(weight.new_empty((1, weight.shape[1])), weight, 1.0, 0, 0, 1, weight.shape[0])
