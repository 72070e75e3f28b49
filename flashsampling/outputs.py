"""Results of a sampling step: how backends lay them out, and ``SampleOutput``, which users get."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling_params import DEFAULT_PARAMS, SamplingParams
from .token_counts import TokenCounts
from .torch_internals import register_dataclass

DEFERRED_DRAW = -2  # in place of a token id between two kernels of a step: the second one draws this row


@dataclass(frozen=True)
class SampleOutput:
    """The output of a sampling step. A pytree, so exported and compiled modules may return it. Releases only add
    fields.

    All fields but ``token_ids`` are None unless the call requests them. Logarithms are natural. The raw logits are
    those of the LM head after its bias, scale and soft cap.

    Attributes:
        token_ids: (B,), or (B, num_samples) when ``num_samples > 1``, int64. -1 in a row whose scores hold a NaN or no
            finite value; such a row does not affect the others.
        logprobs: float32, shape of ``token_ids``: log softmax of the raw logits at the token; NaN where the token is
            -1.
        processed_logprobs: float32, shape of ``token_ids``: log-probability in the distribution that was drawn from.
            For a greedy row that distribution is taken at temperature 1.
        ranks: int64, shape of ``token_ids``: 1 + the number of tokens with a larger raw logit; -1 where the token is
            -1.
        top_token_ids: (B, n) int64: the tokens with the highest raw logits, the lowest ids among equal ones; -1 in a
            row that holds a NaN.
        top_logprobs: (B, n) float32: their raw log-probabilities; NaN in a row that holds a NaN.
        given_logprobs: (B, m) float32: raw log-probabilities of ``logprob_ids``; NaN for an id out of range.
        logsumexp: (B,) float32: log-sum-exp of the raw logits.
        kept_counts: (B,) int64: how many tokens the row was drawn from: those that filters keep and that have a
            probability; 1 of a greedy row, 0 of one without a token.
        kept_mask: (B, ceil(V / 32)) int32: which they are; bit t & 31 of word t >> 5 is token t.

    Example:
        >>> import torch, flashsampling
        >>> hidden_states, weight = torch.zeros(2, 8), torch.zeros(1000, 8)
        >>> flashsampling.sample(hidden_states, weight, seed=torch.arange(2), num_samples=3).token_ids.shape
        torch.Size([2, 3])
    """

    token_ids: Tensor
    logprobs: Tensor | None = None
    processed_logprobs: Tensor | None = None
    ranks: Tensor | None = None
    top_token_ids: Tensor | None = None
    top_logprobs: Tensor | None = None
    given_logprobs: Tensor | None = None
    logsumexp: Tensor | None = None
    kept_counts: Tensor | None = None
    kept_mask: Tensor | None = None


register_dataclass(SampleOutput, serialized_type_name="flashsampling.SampleOutput")


class SampleResult(NamedTuple):
    """The ids and values of a step as a backend returns them, flat; ``layout`` describes their order."""

    ids: Tensor  # int64: (B * num_samples,) token ids, row by row, or what ``SampleInputs.shard`` says; then other ids
    values: Tensor | None = None  # float32: the other outputs; None or empty: none


class FilteredLogits(NamedTuple):
    """The tokens of a step with one draw per row, and the logits that rejection sampling needs."""

    ids: Tensor  # (B,) int64
    logits: Tensor  # (B, V): processed logits, as filters see them
    limits: Tensor  # (B,) int64: the sort key of a row's last kept token; the filtered-sampling kernel defines both
    masses: Tensor  # (B, 4) float32


class OutputSlice(NamedTuple):
    """A part of ``SampleResult.ids`` or ``SampleResult.values``, row after row."""

    first: int  # element
    columns: int  # per row


class OutputLayout(NamedTuple):
    """The parts of a ``SampleResult``, in order, by the names of ``SampleOutput``."""

    ids: dict[str, OutputSlice]
    values: dict[str, OutputSlice]
    num_ids: int  # elements in total
    num_values: int

    def split(self, result: SampleResult, batch: int) -> dict[str, Tensor]:
        """Returns every part, (B, columns)."""
        values = result.ids.new_empty(0, dtype=torch.float32) if result.values is None else result.values
        return {
            name: tensor[first : first + batch * columns].view(batch, columns)
            for parts, tensor in ((self.ids, result.ids), (self.values, values))
            for name, (first, columns) in parts.items()
        }

    def join(self, parts: dict[str, Tensor]) -> SampleResult:
        """Returns the result that ``split`` splits into these parts, (B, columns), int64 and float32."""
        ids, values = ([parts[name].flatten() for name in names] for names in (self.ids, self.values))
        return SampleResult(torch.cat(ids) if len(ids) > 1 else ids[0], torch.cat(values) if values else None)


def layout(batch: int, num_samples: int, params: SamplingParams) -> OutputLayout:
    """Returns the layout of what a step of ``batch`` rows returns."""
    draws = num_samples if params.scored_ids is None else params.scored_ids.shape[1]
    draws = draws if params.logprobs else 0
    given = 0 if params.logprob_ids is None else params.logprob_ids.shape[1]
    ids = [
        ("token_ids", num_samples, True),
        ("top_token_ids", params.top_logprobs, params.top_logprobs > 0),
        ("ranks", draws, params.logprobs and params.ranks),
        ("kept_counts", 1, params.kept_words > 0),
        ("kept_mask", params.kept_words, params.kept_words > 0),
    ]
    values = [
        ("logprobs", draws, params.logprobs),
        ("processed_logprobs", draws, params.logprobs),
        ("top_logprobs", params.top_logprobs, params.top_logprobs > 0),
        ("given_logprobs", given, params.logprob_ids is not None),
        ("logsumexp", 1, params.logsumexp),
    ]

    def place(parts: list[tuple[str, int, bool]]) -> tuple[dict[str, OutputSlice], int]:
        slices, first = {}, 0
        for name, columns, is_there in parts:
            if is_there:
                slices[name] = OutputSlice(first, columns)
                first = first + batch * columns  # not in place: to torch.jit.trace these are tensors
        return slices, first

    (id_parts, num_ids), (value_parts, num_values) = place(ids), place(values)
    return OutputLayout(id_parts, value_parts, num_ids, num_values)


def _output_of_tokens(token_ids: Tensor) -> SampleOutput:
    """Returns ``SampleOutput(token_ids)``. The class has the other fields' defaults: a frozen dataclass's constructor,
    which sets all ten, takes 2 us of a call of 10."""
    if torch.compiler.is_compiling():
        return SampleOutput(token_ids)
    out = object.__new__(SampleOutput)
    vars(out)["token_ids"] = token_ids
    return out


def make_output(
    result: SampleResult, batch: int, num_samples: int, params: SamplingParams, token_counts: object = None
) -> SampleOutput:
    """Returns a backend's result in its parts. ``token_counts``: if it is a ``TokenCounts``, it counts the drawn
    tokens."""
    if params is DEFAULT_PARAMS or not params.needs_raw_mass():
        out = _output_of_tokens(result.ids if num_samples == 1 else result.ids.view(batch, num_samples))
    else:
        parts = layout(batch, num_samples, params).split(result, batch)
        flat = ["logsumexp", "kept_counts"]
        if "kept_mask" in parts:
            parts["kept_mask"] = parts["kept_mask"].to(torch.int32)
        if num_samples == 1:
            flat += ["token_ids", "logprobs", "processed_logprobs", "ranks"]
        out = SampleOutput(**{name: part[:, 0] if name in flat else part for name, part in parts.items()})
    if isinstance(token_counts, TokenCounts):
        token_counts.add(out.token_ids)
    return out
