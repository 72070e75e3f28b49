"""What a request asks for beside one plain draw: arguments of ``sample`` and its like, checked, as
``step.SamplingParams`` has them."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .inputs import DEFAULT_PARAMS, SamplingParams
from .row_params import (
    Integers,
    Reals,
    above_0,
    finite,
    flags,
    integer,
    integers,
    is_plain,
    is_symbolic,
    kind_of,
    real,
    reals,
    share,
)
from .token_counts import Counted, TokenCounts, groups_of

MAX_BIASED = 1024  # tokens of a row
MAX_TOP_LOGPROBS = 20
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_IDS = (torch.int32, torch.int64)
_OTHER_FORMS = "of a dict d pass (list(d), list(d.values())), of (id, value) pairs tuple(zip(*pairs))"
_LEAST_CAP = torch.finfo(torch.float32).smallest_normal  # of which the kernels' float32 may make 0: no cap at all

LogitBias: TypeAlias = Tensor | tuple[Any, Any]


class Request(TypedDict, total=False):
    """Arguments of ``sample`` by which a request asks for more; None, False or 0, or left out: it does not."""

    bias: Tensor | None  # (V,)
    logit_scale: float | None
    soft_cap: float | None
    logit_bias: LogitBias | None  # (V,), or ids (B, n) and values (B, n)
    token_counts: TokenCounts | Counted | Tensor | None  # (B, V)
    repetition_penalty: Reals | None  # or (B,)
    frequency_penalty: Reals | None  # or (B,)
    presence_penalty: Reals | None  # or (B,)
    token_mask: Tensor | None  # (B, ceil(V / 32))
    top_k: Integers | None  # or (B,)
    top_p: Reals | None  # or (B,)
    min_p: Reals | None  # or (B,)
    joint_top_p: bool | Sequence[bool] | Tensor | None  # or (B,)
    return_logprobs: bool
    top_logprobs: int
    logprob_ids: Any  # (B, m)
    return_logsumexp: bool


_NAMES = Request.__annotations__


class BatchShape(NamedTuple):
    """What the arguments have to fit."""

    batch: int
    vocab: int  # rows of the weight, or columns of logits; of all ranks' weights together
    vocab_size: int  # how many of them are tokens
    device: torch.device
    num_samples: int
    head: int | None = None  # rows of the weight here, a shard; None: it is whole


def batch_shape(batch: int, rows: int, vocab_size: int, device: torch.device, num_samples: int, tp: Any) -> BatchShape:
    """Of a weight of so many rows here; with ``tp``, a ``TensorParallel`` or None, of all ranks' weights."""
    if tp is None:
        return BatchShape(batch, rows, vocab_size, device, num_samples)
    return BatchShape(batch, tp.num_rows, tp.vocab_size, device, num_samples, rows)


def unexpected(name: str, function: Callable[..., Any] | None, given_elsewhere: Sequence[str] = ()) -> TypeError:
    """The error for an argument that ``function`` does not take. ``given_elsewhere``: arguments of it that its caller gives."""
    own = [] if function is None else inspect.signature(function).parameters
    names = [name for name in (*own, *_NAMES) if name not in ("self", "request", *given_elsewhere)]
    similar = [other for other in names if other.startswith(name)] or difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {similar[0]}?" if similar else "."
    taker = "A request" if function is None else function.__name__
    return TypeError(f"unexpected argument {name!r}{hint} {taker} takes {', '.join(names)}")


def parse_sampling_params(
    request: Request, problem: BatchShape, function: Callable[..., Any] | None = None
) -> SamplingParams:
    """The request as implementations take it; ``DEFAULT_PARAMS`` if it asks for nothing. Raises what ``sample`` documents.
    ``function``: whose arguments these are."""
    for name in request:
        if name not in _NAMES:
            raise unexpected(name, function)
    given = {name: value for name, value in request.items() if value is not None}
    params: dict[str, Any] = {}
    for name, take in _TAKE.items():
        if name in given:
            params |= take(name, given[name], problem)
    _with_penalties(params, given, problem)
    # with ``DEFAULT_PARAMS``'s own defaults Dynamo sees that they are the same, which are symbols to it with dynamic=True
    together = DEFAULT_PARAMS._replace(**params) if is_dynamo_compiling() else SamplingParams(**params)
    if "joint_top_p" in params and not together.may_be_joint():  # then there is nothing that top-k kept
        together = together._replace(joint_top_p=DEFAULT_PARAMS.joint_top_p)
    return together if together.names() else DEFAULT_PARAMS


