"""Pure torch on any device: the vocabulary in chunks with a running maximum, extra memory O(B x chunk), never (B, V).

Several draws share a chunk's logits, a few draws at a time; a draw costs 5 bytes of memory besides its token. Sampling
parameters need all logits of a row: a few rows at a time then have theirs in memory, whatever B is, and the weight is
read once per group of rows. The arithmetic is the oracle's.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import exchange_protocol, noise
from ..exchange_protocol import WHOLE
from ..inputs import SampleInputs
from ..outputs import SampleResult, layout
from ..sampling_params import DEFAULT_PARAMS, argument_names
from . import oracle
from .oracle import exact_logits, may_round, scores_of_logits, without_autocast

# scores of a chunk over all rows and draws; on a CPU 64 k floats and their Philox words stay in a core's cache
_SCORES_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
# scores at once with several draws. 4 rows, 64 draws, V = 5000 take 52, 49, 46, 44 ms with 2**16 to 2**19
_SCORES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
_WIDENED_ELEMENTS = 1 << 19
_MAX_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 16}  # per chunk, for any number of rows
_GRANULE = 128  # whole Philox groups
_LOGITS_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 24}  # whole rows, at least one; some 60 bytes each with filters


def chunk_tokens(rows: int, vocab_size: int, device_type: str) -> int:
    """Returns the tokens per chunk, a multiple of 128. ``rows``: B * num_samples."""
    tokens = min(_SCORES_PER_CHUNK.get(device_type, 1 << 18) // max(rows, 1), _MAX_TOKENS.get(device_type, 1 << 14))
    return min(max(tokens // _GRANULE, 8) * _GRANULE, -(-vocab_size // _GRANULE) * _GRANULE)


def head_logits(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """Returns (B, chunk) float32. On CUDA the 16-bit matmul accumulates and returns fp32. Elsewhere the weights are
    widened into one buffer that stays in cache: 12 ms per step instead of 37 ms (V = 49152, D = 576, bf16, 2 cores)."""
    if hidden_states.dtype == torch.float32 or may_round(hidden_states):
        return exact_logits(hidden_states, weight)
    with without_autocast(hidden_states.device):
        if hidden_states.is_cuda:
            return torch.mm(hidden_states, weight.T, out_dtype=torch.float32)
        wide_states = hidden_states.float()
        rows = min(max(1, _WIDENED_ELEMENTS // weight.shape[1]), weight.shape[0])
        widened = torch.empty((rows, weight.shape[1]), dtype=torch.float32, device=weight.device)
        parts = [wide_states @ widened[: len(part)].copy_(part).T for part in weight.split(rows)]
        return torch.cat(parts, dim=1)


def _any_finite(scores: Tensor, best: Tensor) -> Tensor:
    # a finite maximum is enough, +inf is not; on a CPU looking for +inf is cheap: 5 % of a step with 16 draws
    if scores.device.type == "cpu" and not best.isposinf().any():
        return best.isfinite()
    return scores.isfinite().any(dim=-1)


def _needs_whole_rows(step: SampleInputs) -> list[str]:
    return [] if step.params is DEFAULT_PARAMS else [name for name in step.params.names() if name != "stream"]


def unsupported(step: SampleInputs) -> str | None:
    """Returns why it cannot run a step, or None."""
    if step.shard != WHOLE and _needs_whole_rows(step):
        return f"a shard of a vocabulary with {argument_names(_needs_whole_rows(step))}"
    return None


def _rows_at_once(step: SampleInputs) -> int:
    return max(_LOGITS_AT_ONCE.get(step.hidden_states.device.type, 1 << 21) // step.vocab_size, 1)


@torch.no_grad()
def shard_logits(step: SampleInputs) -> Tensor:
    """Returns a shard's logits, as ``backends`` says."""
    rows, weight = _rows_at_once(step), step.weight[: step.vocab_size]
    return torch.cat([head_logits(states, weight) for states in step.hidden_states.split(rows)])


