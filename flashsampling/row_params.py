"""Scalar and per-row parameters, such as seeds and temperatures: from what users write to what backends take.

Users write one number for all rows or one value per row, in anything that holds numbers: Python and numpy scalars,
lists, tuples, arrays, tensors. Backends take the number itself, or a contiguous (B,) tensor on the device of the hidden
states. No values of tensors are read here, so no call waits for a device. numpy is not imported: its scalars and
arrays, and anything else with ``tolist()``, are converted by that method.
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
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt)
_MAX_FLOAT32 = torch.finfo(torch.float32).max


class Array(Protocol):
    """An object with ``tolist``, such as a numpy scalar or array."""

    def tolist(self) -> Any:
        """Returns a Python number, or nested lists of them."""


Integers: TypeAlias = SupportsIndex | Sequence[SupportsIndex] | Array | Tensor
Reals: TypeAlias = float | Sequence[float] | Array | Tensor
Check: TypeAlias = Callable[[str, float], float]  # (argument's name, number); returns the number, or raises ValueError


def _range(contains: Callable[[float], bool], wanted: str) -> Check:
    """Returns a check that takes the numbers of a range."""

    def check(name: str, value: float) -> float:
        if not contains(value):
            raise ValueError(f"{name} must be {wanted}, got {value}")
        return float(value)

    return check


# NaN is in none of them; "finite" numbers are those that float32 holds
finite = _range(lambda value: -_MAX_FLOAT32 <= value <= _MAX_FLOAT32, "finite")
finite_from_0 = _range(lambda value: 0 <= value <= _MAX_FLOAT32, "at least 0 and finite")
above_0 = _range(lambda value: 0 < value <= _MAX_FLOAT32, "above 0 and finite")
share = _range(lambda value: 0 <= value <= 1, "from 0 to 1")
share_below_1 = _range(lambda value: 0 <= value < 1, "at least 0 and below 1")


def at_least_0(name: str, value: float) -> float:
    """Returns a number from 0 on; infinity if float32 does not hold it."""
    if not value >= 0:  # NaN too
        raise ValueError(f"{name} must be at least 0, got {value}")
    return float(value) if value <= _MAX_FLOAT32 else math.inf


def integers(
    name: str, value: Integers, batch: int, device: torch.device, also: torch.dtype = torch.int64
) -> Tensor | int:
    """Returns 64 bits per row, as two's complement: a tensor (batch,) int64, or one number for all rows. A tensor of
    the dtype ``also`` is not converted."""
    if type(value) is int and -(2**63) <= value < 2**63:  # saves 2 us
        return value
    if isinstance(value, Tensor):
        if _is_ready(value, batch, device, also):
            return value
        dtype = value.dtype
        if dtype not in _INTEGERS:
            raise TypeError(f"{name} must be an integer tensor, got {dtype}")
        return _rows(name, value, batch, device, also if dtype is also else torch.int64)
    if isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value] # serves as an int
    numbers = _numbers(name, value, "an int or integers, one per row", _integer)
    return _column(name, [_two_s_complement(name, number) for number in numbers], batch, device, torch.int64)


def reals(name: str, value: Reals, batch: int, device: torch.device, check: Check = at_least_0) -> Tensor | float:
    """Returns a tensor (batch,) float32, or one number for all rows.

    ``check`` takes each number that the host knows and returns it, or raises ValueError. A number that Dynamo traces as
    a symbol becomes a tensor: AOTAutograd makes a constant, and so a graph for each value, of every float that reaches
    an operator other than torch's own arithmetic (``torch.fx.passes._tensorify_python_scalars``). ``torch.full`` is no
    such arithmetic, a product is.
    """
    if isinstance(value, Tensor):
        if _is_ready(value, batch, device, torch.float32):
            return value
        if not value.dtype.is_floating_point and value.dtype not in _INTEGERS:
            raise TypeError(f"{name} must be a tensor of floating-point numbers or integers, got {value.dtype}")
        return _rows(name, value, batch, device, torch.float32)
    if isinstance(value, _NUMBERS) and not isinstance(value, bool):  # saves 2 us
        number = check(name, value)
        return torch.ones(batch, dtype=torch.float32, device=device) * number if is_symbolic(number) else number
    numbers = _numbers(name, value, "a number or numbers, one per row", _real)
    return _column(name, [check(name, number) for number in numbers], batch, device, torch.float32)


def flags(name: str, value: Any, batch: int, device: torch.device) -> Tensor | int:
    """Returns a flag per row: a tensor (batch,) int32, not 0 for True, or 0 or 1 for all rows. Takes bools, or a tensor
    of bools or int32."""
    if isinstance(value, Tensor):
        if value.dtype not in (torch.bool, torch.int32):
            raise TypeError(f"{name} must be a bool, bools or int32, one per row, got a tensor of {value.dtype}")
        return _rows(name, value, batch, device, torch.int32, "a bool")
    bits = _numbers(name, value, "a bool or bools, one per row", _bit)
    return _column(name, bits, batch, device, torch.int32, "a bool")


def real(name: str, value: float, check: Check) -> float:
    """Returns one number for all rows, which the host knows and ``check`` takes. A number that Dynamo traces as a
    symbol becomes a tensor () float64 on the CPU, see ``reals``."""
    if not isinstance(value, _NUMBERS) or isinstance(value, bool):
        if isinstance(value, Tensor) or dimensions(value):
            raise TypeError(f"{name} must be a number, got {type(value).__name__}")
        (value,) = _numbers(name, value, "a number", _real)
    number = check(name, value)
    if is_symbolic(number):
        return torch.ones((), dtype=torch.float64, device="cpu") * number  # type: ignore[return-value]
    return number


def integer(name: str, value: Any) -> int:
    """Returns an int from anything that Python takes as an index, except a bool."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value] # a SymInt serves as an int
    try:
        return _integer(value)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {type(value).__name__}") from None


