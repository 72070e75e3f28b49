"""The backends: a table, in the order in which ``impl=None`` tries them.

A backend is a module or package that the table names. It has

    unsupported(inputs) -> str | None  returns why it cannot run a step, or None; nothing else decides that
    run(inputs) -> SampleResult        runs a step of one row or more on the current device and stream

It may have

    UNSUPPORTED_PARAMS                 fields of ``SamplingParams`` that it does not implement; a step with one of them
                                       is refused by name. Default: it implements all
    recorded(inputs) -> FilteredLogits runs a step of one draw, stream 0 and a whole vocabulary, and returns what it was
                                       drawn from, so that kernels can reject drafts
    compiled_for(weight, max_batch_size, num_samples) -> names, batch sizes
                                       returns the kernels that such calls can need, and the batch sizes whose draws
                                       compile them, ascending and the same for every shard of a weight; with 0 samples
                                       calls that have sampling parameters
    compiling(num_threads)             returns a context in which this thread's draws compile what they need, several
                                       kernels at once; their results are undefined

Under tensor parallelism it may have

    runs_on_shard(inputs) -> bool      returns whether ``run`` applies these sampling parameters to a shard by itself;
                                       they are then the whole vocabulary's, except for the LM head's bias

Otherwise ranks exchange logits (``tensor_parallel/filtered_sampling``), and the backend must have

    shard_logits(inputs) -> Tensor     returns the logits of a shard with at least one token, (B, vocab_size) float32,
                                       without any sampling parameter: the bits that ``run`` computes

A backend is imported at its first use, and only if the packages that it needs are installed.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import re
from dataclasses import KW_ONLY, dataclass
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from .inputs import SampleInputs
from .outputs import FilteredLogits, SampleResult
from .sampling_params import DEFAULT_PARAMS, argument_names
from .torch_internals import dispatch_modes, tracing_state


class Package(NamedTuple):
    """A package that a backend needs besides torch."""

    module: str
    distribution: str
    least: tuple[int, ...] = ()  # version
    hint: str = ""

    def missing(self) -> str | None:
        """Returns why the package cannot be used, or None."""
        if importlib.util.find_spec(self.module) is None:
            return f"{self.distribution} is not installed{self.hint}"
        try:
            version = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:  # another name, such as a nightly build's: unknown
            return None
        if tuple(int(part) for part in re.findall(r"\d+", version)[: len(self.least)]) < self.least:
            return f"{self.distribution} {version} is installed, it needs {'.'.join(map(str, self.least))} or newer"
        return None


def _first_missing(packages: tuple[Package, ...]) -> str | None:
    return next((reason for package in packages if (reason := package.missing()) is not None), None)


@dataclass(eq=False)
class Backend:
    """A row of the table.

    Args:
        name: the value of ``impl``.
        package: the module or package below ``flashsampling``.
        needs: packages.
        chosen_on: the kinds of device, "cuda" and "cpu", on which ``impl=None`` tries it.
        sharded: it runs on a shard, so it serves under tensor parallelism.
        exchanges: its kernel does the exchange of the transport ``p2p`` itself.
        takes_logits: it runs steps whose logits are in memory (``SampleInputs.logits``).
        params_need: packages, for steps with sampling parameters.
    """

    name: str
    package: str
    _: KW_ONLY
    needs: tuple[Package, ...] = ()
    chosen_on: tuple[str, ...]
    sharded: bool
    exchanges: bool = False
    takes_logits: bool = True
    params_need: tuple[Package, ...] = ()

    @functools.cached_property
    def missing(self) -> str | None:
        """Why a package that it needs cannot be used; None: all can."""
        return _first_missing(self.needs)

    @functools.cached_property
    def params_missing(self) -> str | None:
        """Why a package that it needs for sampling parameters cannot be used; None: all can."""
        return _first_missing(self.params_need)

    @functools.cached_property
    def module(self) -> ModuleType:
        """The backend's module, imported at its first use."""
        return importlib.import_module(f".{self.package}", __package__)

    @functools.cached_property
    def unsupported_params(self) -> tuple[str, ...]:
        """The fields of ``SamplingParams`` that it does not implement."""
        return getattr(self.module, "UNSUPPORTED_PARAMS", ())

    def unsupported(self, inputs: SampleInputs) -> str | None:
        """Returns why it cannot run a step here, or None."""
        if self.missing is not None:
            return self.missing
        if inputs.logits is not None and not self.takes_logits:
            return "it takes hidden states and a weight, not logits"
        if inputs.params is not DEFAULT_PARAMS:
            left_out = [name for name in self.unsupported_params if name in inputs.params.names()]
            if left_out:
                return f"it does not do {argument_names(left_out)}"
            if self.params_missing is not None:
                return f"it does not do {argument_names(inputs.params.names())}: {self.params_missing}"
        return self.module.unsupported(inputs)  # type: ignore[no-any-return]

    def run(self, inputs: SampleInputs) -> SampleResult:
        """Runs a step that it supports, of one row or more, on the current device and stream."""
        return self.module.run(inputs)  # type: ignore[no-any-return]

    def runs_on_shard(self, inputs: SampleInputs) -> bool:
        """Returns whether ``run`` applies the step's sampling parameters to a shard by itself."""
        decide = getattr(self.module, "runs_on_shard", None)
        return inputs.params is DEFAULT_PARAMS or (decide is not None and decide(inputs))

    def shard_logits(self, inputs: SampleInputs) -> Tensor:
        """Returns the logits of a shard, (B, vocab_size) float32."""
        return self.module.shard_logits(inputs)  # type: ignore[no-any-return]

    @property
    def for_logits(self) -> "Backend":
        """The backend that draws from logits that this one has stored, as this one does."""
        return self if self.takes_logits else BACKENDS["triton"]

    @property
    def records(self) -> bool:
        """True if it has ``recorded``."""
        return hasattr(self.module, "recorded")

    def recorded(self, inputs: SampleInputs) -> FilteredLogits:
        """Runs a step that it supports and returns what it was drawn from."""
        return self.module.recorded(inputs)  # type: ignore[no-any-return]

    @property
    def compiles(self) -> bool:
        """True if it has kernels to compile."""
        return hasattr(self.module, "compiled_for")

    def compiled_for(self, weight: Tensor, max_batch_size: int, num_samples: int) -> tuple[list[str], list[int]]:
        """Returns the names of the kernels for batches of up to ``max_batch_size`` rows, and the batch sizes whose
        draws compile them."""
        if not self.compiles:
            return [], [1]
        return self.module.compiled_for(weight, max_batch_size, num_samples)  # type: ignore[no-any-return]


