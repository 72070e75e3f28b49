"""``warmup``: compiles before serving what serving would compile."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from . import ops
from .backends import BACKENDS
from .inputs import SampleInputs, example
from .param_parsers import batch_shape
from .row_params import integer
from .sampling import check_num_samples, check_tensor_parallel, check_vocab_size, check_weight, sample
from .sampling_params import (
    DEFAULT_PARAMS,
    SamplingOptions,
    SamplingParams,
    argument_names,
    parse_sampling_params,
    with_sampling_options,
)
from .token_counts import TokenCounts

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch installs this package

    from .tensor_parallel import TensorParallel

# is called with hidden states (B, D), temperature, and zeros for seeds and offsets
_Draw: TypeAlias = Callable[[Tensor, Tensor | float, Tensor], Any]

_logger = logging.getLogger("flashsampling")


@with_sampling_options
def warmup(
    weight: Tensor,  # (V, D)
    *,
    max_batch_size: int | None = None,
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
    **params: "Unpack[SamplingOptions]",
) -> list[str]:
    """Compiles every kernel that ``sample`` can need for this weight. Call it once before serving.

    Afterwards no batch of 1 to ``max_batch_size`` rows compiles anything, whichever of its parameters are numbers and
    which are tensors. A weight with another D, dtype or row stride, another ``num_samples`` (1, or more), GPU, ``impl``
    or group may compile. The call draws once per kernel from all-zero hidden states on the current stream and waits for
    the results; it writes to no tensor of the caller and reads no random generator. A second call draws again and
    compiles nothing.

    Sampling parameters are of four kinds: the LM head's (``bias``, ``logit_scale``, ``soft_cap``), others that change
    logits (``logit_bias`` to ``token_mask``), filters, and outputs. On one GPU two calls with parameters of the same
    kinds need the same kernels, except that a ``logit_bias`` of ids has one for each power of two that bounds the ids
    per row. A filter that is a number and off, such as a ``top_p`` of 1.0, counts as left out.

    The kernels are logged first, at level INFO to the logger "flashsampling". Triton takes seconds per kernel, up to
    eight at once, or milliseconds if its cache on disk has it. The Hopper kernel takes three seconds per shape, or none
    if ``python -m flashsampling precompile`` filled the cache. With ``tp`` a rank waits for the other ranks' compilers.

    Args:
        weight: (V, D), as it will be passed to ``sample``.
        max_batch_size: rows of the largest batch; None is ``tp.max_batch_size``, or 256 without ``tp``.
        num_samples: draws per row, as in ``sample``.
        vocab_size: as in ``sample``.
        impl: as in ``sample``.
        tp: as in ``sample``. Every rank then makes this call, as it would make a step, with the same ``max_batch_size``
            and ``num_samples``.
        bias, logit_scale, ..., return_logsumexp: the sampling parameters of the calls, as in ``sample``. Their values
            do not matter; values per row are for ``max_batch_size`` rows. The call compiles what these parameters need
            together: call it for each combination of kinds that will be served, over several ranks for each mix of
            parameters, and without any for plain draws. Counts do not advance.

    Returns:
        Names of the kernels that are now compiled; empty if the backend compiles nothing ("streaming", "reference").

    Raises:
        TypeError, ValueError: as ``sample``; or ``max_batch_size`` is below 1, or above that of ``tp``.
        RuntimeError: the current stream is being captured.
        flashsampling.tensor_parallel.TensorParallelError: as ``sample``.

    Example:
        >>> import torch, flashsampling
        >>> flashsampling.warmup(torch.zeros(1000, 8), max_batch_size=64)  # on a CPU nothing is compiled
        []
    """
    return warmup_mixes(
        weight,
        [params],
        max_batch_size=max_batch_size,
        num_samples=num_samples,
        vocab_size=vocab_size,
        impl=impl,
        tp=tp,
    )


def warmup_mixes(
    weight: Tensor,  # (V, D)
    mixes: "Sequence[SamplingOptions]",
    *,
    max_batch_size: int | None = None,
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
) -> list[str]:
    """Runs ``warmup`` for several mixes of sampling parameters, an empty one for plain draws. The Triton kernels of all
    mixes compile together, up to eight at once. With ``tp`` ranks wait for each other's compilers once."""
    try:
        return _draw_all(weight, mixes, max_batch_size, num_samples, vocab_size, impl, tp)
    except BaseException as error:
        ops.count_skipped_call(tp, error)
        raise


