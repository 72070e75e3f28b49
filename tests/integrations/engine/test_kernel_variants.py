"""Kernel variants: what a batch needs is in the variant that serves it, and there are few."""

import itertools

import pytest

from flashsampling.integrations.engine.kernel_variants import (
    ALL_PARAMS,
    ALL_WITHOUT_PENALTIES,
    PLAIN_VARIANT,
    KernelVariant,
    choose_sharded_variant,
    choose_variant,
    list_variants,
)
from flashsampling.param_parsers import MAX_BIASED

WANTED = [KernelVariant(*each) for each in itertools.product((False, True), (0, 1, 64, 65), *[(False, True)] * 3)]


@pytest.mark.parametrize("in_registers", [False, True])
def test_mixes(in_registers):
    """A mix has what is wanted, and where the kernel biases, masks and penalises no more, but behind logits in
    memory."""
    assert list_variants(in_registers)[0] == choose_variant(PLAIN_VARIANT, in_registers) == PLAIN_VARIANT
    assert len(list_variants(in_registers)) == (21 if in_registers else 8)
    for wanted in WANTED:
        mix = choose_variant(wanted, in_registers)
        assert mix in list_variants(in_registers)
        assert all(has >= want for has, want in zip(mix, wanted)), wanted
        assert choose_variant(mix, in_registers) == mix
        of_request = wanted.mask or wanted.penalties
        if wanted.biases > 64:
            assert mix == ALL_PARAMS._replace(logprobs=wanted.logprobs or not in_registers)
        elif in_registers and not wanted.logprobs:
            assert mix == wanted._replace(biases=64 if wanted.biases else 0)
        elif wanted.biases or of_request:
            assert mix == KernelVariant(True, 64, True, wanted.penalties, wanted.logprobs)
        else:
            assert mix == KernelVariant(filters=wanted.filters or wanted.logprobs, logprobs=wanted.logprobs)


def test_sglangs_variants():
    """Filters with everything, biases beside a mask, ``joint_top_p`` beside both; no penalties."""
    found = list_variants(False, ALL_WITHOUT_PENALTIES)
    changed = itertools.product((64, MAX_BIASED), (False, True))
    assert set(found) == {
        PLAIN_VARIANT,
        KernelVariant(filters=True),
        KernelVariant(filters=True, joint=True),
        KernelVariant(filters=True, logprobs=True, joint=True),
        *(KernelVariant(True, biases, True, False, logprobs, True) for biases, logprobs in changed),
    }
    assert found[0] == PLAIN_VARIANT


def test_variants_of_several_ranks():
    for needed in WANTED:
        variant = choose_sharded_variant(needed)
        if needed.biases > 64:
            assert variant == ALL_PARAMS._replace(logprobs=needed.logprobs)
        else:
            assert variant == needed._replace(biases=64 if needed.biases else 0)
