"""The package's sources as they were when the package was imported: what runs, whatever an upgrade writes over them later."""

import contextlib
from collections.abc import Mapping
from pathlib import Path


def read(package: Path) -> Mapping[Path, bytes]:
    """The bytes of every Python source of a package."""
    found = {}
    for path in package.rglob("*.py"):
        with contextlib.suppress(OSError):  # an upgrade may be under way
            found[path] = path.read_bytes()
    return found


IMPORTED = read(Path(__file__).parent)
