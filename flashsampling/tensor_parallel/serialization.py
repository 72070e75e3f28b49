"""Serialises values that ranks exchange outside of steps, as JSON whose every field is checked when it is read.

A process group's store has no authentication: any process that reaches its port can write any bytes under any key. The
package therefore never unpickles, evaluates or imports a value of the store. Bytes that no rank writes end in a
MalformedError.
"""

import base64
import binascii
import json
import math
import types
from dataclasses import asdict, fields
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


def from_json(data: bytes | str) -> Any:
    """Parses JSON. Raises MalformedError for anything else."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a number of too many digits, too deep
        raise MalformedError(f"it is no JSON ({type(error).__name__})") from None


def record_to_json(record: Any) -> str:
    """Encodes a dataclass as ASCII text, for ``record_from_json``."""
    return json.dumps(asdict(record))


def record_from_json(kind: type[T], data: bytes | str) -> T:
    """Decodes a dataclass whose fields are str, int, float, None, Literal, or tuples and dictionaries of these.

    Raises:
        MalformedError: a field is missing, unknown or of another type.
    """
    values, hints = from_json(data), get_type_hints(kind)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(values, dict) or sorted(values) != sorted(names):
        raise MalformedError(f"a {kind.__name__} has the fields {', '.join(names)}")
    wrong = [name for name in names if not _fits(values[name], hints[name])]
    if wrong:
        name = wrong[0]
        raise MalformedError(f"{name} of a {kind.__name__} must be {hints[name]}, got {type(values[name]).__name__}")
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _fits(value: Any, kind: Any) -> bool:
    """Returns whether a JSON value fits a type annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return value in arguments
    if origin in (Union, types.UnionType):
        return any(_fits(value, argument) for argument in arguments)
    if origin is tuple:
        return isinstance(value, list) and all(_fits(each, arguments[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, arguments[1]) for each in value.values())
    return type(value) in ((int, float) if kind is float else (kind,))


def to_bytes(value: Any) -> bytes:
    """Encodes a value for ``from_bytes``.

    Takes None, bools, numbers, strings, tensors on the CPU, and lists, tuples and dictionaries of these.

    Raises:
        TypeError: the value holds another type.
        ValueError: the value contains itself, or is too deep.
    """
    try:
        return json.dumps(_described(value)).encode()
    except RecursionError:
        raise ValueError("values must not contain themselves, nor be hundreds of levels deep") from None


def from_bytes(data: bytes) -> Any:
    """Decodes bytes of ``to_bytes``. Raises MalformedError for other bytes."""
    try:
        return _restored(from_json(data))
    except RecursionError:
        raise MalformedError("it is too deep") from None


def _described(value: Any) -> Any:
    """Describes a value in JSON: an array is a list, an object has one field, "tuple", "dict" or "tensor"."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [_described(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [_described(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[_described(key), _described(each)] for key, each in value.items()]}
    if not isinstance(value, Tensor):
        kinds = "None, bools, numbers, strings, tensors, and lists, tuples and dictionaries of these"
        raise TypeError(f"values must be {kinds}, got {type(value).__name__}")
    dtype = str(value.dtype).removeprefix("torch.")
    if not is_plain(value) or value.device.type != "cpu" or dtype not in _DTYPES:
        expected = f"plain ones on the CPU of {', '.join(_DTYPES)}"
        raise TypeError(f"tensors in values must be {expected}, got {dtype} on {value.device}")
    raw = value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return {"tensor": [dtype, list(value.shape), base64.b64encode(raw).decode()]}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return [_restored(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind, content = next(iter(value.items())) if len(value) == 1 else (None, None)
    if isinstance(content, list):
        if kind == "tuple":
            return tuple(_restored(each) for each in content)
        if kind == "dict" and all(isinstance(pair, list) and len(pair) == 2 for pair in content):
            try:
                return {_restored(key): _restored(each) for key, each in content}
            except TypeError:
                raise MalformedError("a dictionary's key cannot be one") from None
        if kind == "tensor" and len(content) == 3:
            return _tensor(*content)
    raise MalformedError("an object is no tuple, dictionary or tensor")


def _tensor(dtype: Any, shape: Any, text: Any) -> Tensor:
    kind = _DTYPES.get(dtype) if isinstance(dtype, str) else None
    if kind is None or not _fits(shape, tuple[int, ...]) or min(shape, default=0) < 0 or not isinstance(text, str):
        raise MalformedError("a tensor is described by its dtype, its shape and its bytes in base64")
    try:
        raw = bytearray(base64.b64decode(text, validate=True))
    except (binascii.Error, ValueError):
        raise MalformedError("a tensor's bytes are no base64") from None
    if math.prod(shape) * kind.itemsize != len(raw):
        raise MalformedError(f"a tensor {tuple(shape)} of {dtype} has {len(raw)} bytes")
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        return (flat != 0 if kind is torch.bool else flat.view(kind)).view(shape)
    except (RuntimeError, TypeError, OverflowError):  # sizes that no tensor has
        raise MalformedError(f"no tensor has the shape {tuple(shape)}") from None
