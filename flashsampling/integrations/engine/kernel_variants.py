"""Kernel variants: the combinations of sampling parameters for which kernels are compiled.

There are few, because a parameter that is off for a row is exactly off. Where one row has a filter, the call has all
three. The Hopper kernel applies biases, masks and penalties in the launch that draws; there a call has no more than its
rows need, unless it returns log-probabilities and changes logits. In all other cases the row is drawn from logits in
memory, and the call has biases, a mask and filters.

Between ranks filters and log-probabilities take an exchange of logits, and a mask and a bias are hashed. There a call
has no more than its rows need. All ranks decide alike: the scheduler sends the same requests to every worker.
"""

import itertools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import ops
from ...inputs import example
from ...param_parsers import MAX_BIASED
from ...token_counts import Counted

FEW_BIASES = 64  # biased tokens of a row
FILTERS = ("top_k", "top_p", "min_p")
PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_IN_REGISTERS = ("cute",)  # backends that apply biases, masks and penalties in the launch that draws

Rows = dict[str, Tensor]  # sampling parameters of a batch, (B,) each, by name


class KernelVariant(NamedTuple):
    """The sampling parameters of a call besides the head's."""

    filters: bool = False  # top-k, top-p and min-p
    biases: int = 0  # biased tokens of a row
    mask: bool = False
    penalties: bool = False
    logprobs: bool = False
    joint: bool = False  # joint_top_p


PLAIN_VARIANT = KernelVariant()
ALL_PARAMS = KernelVariant(True, MAX_BIASED, True, True, True)  # vLLM
ALL_WITHOUT_PENALTIES = KernelVariant(True, MAX_BIASED, True, False, False, True)  # SGLang


def in_registers(weight: Tensor) -> bool:
    """Returns whether the backend of a head applies biases, masks and penalties in the launch that draws."""
    return ops.choose(example(weight), "").name in _IN_REGISTERS


def choose_variant(needed: KernelVariant, in_registers: bool, most: KernelVariant = ALL_PARAMS) -> KernelVariant:
    """Returns the variant that serves a batch.

    Args:
        needed: what any of its rows needs.
        in_registers: see the function.
        most: the variant for many biases; its ``joint`` and ``penalties``: whether the engine has them.
    """
    changed = needed.mask or needed.penalties or needed.biases > 0
    joint = most.joint and (needed.joint or changed or needed.logprobs)
    if not changed:
        return needed._replace(filters=needed.filters or needed.logprobs or joint, joint=joint)
    if needed.biases > FEW_BIASES:
        return most._replace(logprobs=needed.logprobs or (most.logprobs and not in_registers))
    if in_registers and not needed.logprobs:
        return needed._replace(biases=FEW_BIASES if needed.biases else 0)
    return KernelVariant(True, FEW_BIASES, True, needed.penalties, needed.logprobs, joint)


def choose_sharded_variant(needed: KernelVariant) -> KernelVariant:
    """Returns the variant that serves a batch of several ranks; ``FusedStep`` decides about filters."""
    if needed.biases > FEW_BIASES:
        return ALL_PARAMS._replace(logprobs=needed.logprobs)
    return needed._replace(biases=FEW_BIASES if needed.biases else 0)


def list_variants(in_registers: bool, most: KernelVariant = ALL_PARAMS) -> tuple[KernelVariant, ...]:
    """Returns all variants of an engine, the plain one first."""
    either, counts = (False, True), (0, 1, MAX_BIASED)
    flags = (either, counts, either, (False, most.penalties), either, (False, most.joint))
    needed = itertools.starmap(KernelVariant, itertools.product(*flags))
    return tuple(dict.fromkeys(choose_variant(each, in_registers, most) for each in needed))


def row_arguments(variant: KernelVariant, rows: Rows) -> dict[str, Any]:
    """Returns the arguments of ``sample`` that are a value per row."""
    parts = (FILTERS, variant.filters), (("joint_top_p",), variant.joint), (PENALTIES, variant.penalties)
    return {name: rows[name] for names, has in parts if has for name in names}


def example_call(variant: KernelVariant, rows: Rows, vocab_size: int, counts: Counted | None = None) -> dict[str, Any]:
    """Returns the arguments of a call of a variant, as ``warmup`` takes them."""
    device, batch = rows["seed"].device, len(rows["seed"])
    request = row_arguments(variant, rows)
    if variant.biases:
        ids = torch.full((batch, variant.biases), -1, dtype=torch.int32, device=device)
        request["logit_bias"] = ids, torch.zeros(ids.shape, device=device)
    if variant.mask:
        request["token_mask"] = torch.full((batch, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    if variant.penalties:
        request["token_counts"] = counts
    if variant.logprobs:
        request |= {"return_logprobs": True, "top_logprobs": 1}
    return request


def example_sharded_calls(rows: Rows, vocab_size: int, counts: Counted) -> list[dict[str, Any]]:
    """Returns calls of several ranks, so that nothing else compiles.

    They are: all that changes logits, with log-probabilities, where another kernel may follow, and without; filters;
    and many biases, with all else and alone.
    """
    either = (False, True)
    changes = (KernelVariant(False, *each) for each in itertools.product((0, FEW_BIASES), either, either, either))
    many = (KernelVariant(biases=MAX_BIASED), *(ALL_PARAMS._replace(logprobs=each) for each in either))
    return [
        example_call(variant, rows, vocab_size, counts) for variant in (*changes, KernelVariant(filters=True), *many)
    ]


def default_rows(batch: int, device: torch.device) -> Rows:
    """Returns parameters that are off."""
    zeros, ones = torch.zeros(batch, device=device), torch.ones(batch, device=device)
    none = zeros.int()
    off = {"top_k": none, "top_p": ones, "min_p": zeros, "joint_top_p": none}
    penalties = {"repetition_penalty": ones, "frequency_penalty": zeros, "presence_penalty": zeros}
    return {"seed": zeros.long(), "temperature": ones, **off, **penalties}