def _draw_all(
    weight: Tensor,
    mixes: "Sequence[SamplingOptions]",
    max_batch_size: int | None,
    num_samples: int,
    vocab_size: int | None,
    impl: str | None,
    tp: "TensorParallel | None",
) -> list[str]:
    check_weight(weight, 1 if tp is None else 0)
    num_samples = check_num_samples(num_samples)
    if tp is not None:
        check_tensor_parallel(tp, vocab_size, impl)
    if max_batch_size is None:
        max_batch_size = 256 if tp is None else tp.max_batch_size
    max_batch_size = integer("max_batch_size", max_batch_size)
    if max_batch_size < 1:
        raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
    if tp is not None and max_batch_size > tp.max_batch_size:
        raise ValueError(
            f"max_batch_size must be at most tp.max_batch_size = {tp.max_batch_size}, got {max_batch_size}"
        )
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "warmup must be called before a CUDA graph is captured: the current stream is being captured"
        )
    tokens = check_vocab_size(vocab_size, weight.shape[0]) if tp is None else tp.part[0]
    shape = batch_shape(max_batch_size, weight.shape[0], tokens, weight.device, num_samples, tp)

    def draw(
        params: SamplingParams, together: bool, states: Tensor, temperature: Tensor | float, zeros: Tensor
    ) -> None:
        """Draws, with the other ranks if ``together``."""
        if params is DEFAULT_PARAMS:
            rows = {"temperature": temperature, "seed": zeros, "offset": zeros, "num_samples": num_samples}
            sample(states, weight, **rows, vocab_size=vocab_size, impl=impl, tp=tp)  # type: ignore[arg-type]
            return
        if not isinstance(temperature, Tensor):
            return  # the same kernels
        some = params.rows(0, len(states))
        inputs = SampleInputs(states, weight, temperature, zeros, zeros, num_samples, tokens, params=some)
        if tp is None:
            ops.sample(inputs, impl or "")
        elif together:
            ops.sample_sharded(inputs._replace(shard=tp.shard), tp)
        else:
            ops.dry_run(inputs._replace(shard=tp.shard), tp)

    parsed = [parse_sampling_params(options, shape) for options in mixes]
    plans = [(plan(weight, max_batch_size, num_samples, impl, tp, params), params) for params in parsed]
    kernels = [name for made, _ in plans for name in made.kernels]
    if kernels:
        _logger.info("warmup compiles what is missing of %d kernels: %s", len(kernels), ", ".join(kernels))
    # a group's kernels for plain draws were compiled when it was made
    to_compile = [each for each in plans if tp is None or each[1] is not DEFAULT_PARAMS]
    missing = [each for each in to_compile if each[0].compiling is not None]
    missing.sort(key=lambda each: len(each[1].names()), reverse=True)  # the longest first
    with contextlib.ExitStack() as meanwhile:
        if tp is not None and missing:
            meanwhile.enter_context(tp.busy())
        for compiling in dict.fromkeys(made.compiling for made, _ in missing):
            assert compiling is not None
            meanwhile.enter_context(compiling(_threads()))
        for made, params in missing:
            made.draw(weight, functools.partial(draw, params, False))
    for made, params in plans:
        made.draw(weight, functools.partial(draw, params, True))
    if weight.is_cuda:
        for options in mixes:
            counts = options.get("token_counts")
            if isinstance(counts, TokenCounts):
                # compiles the kernel that counts tokens; -1 is no token
                counts.add(torch.full((1,), -1, device=weight.device))
        torch.cuda.current_stream(weight.device).synchronize()
    return kernels


def _threads() -> int:
    """Returns how many kernels are compiled at once."""
    return min(8, os.cpu_count() or 1)


class Plan(NamedTuple):
    """The kernels of a warm-up and how they are compiled."""

    kernels: list[str]  # their names
    batches: list[int]  # the batch sizes whose draws compile them, ascending, the same on all ranks
    # as in ``backends``; None: one after another
    compiling: Callable[[int], AbstractContextManager[None]] | None = None

    def compile(self, weight: Tensor, draw: _Draw) -> None:
        """Compiles missing kernels, several at once, if the backend can: ``draw(hidden_states, temperature, zeros)`` is
        called for each, and no kernel runs."""
        if self.compiling is not None:
            with self.compiling(_threads()):
                self.draw(weight, draw)

    def draw(self, weight: Tensor, draw: _Draw) -> None:
        """Calls ``draw`` for each kernel, one after another, on the current stream."""
        for batch in self.batches:
            states = weight.new_zeros(batch, weight.shape[1])
            zeros = torch.zeros(batch, dtype=torch.int64, device=weight.device)
            draw(states, torch.ones(batch, device=weight.device), zeros)
            # a second kernel serves calls in which some parameter is a number; Triton does not care which
            draw(states, 1.0, zeros)


def plan(
    weight: Tensor,
    max_batch_size: int,
    num_samples: int,
    impl: str | None,
    tp: "TensorParallel | None",
    params: SamplingParams = DEFAULT_PARAMS,
) -> Plan:
    """Returns the plan of a warm-up; with ``tp`` it is the same on every rank."""
    step = example(weight)._replace(params=params)
    name = impl if tp is None else tp.impl
    if name is not None and (name not in BACKENDS or BACKENDS[name].unsupported(step) is not None):
        return Plan([], [1])  # the call raises
    draws = num_samples if params is DEFAULT_PARAMS else 0
    backend = ops.choose(step, name or "")
    names, batches = backend.compiled_for(weight, max_batch_size, draws)
    if params is not DEFAULT_PARAMS:
        names = [f"{name} with {argument_names(params.names())}" for name in names]
    compiles_together = weight.is_cuda and (backend.name == "triton" or params is not DEFAULT_PARAMS)
    return Plan(names, batches, getattr(backend.module, "compiling", None) if compiles_together else None)
