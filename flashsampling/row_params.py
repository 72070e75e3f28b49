"""Parameters of rows, as seeds and temperatures: what users write, and what implementations take.

Users write one number for all rows or one value per row, in whatever holds numbers: Python's and numpy's scalars, lists,
tuples, arrays, tensors. Implementations take the number itself, or a contiguous (B,) tensor on the device of the hidden states.
No tensor's values are read here, so no call waits for a device. numpy is not imported: what is not a tensor and has
``tolist()``, as numpy's scalars and arrays do, is turned into Python numbers by it.
"""

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol, SupportsIndex, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Parameter

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
# asking torch costs a row parameter a tenth of a microsecond
_INT64, _FLOAT32, _STRIDED = torch.int64, torch.float32, torch.strided
_MAX_FLOAT32 = torch.finfo(torch.float32).max


class Array(Protocol):
    """numpy's scalars and arrays, and their like."""

    def tolist(self) -> Any:
        """The same as Python numbers, in lists."""


Integers: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | Array | Tensor
Reals: TypeAlias = float | Sequence[float] | Array | Tensor


def integers(name: str, value: Integers, batch: int, device: torch.device, also: torch.dtype = _INT64) -> Tensor | int:
    """64 bits per row: a tensor (batch,) int64, or the number for all rows, as two's complement. ``also``: another dtype that
    is good as it is."""
    if isinstance(value, Tensor):
        dtype = value.dtype
        if (
            (dtype is _INT64 or dtype is also)
            and value.layout is _STRIDED
            and value.dim() == 1
            and value.numel() == batch
            and value.device == device
            and value.is_contiguous()
        ):
            return value
        if dtype not in _INTEGERS:
            raise TypeError(f"{name} must be an integer tensor, got {dtype}")
        return _rows(name, value, batch, device, also if dtype is also else _INT64)
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        numbers = [
            _two_s_complement(name, number)
            for number in _numbers(name, value, "an int or integers, one per row", _integer)
        ]
        if len(numbers) != 1:
            return _column(name, numbers, batch, device, _INT64)
        return numbers[0]  # type: ignore[no-any-return]
    if -(2**63) <= value < 2**63:
        return value  # type: ignore[return-value] # a SymInt is one to whoever takes it
    return _two_s_complement(name, value)


def reals(
    name: str, value: Reals, batch: int, device: torch.device, check: "Callable[[str, float], float] | None" = None
) -> Tensor | float:
    """A tensor (batch,) float32, or the number for all rows. ``check`` takes what the host knows, or raises what ``sample``
    documents; None: it is at least 0, and infinite beyond float32."""
    if isinstance(value, Tensor):
        dtype = value.dtype
        if (
            dtype is _FLOAT32
            and value.layout is _STRIDED
            and value.dim() == 1
            and value.numel() == batch
            and value.device == device
            and value.is_contiguous()
        ):
            return value
        if not dtype.is_floating_point and dtype not in _INTEGERS:
            raise TypeError(f"{name} must be a tensor of floating-point numbers or integers, got {dtype}")
        return _rows(name, value, batch, device, _FLOAT32)
    if isinstance(value, bool) or not isinstance(value, (float, int, torch.SymFloat, torch.SymInt)):
        check = check or _at_least_0
        numbers = [check(name, number) for number in _numbers(name, value, "a number or numbers, one per row", _real)]
        if len(numbers) != 1:
            return _column(name, numbers, batch, device, _FLOAT32)
        return numbers[0]
    if check is not None:
        return check(name, value)
    if 0 <= value <= _MAX_FLOAT32:
        return float(value)
    return _at_least_0(name, value)


def flags(name: str, value: Any, batch: int, device: torch.device) -> Tensor | int:
    """Yes or no per row: a tensor (batch,) int32, not 0 for yes, or 0 or 1 for all rows. Bools; in a tensor also int32."""
    if isinstance(value, Tensor):
        if value.dtype not in (torch.bool, torch.int32):
            raise TypeError(f"{name} must be a bool, bools or int32, one per row, got a tensor of {value.dtype}")
        return _rows(name, value, batch, device, torch.int32, "a bool")
    bools = _numbers(name, value, "a bool or bools, one per row", _bool)
    return int(bools[0]) if len(bools) == 1 else _column(name, bools, batch, device, torch.int32, "a bool")


def real(name: str, value: float, check: Callable[[str, float], float]) -> float:
    """One number for all rows, which the host knows."""
    if isinstance(value, Tensor):
        raise TypeError(f"{name} must be a number, got Tensor")
    if isinstance(value, (float, int, torch.SymFloat, torch.SymInt)) and not isinstance(value, bool):
        return check(name, value)
    numbers = _numbers(name, value, "a number", _real)
    if len(numbers) != 1:
        raise TypeError(f"{name} must be a number, got {len(numbers)} of them")
    return check(name, numbers[0])


def finite(name: str, value: float) -> float:
    """A number that float32 holds."""
    if not -_MAX_FLOAT32 <= value <= _MAX_FLOAT32:
        raise ValueError(f"{name} must be finite, got {value}")
    return float(value)


def above_0(name: str, value: float) -> float:
    """... and that is positive."""
    if not 0 < value <= _MAX_FLOAT32:
        raise ValueError(f"{name} must be above 0 and finite, got {value}")
    return float(value)


def share(name: str, value: float) -> float:
    """A number from 0 to 1."""
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be from 0 to 1, got {value}")
    return float(value)


