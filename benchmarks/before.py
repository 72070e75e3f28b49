"""Imports another checkout of this package under a name of its own, for the options ``--before`` of the benchmarks."""

import importlib
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from flashsampling.inputs import SampleInputs
from flashsampling.outputs import SampleResult, layout

NAME = "flashsampling_before"
_scratch = tempfile.TemporaryDirectory(prefix="before-")  # until the process ends


def import_before(checkout: Path) -> ModuleType:
    """Imports the package of a checkout (``git worktree add FOLDER COMMIT``), its operators renamed too.

    Its Hopper kernels have a cache folder of their own, as those of every version; what is missing there is compiled.

    Raises:
        FileNotFoundError: the checkout has no package ``flashsampling``.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    package = Path(_scratch.name) / NAME
    shutil.copytree(checkout / "flashsampling", package, ignore=shutil.ignore_patterns("__pycache__"))
    for source in package.rglob("*.py"):
        source.write_text(re.sub(r"\bflashsampling\b", NAME, source.read_text()))
    sys.path.insert(0, _scratch.name)
    return importlib.import_module(NAME)


def _keywords(step: SampleInputs, package: ModuleType) -> dict[str, Any]:
    """Returns the sampling parameters of a step as the public functions take them, at any commit."""
    params = step.params
    given = {name: getattr(params, name) for name in params.names()}
    keywords = {
        {"dense_bias": "logit_bias", "logprobs": "return_logprobs", "logsumexp": "return_logsumexp"}.get(
            name, name
        ): value
        for name, value in given.items()
        if name not in ("bias_ids", "bias_values", "counts")
    }
    if isinstance(keywords.get("joint_top_p"), int):
        keywords["joint_top_p"] = bool(keywords["joint_top_p"])
    if params.bias_ids is not None:
        keywords["logit_bias"] = (params.bias_ids, params.bias_values)
    if params.counts is not None:
        counted = sys.modules[package.TokenCounts.__module__].Counted  # its module has another name before the move
        keywords["token_counts"] = counted(params.counts, params.seen)
    return keywords


def compile_together_before(checkout: Path, steps: Iterable[SampleInputs], impl: str) -> None:
    """Compiles what the steps lack of that package's kernels, one per core at a time."""
    import_before(checkout)
    backends = importlib.import_module(f"{NAME}.backends")
    with backends.BACKENDS[impl].module.compiling(os.cpu_count() or 1):
        for step in steps:
            sample_before(checkout, step, impl)


def sample_before(checkout: Path, step: SampleInputs, impl: str) -> SampleResult:
    """Runs a step by that package's ``sample`` or ``sample_from_logits``, whose arguments are the same at every commit.

    ``step``: of a whole vocabulary, without drafts; its noise is that of tokens.
    """
    package = import_before(checkout)
    keywords = _keywords(step, package) | {
        **{"temperature": step.temperature, "seed": step.seed, "offset": step.offset},
        **{"num_samples": step.num_samples, "vocab_size": step.vocab_size, "impl": impl},
    }
    if step.logits is not None:
        out = package.sample_from_logits(step.logits, **keywords)
    else:
        out = package.sample(step.hidden_states, step.weight, **keywords)
    batch = len(step.hidden_states)
    parts: dict[str, Tensor] = {}
    places = layout(batch, step.num_samples, step.params)
    for name in (*places.ids, *places.values):
        parts[name] = getattr(out, name).view(batch, -1)
    return places.join(parts)
