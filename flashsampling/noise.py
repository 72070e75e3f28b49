"""The noise: a pure function of (seed, offset, draw, token), in torch, on any device.

Every backend computes this function; ``kernels/triton/fused/noise.py`` is the Triton version. Rounds, counter layout
and lane mapping are fixed: a change of any of them changes every token.

    key     = (seed & 0xffffffff, seed >> 32)
    counter = (group(token), draw | stream << 24, offset & 0xffffffff, offset >> 32)
    word    = philox4x32_10(counter, key)[lane(token)]
    lane    = bits 3 and 6 of the token id
    group   = the token id without these bits

Generator: Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC'11.
The Gumbel-max trick: Gumbel 1954; Maddison, Tarlow and Minka, "A* sampling", NeurIPS 2014.
"""

from enum import IntEnum

import torch
from torch import Tensor

PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL_INCREMENTS = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10
MAX_DRAWS = 1 << 24
_MASK32 = 0xFFFFFFFF
_REFINEMENT_BIT = 0x80


class Stream(IntEnum):
    """The purpose of a word. Purposes never share words; releases add values and never reuse one."""

    TOKEN = 0
    ACCEPTANCE_COIN = 1
    RECOVERY = 2


def philox4x32_10(
    counter: tuple[Tensor, Tensor, Tensor, Tensor],  # int64 in [0, 2**32), broadcastable
    key: tuple[Tensor, Tensor],  # int64 in [0, 2**32), broadcastable
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Computes Philox4x32-10: four words in [0, 2**32), int64, of the broadcast shape.

    torch has no full set of uint32 arithmetic, so words live in int64. A 32 x 32 bit product may pass 2**63; it wraps,
    and the shift and mask still give its two halves.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # each product is taken while its factor still has the smallest shape it can have: rounds 1 and 2 are half free
        p0 = c0 * PHILOX_MULTIPLIERS[0]
        p1 = c2 * PHILOX_MULTIPLIERS[1]
        c0 = ((p1 >> 32) & _MASK32) ^ (c1 ^ k0)
        c1 = p1 & _MASK32
        c2 = ((p0 >> 32) & _MASK32) ^ (c3 ^ k1)
        c3 = p0 & _MASK32
        k0 = (k0 + PHILOX_WEYL_INCREMENTS[0]) & _MASK32
        k1 = (k1 + PHILOX_WEYL_INCREMENTS[1]) & _MASK32
    shape = torch.broadcast_shapes(c0.shape, c1.shape, c2.shape, c3.shape)
    return c0.expand(shape), c1.expand(shape), c2.expand(shape), c3.expand(shape)


def gumbel_from_words(word: Tensor, refinement: Tensor | None = None) -> Tensor:
    """Returns standard Gumbel noise of Philox words.

    Args:
        word: int64 in [0, 2**32).
        refinement: words of the same shape from the refinement block, used where ``word == 0``. None: the caller
            knows that no word is 0.

    Returns:
        float32 of the same shape: ``-log(-log1p(-v))`` with ``v = (word + 0.5) * 2**-32``, within 2e-6 * max(1, abs(g))
        of the exact value for every word. From v = 1/2 upwards ``-log1p(-v)`` is taken as ``-log(1 - v)`` with
        ``1 - v`` formed exactly from the complemented word, so that the lower tail is as accurate as the upper one.
    """
    upper = word >= 1 << 31
    # distance to the nearer end, (0, 1/2]: exact to 24 bits on both sides
    distance = (torch.where(upper, _MASK32 - word, word).to(torch.float32) + 0.5) * 2.0**-32
    exponential = -torch.where(upper, torch.log(distance), torch.log1p(-distance))
    if refinement is not None:
        v = (refinement.to(torch.float32) + 0.5) * 2.0**-64
        exponential = torch.where(word == 0, -torch.log1p(-v), exponential)
    return -torch.log(exponential)


def gumbel(
    seed: Tensor,  # (B,) int64
    offset: Tensor,  # (B,) int64
    draw: Tensor,  # (S,) int64 in [0, 2**24)
    first_token: int,
    last_token: int,  # exclusive
    stream: Stream = Stream.TOKEN,
) -> Tensor:
    """Returns the Gumbel noise of the tokens [first_token, last_token), (B, S, last_token - first_token) float32.

    ``first_token`` is a global token id and a multiple of 128, so that all groups but the last are whole.
    """
    if first_token % 128:
        raise ValueError(f"first_token must be a multiple of 128, got {first_token}")
    padded = -(-(last_token - first_token) // 128) * 128
    groups = torch.arange(first_token // 4, (first_token + padded) // 4, device=seed.device)
    low, high = offset & _MASK32, offset >> 32 & _MASK32
    key = (seed & _MASK32)[:, None, None], (seed >> 32 & _MASK32)[:, None, None]

    def words(bits: int) -> Tensor:
        counter = (groups[None, None, :], (draw | bits << 24)[None, :, None], low[:, None, None], high[:, None, None])
        lanes = torch.stack(philox4x32_10(counter, key), dim=-1)  # (B, S, groups, 4)
        # group bits: 5 up | 4, 3 | 2..0, lane bits: 1 | 0  ->  token bits: 7 up | 6 | 5, 4 | 3 | 2..0
        lanes = lanes.unflatten(-1, (2, 2)).unflatten(2, (padded // 128, 4, 8)).permute(0, 1, 2, 5, 3, 6, 4)
        return lanes.reshape(*lanes.shape[:2], padded)[..., : last_token - first_token]

    word = words(stream)
    # one word in 2**32 is 0; on a GPU the search for one would synchronise the host
    if word.device.type == "cpu" and bool(word.all()):
        return gumbel_from_words(word)
    return gumbel_from_words(word, words(stream | _REFINEMENT_BIT))


def coin(
    seed: Tensor,  # (B,) int64
    offset: Tensor,  # (B,) int64
) -> Tensor:
    """Returns (B,) float64, uniform, strictly between 0 and 1: ``(word + 0.5) * 2**-32`` of token 0's word of
    ``ACCEPTANCE_COIN``."""
    counter = (torch.zeros_like(offset), torch.full_like(offset, Stream.ACCEPTANCE_COIN << 24), offset & _MASK32)
    word = philox4x32_10((*counter, offset >> 32 & _MASK32), (seed & _MASK32, seed >> 32 & _MASK32))[0]
    return (word.double() + 0.5) * 2.0**-32
