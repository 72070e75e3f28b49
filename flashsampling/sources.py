"""The package's sources at its import: the code that runs, even if an upgrade overwrites the files later."""

import contextlib
from collections.abc import Mapping
from pathlib import Path


def read(package: Path) -> Mapping[Path, bytes]:
    """Returns the bytes of every Python source of a package."""
    found = {}
    for path in package.rglob("*.py"):
        with contextlib.suppress(OSError):  # an upgrade may be under way
            found[path] = path.read_bytes()
    return found


IMPORTED = read(Path(__file__).parent)
