"""Computes the exact score of one token, as the contract defines it."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Uint32, select_

from . import noise


@cute.jit
def exact_score(args, logit, token, row, draw) -> Float32:
    """Returns the score of a token id; ``row`` may be beyond the batch."""
    temperature, k0, k1, o0, o1 = args.row(cutlass.min(row, args.batch - 1))
    group = Uint32((token & 7) | ((token >> 4) & 3) << 3 | (token >> 7) << 5)
    words = noise.philox_words(group, Uint32(draw), (o0, o1), (k0, k1))
    word = _select_word(words, token)
    tail = Uint32(0)
    if word == Uint32(0):
        refined = Uint32(draw) | Uint32(noise.REFINEMENT_BIT)
        tail = _select_word(noise.philox_words(group, refined, (o0, o1), (k0, k1)), token)
    scale, amplitude = noise.row_factors(temperature)
    return noise.score(logit, scale, noise.minus_gumbel_refined(word, tail), amplitude)


@cute.jit
def _select_word(words, token) -> Uint32:
    """Selects the word of a token's lane: bits 3 and 6."""
    low = Uint32(select_(token & 8 != 0, words[1], words[0]))
    high = Uint32(select_(token & 8 != 0, words[3], words[2]))
    return Uint32(select_(token & 64 != 0, high, low))