def is_symbolic(value: Any) -> bool:
    """Returns whether Dynamo traces a number as a symbol. A comparison of a symbol is a guard: each outcome has its own
    graph."""
    if not is_dynamo_compiling() or isinstance(value, Tensor):
        return False
    from torch.fx.experimental.symbolic_shapes import has_static_value  # imports sympy

    return not has_static_value(value)


def is_plain(value: Any) -> TypeGuard[Tensor]:
    """Returns whether a value is a dense tensor whose memory is its values: not quantised, no DTensor.
    ``torch.export``'s fake tensors count."""
    kind = type(value)
    is_ours = kind is Tensor or kind is Parameter
    # torch's class of fake tensors is private
    is_ours = is_ours or (kind.__name__ == "FakeTensor" and kind.__module__.startswith("torch."))
    return is_ours and is_dense(value)


def check_plain(name: str, value: Any, device: torch.device) -> None:
    """Raises unless a value is a plain tensor on the device of the step."""
    if not is_plain(value):
        raise TypeError(f"{name} must be a plain torch.Tensor, got {describe_kind(value)}")
    if value.device != device:
        raise ValueError(f"{name} must be on the device of the step, {device}, got {value.device}")


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor has strides: it is neither sparse nor nested, nor another library's."""
    return tensor.layout is torch.strided and not tensor.is_nested


def describe_kind(value: Any) -> str:
    """Returns the type or layout of a value that is no plain tensor, for messages."""
    if not isinstance(value, Tensor) or is_dense(value):
        return type(value).__name__
    return "a nested tensor" if value.is_nested else str(value.layout)


def dimensions(value: Any) -> int:
    """Returns 0 for one number, 1 for a value per row, such as a list."""
    return int(getattr(value, "ndim", isinstance(value, Sequence)))


def row_index(rows: Tensor | slice | int | list[int] | None, size: int) -> Tensor | slice:
    """Returns an index into ``size`` rows. Indices on the CPU are checked: an index out of range on a GPU ends the
    process."""
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


def _integer(value: Any) -> int:
    if isinstance(value, (bool, Tensor)):
        raise TypeError
    return operator.index(value)


def _bit(value: Any) -> int:
    if not isinstance(value, bool):
        raise TypeError
    return int(value)


def _real(value: Any) -> float:
    if isinstance(value, (bool, Tensor, str, bytes)):
        raise TypeError
    return value if isinstance(value, int) else float(value)  # an int may be beyond every float


def _numbers(name: str, value: Any, wanted: str, number: Callable[[Any], Any]) -> list[Any]:
    """Returns Python numbers from an object that holds one number, or one per row."""
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
) -> Any:
    """Returns one number for all rows, or a value per row, copied to the device."""
    if len(numbers) == 1:
        return numbers[0]
    if len(numbers) != batch:
        raise _shape_error(name, batch, (len(numbers),), one)
    return torch.tensor(numbers, dtype=dtype, device=device)


def _is_ready(rows: Tensor, batch: int, device: torch.device, wanted: torch.dtype) -> bool:
    """Returns whether a value per row is as backends take it."""
    return (
        rows.dtype is wanted
        and rows.layout is torch.strided
        and rows.shape == (batch,)
        and rows.device == device
        and rows.is_contiguous()
    )


def _rows(
    name: str, rows: Tensor, batch: int, device: torch.device, wanted: torch.dtype, one: str = "a number"
) -> Tensor:
    """Returns a value per row as backends take it: contiguous, of the dtype ``wanted``."""
    if not is_dense(rows):
        raise TypeError(f"{name} must be a dense tensor, got {describe_kind(rows)}")
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
