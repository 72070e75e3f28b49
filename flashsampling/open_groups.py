"""Open tensor-parallel groups by the name that the torch operator receives.

The module is not in the package ``tensor_parallel``, whose ``__init__`` imports ``ops``, because ``ops`` imports it.

References are strong: a group without another reference stays until it is closed, because a captured graph may replay
with its buffers and peers may write to them. Only ``close`` frees them.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tensor_parallel import TensorParallel

_open: dict[str, "TensorParallel"] = {}


def add(name: str, group: "TensorParallel") -> None:
    """Adds an open group."""
    _open[name] = group


def remove(name: str) -> None:
    """Removes a group, if it is there."""
    _open.pop(name, None)


def find(name: str) -> "TensorParallel":
    """Returns the group of that name. Raises ValueError if it has been closed."""
    try:
        return _open[name]
    except KeyError:
        raise ValueError(
            "tp must be open, it has been closed: a compiled function or an exported program needs its TensorParallel "
            "open as long as it is called"
        ) from None
