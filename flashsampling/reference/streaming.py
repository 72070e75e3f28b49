"""Pure torch on any device: the vocabulary in chunks, a running maximum, extra memory O(B x chunk), never (B, V).

Many draws are made in passes over the vocabulary, and in a chunk's logits a few at a time, so their number costs no memory but
that of their tokens.

What a request asks for needs all logits of its row: then a few rows at a time have theirs in memory, whatever B is, and the
weight is read once for each such group. The arithmetic is the oracle's.
"""

import torch
from torch import Tensor

from .. import exchange_protocol, noise
from ..exchange_protocol import WHOLE
from ..inputs import DEFAULT_PARAMS, SampleInputs, SampleResult, arguments, layout
from . import logit_transforms, oracle
from .oracle import exact_logits, may_round, scores_of_logits, without_autocast

DOES = DOES_OF_LOGITS = oracle.DOES

# scores of one chunk in all rows and draws; on a CPU 64 k floats and their Philox words stay in a core's cache
_SCORES_PER_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 22}
# ... and at most, of several draws: more at once would save little more (4 rows, 64 draws, V = 5000: 52, 49, 46, 44 ms for
# 2**16 to 2**19)
_SCORES_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 22}
_WIDENED_ELEMENTS = 1 << 19
_MAX_TOKENS = {"cpu": 1 << 14, "cuda": 1 << 16}  # however few the rows: a chunk, not the vocabulary
_GRANULE = 128  # whole Philox groups
_LOGITS_AT_ONCE = {"cpu": 1 << 21, "cuda": 1 << 24}  # of whole rows, or else of one; some 60 bytes each, with filters
_DRAWS_PER_PASS = (
    1 << 14
)  # 5 bytes of state each and row; the logits, made anew in every pass, are a small part of so many