def integer(name: str, value: SupportsIndex) -> int:
    """An int from whatever Python would take as an index, but for a bool."""
    try:
        return value if type(value) is int else _integer(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def is_symbolic(value: Any) -> bool:
    """Whether Dynamo traces a number as a symbol. A comparison of a symbol is a guard: each outcome has a graph of its own."""
    if not is_dynamo_compiling() or isinstance(value, Tensor):
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # which imports sympy

    return not has_static_value(value)


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Whether it is a tensor whose memory is its values: no quantised one, no DTensor, dense. Those of ``torch.export`` are."""
    kind = type(value)
    return (kind is Tensor or kind is Parameter or _is_fake(kind)) and is_dense(value)


def _is_fake(kind: type) -> bool:
    return kind.__name__ == "FakeTensor" and kind.__module__.startswith("torch.")  # which is private to torch


def is_dense(tensor: Tensor) -> bool:
    """Whether it has strides: it is neither sparse nor nested, nor another library's."""
    return tensor.layout is _STRIDED and not tensor.is_nested


def kind_of(value: Any) -> str:
    """What it is, for whoever wanted a plain tensor."""
    if not isinstance(value, Tensor) or is_dense(value):
        return type(value).__name__
    return "a nested tensor" if value.is_nested else str(value.layout)


def dimensions(value: Any) -> int:
    """0: one number; 1: a value per row, as lists and most tensors are."""
    return int(getattr(value, "ndim", isinstance(value, Sequence)))


def index_of(rows: Tensor | slice | int | list[int] | None, size: int) -> Tensor | slice:
    """Rows of a state of so many; those that the host knows are in range, since a GPU would end the process over one that is
    not."""
    if rows is None:
        return slice(None)
    if isinstance(rows, slice):
        return rows
    try:
        index = rows if isinstance(rows, Tensor) else torch.as_tensor(rows, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"rows must be integers, a slice or a mask, got {type(rows).__name__}") from None
    index = index.reshape(-1)
    if index.dtype == torch.bool:
        if len(index) != size:
            raise ValueError(f"rows must be a mask of max_batch_size = {size} rows, got {len(index)}")
        return index
    if index.dtype not in _INTEGERS and index.numel():  # torch takes [] for floats
        raise TypeError(f"rows must be integers or a mask, got {index.dtype}")
    index = index.long()  # uint8 would be a mask to torch
    if index.device.type == "cpu" and bool(((index < -size) | (index >= size)).any()):
        raise ValueError(f"rows must be from 0 to max_batch_size - 1 = {size - 1}, got {index.tolist()}")
    return index


def _two_s_complement(name: str, value: Any) -> int:
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must fit in 64 bits, got {value}")
    return value - 2**64 if value >= 2**63 else value


def _at_least_0(name: str, value: float) -> float:
    if not value >= 0:  # NaN too
        raise ValueError(f"{name} must be at least 0, got {value}")
    return float(value) if value <= _MAX_FLOAT32 else math.inf


def _integer(value: Any) -> int:
    if isinstance(value, (bool, Tensor)):
        raise TypeError
    return operator.index(value)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _real(value: Any) -> float:
    if isinstance(value, (bool, Tensor, str, bytes)):
        raise TypeError
    return value if isinstance(value, int) else float(value)  # an int may be beyond every float


def _numbers(name: str, value: Any, wanted: str, number: Callable[[Any], Any]) -> list[Any]:
    """Python numbers out of what holds one number, or one per row."""
    got = type(value).__name__
    if hasattr(value, "tolist"):
        value = value.tolist()
    several = isinstance(value, Sequence) and not isinstance(value, (str, bytes))
    numbers = []
    for element in value if several else (value,):
        if not isinstance(element, (int, float, Tensor)) and hasattr(element, "tolist"):
            element = element.tolist()
        if isinstance(element, (list, tuple)):
            raise ValueError(f"{name} must be {wanted}, got {got} of more than one dimension")
        try:
            numbers.append(number(element))
        except TypeError:
            if several:
                got += f" that holds {type(element).__name__}"
            hint = "; torch.stack makes one tensor of several" if isinstance(element, Tensor) else ""
            raise TypeError(f"{name} must be {wanted}, got {got}{hint}") from None
    return numbers


def _column(
    name: str, numbers: list[Any], batch: int, device: torch.device, dtype: torch.dtype, one: str = "a number"
) -> Tensor:
    """A value per row, copied to the device."""
    if len(numbers) != batch:
        raise _shape_error(name, batch, (len(numbers),), one)
    return torch.tensor(numbers, dtype=dtype, device=device)


def _rows(
    name: str, rows: Tensor, batch: int, device: torch.device, wanted: torch.dtype, one: str = "a number"
) -> Tensor:
    """A value per row as the implementations take it: contiguous, of the dtype ``wanted``. One that is so already does not come
    here: each question to a tensor, and each call, costs a row parameter a tenth of a microsecond."""
    if not is_dense(rows):
        raise TypeError(f"{name} must be a dense tensor, got {kind_of(rows)}")
    if rows.shape != (batch,):
        if rows.dim() > 1 or rows.numel() != 1:
            raise _shape_error(name, batch, tuple(rows.shape), one)
        if rows.dim() == 0 and rows.device.type == "cpu":
            rows = rows.to(device)  # torch's rule: a number on the CPU goes with any device
        rows = rows.expand(batch)
    if rows.device != device:
        raise ValueError(f"{name} must be on the device of the step, {device}, got {rows.device}")
    return rows.to(wanted).contiguous()


def _shape_error(name: str, batch: int, shape: tuple[int, ...], one: str) -> ValueError:
    return ValueError(f"{name} must be {one} or have shape (), (1,) or ({batch},), one per row, got shape {shape}")
