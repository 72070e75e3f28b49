"""The public function: validate, choose, call, return."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import noise, ops

if TYPE_CHECKING:
    from .distributed import TensorParallel

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_INT64_BITS = 64


@dataclass(frozen=True)
class SampleOutput:
    """What a sampling step returns. Fields are only ever added.

    Attributes:
        token_ids: int64, (B,), or (B, num_samples) when ``num_samples > 1``. -1 in a row whose scores hold a NaN or no
            finite value; such a row leaves the others untouched.
    """

    token_ids: Tensor


def sample(
    hidden_states: Tensor,  # (B, D)
    weight: Tensor,  # (V, D)
    *,
    temperature: float | Tensor = 1.0,  # or (B,)
    seed: int | Tensor | None = None,  # or (B,) int64
    offset: int | Tensor = 0,  # or (B,) int64
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
) -> SampleOutput:
    """Draws token ids from ``softmax(hidden_states @ weight.T / temperature)``, exactly, without storing the logits.

    The draw is ``argmax(logits / temperature + Gumbel noise)`` (the Gumbel-max trick; FlashSampling, arXiv 2603.15854), with
    logits accumulated in fp32 and noise that is a pure function of (seed, offset, draw, token id): row b's token depends on
    row b alone, not on the batch, the implementation's tiling or whether a CUDA graph replays.

    Args:
        hidden_states: (B, D), bfloat16, float16 or float32; B may be 0.
        weight: (V, D), the LM head, same dtype and device; any row stride.
        temperature: a number >= 0 or a floating-point tensor (B,). Below 1e-6 a row is greedy.
        seed: an int or an integer tensor (B,): 64 bits, negative values count as their two's complement. An int is every
            row's seed: rows that share (seed, offset) share their noise, so give independent rows seeds of their own.
            None draws one seed per row from torch's default generator of the device.
        offset: an int or an integer tensor (B,): the row's position, by convention how many tokens it has drawn.
        num_samples: draws per row, 1 to 2**24; each has noise of its own.
        vocab_size: real size where ``weight`` is padded; rows from it on are never sampled.
        impl: "reference", "streaming", "triton" or "cute". None chooses by device and problem; a name never falls back.
        tp: a ``flashsampling.distributed.TensorParallel``: ``weight`` is then this rank's shard, the one that ``tp`` was made
            with, and every rank of the group makes this call with the same hidden states and parameters, and gets the same
            token ids. ``seed`` must be given; ``impl`` and ``vocab_size`` belong to ``tp``.

    Returns:
        SampleOutput.

    Raises:
        TypeError: an argument is of the wrong type or dtype.
        ValueError: a shape, device or range does not fit, or ``impl`` cannot do this problem.
        flashsampling.distributed.TensorParallelTimeout: another rank did not take part in this step or, with the transport
            "p2p", in an earlier one; the rows of that step are -1.
    """
    batch, vocab, device = _check_matrices(hidden_states, weight, 1 if tp is None else 0)
    if tp is not None:
        vocab_size, impl = _check_tensor_parallel(tp, weight, batch, num_samples, seed, vocab_size, impl)
    elif vocab_size is None:
        vocab_size = vocab
    elif not 1 <= vocab_size <= vocab:
        raise ValueError(f"vocab_size must be from 1 to the {vocab} rows of weight, got {vocab_size}")
    if not 1 <= num_samples <= noise.MAX_DRAWS:
        raise ValueError(f"num_samples must be from 1 to 2**24, got {num_samples}")
    if impl is not None and impl not in ops.IMPLEMENTATIONS:
        raise ValueError(f"impl must be None or one of {', '.join(ops.IMPLEMENTATIONS)}, got {impl!r}")
    if seed is None:
        seed = torch.randint(-(2**63), 2**63 - 1, (batch,), dtype=torch.int64, device=device)
    temperature_rows, temperature_value = _temperature(temperature, batch, device)
    seed_rows, seed_value = _integers("seed", seed, batch, device)
    offset_rows, offset_value = _integers("offset", offset, batch, device)
    token_ids = ops.sample(
        hidden_states,
        weight,
        temperature_rows,
        temperature_value,
        seed_rows,
        seed_value,
        offset_rows,
        offset_value,
        num_samples,
        vocab_size,
        impl or "",
        "" if tp is None else tp.name,
    )
    return SampleOutput(token_ids=token_ids if num_samples == 1 else token_ids.view(batch, num_samples))


def _check_matrices(hidden_states: Tensor, weight: Tensor, least_rows: int) -> tuple[int, int, torch.device]:
    """B, V and the device. Every attribute is asked for once: a tenth of a microsecond each."""
    if not isinstance(hidden_states, Tensor):
        raise TypeError(f"hidden_states must be a torch.Tensor, got {type(hidden_states).__name__}")
    if not isinstance(weight, Tensor):
        raise TypeError(f"weight must be a torch.Tensor, got {type(weight).__name__}")
    shape, weight_shape = hidden_states.shape, weight.shape
    if len(shape) != 2:
        hint = "select the positions to sample first, e.g. hidden_states[:, -1]"
        raise ValueError(f"hidden_states must have 2 dimensions, got shape {tuple(shape)}; {hint}")
    if len(weight_shape) != 2:
        raise ValueError(f"weight must have 2 dimensions, got shape {tuple(weight_shape)}")
    dtype, device = hidden_states.dtype, hidden_states.device
    if dtype not in _DTYPES:
        raise TypeError(f"hidden_states must be bfloat16, float16 or float32, got {dtype}")
    if weight.dtype != dtype:
        raise TypeError(f"weight must have the dtype of hidden_states, {dtype}, got {weight.dtype}")
    if weight.device != device:
        raise ValueError(f"weight must be on the device of hidden_states, {device}, got {weight.device}")
    (batch, dim), (vocab, columns) = shape, weight_shape
    if dim != columns:
        raise ValueError(f"weight must have the {dim} columns of hidden_states, got shape {tuple(weight_shape)}")
    if vocab < least_rows or dim < 1:
        raise ValueError(f"weight must have at least one row and one column, got shape {tuple(weight_shape)}")
    return batch, vocab, device


def _check_tensor_parallel(
    tp: "TensorParallel",
    weight: Tensor,
    batch: int,
    num_samples: int,
    seed: int | Tensor | None,
    vocab_size: int | None,
    impl: str | None,
) -> tuple[int, str]:
    """The shard's own vocabulary size and the group's implementation."""
    from .distributed import TensorParallel  # whoever has one has imported it

    if not isinstance(tp, TensorParallel):
        raise TypeError(f"tp must be a flashsampling.distributed.TensorParallel, got {type(tp).__name__}")
    if seed is None:
        raise ValueError("seed must be given with tp: all ranks need the same")
    if vocab_size is not None:
        raise ValueError("vocab_size must be given to TensorParallel, not together with tp")
    if impl is not None and impl != tp.impl:
        raise ValueError(f"impl must be None or tp.impl = {tp.impl!r} with tp, got {impl!r}")
    tp.check_call(weight, batch, num_samples)
    return tp.last_token - tp.first_token, tp.impl


def _temperature(temperature: float | Tensor, batch: int, device: torch.device) -> tuple[Tensor | None, float]:
    if isinstance(temperature, Tensor):
        dtype = temperature.dtype
        if dtype is not torch.float32 and not dtype.is_floating_point:
            raise TypeError(f"temperature must be floating point, got {dtype}")
        return _rows("temperature", temperature, batch, device, dtype, torch.float32), 0.0
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(f"temperature must be a float or a tensor, got {type(temperature).__name__}")
    if math.isnan(temperature) or temperature < 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    return None, float(temperature)


def _integers(name: str, value: int | Tensor, batch: int, device: torch.device) -> tuple[Tensor | None, int]:
    if isinstance(value, Tensor):
        dtype = value.dtype
        if dtype is not torch.int64 and dtype not in _INTEGERS:
            raise TypeError(f"{name} must be an integer tensor, got {dtype}")
        return _rows(name, value, batch, device, dtype, torch.int64), 0
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name} must be an int or an integer tensor, got {type(value).__name__}")
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must fit in 64 bits, got {value}")
    return None, value - 2**_INT64_BITS if value >= 2**63 else value


def _rows(name: str, rows: Tensor, batch: int, device: torch.device, dtype: torch.dtype, wanted: torch.dtype) -> Tensor:
    """A value per row as the implementations take it: contiguous, of the dtype ``wanted``. ``dtype``: what it has."""
    if rows.shape != (batch,):
        raise ValueError(f"{name} must be a number or have shape ({batch},), got shape {tuple(rows.shape)}")
    if rows.device != device:
        raise ValueError(f"{name} must be on the device of hidden_states, {device}, got {rows.device}")
    # asking is a tenth of what the two calls cost that would change nothing
    return rows if dtype is wanted and rows.is_contiguous() else rows.to(wanted).contiguous()
