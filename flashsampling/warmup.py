"""Compiles ahead of serving everything that serving would compile."""

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
from .inputs import DEFAULT_PARAMS, SampleInputs, SamplingParams, arguments, example
from .row_params import integer
from .sampling import (
    check_num_samples,
    check_tensor_parallel,
    check_vocab_size,
    check_weight,
    count_skipped_call,
    sample,
)
from .sampling_params import Request, batch_shape, parse_sampling_params
from .token_counts import TokenCounts

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch brings this one

    from .tensor_parallel import TensorParallel

Inputs: TypeAlias = tuple[
    Tensor, Tensor | float, Tensor
]  # (B, D), of a call: hidden states, temperature, seeds and offsets
_Draw: TypeAlias = Callable[[Tensor, Tensor | float, Tensor], Any]

_logger = logging.getLogger("flashsampling")


def warmup(
    weight: Tensor,  # (V, D)
    *,
    max_batch_size: int | None = None,
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
    **request: "Unpack[Request]",
) -> list[str]:
    """Compiles every kernel that ``sample`` can need for this weight: call it once before serving.

    After it no batch of 1 to ``max_batch_size`` rows compiles anything, whichever of temperature, seed and offset are numbers
    and which are tensors; a weight of another D, dtype or row stride, another ``num_samples`` (1, or more), GPU, ``impl`` or
    group may. It draws from all-zero hidden states on the current stream, for each kernel, and waits for the result; nothing
    of the caller's is written, and no random generator is read. Called again it draws again and compiles nothing.

    A filter that is a number and switched off, as a ``top_p`` of 1.0, is one that is not asked for.

    What will be compiled is logged first, at level INFO to the logger "flashsampling". Triton takes seconds for each kernel, up
    to eight of them at once, or milliseconds where its own cache on disk has it; the Hopper kernel three seconds for each
    shape, or none where ``python -m flashsampling precompile`` filled the cache. With ``tp`` a rank waits for the others'
    compilers.

    Args:
        weight: (V, D), as it will be passed to ``sample``.
        max_batch_size: rows of the largest batch; None is ``tp.max_batch_size``, or 256 without ``tp``.
        num_samples: draws per row, as in ``sample``.
        vocab_size: as in ``sample``.
        impl: as in ``sample``.
        tp: as in ``sample``. Every rank then makes this call, as it would make a step, with the same ``max_batch_size`` and
            ``num_samples``.
        request: what the calls will ask for, as ``sample`` takes it; its kinds count, not its values: what is a tensor here is
            one then. Values per row are for ``max_batch_size`` rows. What such calls need is compiled, and no more: call it for
            each mix that will be served, and without any for plain draws. Counts are not advanced.

    Returns:
        Names of the kernels that are now there; empty where nothing is compiled ("streaming", "reference").

    Raises:
        TypeError, ValueError: as ``sample``; and ``max_batch_size`` is below 1, or above that of ``tp``.
        RuntimeError: the current stream is being captured.
        flashsampling.tensor_parallel.TensorParallelError: as ``sample``.

    Example:
        >>> import torch, flashsampling
        >>> flashsampling.warmup(torch.zeros(1000, 8), max_batch_size=64)  # on a CPU nothing is compiled
        []
    """
    return warmup_mixes(
        weight,
        [request],
        max_batch_size=max_batch_size,
        num_samples=num_samples,
        vocab_size=vocab_size,
        impl=impl,
        tp=tp,
    )


def warmup_mixes(
    weight: Tensor,  # (V, D)
    requests: "Sequence[Request]",
    *,
    max_batch_size: int | None = None,
    num_samples: int = 1,
    vocab_size: int | None = None,
    impl: str | None = None,
    tp: "TensorParallel | None" = None,
) -> list[str]:
    """``warmup`` for each of several requests, an empty one being plain draws; what is missing of Triton's kernels for them all
    compiles together, up to eight at once. With ``tp`` ranks wait for each other's compilers once."""
    try:
        return _draw_all(weight, requests, max_batch_size, num_samples, vocab_size, impl, tp)
    except BaseException as error:
        count_skipped_call(tp, error)
        raise