def chunk_tokens(rows: int, vocab_size: int, device_type: str) -> int:
    """Tokens per chunk for ``rows`` = B * num_samples; a multiple of 128."""
    tokens = min(_SCORES_PER_CHUNK.get(device_type, 1 << 18) // max(rows, 1), _MAX_TOKENS.get(device_type, 1 << 14))
    return min(max(tokens // _GRANULE, 8) * _GRANULE, -(-vocab_size // _GRANULE) * _GRANULE)


def head_product(hidden_states: Tensor, weight: Tensor) -> Tensor:
    """(B, chunk) float32. On CUDA the 16-bit matmul accumulates and returns fp32 by itself; elsewhere the weights are widened
    into one buffer that stays in cache (V = 49152, D = 576, bf16 on 2 cores: a step of 12 ms against 37 ms in one piece)."""
    if hidden_states.dtype == torch.float32 or may_round(hidden_states):
        return exact_logits(hidden_states, weight)
    with without_autocast(hidden_states.device):
        return _widened_product(hidden_states, weight)


def _widened_product(hidden_states: Tensor, weight: Tensor) -> Tensor:
    if hidden_states.is_cuda:
        return torch.mm(hidden_states, weight.T, out_dtype=torch.float32)
    wide_states = hidden_states.float()
    rows = min(max(1, _WIDENED_ELEMENTS // weight.shape[1]), weight.shape[0])
    widened = torch.empty((rows, weight.shape[1]), dtype=torch.float32, device=weight.device)
    parts = [wide_states @ widened[: len(part)].copy_(part).T for part in weight.split(rows)]
    return torch.cat(parts, dim=1)


def _any_finite(scores: Tensor, best: Tensor) -> Tensor:
    # a finite maximum answers it; a +inf does not, but on a CPU it costs nothing to see that there is none
    if scores.device.type == "cpu" and not best.isposinf().any():
        return best.isfinite()
    return scores.isfinite().any(dim=-1)


def _needs_whole_rows(step: SampleInputs) -> list[str]:
    return [] if step.params is DEFAULT_PARAMS else [name for name in step.params.names() if name != "stream"]


def unsupported(step: SampleInputs) -> str | None:
    """Why it cannot do a step, or None."""
    if step.shard != WHOLE and _needs_whole_rows(step):
        return f"a shard of a vocabulary with {arguments(_needs_whole_rows(step))}"
    return None


def _rows_at_once(step: SampleInputs) -> int:
    return max(_LOGITS_AT_ONCE.get(step.hidden_states.device.type, 1 << 21) // step.vocab_size, 1)


@torch.no_grad()
def shard_logits(step: SampleInputs) -> tuple[Tensor, Tensor]:
    """See ``backends``."""
    rows = _rows_at_once(step)
    both = []
    for first in range(0, step.hidden_states.shape[0], rows):
        part = step.part(first, first + rows)
        raw = logit_transforms.raw(head_product(part.hidden_states, part.weight[: step.vocab_size]), part.params)
        both.append((raw, logit_transforms.processed(raw, part.params)))
    if all(raw is processed for raw, processed in both):
        raw = torch.cat([raw for raw, _ in both])
        return raw, raw
    return torch.cat([raw for raw, _ in both]), torch.cat([processed for _, processed in both])


def shard_winners(step: SampleInputs, processed: Tensor, limit: Tensor, known: Tensor | None = None) -> Tensor:
    """See ``backends``."""
    first = step.shard.first_token
    ids = torch.arange(first, first + step.vocab_size, device=processed.device)
    rows = _rows_at_once(step)
    winners = []
    for first in range(0, len(processed), rows):
        part, logits = step.part(first, first + rows), processed[first : first + rows]
        temperature = part.rows().temperature
        kept = logit_transforms.places_of(logit_transforms.keys_of(logits), ids) >= limit[first : first + rows, None]
        endless = temperature.isposinf()  # so all are equal, but what is not kept stays -inf
        logits = torch.where(endless[:, None], 0.0, logits).masked_fill(~kept | logits.isneginf(), float("-inf"))
        part = part._replace(hidden_states=logits, logits=logits, temperature=torch.where(endless, 1.0, temperature))
        winners.append(_in_chunks(part._replace(shard=step.shard._replace(exchange=exchange_protocol.PACKED))).ids)
    return torch.cat(winners)


@torch.no_grad()  # with a trainable weight, autograd would keep every chunk for a gradient that tokens do not have
def run(step: SampleInputs) -> SampleResult:
    """See ``backends``."""
    return _in_rows(step) if _needs_whole_rows(step) else _in_chunks(step)


def _in_rows(step: SampleInputs) -> SampleResult:
    """All logits of a few rows at a time."""
    batch, device = step.hidden_states.shape[0], step.hidden_states.device
    rows = _rows_at_once(step)
    draws = torch.arange(step.num_samples, device=device)
    outcomes = []
    for first in range(0, batch, rows):
        part = step.part(first, min(first + rows, batch))
        if part.logits is None:
            product = head_product(part.hidden_states, part.weight[: step.vocab_size])
        else:
            product = oracle.product(part)
        logits = oracle.logits_of(product, part.rows().temperature, part.params)
        at_once = max(_SCORES_AT_ONCE.get(device.type, 1 << 18) // product.numel(), 1)
        token_ids = torch.cat([oracle.draw(logits, part, some) for some in draws.split(at_once)], dim=1)
        outcomes.append(oracle.outcome(token_ids, logits, part))
    parts = {name: torch.cat([outcome[name] for outcome in outcomes]) for name in outcomes[0]}
    return layout(batch, step.num_samples, step.params).join(parts)


def _in_chunks(step: SampleInputs) -> SampleResult:
    """A chunk of all rows' logits at a time."""
    rows = step.rows()
    num_samples, vocab_size = step.num_samples, step.vocab_size
    batch, device = step.hidden_states.shape[0], step.hidden_states.device
    chunk = chunk_tokens(batch * num_samples, max(vocab_size, 1), device.type)
    draws_at_once = max(_SCORES_AT_ONCE.get(device.type, 1 << 18) // (max(batch, 1) * chunk), 1)
    begin, end = step.shard.first_token, step.shard.first_token + vocab_size
    starts = range(begin - begin % _GRANULE, end, chunk) if vocab_size > 0 else ()
    out = torch.full((batch, num_samples), -1, dtype=torch.int64, device=device)
    for first_draw in range(0, num_samples, _DRAWS_PER_PASS):
        token_ids = out[:, first_draw : first_draw + _DRAWS_PER_PASS]
        draws = torch.arange(first_draw, first_draw + token_ids.shape[1], device=device)
        best = torch.full(token_ids.shape, float("-inf"), dtype=torch.float32, device=device)
        finite = torch.zeros(token_ids.shape, dtype=torch.bool, device=device)
        parts = [part.split(draws_at_once, dim=-1) for part in (draws, best, token_ids, finite)]
        for start in starts:  # whole Philox groups, of which the first may not all be ours
            first, last = max(start, begin), min(start + chunk, end)
            if step.logits is None:
                logits = head_product(step.hidden_states, step.weight[first - begin : last - begin])
            else:
                logits = step.logits[:, first - begin : last - begin].float()
            for some_draws, some_best, some_ids, some_finite in zip(*parts):
                gumbel = noise.gumbel(rows.seed, rows.offset, some_draws, start, last, step.params.stream)[
                    ..., first - start :
                ]
                scores = scores_of_logits(logits, rows.temperature, gumbel)
                chunk_best, index = scores.max(dim=-1)  # NaN if there is one; the first index of a tie
                torch.where(chunk_best > some_best, first + index, some_ids, out=some_ids)
                some_finite |= _any_finite(scores, chunk_best)
                torch.maximum(some_best, chunk_best, out=some_best)  # keeps a NaN
        if step.shard.exchange == exchange_protocol.PACKED:
            token_ids.copy_(exchange_protocol.pack(best, token_ids, finite))
        else:
            token_ids.masked_fill_(~finite | best.isnan(), -1)
    return SampleResult(out.flatten())
