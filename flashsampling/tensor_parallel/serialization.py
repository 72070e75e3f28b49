"""Serialises values that ranks exchange outside of steps, as JSON that is checked when it is read.

A process group's store has no authentication: any process that reaches its port can write any bytes under any key. The
package therefore never unpickles, evaluates or imports a value of the store. Bytes that no rank writes end in a
MalformedError.
"""

import json
import types
from dataclasses import asdict, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..row_params import is_plain

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
}
T = TypeVar("T")


class MalformedError(ValueError):
    """Bytes that no rank writes."""


def to_text(value: Any) -> str:
    """Encodes a value as ASCII text for ``from_text``.

    Takes None, bools, numbers, strings, tensors on the CPU, and lists, tuples and dictionaries of these; a dataclass as
    the dictionary of its fields.

    Raises:
        TypeError: the value holds another type.
        ValueError: the value contains itself, or is too deep.
    """
    try:
        return json.dumps(_described(value))
    except RecursionError:
        raise ValueError("values must not contain themselves, nor be hundreds of levels deep") from None


def from_text(text: bytes | str) -> Any:
    """Decodes a text of ``to_text``. Raises MalformedError for anything else."""
    try:
        return _restored(json.loads(text))
    except MalformedError:
        raise
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of too many digits, too deep
        raise MalformedError(f"it is no JSON ({type(error).__name__})") from None


def parse_record(kind: type[T], value: Any) -> T:
    """Makes a dataclass of the dictionary of its fields, which are str, int, float, None, Literal, or tuples and
    dictionaries of these.

    Raises:
        MalformedError: a field is missing, unknown or of another type.
    """
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(value, dict) or value.keys() != set(names):
        raise MalformedError(f"a {kind.__name__} has the fields {', '.join(names)}")
    for name in names:
        if not _fits(value[name], hints[name]):
            got = type(value[name]).__name__
            raise MalformedError(f"{name} of a {kind.__name__} must be {hints[name]}, got {got}")
    return kind(**value)


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether a value fits a type annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, arguments[1]) for each in value.values())
    return type(value) in ((int, float) if kind is float else (kind,))


def _described(value: Any) -> Any:
    """Describes a value in JSON: an array is a list, an object has one field, "tuple", "dict" or "tensor"."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_described(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_described(each) for each in value]}
    if is_dataclass(value):
        value = asdict(value)  # type: ignore[arg-type]
    if isinstance(value, dict):
        return {"dict": [[_described(key), _described(each)] for key, each in value.items()]}
    if not isinstance(value, Tensor):
        kinds = "None, bools, numbers, strings, tensors, and lists, tuples and dictionaries of these"
        raise TypeError(f"values must be {kinds}, got {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    if not is_plain(value) or value.device.type != "cpu" or dtype not in _DTYPES:
        expected = f"plain ones on the CPU of {', '.join(_DTYPES)}"
        raise TypeError(f"tensors in values must be {expected}, got {dtype} on {value.device}")
    return {"tensor": [dtype, list(value.shape), value.flatten().tolist()]}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    try:
        ((kind, content),) = value.items()
        if kind == "tuple":
            return tuple(map(_restored, content))
        if kind == "dict":
            return {_restored(key): _restored(each) for key, each in content}
        if kind == "tensor":
            dtype, shape, numbers = content
            return torch.tensor(numbers, dtype=_DTYPES[dtype], device="cpu").view(shape)
    except MalformedError:
        raise
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError):
        pass  # a dictionary's key that cannot be one, or a dtype, a shape or numbers of no tensor, for example
    raise MalformedError("an object is no tuple, dictionary or tensor")