def _draw_all(
    weight: Tensor,
    requests: "Sequence[Request]",
    max_batch_size: int | None,
    num_samples: int,
    vocab_size: int | None,
    impl: str | None,
    tp: "TensorParallel | None",
) -> list[str]:
    check_weight(weight, 1 if tp is None else 0)
    num_samples = check_num_samples(num_samples)
    if tp is not None:
        from .tensor_parallel import TensorParallel  # whoever has one has imported it

        if not isinstance(tp, TensorParallel):
            raise TypeError(f"tp must be a flashsampling.tensor_parallel.TensorParallel, got {type(tp).__name__}")
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
    if tp is None:
        tokens = check_vocab_size(vocab_size, weight.shape[0])
    else:
        check_tensor_parallel(tp, vocab_size, impl)
        tokens = tp.part[0]
    problem = batch_shape(max_batch_size, weight.shape[0], tokens, weight.device, num_samples, tp)

    def draw(
        params: SamplingParams, together: bool, states: Tensor, temperature: Tensor | float, zeros: Tensor
    ) -> None:
        """``together``: with the other ranks."""
        if params is DEFAULT_PARAMS:
            rows = {"temperature": temperature, "seed": zeros, "offset": zeros, "num_samples": num_samples}
            sample(states, weight, **rows, vocab_size=vocab_size, impl=impl, tp=tp)  # type: ignore[arg-type]
            return
        some = params.rows(0, len(states))
        for step in _of_any_number(
            SampleInputs(states, weight, temperature, zeros, zeros, num_samples, tokens, params=some), tp
        ):
            if tp is None:
                ops.sample(step, impl or "")
            elif together:
                ops.sample_sharded(step, tp)
            else:
                ops.dry_run(step, tp)

    mixes = [parse_sampling_params(request, problem) if request else DEFAULT_PARAMS for request in requests]
    plans = [(plan(weight, max_batch_size, num_samples, impl, tp, params), params) for params in mixes]
    kernels = [name for made, _ in plans for name in made.kernels]
    if kernels:
        _logger.info("warmup compiles what is missing of %d kernels: %s", len(kernels), ", ".join(kernels))
    # a group's kernels for plain draws were compiled when it was made
    missing = [
        each for each in plans if each[0].compiling is not None and (tp is None or each[1] is not DEFAULT_PARAMS)
    ]
    missing.sort(key=lambda each: len(each[1].names()), reverse=True)  # those take longest
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
        for request in requests:
            counts = request.get("token_counts")
            if isinstance(counts, TokenCounts):
                counts.add(torch.full((1,), -1, device=weight.device))  # what counts tokens compiles; this is none
        torch.cuda.current_stream(weight.device).synchronize()
    return kernels


def _of_any_number(step: SampleInputs, tp: "TensorParallel | None") -> list[SampleInputs]:
    """Over several ranks a small top-k, a number, takes kernels of two sizes: a rank's steps with each."""
    if tp is None:
        return [step]
    from .tensor_parallel.cutoffs import FEW, are_few  # whoever has a group has imported it

    step = step._replace(shard=tp.shard)
    if not are_few(step.params.top_k):
        return [step]
    return [step._replace(params=step.params._replace(top_k=top_k)) for top_k in (1, min(FEW, tp.vocab_size - 1))]


def _threads() -> int:
    """How many kernels are compiled at a time."""
    return min(8, os.cpu_count() or 1)


def _inputs(weight: Tensor, batch: int) -> tuple[Inputs, Inputs]:
    """Hidden states, a temperature, and zeros for seeds and offsets, of calls that need both kernels of a batch size."""
    states = weight.new_zeros(batch, weight.shape[1])
    zeros = torch.zeros(batch, dtype=torch.int64, device=weight.device)
    # some parameter is a number: which one is the same to Triton
    return (states, torch.ones(batch, device=weight.device), zeros), (states, 1.0, zeros)


class Plan(NamedTuple):
    """What a warm-up does."""

    kernels: list[str]  # their names
    batches: list[int]  # the batch sizes whose draws compile them, ascending, the same on all ranks
    compiling: Callable[[int], AbstractContextManager[None]] | None = None  # see ``backends``; None: in turn

    def compile(self, weight: Tensor, draw: _Draw) -> None:
        """Calls ``draw(hidden_states, temperature, zeros)`` for each kernel, while what is missing of them is compiled, several
        at once, and nothing of them runs; if several can be."""
        if self.compiling is not None:
            with self.compiling(_threads()):
                self.draw(weight, draw)

    def draw(self, weight: Tensor, draw: _Draw) -> None:
        """Likewise, in turn, on the current stream."""
        for batch in self.batches:
            for inputs in _inputs(weight, batch):
                draw(*inputs)


def plan(
    weight: Tensor,
    max_batch_size: int,
    num_samples: int,
    impl: str | None,
    tp: "TensorParallel | None",
    params: SamplingParams = DEFAULT_PARAMS,
) -> Plan:
    """What is to be compiled: with ``tp`` the same on every rank."""
    step = example(weight)._replace(params=params)
    name = impl if tp is None else tp.impl
    if name is not None and (name not in BACKENDS or BACKENDS[name].unsupported(step) is not None):
        return Plan([], [1])  # the call says what is wrong
    # what is asked for is drawn behind a matmul, in the shapes of one draw
    draws = num_samples if params is DEFAULT_PARAMS else 1
    backend = ops.choose(step, name or "")
    names, batches = backend.compiled_for(weight, max_batch_size, draws)
    if params is not DEFAULT_PARAMS:
        names = [f"{name} with {arguments(params.names())}" for name in names]
    of_several = weight.is_cuda and (backend.name == "triton" or params is not DEFAULT_PARAMS)
    return Plan(names, batches, getattr(backend.module, "compiling", None) if of_several else None)