def soft_cap_of(value: Any) -> float:
    """0: none. Raises what ``sample`` documents."""
    cap = real("soft_cap", value, finite)
    if cap < 0:
        raise ValueError(f"soft_cap must be at least 0, got {value}")
    if cap * 2.0**500 * (cap - _LEAST_CAP) < 0:  # between them, by one comparison: it is a guard under torch.compile
        least = f"{_LEAST_CAP:.3g}, the smallest normal float32"
        raise ValueError(f"soft_cap must be 0, for none, or at least {least}, got {value}")
    return cap


# -- how an argument becomes fields


def _bias(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    _check_tensor(name, value, problem)
    rows = problem.vocab if problem.head is None else problem.head
    if tuple(value.shape) != (rows,):
        whose = "the head" if problem.head is None else "this rank's shard"
        raise ValueError(
            f"{name} must have shape ({rows},), one value per row of {whose}, got shape {tuple(value.shape)}"
        )
    return {"bias": _float32(name, value)}


def _scale(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    return {name: real(name, value, finite)}


def _soft_cap(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    return {name: soft_cap_of(value)}


def _logit_bias(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    if isinstance(value, Tensor):
        _check_tensor(name, value, problem)
        if value.ndim != 1 or not problem.vocab_size <= value.shape[0] <= problem.vocab:
            wanted = f"a tensor ({problem.vocab_size},), for all rows, or ids and values, ({problem.batch}, n) each"
            raise ValueError(f"{name} must be {wanted}, got shape {tuple(value.shape)}")
        return {"dense_bias": _float32(name, value)}
    several = (
        isinstance(value, (tuple, list)) and len(value) == 2 and not any(isinstance(part, Mapping) for part in value)
    )
    pairs = isinstance(value, list) and all(isinstance(part, tuple) and len(part) == 2 for part in value)
    if not several or pairs:
        got = f"{type(value).__name__}; {_OTHER_FORMS}"
        raise TypeError(f"{name} must be a tensor (V,) or a pair of ids and values, got {got}")
    ids, values = (_matrix(f"{name}'s {what}", part, problem) for what, part in zip(("ids", "values"), value))
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
    if ids.dtype is not torch.int32:  # an id that int32 does not hold names no token: it must not become one that does
        ids = torch.where((ids >= 0) & (ids < problem.vocab_size), ids, -1).to(torch.int32)
    return {"bias_ids": ids, "bias_values": _float32(f"{name}'s values", values)}


def _token_mask(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    _check_tensor(name, value, problem)
    words = -(-problem.vocab_size // 32)
    if value.dtype is not torch.int32:
        hint = ": bit t & 31 of word t >> 5 is set where token t is allowed"
        raise TypeError(f"{name} must be int32{hint}, got {value.dtype}")
    if value.ndim == 1:
        value = value.expand(problem.batch, -1)
    if value.ndim != 2 or value.shape[0] != problem.batch or value.shape[1] < words:
        raise ValueError(
            f"{name} must have shape ({problem.batch}, {words}) or ({words},), a bit for each of {problem.vocab_size} tokens, "
            f"got shape {tuple(value.shape)}"
        )
    return {name: _rows_of_contiguous(value)}


def _top_k(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    k = integers(name, value, problem.batch, problem.device, also=torch.int32)
    return {name: k if isinstance(k, Tensor) or is_symbolic(k) or 0 < k < problem.vocab_size else DEFAULT_PARAMS.top_k}


def _share(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    return {name: reals(name, value, problem.batch, problem.device, share)}


def _joint_top_p(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    return {name: flags(name, value, problem.batch, problem.device)}


def _flag(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be a bool, got {type(value).__name__}")
    return {name.removeprefix("return_"): value}


def _top_logprobs(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    count, most = integer(name, value), min(MAX_TOP_LOGPROBS, problem.vocab_size)
    if not 0 <= count <= most:
        raise ValueError(f"{name} must be from 0 to {most}, got {count}")
    return {name: count}


def _logprob_ids(name: str, value: Any, problem: BatchShape) -> dict[str, Any]:
    ids = _matrix(name, value, problem)
    if ids.dtype not in _IDS:
        raise TypeError(f"{name} must be int32 or int64, got {ids.dtype}")
    return {name: ids.long()}


_TAKE = {
    "bias": _bias,
    "logit_scale": _scale,
    "soft_cap": _soft_cap,
    "logit_bias": _logit_bias,
    "token_mask": _token_mask,
    "top_k": _top_k,
    "top_p": _share,
    "min_p": _share,
    "joint_top_p": _joint_top_p,
    "return_logprobs": _flag,
    "top_logprobs": _top_logprobs,
    "logprob_ids": _logprob_ids,
    "return_logsumexp": _flag,
}
_PENALTIES = {"repetition_penalty": above_0, "frequency_penalty": finite, "presence_penalty": finite}


def _with_penalties(params: dict[str, Any], given: dict[str, Any], problem: BatchShape) -> None:
    """Adds penalties and counts; counts alone change no logit."""
    counts = given.get("token_counts")
    if counts is not None:
        counts, seen = _counts(counts, problem)
    for name, check in _PENALTIES.items():
        if name in given:
            penalty = reals(name, given[name], problem.batch, problem.device, check)
            known = counts is None or not is_symbolic(penalty)
            if isinstance(penalty, Tensor) or not known or penalty != getattr(DEFAULT_PARAMS, name):
                if counts is None:
                    raise ValueError(f"token_counts must be given with {name}")
                params |= {name: penalty, "counts": counts, "seen": seen}


def _counts(counts: Any, problem: BatchShape) -> tuple[Tensor, Tensor | None]:
    """(B, V) of what was given, and ``SamplingParams.seen``."""
    if isinstance(counts, TokenCounts):
        if problem.num_samples != 1:
            raise ValueError(
                f"num_samples must be 1 with a TokenCounts, which counts one token per row, got {problem.num_samples}"
            )
        counted = counts.read(problem.batch)
        _check_tensor("token_counts", counted.counts, problem)
        if counts.max_batch_size < problem.batch:
            raise ValueError(
                f"token_counts must have a row for each of {problem.batch} rows, got {counts.max_batch_size}"
            )
        if counts.vocab_size < problem.vocab_size:
            raise ValueError(f"token_counts must be of at least {problem.vocab_size} tokens, got {counts.vocab_size}")
        return counted
    seen = None
    if isinstance(counts, Counted):
        counts, seen = counts
    _check_tensor("token_counts", counts, problem)
    if counts.dtype is not torch.int32:
        raise TypeError(f"token_counts must be a TokenCounts or int32, got {counts.dtype}")
    if counts.ndim != 2 or counts.shape[0] != problem.batch or counts.shape[1] < problem.vocab_size:
        wanted = f"({problem.batch}, {problem.vocab_size})"
        raise ValueError(f"token_counts must have shape {wanted}, got shape {tuple(counts.shape)}")
    if seen is not None:
        _check_tensor("token_counts.seen", seen, problem)
        if seen.dtype is not torch.uint8 or seen.ndim != 2 or seen.shape != (problem.batch, groups_of(counts.shape[1])):
            wanted = f"({problem.batch}, {groups_of(counts.shape[1])}) uint8"
            raise ValueError(f"token_counts.seen must be {wanted}, got shape {tuple(seen.shape)} {seen.dtype}")
    return _rows_of_contiguous(counts), seen


# -- tensors


def _check_tensor(name: str, value: Any, problem: BatchShape) -> None:
    if not is_plain(value):
        raise TypeError(f"{name} must be a plain torch.Tensor, got {kind_of(value)}")
    if value.device != problem.device:
        raise ValueError(f"{name} must be on the device of the step, {problem.device}, got {value.device}")


def _float32(name: str, value: Tensor) -> Tensor:
    if value.dtype not in _FLOATS:
        raise TypeError(f"{name} must be float32, bfloat16 or float16, got {value.dtype}")
    return _rows_of_contiguous(value.detach().float())


def _matrix(name: str, value: Any, problem: BatchShape) -> Tensor:
    """(B, n), of one row for all too, and of what holds numbers."""
    if not isinstance(value, Tensor):
        try:
            given = value
            value = torch.as_tensor(given, device=problem.device)
            if value.is_floating_point():  # which torch may take for 16 bits: torch.set_default_dtype
                value = torch.as_tensor(given, dtype=torch.float32, device=problem.device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name} must be a tensor ({problem.batch}, n), or lists of as many numbers: {error}"
            ) from None
        if value.numel() == 0 and value.is_floating_point():  # torch takes [] for floats
            value = value.long()
    _check_tensor(name, value, problem)
    if value.ndim == 1:
        value = value.expand(problem.batch, -1)
    if value.ndim != 2 or value.shape[0] != problem.batch:
        raise ValueError(
            f"{name} must have shape ({problem.batch}, n), or (n,) for all rows, got shape {tuple(value.shape)}"
        )
    return _rows_of_contiguous(value)


def _rows_of_contiguous(value: Tensor) -> Tensor:
    """The same, its last dimension contiguous."""
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()
