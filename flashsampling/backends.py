"""The implementations: a row each, in the order in which ``impl=None`` tries them.

A backend is a module or package, named in the table below, with

    DOES                               fields of ``step.SamplingParams`` that it does; a step with another one is
    refused; if it does any
    DOES_OF_LOGITS                     the same of steps that have ``SampleInputs.logits``; if it takes them
    unsupported(step) -> str | None    why it cannot do a step, or None: the only truth about what it takes
    run(step) -> Drawn                 of one row or more, on the current device and, there, the current stream
    recorded(step) -> Recorded         the same of one draw, stream 0 and a whole vocabulary, and what it was drawn from: drafts
                                       are then rejected by kernels; if it leaves that
    compiled_for(weight, max_batch_size, num_samples) -> names, batch sizes
                                       the kernels that such calls can need, and whose draws compile them, ascending and the
                                       same whichever part of a weight it is; if it compiles any
    compiling(at_once)                 a context in which this thread's draws compile what they need, side by side, and may draw
                                       anything; if several kernels of it can be compiled at once

One that knows shards may have

    runs_on_shard(step) -> bool        ``run`` does what is asked for of a shard as it does a plain step; what is asked for is
                                       then the whole vocabulary's, but for the head's bias

and else does them with what a request asks for in two parts, between which the ranks meet
(``tensor_parallel/filtered_sampling``); of a
shard with a token or more, and of what is asked for cut to it:

    shard_logits(step) -> Tensor, Tensor
                                       (B, vocab_size) float32, raw and processed logits; the same one where they are the same
    shard_winners(step, processed, limit, known=None) -> Tensor
                                       (B * num_samples,) packed winners of the tokens whose place (``filters.places_of``) is
                                       at least the row's ``limit``, (B,) int64; ``NO_FINITE`` where there is none. Of rows
                                       with a NaN anything. ``known``: what ``limits.highest`` found of these logits

What ends where in between, the functions of ``tensor_parallel.cutoffs`` find, and what all ranks conclude those of
``tensor_parallel.outputs``, or of other modules of these kinds; of one that does the exchange itself, ``of_top_k_and_p`` too
(``kernels/triton/sharded/cutoffs``).

It is imported when it is first asked, and only where the packages that it needs are installed.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from .inputs import DEFAULT_PARAMS, FilteredLogits, SampleInputs, SampleResult, arguments


class Package(NamedTuple):
    """What a backend needs beside torch."""

    module: str
    distribution: str
    least: tuple[int, ...] = ()  # version
    hint: str = ""

    def missing(self) -> str | None:
        """Why it cannot be used, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed{self.hint}"
        version = self._version()
        if version and tuple(int(part) for part in re.findall(r"\d+", version)[: len(self.least)]) < self.least:
            return f"{self.distribution} {version} is installed, it needs {'.'.join(map(str, self.least))} or newer"
        return None

    def _version(self) -> str:
        """What is loaded counts, or else what is installed; "" if that cannot be known."""
        version = getattr(sys.modules.get(self.module), "__version__", None)
        if version is None:
            try:
                return importlib.metadata.version(self.distribution)
            except (
                importlib.metadata.PackageNotFoundError
            ):  # it came under another name, or as a bare folder on the path
                version = getattr(importlib.import_module(self.module), "__version__", "")
        return str(version)


def _first_missing(packages: tuple[Package, ...]) -> str | None:
    return next((reason for package in packages if (reason := package.missing()) is not None), None)


