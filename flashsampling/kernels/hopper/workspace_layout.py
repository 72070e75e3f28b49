"""What lies where in the workspace, whose int64 words are zero between launches. n is the batch size times the draws
per row.

    words               what
    0 .. n              of each row and draw, number ``row * num_samples + draw``, the best key whose score is not +inf
    n .. 2 n            of each, the key of the lowest id whose score is +inf
    2 n ..              a counter per block of rows: of its CTAs that are done
    and of a kernel with ``Features.logits``, behind them (``cutoffs``)
                        a counter per block of rows: of its CTAs whose first tile's keys are in memory
                        of each row its floor, once it is known

What keys are, and who reads and writes them in which order, stands in ``reduction``. Some words before the workspace
are there for kernels that tests and benchmarks compile (``config.Features``). All of this is arithmetic, on numbers on
the host and on addresses, of bytes, on the device.
"""

from typing import Any

Number = Any  # an int on the host, Int64 on the device

WORD = 8  # bytes
EVALUATED, EVALUATED_WHOLE = 1, 2  # words before the workspace: tokens evaluated one by one, and those of whole tiles
RECEIVED, SENT, WON, ARRIVED = 1, 2, 3, 4  # and times of the launch's last CTA, of its last row block


def words(draws: int, row_blocks: int, cutoffs: int = 0) -> int:
    """How many there are. ``draws``: n; ``cutoffs``: of how many rows."""
    return 2 * draws + row_blocks + (row_blocks + cutoffs if cutoffs else 0)


def best(workspace: Number, number: Number) -> Number:
    """Address of the best key of a row and draw."""
    return workspace + number * WORD


def infinite(best: Number, draws: Number) -> Number:
    """Address of the key of +inf that goes with the best key at an address."""
    return best + draws * WORD


def counter(workspace: Number, draws: Number, row_block: Number) -> Number:
    """Address of a block's counter."""
    return workspace + (2 * draws + row_block) * WORD


def first_tiles(workspace: Number, draws: Number, row_blocks: Number, row_block: Number) -> Number:
    """Address of a block's counter of first tiles."""
    return counter(workspace, draws, row_blocks + row_block)


def cutoff(workspace: Number, draws: Number, row_blocks: Number, row: Number) -> Number:
    """Address of the word of a row's floor."""
    return counter(workspace, draws, 2 * row_blocks + row)


def before(workspace: Number, number: int) -> Number:
    """Address of a word before the workspace."""
    return workspace - WORD * number
