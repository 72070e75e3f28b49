"""Parsers: they check an argument of ``sample`` and return the fields of ``SamplingParams`` that it sets.

``sampling_params.SamplingParams`` names a parser for each parameter. A parser raises what ``sample`` documents. It
reads no values of tensors, so no call waits for a device.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .row_params import Check, check_plain, flags, integer, integers, is_symbolic, real, reals
from .token_counts import Counted, CountedSlots, TokenCounts, num_token_groups

MAX_BIASED = 1024  # ids per row
MAX_TOP_LOGPROBS = 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IDS = (torch.int32, torch.int64)
_OTHER_FORMS = "of a dict d pass (list(d), list(d.values())), of (id, value) pairs tuple(zip(*pairs))"


class BatchShape(NamedTuple):
    """The shapes that sampling parameters must fit."""

    batch: int
    vocab: int  # rows of the weight, or columns of the logits; under tensor parallelism of all shards together
    vocab_size: int  # how many of them are tokens
    device: torch.device
    num_samples: int
    shard_rows: int | None = None  # rows of this rank's shard; None: the weight is whole


Fields: TypeAlias = dict[str, Any]  # of ``SamplingParams``
Parser: TypeAlias = Callable[[str, Any, BatchShape], Fields]  # (argument's name, value, shape); the value is not None


def batch_shape(batch: int, rows: int, vocab_size: int, device: torch.device, num_samples: int, tp: Any) -> BatchShape:
    """Returns the shape of a call whose weight has ``rows`` rows on this rank. ``tp``: a ``TensorParallel`` or None."""
    if tp is None:
        return BatchShape(batch, rows, vocab_size, device, num_samples)
    return BatchShape(batch, tp.num_rows, tp.vocab_size, device, num_samples, rows)


# -- one number


def number(check: Check) -> Parser:
    """Returns a parser for one real number."""
    return lambda name, value, shape: {name: real(name, value, check)}


def parse_flag(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses a bool. The field of ``return_x`` is ``x``."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return {name.removeprefix("return_"): value}


def parse_kept(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses a bool: whether the kept set is wanted, of so many words."""
    return {"kept_words": -(-shape.vocab_size // 32) if parse_flag(name, value, shape)["kept"] else 0}


def parse_top_logprobs(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses a number of tokens, from 0 to 20 and to the vocabulary's size."""
    count, most = integer(name, value), min(MAX_TOP_LOGPROBS, shape.vocab_size)
    if not 0 <= count <= most:
        raise ValueError(f"{name} must be from 0 to {most}, got {count}")
    return {name: count}


# -- one number, or one per row


def row_reals(check: Check) -> Parser:
    """Returns a parser for a real number or one per row. Numbers in tensors are not checked."""
    return lambda name, value, shape: {name: reals(name, value, shape.batch, shape.device, check)}


def parse_top_k(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses an integer or one per row; an integer that keeps all tokens becomes 0, which is off."""
    k = integers(name, value, shape.batch, shape.device, also=torch.int32)
    if isinstance(k, Tensor) or is_symbolic(k) or 0 < k < shape.vocab_size:
        return {name: k}
    return {name: 0}


def parse_row_flags(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses a bool or one per row, as 0 and 1."""
    return {name: flags(name, value, shape.batch, shape.device)}


# -- tensors with a value per token


def parse_head_bias(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses the LM head's bias, (V,), or this rank's part of it."""
    check_plain(name, value, shape.device)
    rows = shape.vocab if shape.shard_rows is None else shape.shard_rows
    if tuple(value.shape) != (rows,):
        owner = "the head" if shape.shard_rows is None else "this rank's shard"
        raise ValueError(
            f"{name} must have shape ({rows},), one value per row of {owner}, got shape {tuple(value.shape)}"
        )
    return {name: _as_float32(name, value)}


def parse_logit_bias(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses a bias of all rows, (V,), or a pair of ids and values, (B, n)."""
    if isinstance(value, Tensor):
        check_plain(name, value, shape.device)
        if value.ndim != 1 or not shape.vocab_size <= value.shape[0] <= shape.vocab:
            wanted = f"a tensor ({shape.vocab_size},), for all rows, or ids and values, ({shape.batch}, n) each"
            raise ValueError(f"{name} must be {wanted}, got shape {tuple(value.shape)}")
        return {"dense_bias": _as_float32(name, value)}
    is_pair = isinstance(value, (tuple, list)) and len(value) == 2 and not any(isinstance(x, Mapping) for x in value)
    holds_pairs = isinstance(value, list) and all(isinstance(x, tuple) and len(x) == 2 for x in value)
    if not is_pair or holds_pairs:
        got = f"{type(value).__name__}; {_OTHER_FORMS}"
        raise TypeError(f"{name} must be a tensor (V,) or a pair of ids and values, got {got}")
    ids, values = (_as_matrix(f"{name}'s {part}", x, shape) for part, x in zip(("ids", "values"), value))
    if ids.dtype not in _IDS:
        raise TypeError(f"{name}'s ids must be int32 or int64, got {ids.dtype}; {_OTHER_FORMS}")
    if ids.shape != values.shape:
        raise ValueError(
            f"{name}'s ids and values must have the same shape, got {tuple(ids.shape)} and {tuple(values.shape)}"
        )
    if ids.shape[1] > MAX_BIASED:
        raise ValueError(f"{name} must have at most {MAX_BIASED} ids per row, got {ids.shape[1]}")
    if values.dtype in _IDS:
        values = values.float()
    if ids.shape[1] == 0:
        return {}
    if ids.dtype is not torch.int32:  # an id beyond int32 names no token and must not wrap around to one
        ids = torch.where((ids >= 0) & (ids < shape.vocab_size), ids, -1).to(torch.int32)
    return {"bias_ids": ids, "bias_values": _as_float32(f"{name}'s values", values)}


def parse_token_counts(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses a ``TokenCounts``, a ``Counted``, or counts (B, V) int32."""
    if isinstance(value, TokenCounts):
        if shape.num_samples != 1:
            raise ValueError(
                f"num_samples must be 1 with a TokenCounts, which counts one token per row, got {shape.num_samples}"
            )
        counts, seen = value.read(shape.batch)
        check_plain(name, counts, shape.device)
        if value.max_batch_size < shape.batch:
            raise ValueError(f"{name} must have a row for each of {shape.batch} rows, got {value.max_batch_size}")
        if value.vocab_size < shape.vocab_size:
            raise ValueError(f"{name} must be of at least {shape.vocab_size} tokens, got {value.vocab_size}")
        return {"counts": counts, "seen": seen}
    counts, seen = value[:2] if isinstance(value, (Counted, CountedSlots)) else (value, None)
    rows = value.rows if isinstance(value, CountedSlots) else None
    check_plain(name, counts, shape.device)
    if counts.dtype is not torch.int32:
        raise TypeError(f"{name} must be a TokenCounts or int32, got {counts.dtype}")
    num_rows = shape.batch if rows is None else counts.shape[0]
    if counts.ndim != 2 or counts.shape[0] != num_rows or counts.shape[1] < shape.vocab_size:
        wanted = f"({shape.batch}, {shape.vocab_size})"
        raise ValueError(f"{name} must have shape {wanted}, got shape {tuple(counts.shape)}")
    if seen is not None:
        check_plain(f"{name}.seen", seen, shape.device)
        groups = num_token_groups(counts.shape[1])
        if seen.dtype is not torch.uint8 or seen.ndim != 2 or seen.shape != (num_rows, groups):
            wanted = f"({num_rows}, {groups}) uint8"
            raise ValueError(f"{name}.seen must be {wanted}, got shape {tuple(seen.shape)} {seen.dtype}")
    return {"counts": _with_contiguous_rows(counts), "seen": seen, "counts_rows": rows}


def parse_token_mask(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses a bit mask, (B, ceil(V / 32)) int32, or one row of it."""
    check_plain(name, value, shape.device)
    words = -(-shape.vocab_size // 32)
    if value.dtype is not torch.int32:
        hint = ": bit t & 31 of word t >> 5 is set where token t is allowed"
        raise TypeError(f"{name} must be int32{hint}, got {value.dtype}")
    if value.ndim == 1:
        value = value.expand(shape.batch, -1)
    if value.ndim != 2 or value.shape[0] != shape.batch or value.shape[1] < words:
        raise ValueError(
            f"{name} must have shape ({shape.batch}, {words}) or ({words},), a bit for each of {shape.vocab_size} "
            f"tokens, got shape {tuple(value.shape)}"
        )
    return {name: _with_contiguous_rows(value)}


def parse_logprob_ids(name: str, value: Any, shape: BatchShape) -> Fields:
    """Parses token ids (B, m), or one row of them."""
    ids = _as_matrix(name, value, shape)
    if ids.dtype not in _IDS:
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    return {name: ids.long()}


# -- tensors


def _as_float32(name: str, value: Tensor) -> Tensor:
    if value.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {value.dtype}")
    return _with_contiguous_rows(value.detach().float())


def _as_matrix(name: str, value: Any, shape: BatchShape) -> Tensor:
    """Returns (B, n) of a tensor, or of nested lists or arrays of numbers; one row serves all."""
    if not isinstance(value, Tensor):
        try:
            given = value
            value = torch.as_tensor(given, device=shape.device)
            if value.is_floating_point():  # under torch.set_default_dtype it may have 16 bits
                value = torch.as_tensor(given, dtype=torch.float32, device=shape.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must be a tensor ({shape.batch}, n), or lists of as many numbers: {error}"
            ) from None
        if value.numel() == 0 and value.is_floating_point():  # torch takes [] for floats
            value = value.long()
    check_plain(name, value, shape.device)
    if value.ndim == 1:
        value = value.expand(shape.batch, -1)
    if value.ndim != 2 or value.shape[0] != shape.batch:
        raise ValueError(
            f"{name} must have shape ({shape.batch}, n), or (n,) for all rows, got shape {tuple(value.shape)}"
        )
    return _with_contiguous_rows(value)


def _with_contiguous_rows(value: Tensor) -> Tensor:
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()