class Backend:
    """An implementation.

    Args:
        name: what ``impl`` takes.
        package: its module or package, below ``flashsampling``.
        needs: packages.
        chosen_on: kind of device on which ``impl=None`` tries it; "any", or None: it must be named.
        sharded: it can be told of a shard, so it serves under tensor parallelism.
        exchanges: its kernel does the exchange of the transport ``p2p`` itself.
        asked_needs: packages, for steps that ask for anything.
        shard_limits, shard_parts: the modules that find where filters end in rows over several ranks, and what a step gives.
    """

    def __init__(
        self,
        name: str,
        package: str,
        *,
        needs: tuple[Package, ...] = (),
        chosen_on: str | None,
        sharded: bool,
        exchanges: bool = False,
        asked_needs: tuple[Package, ...] = (),
        shard_limits: str = "tensor_parallel.cutoffs",
        shard_parts: str = "tensor_parallel.outputs",
    ) -> None:
        self._package = package
        self.name, self.needs, self.chosen_on, self.sharded, self.exchanges = name, needs, chosen_on, sharded, exchanges
        self.asked_needs, self._shard_limits, self._shard_parts = asked_needs, shard_limits, shard_parts

    @functools.cached_property
    def missing(self) -> str | None:
        """Which package that it needs is not there, or too old; None: all are there."""
        return _first_missing(self.needs)

    @functools.cached_property
    def asked_missing(self) -> str | None:
        """The same of steps that ask for anything."""
        return _first_missing(self.asked_needs)

    @functools.cached_property
    def module(self) -> ModuleType:
        """Imported at the first use."""
        return importlib.import_module(f".{self._package}", __package__)

    @functools.cached_property
    def shard_limits(self) -> ModuleType:
        """Imported at the first use."""
        return importlib.import_module(f".{self._shard_limits}", __package__)

    @functools.cached_property
    def shard_parts(self) -> ModuleType:
        """Imported at the first use."""
        return importlib.import_module(f".{self._shard_parts}", __package__)

    def unsupported(self, step: SampleInputs) -> str | None:
        """Why it cannot do a step here, or None."""
        if self.missing is not None:
            return self.missing
        if step.params is not DEFAULT_PARAMS or step.logits is not None:
            does = getattr(self.module, "DOES" if step.logits is None else "DOES_OF_LOGITS", None)
            if does is None and step.logits is not None:
                return "it takes hidden states and a weight, not logits"
            left = [name for name in step.params.names() if name not in (does or ())]
            if left:
                return f"it does not do {arguments(left)}"
            if step.params is not DEFAULT_PARAMS and self.asked_missing is not None:
                return f"it does not do {arguments(step.params.names())}: {self.asked_missing}"
        return self.module.unsupported(step)  # type: ignore[no-any-return]

    def run(self, step: SampleInputs) -> SampleResult:
        """Does a step that it supports, of one row or more, on the current device and stream."""
        return self.module.run(step)  # type: ignore[no-any-return]

    def runs_on_shard(self, step: SampleInputs) -> bool:
        """Whether ``run`` does all that a step asks for, of a shard too."""
        decide = getattr(self.module, "runs_on_shard", None)
        return step.params is DEFAULT_PARAMS or (decide is not None and decide(step))

    @property
    def records(self) -> bool:
        """Whether it has ``recorded``."""
        return hasattr(self.module, "recorded")

    def recorded(self, step: SampleInputs) -> FilteredLogits:
        """Does a step that it supports, and leaves what it was drawn from."""
        return self.module.recorded(step)  # type: ignore[no-any-return]

    @property
    def compiles(self) -> bool:
        """Whether it has kernels of its own."""
        return hasattr(self.module, "compiled_for")

    def compiled_for(self, weight: Tensor, max_batch_size: int, num_samples: int) -> tuple[list[str], list[int]]:
        """Names of the kernels for batches of up to ``max_batch_size`` rows, and the batch sizes whose draws compile them."""
        if not self.compiles:
            return [], [1]
        return self.module.compiled_for(weight, max_batch_size, num_samples)  # type: ignore[no-any-return]


# 3.4 fails to compile the kernel; 3.6 is measured, 3.9 compiles in all its shapes
_TRITON = Package("triton", "triton", (3, 6), " (the extra triton: pip install '.[triton]' from a checkout)")
_CUTE_HINT = " (the extra cute: pip install '.[cute]' from a checkout)"
_LIMITS, _PARTS = "kernels.triton.sharded.cutoffs", "kernels.triton.sharded.outputs"
_TABLE = (
    Backend(
        "cute",
        "kernels.hopper",
        needs=(
            # not "cutlass": the old C++ template package goes by that name too. 4.8.1 is the only one measured, and
            # 4.8.0 makes the same cubins
            Package("nvidia_cutlass_dsl", "nvidia-cutlass-dsl", (4, 8, 0), _CUTE_HINT),
            Package("tvm_ffi", "apache-tvm-ffi", hint=_CUTE_HINT),
        ),
        chosen_on="cuda",
        sharded=True,
        exchanges=True,
        asked_needs=(_TRITON,),  # which picks from the logits that the kernel leaves
        shard_limits=_LIMITS,
        shard_parts=_PARTS,
    ),
    Backend(
        "triton",
        "kernels.triton",
        needs=(_TRITON,),
        chosen_on="cuda",
        sharded=True,
        exchanges=True,
        shard_limits=_LIMITS,
        shard_parts=_PARTS,
    ),
    Backend("streaming", "reference.streaming", chosen_on="any", sharded=True),
    Backend("reference", "reference.oracle", chosen_on=None, sharded=False),
)
BACKENDS = {backend.name: backend for backend in _TABLE}


@functools.cache  # to go through the table costs a call most of a microsecond
def tried_on(kind: str) -> tuple[Backend, ...]:
    """Those that ``impl=None`` tries on a kind of device, "cuda" or "cpu", in that order."""
    return tuple(backend for backend in BACKENDS.values() if backend.chosen_on in (kind, "any"))


def named(name: str) -> Backend:
    """The backend of that name; ValueError if there is none."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise ValueError(f"impl must be None or one of {', '.join(BACKENDS)}, got {name!r}") from None
