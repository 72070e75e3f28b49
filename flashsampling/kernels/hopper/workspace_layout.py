"""Lays out the workspace, whose int64 words are zero between launches. n is the batch size times the draws per row.

    words               content
    0 .. n              for row and draw number ``row * num_samples + draw``: the best key whose score is not +inf
    n .. 2 n            for each: the key of the lowest id whose score is +inf
    2 n ..              per row block: a counter of its CTAs that are done
    behind these, in a kernel with ``Features.logits`` (``store_cutoff``):
                        per row block: a counter of its CTAs whose first tile's keys are in memory
                        per row: its store cutoff, once known

``reduction`` defines keys, and who reads and writes them in which order. Some words before the workspace serve kernels
that tests and benchmarks compile (``config.Features``). The arithmetic works on numbers on the host, and on byte
addresses on the device.
"""

from typing import Any

Number = Any  # an int on the host, Int64 on the device

WORD = 8  # bytes
EVALUATED, EVALUATED_WHOLE = 1, 2  # words before the workspace: tokens scored one by one, and in whole tiles
RECEIVED, SENT, WON, ARRIVED = 1, 2, 3, 4  # or times of the launch's last CTA, of its last row block


def words(draws: int, row_blocks: int, cutoffs: int = 0) -> int:
    """Returns the number of words. ``draws``: n; ``cutoffs``: rows with store cutoffs."""
    return 2 * draws + row_blocks + (row_blocks + cutoffs if cutoffs else 0)


def best(workspace: Number, number: Number) -> Number:
    """Returns the address of the best key of a row and draw."""
    return workspace + number * WORD


def infinite(best: Number, draws: Number) -> Number:
    """Returns the address of the key of +inf that belongs to the best key at an address."""
    return best + draws * WORD


def counter(workspace: Number, draws: Number, row_block: Number) -> Number:
    """Returns the address of a row block's counter."""
    return workspace + (2 * draws + row_block) * WORD


def first_tiles(workspace: Number, draws: Number, row_blocks: Number, row_block: Number) -> Number:
    """Returns the address of a row block's counter of first tiles."""
    return counter(workspace, draws, row_blocks + row_block)


def cutoff(workspace: Number, draws: Number, row_blocks: Number, row: Number) -> Number:
    """Returns the address of a row's store cutoff."""
    return counter(workspace, draws, 2 * row_blocks + row)


def before(workspace: Number, number: int) -> Number:
    """Returns the address of a word before the workspace."""
    return workspace - WORD * number
