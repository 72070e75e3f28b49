"""Another checkout of this package under a name of its own, to be timed in one run with this one: options ``--before``."""

import importlib
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from flashsampling.inputs import SampleInputs

NAME = "flashsampling_before"
_scratch = tempfile.TemporaryDirectory(prefix="before-")  # until the process ends


def import_before(checkout: Path) -> ModuleType:
    """The package of a checkout (``git worktree add FOLDER COMMIT``), its operators under a name of their own too.

    Its Hopper kernels have a cache folder of their own, as those of every version; what is missing there is compiled.

    Raises:
        FileNotFoundError: there is no package ``flashsampling`` in it.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    package = Path(_scratch.name) / NAME
    shutil.copytree(checkout / "flashsampling", package, ignore=shutil.ignore_patterns("__pycache__"))
    for source in package.rglob("*.py"):
        source.write_text(re.sub(r"\bflashsampling\b", NAME, source.read_text()))
    sys.path.insert(0, _scratch.name)
    return importlib.import_module(NAME)


def step_before(checkout: Path, step: SampleInputs) -> Any:
    """A step of a whole vocabulary and no drafts, as that package has it."""
    theirs = importlib.import_module(f"{import_before(checkout).__name__}.inputs")
    params = step.params._asdict()
    if "seen" not in theirs.SamplingParams._fields:  # it changes no token
        del params["seen"]
    fields = step._asdict() | {
        "params": theirs.SamplingParams(**params) if step.params.names() else theirs.DEFAULT_PARAMS
    }
    for name in ("shard", "drafted", "draft_hash"):  # as by default
        del fields[name]
    return theirs.SampleInputs(**fields)


def sample_before(checkout: Path, step: SampleInputs, impl: str) -> Any:
    """What that package draws for such a step."""
    ops = importlib.import_module(f"{import_before(checkout).__name__}.ops")
    return ops.sample(step_before(checkout, step), impl)
