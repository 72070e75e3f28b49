"""Fuses several reductions into one: a program's threads synchronize once instead of once per reduction."""

import triton.language as tl

from .jit import jit


@jit
def sums_of_three(a, b, c):
    """Returns the sums of three (N,) tensors of one type."""
    of_ab, of_cc = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, c)), axis=0))
    of_a, of_b = tl.split(of_ab)
    of_c, _ = tl.split(of_cc)
    return of_a, of_b, of_c


@jit
def lowest_and_highest(low, high):
    """Returns the minimum of ``low`` and the maximum of ``high``, (N,) int32 tensors."""
    least, complement = tl.split(tl.min(tl.join(low, ~high), axis=0))
    return least, ~complement
