"""Rows that are made up, from which programs of ``pick`` draw while the kernel before it still runs.

Of ``pick``'s thousands of instructions a row executes some 2,000 once, and a step's weight and its other kernels have
pushed them out of the caches: of 19 us that a row of 64 takes with a top-k and a top-p behind the Hopper kernel, 7 are
gone when it is launched again, of 13 with a min-p 8 (time stamps, an H100; docs/kernels.md has what of it is won).
While the kernel before it ends, the rows' programs wait. So each has another beside it that does not wait: it has the
code brought to the level-2 cache and to its multiprocessor, which has room for two, and throws its token away. Where
two or four multiprocessors become free at once, neighbours come to lie on different ones, so rows and made-up rows are
in an order in which every second and every fourth program are of both kinds as well (``turn_of``).

Such a program reads nothing that is made meanwhile and writes to its room alone, which must have been allocated before
that kernel was launched: memory that is free behind a launch may be what the launch still reads.

    words of the room   what
    0 ..                logits of 2048 tokens, evenly from 0 to 24: some 200 of them have 0.9 of the mass
    2048, 2112 ..       their chunks' highest keys, and masses
    2176                the row's token without filters, which a top-p refuses
    2178                a floor below all
    2180                the token that is drawn
    2184 ..             its candidates, 3 * 2048, and lists, 64 + 3 * FEW
"""

from typing import NamedTuple

import triton.language as tl

from ..constant import Constant
from ..jit import jit
from .logit_source import LOG2E, chunk_places, chunk_tokens, exp2, key_of

TOKENS = Constant(2048)
_CHUNKS = Constant(64)
_KEYS = Constant(2048)
_SUMS = Constant(2112)
_WINNER = Constant(2176)
_FLOOR = Constant(2178)
RESULT = Constant(2180)
_CANDIDATES = Constant(2184)
ROOM = Constant(2184 + 3 * 2048 + 64)  # words, and 3 * FEW more


class MadeUp(NamedTuple):
    """Where the parts of the row are."""

    logits: object
    keys: object
    sums: object
    winner: object
    floor: object
    result: object
    candidates: object


@jit
def turn_of(program, ahead):
    """Whether a program draws from a made-up row, and which row it has, or has the parameters of. ``ahead``: how many
    are made up, all or none. By the parity of the program's bits (the sequence of Thue and Morse)."""
    parity = program ^ (program >> 8)
    parity ^= parity >> 4
    parity ^= parity >> 2
    parity ^= parity >> 1
    return (ahead > 0) & ((parity & 1) == 0), tl.where(ahead > 0, program >> 1, program)


@jit
def made_up_at(at):
    """Of the row that ``make_up`` writes to the int32 words from ``at`` on."""
    return MadeUp(at, at + _KEYS, at + _SUMS, at + _WINNER, at + _FLOOR, at + RESULT, at + _CANDIDATES)


@jit
def make_up(row, BY_CHUNK: tl.constexpr):
    """Writes a ``MadeUp`` row. ``BY_CHUNK``: see ``logits_source.place_in_memory``."""
    chunk = tl.arange(0, _CHUNKS)
    token = chunk_tokens(chunk)
    x = ((token * 40503) & 0xFFFF).to(tl.float32) * (24.0 / 65536.0)  # all of them different, in no order
    highest = tl.max(x, axis=1)
    places = token
    if BY_CHUNK:
        places = chunk_places(chunk)
    tl.store(row.logits.to(tl.pointer_type(tl.float32)) + places, x)
    tl.store(row.keys + chunk, key_of(highest))
    tl.store(row.sums.to(tl.pointer_type(tl.float32)) + chunk, tl.sum(exp2((x - highest[:, None]) * LOG2E), axis=1))
    refused = tl.min(tl.min(tl.where((x > 18.0) & (x < 20.0), token, TOKENS), axis=1), axis=0)
    tl.store(row.winner.to(tl.pointer_type(tl.int64)), refused.to(tl.int64))
    tl.store(row.floor, tl.full((), -0x80000000, tl.int32))
    tl.debug_barrier()
