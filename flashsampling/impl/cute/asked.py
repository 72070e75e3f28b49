"""Steps that must see a row's logits more than once: the Hopper kernel stores them, and ``impl.triton`` picks from them.

filters and log-probabilities of the products     two launches: the kernel draws and summarises them too (``Features.logits``),
                                                  then ``impl.triton.logits.pick``
what changes logits, other noise, several draws   three: the kernel only stores them, then ``impl.triton.logits.run``
of a shard                                        the kernel only stores them, then ``impl.triton.shards``
"""

import functools
import importlib
from types import ModuleType

import torch
from torch import Tensor

from ...exchange import WHOLE
from ...step import PLAIN, Asked, Drawn, Step
from . import launch
from .config import TILE_V, TileConfig


@functools.cache
def _picking() -> ModuleType:
    """Imported at the first use, and by name: what is compiled here does not depend on it, as ``cache`` would take it to."""
    return importlib.import_module("..triton.logits", __package__)


@functools.cache
def _of_shards() -> ModuleType:
    """Likewise."""
    return importlib.import_module("..triton.shards", __package__)


def _processes(asked: Asked) -> bool:
    """Whether what is drawn from is another thing than the products, or drawn with noise that the kernel has not."""
    tensors = asked.bias, asked.dense_bias, asked.bias_ids, asked.counts, asked.token_mask
    return (
        asked.logit_scale != 1.0
        or asked.soft_cap != 0.0
        or asked.stream != PLAIN.stream
        or any(tensor is not None for tensor in tensors)
    )


def run(step: Step, config: TileConfig | None = None) -> Drawn:
    """See ``launch.run``, of what is not PLAIN."""
    if step.num_samples > 1 or _processes(step.asked):  # of several draws the kernel would evaluate every token
        logits, _, _ = with_logits(step, 0, None, config)
        return _picking().run(step._replace(logits=logits))  # type: ignore[no-any-return]
    masses = step.asked.needs_mass(step.vocab_size), step.asked.needs_raw_mass()
    # the draws also say which rows are undefined, with filters and without
    logits, summaries, drawn = with_logits(step, step.num_samples, masses, config)
    return _picking().pick(step._replace(logits=logits), _picking().Summaries(*summaries), drawn)  # type: ignore[no-any-return]


def shard_logits(step: Step) -> tuple[Tensor, Tensor]:
    """See ``backends``."""
    logits, _, _ = with_logits(step._replace(shard=WHOLE), 0, None)
    return _of_shards().processed(step, logits)  # type: ignore[no-any-return]


def shard_winners(step: Step, processed: Tensor, limit: Tensor) -> Tensor:
    """See ``backends``."""
    return _of_shards().shard_winners(step, processed, limit)  # type: ignore[no-any-return]


def with_logits(
    step: Step, draws: int, masses: tuple[bool, bool] | None, config: TileConfig | None = None
) -> tuple[Tensor, tuple[Tensor, Tensor | None, Tensor | None], Tensor]:
    """One launch, for a whole vocabulary.

    Args:
        step: of which hidden states, weight and the rows' parameters matter.
        draws: how many of ``step.num_samples`` are wanted: all or none.
        masses: whether the chunks' are wanted, at the rows' temperatures and at 1.
        config: in place of the shape that is chosen.

    Returns:
        logits: (B, V) float32, rows a multiple of 16 bytes apart.
        summaries: keys (B, chunks) int32 and as many float32 twice: see ``arguments.Outputs``.
        drawn: (B * num_samples,) int64, the tokens without any filter; of no draws as ``launch.run`` says.
    """
    batch, vocab_size, device = step.hidden_states.shape[0], step.vocab_size, step.hidden_states.device
    chunks = -(-vocab_size // TILE_V) * 4
    logits = torch.empty((batch, -(-vocab_size // 4) * 4), dtype=torch.float32, device=device)
    keys = torch.empty((batch, chunks), dtype=torch.int32, device=device)
    sums, raw_sums = (
        torch.empty((batch, chunks), dtype=torch.float32, device=device) if wanted else None
        for wanted in (masses or (False, False))
    )
    outputs = (
        logits.data_ptr(),
        logits.stride(0) * 4,
        keys.data_ptr(),
        0 if sums is None else sums.data_ptr(),
        0 if raw_sums is None else raw_sums.data_ptr(),
    )
    drawn = launch.run(step._replace(asked=PLAIN, num_samples=draws), config, outputs).ids
    return logits[:, :vocab_size], (keys, sums, raw_sums), drawn
