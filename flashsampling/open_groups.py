"""Open tensor-parallel groups by the name that the torch operator is called with.

It stands beside the package ``tensor_parallel`` and not in it, since ``ops`` imports it at the top: importing a module of that
package would run the package's ``__init__``, which imports ``ops``.

References are strong: a group that is neither closed nor kept by anybody goes on, since a captured graph may replay with its
buffers, and peers may write to them. Only ``close`` gives them back.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .tensor_parallel import TensorParallel

_open: dict[str, "TensorParallel"] = {}


def add(name: str, group: "TensorParallel") -> None:
    """Makes a group known."""
    _open[name] = group


def remove(name: str) -> None:
    """Forgets a group; one that is not known is fine."""
    _open.pop(name, None)


def find(name: str) -> "TensorParallel":
    """The group of that name; ValueError if it has been closed."""
    try:
        return _open[name]
    except KeyError:
        raise ValueError(
            "tp must be open, it has been closed: a compiled function or an exported program needs its TensorParallel open as "
            "long as it is called"
        ) from None