@torch.no_grad()  # with a trainable weight autograd would keep every chunk, for a gradient that tokens lack
def run(step: SampleInputs) -> SampleResult:
    """Runs a step, as ``backends`` says."""
    return _in_rows(step) if _needs_whole_rows(step) else _in_chunks(step)


def row_groups(step: SampleInputs) -> Iterator[tuple[slice, SampleInputs, oracle.Logits]]:
    """Yields a few rows at a time: their slice, inputs and logits."""
    batch, rows = step.hidden_states.shape[0], _rows_at_once(step)
    for first in range(0, batch, rows):
        some = slice(first, min(first + rows, batch))
        part = step.part(some.start, some.stop)
        if part.logits is None:
            head = head_logits(part.hidden_states, part.weight[: step.vocab_size])
        else:
            head = oracle.head_logits(part)
        yield some, part, oracle.transform_logits(head, part.rows().temperature, part.params)


def _in_rows(step: SampleInputs) -> SampleResult:
    """Runs a step with all logits of a few rows at a time."""
    batch, device = step.hidden_states.shape[0], step.hidden_states.device
    draws = torch.arange(step.num_samples, device=device)
    some_outputs = []
    for _, part, logits in row_groups(step):
        at_once = max(_SCORES_AT_ONCE.get(device.type, 1 << 18) // logits.raw.numel(), 1)
        token_ids = torch.cat([oracle.draw(logits, part, some) for some in draws.split(at_once)], dim=1)
        some_outputs.append(oracle.outputs(token_ids, logits, part))
    parts = {name: torch.cat([some[name] for some in some_outputs]) for name in some_outputs[0]}
    return layout(batch, step.num_samples, step.params).join(parts)


def _in_chunks(step: SampleInputs) -> SampleResult:
    """Runs a step with a chunk of all rows' logits at a time."""
    rows = step.rows()
    num_samples, vocab_size = step.num_samples, step.vocab_size
    batch, device = step.hidden_states.shape[0], step.hidden_states.device
    chunk = chunk_tokens(batch * num_samples, max(vocab_size, 1), device.type)
    draws_at_once = max(_SCORES_AT_ONCE.get(device.type, 1 << 18) // (max(batch, 1) * chunk), 1)
    begin, end = step.shard.first_token, step.shard.first_token + vocab_size
    starts = range(begin - begin % _GRANULE, end, chunk) if vocab_size > 0 else ()
    draws = torch.arange(num_samples, device=device)
    token_ids = torch.full((batch, num_samples), -1, dtype=torch.int64, device=device)
    best = torch.full(token_ids.shape, float("-inf"), dtype=torch.float32, device=device)
    finite = torch.zeros(token_ids.shape, dtype=torch.bool, device=device)
    parts = [part.split(draws_at_once, dim=-1) for part in (draws, best, token_ids, finite)]
    for start in starts:  # whole Philox groups; the first may begin before the shard
        first, last = max(start, begin), min(start + chunk, end)
        if step.logits is None:
            logits = head_logits(step.hidden_states, step.weight[first - begin : last - begin])
        else:
            logits = step.logits[:, first - begin : last - begin].float()
        for some_draws, some_best, some_ids, some_finite in zip(*parts):
            gumbel = noise.gumbel(rows.seed, rows.offset, some_draws, start, last, step.params.stream)
            scores = scores_of_logits(logits, rows.temperature, gumbel[..., first - start :])
            chunk_best, index = scores.max(dim=-1)  # NaN if there is one; the first index of a tie
            torch.where(chunk_best > some_best, first + index, some_ids, out=some_ids)
            some_finite |= _any_finite(scores, chunk_best)
            torch.maximum(some_best, chunk_best, out=some_best)  # keeps a NaN
    if step.shard.exchange == exchange_protocol.PACKED:
        token_ids = exchange_protocol.pack(best, token_ids, finite)
    else:
        token_ids.masked_fill_(~finite | best.isnan(), -1)
    return SampleResult(token_ids.flatten())
