import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashsampling import noise
from tests.conftest import DEVICE
from tests.zero_words import ZERO_WORDS

# Random123's kat_vectors for philox4x32, 10 rounds
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_philox_known_answers(counter, key, expected, device):
    words = noise.philox4x32_10(
        tuple(torch.tensor(c, device=device) for c in counter), tuple(torch.tensor(k, device=device) for k in key)
    )
    assert tuple(int(word) for word in words) == expected


def scalar_philox(counter, key):
    c, k = list(counter), list(key)
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 & 0xFFFFFFFF, (p0 >> 32) ^ c[3] ^ k[1], p0 & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c


def scalar_gumbel(seed, offset, draw, token, stream=0):
    """The contract's section 2 in exact integers and Python floats."""
    lane = (token >> 3 & 1) | (token >> 6 & 1) << 1
    group = (token & 7) | ((token >> 4) & 3) << 3 | (token >> 7) << 5
    seed, offset = seed % 2**64, offset % 2**64
    key = seed & 0xFFFFFFFF, seed >> 32

    def word(bits):
        return scalar_philox((group, draw | bits << 24, offset & 0xFFFFFFFF, offset >> 32), key)[lane]

    v = (word(stream) + 0.5) * 2.0**-32
    if word(stream) == 0:
        v = (word(stream | 0x80) + 0.5) * 2.0**-64
    return -math.log(-math.log1p(-v))


int64 = st.integers(-(2**63), 2**63 - 1)


@settings(max_examples=60, deadline=None)
@given(int64, int64, st.integers(0, 2**24 - 1), st.integers(0, 2**20), st.sampled_from(list(noise.Stream)))
def test_gumbel_is_the_contract(seed, offset, draw, token, stream):
    first = token // 128 * 128
    row = noise.gumbel(
        torch.tensor([seed], device=DEVICE),
        torch.tensor([offset], device=DEVICE),
        torch.tensor([draw], device=DEVICE),
        first,
        token + 1,
        stream,
    )
    assert row.shape == (1, 1, token + 1 - first)
    assert row[0, 0, -1].item() == pytest.approx(scalar_gumbel(seed, offset, draw, token, stream), rel=2e-6, abs=2e-6)


def exact_gumbel(words: torch.Tensor) -> torch.Tensor:
    v = (words.double() + 0.5) * 2.0**-32
    return -torch.log(-torch.log1p(-v))


def test_gumbel_error_over_the_word_range(device):
    """2e-6 * max(1, |g|) against float64: both ends exhaustively, the rest densely, and around the branch at v =
    1/2."""
    edge = torch.arange(1 << 18, device=device)
    pieces = [edge, 2**32 - 1 - edge, 2**31 - (1 << 17) + edge]
    pieces += [torch.randint(0, 2**32, (1 << 20,), device=device) for _ in range(4)]
    pieces += [(torch.logspace(0, 32, 1 << 18, base=2, dtype=torch.float64, device=device)).long().clamp(max=2**32 - 1)]
    for words in pieces:
        error = (noise.gumbel_from_words(words).double() - exact_gumbel(words)).abs()
        assert (error / exact_gumbel(words).abs().clamp(min=1.0)).max() <= 2e-6


def test_no_spike_at_either_end(device):
    """Trap 1 and 2: the largest values are reached by exactly one word each, and none stops at 16.6."""
    low = noise.gumbel_from_words(torch.arange(8, device=device))
    assert low[0] > 22.8
    assert (low.diff() < 0).all()
    high = noise.gumbel_from_words(2**32 - 1 - torch.arange(8, device=device))
    assert (high.diff() > 0).all()
    assert high[0].item() == pytest.approx(-math.log(33 * math.log(2)), rel=1e-6)


def test_tail_refinement_continues_the_tail(device):
    zero = torch.zeros(4, dtype=torch.int64, device=device)
    deep = torch.tensor([0, 1, 2**31, 2**32 - 1], device=device)
    refined = noise.gumbel_from_words(zero, deep)
    assert refined[0] > 44.0  # 64 bits deep
    assert (refined.diff() < 0).all()
    # v stays below the smallest unrefined one, but for word 0, which it replaces
    assert refined[-1] > noise.gumbel_from_words(torch.ones(1, dtype=torch.int64, device=device))
    exact = -torch.log((deep.double() + 0.5) * 2.0**-64)
    assert torch.allclose(refined.double(), exact, rtol=2e-6)


@pytest.mark.parametrize("depth", [0.0, 4.0, 8.0, 12.0, 16.0, 16.7, 18.0, 20.0, 22.0])
def test_tail_mass_is_exact(depth, device):
    """P(g > depth), read off the words: the count of words beyond a depth is 2**32 * (1 - exp(-exp(-depth)))."""
    expected = -math.expm1(-math.exp(-depth)) * 2**32
    low, high = 0, 2**32 - 1
    while low < high:  # the first word whose Gumbel is not above depth; the map is monotone
        middle = (low + high) // 2
        if noise.gumbel_from_words(torch.tensor([middle], device=device)).item() > depth:
            low = middle + 1
        else:
            high = middle
    assert abs(low - expected) <= 1 + 4e-6 * expected


def test_words_are_independent_across_everything(device):
    """Trap 4: neighbours in seed, offset, draw, stream and token share nothing."""
    size = 1 << 14
    base = {"seed": 1, "offset": 1, "draw": 1, "stream": noise.Stream.TOKEN}
    variants = [base, base | {"seed": 2}, base | {"offset": 2}, base | {"draw": 2}, base | {"seed": 1 << 32 | 1}]
    variants += [base | {"offset": 1 << 32 | 1}, base | {"stream": noise.Stream.RECOVERY}]

    def row(v):
        seed, offset, draw = (torch.tensor([v[name]], device=device) for name in ("seed", "offset", "draw"))
        return noise.gumbel(seed, offset, draw, 0, size, v["stream"]).flatten()

    rows = torch.stack([row(v) for v in variants])
    correlation = torch.corrcoef(rows.double()) - torch.eye(len(variants), device=device)
    assert correlation.abs().max() < 6 / size**0.5
    shifted = torch.corrcoef(torch.stack([rows[0, :-1], rows[0, 1:]]).double())[0, 1]
    assert abs(shifted) < 6 / size**0.5


@pytest.mark.parametrize(("seed", "offset", "token", "refinement"), ZERO_WORDS)
def test_known_zero_words_are_refined(seed, offset, token, refinement, device):
    seeds, offsets, draws = (torch.tensor([x], device=device) for x in (seed, offset, 0))
    row = noise.gumbel(seeds, offsets, draws, 0, token + 1)[0, 0]
    assert row[token].item() == pytest.approx(-math.log((refinement + 0.5) * 2.0**-64), rel=1e-6)


def test_first_token_must_start_a_tile():
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="multiple of 128"):
        noise.gumbel(one, one, one, 64, 256)
