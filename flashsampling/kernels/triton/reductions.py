"""Joins several reductions over a program's threads into one, so that the threads wait for each other once."""

import triton.language as tl

from .jit import jit


@jit
def sum_three(a, b, c):
    """Sums three (N,) tensors of one type."""
    of_ab, of_cc = tl.split(tl.sum(tl.join(tl.join(a, b), tl.join(c, c)), axis=0))
    of_a, of_b = tl.split(of_ab)
    of_c, _ = tl.split(of_cc)
    return of_a, of_b, of_c


@jit
def lowest_and_highest(low, high):
    """Returns the least of one (N,) int32 tensor and the greatest of another."""
    least, complement = tl.split(tl.min(tl.join(low, ~high), axis=0))
    return least, ~complement