# 3.4 fails to compile the kernel; 3.6 is measured; 3.9 compiles it in all its shapes
_TRITON = Package("triton", "triton", (3, 6), " (the extra triton: pip install '.[triton]' from a checkout)")
_CUTE_HINT = " (the extra cute: pip install '.[cute]' from a checkout)"
_TABLE = (
    Backend(
        "cute",
        "kernels.hopper",
        needs=(
            # not "cutlass", which is also the name of the old C++ template package. 4.8.1 is measured; 4.8.0 makes the
            # same cubins
            Package("nvidia_cutlass_dsl", "nvidia-cutlass-dsl", (4, 8, 0), _CUTE_HINT),
            Package("tvm_ffi", "apache-tvm-ffi", hint=_CUTE_HINT),
        ),
        chosen_on=("cuda",),
        sharded=True,
        exchanges=True,
        takes_logits=False,
        params_need=(_TRITON,),  # draws from the logits that the kernel stores
    ),
    Backend("triton", "kernels.triton", needs=(_TRITON,), chosen_on=("cuda",), sharded=True, exchanges=True),
    Backend("streaming", "reference.streaming", chosen_on=("cuda", "cpu"), sharded=True),
    Backend("reference", "reference.oracle", chosen_on=(), sharded=False),
)
BACKENDS = {backend.name: backend for backend in _TABLE}


def named(name: str) -> Backend:
    """Returns the backend of that name. Raises ValueError if there is none."""
    try:
        return BACKENDS[name]
    except KeyError:
        raise ValueError(f"impl must be None or one of {', '.join(BACKENDS)}, got {name!r}") from None


def runs_small_kernels(tensor: Tensor) -> bool:
    """Returns whether small Triton kernels can replace torch operations: a GPU of capability 8.0, Triton, and no
    tracer."""
    from .kernels.device import capability

    return (
        tensor.is_cuda
        and BACKENDS["triton"].missing is None
        and capability(tensor.device) >= (8, 0)
        and not torch.compiler.is_compiling()
        and tracing_state() is None
        and not dispatch_modes()
    )
