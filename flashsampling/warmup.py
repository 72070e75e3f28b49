"""``warmup``: compiles before serving what serving would compile."""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from . import ops
from .backends import Backend
from .exchange_protocol import WHOLE
from .inputs import SampleInputs, example
from .param_parsers import batch_shape
from .row_params import integer
from .sampling import check_impl, check_num_samples, check_tensor_parallel, check_vocab_size, check_weight
from .sampling_params import (
    DEFAULT_PARAMS,
    SamplingOptions,
    argument_names,
    parse_sampling_params,
    with_sampling_options,
)
from .token_counts import TokenCounts

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch installs this package

    from .tensor_parallel import TensorParallel

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
        check_weight(weight, 1 if tp is None else 0)
        num_samples = check_num_samples(num_samples)
        if tp is None:
            check_impl(impl)
            tokens, shard = check_vocab_size(vocab_size, weight.shape[0]), WHOLE
        else:
            check_tensor_parallel(tp, vocab_size, impl)
            (tokens, shard), impl = tp.part, tp.impl
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

        shape = batch_shape(max_batch_size, weight.shape[0], tokens, weight.device, num_samples, tp)
        plans = []
        for options in mixes:
            inputs = example(weight)._replace(params=parse_sampling_params(options, shape))
            backend = ops.choose(inputs, impl or "")
            inputs = inputs._replace(num_samples=num_samples, vocab_size=tokens, shard=shard)
            plans.append(make_plan(backend, inputs, max_batch_size))
        kernels = [name for plan in plans for name in plan.kernels]
        if kernels:
            _logger.info("warmup compiles what is missing of %d kernels: %s", len(kernels), ", ".join(kernels))

        draw: Callable[[SampleInputs], object] = functools.partial(ops.sample, impl=impl or "")
        draw_alone = draw
        if tp is not None:
            draw, draw_alone = functools.partial(ops.sample_sharded, tp=tp), functools.partial(ops.dry_run, group=tp)
        ahead = [
            plan
            for plan in plans
            # a group's kernels for plain draws were compiled when it was made
            if plan.compiling is not None and (tp is None or plan.inputs.params is not DEFAULT_PARAMS)
        ]
        ahead.sort(key=lambda plan: len(plan.inputs.params.names()), reverse=True)  # the longest first
        if ahead:
            with nullcontext() if tp is None else tp.busy(), ahead[0].compile_together():
                for plan in ahead:
                    plan.draw(draw_alone)
        for plan in plans:
            plan.draw(draw)
        if weight.is_cuda:
            for options in mixes:
                counts = options.get("token_counts")
                if isinstance(counts, TokenCounts):
                    # compiles the kernel that counts tokens; -1 is no token
                    counts.add(torch.full((1,), -1, device=weight.device))
            torch.cuda.current_stream(weight.device).synchronize()
        return kernels
    except BaseException as error:
        ops.count_skipped_call(tp, error)
        raise


class Plan(NamedTuple):
    """The kernels of a warm-up, and the draws that compile them."""

    kernels: list[str]  # their names
    batches: list[int]  # the batch sizes whose draws compile them, the same on all ranks
    inputs: SampleInputs  # of one row
    # as in ``backends``; None: kernels compile one after another, as they run
    compiling: Callable[[int], AbstractContextManager[None]] | None

    def compile_together(self) -> AbstractContextManager[None]:
        """Returns a context in which draws compile missing kernels, several at once if the backend can, and then run
        none."""
        return nullcontext() if self.compiling is None else self.compiling(min(8, os.cpu_count() or 1))

    def draw(self, run: Callable[[SampleInputs], object]) -> None:
        """Calls ``run`` for each kernel, with all-zero hidden states."""
        weight, params = self.inputs.weight, self.inputs.params
        for batch in self.batches:
            zeros = torch.zeros(batch, dtype=torch.int64, device=weight.device)
            inputs = self.inputs._replace(
                hidden_states=weight.new_zeros(batch, weight.shape[1]),
                temperature=torch.ones(batch, device=weight.device),
                seed=zeros,
                offset=zeros,
            )
            if params is DEFAULT_PARAMS:
                run(inputs)
                # a second kernel serves plain draws in which some parameter is a number; Triton does not care which
                run(inputs._replace(temperature=1.0))
            else:
                run(inputs._replace(params=params.rows(0, batch)))


def make_plan(backend: Backend, inputs: SampleInputs, max_batch_size: int) -> Plan:
    """Returns the plan of a warm-up, the same for every shard of a weight. ``inputs``: of one row."""
    weight, params = inputs.weight, inputs.params
    plain = params is DEFAULT_PARAMS
    names, batches = backend.compiled_for(weight, max_batch_size, inputs.num_samples if plain else 0)
    if not plain:
        names = [f"{name} with {argument_names(params.names())}" for name in names]
    compiles_together = weight.is_cuda and (backend.name == "triton" or not plain)
    return Plan(names, batches, inputs, getattr(backend.module, "compiling", None) if compiles_together else None)
