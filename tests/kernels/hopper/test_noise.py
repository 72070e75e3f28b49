"""The Hopper kernel's noise and keys by themselves, against float64 and the published vectors."""

import math

import pytest
import torch

from flashsampling import noise
from tests.api.test_noise import KNOWN_ANSWERS
from tests.conftest import DEVICE
from tests.problems import KERNELS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("cute" not in KERNELS, reason="needs a Hopper GPU and the CuTe DSL")]


@pytest.fixture(scope="module")
def compute():
    from tests.kernels.hopper.noise_on_device import INPUTS, OUTPUTS, compile_noise

    compiled = compile_noise("sm_90a")

    def compute(blocks):
        """(n, 11 to INPUTS) int64 -> (n, OUTPUTS) int64"""
        blocks = torch.nn.functional.pad(blocks, (0, INPUTS - blocks.shape[1]))
        blocks = blocks.to(DEVICE).contiguous()
        out = torch.full((len(blocks), OUTPUTS), -1, device=DEVICE)
        compiled(blocks, out, len(blocks))
        return out

    return compute


def as_float(bits):
    return bits.to(torch.int32).view(torch.float32).double()


def blocks_of(words, refinement=0):
    """Blocks with the given words, four to a block, and random counters."""
    words = torch.nn.functional.pad(words, (0, -len(words) % 4), value=5).view(-1, 4)
    counters = torch.randint(0, 2**32, (len(words), 6))
    return torch.cat([counters, words, torch.full((len(words), 1), refinement)], dim=1)


def test_philox_known_answers(compute):
    blocks = torch.tensor([[*counter, *key, 0, 0, 0, 0, 0] for counter, key, _ in KNOWN_ANSWERS])
    expected = torch.tensor([words for _, _, words in KNOWN_ANSWERS], device=DEVICE)
    out = compute(blocks)
    for first in (0, 4):
        assert torch.equal(out[:, first : first + 4], expected)


def test_narrow_multiplications_give_philox(compute):
    """On random counters, and with zeros and all ones, where carries and roundings live."""
    edges = torch.tensor([0, 1, 2, 0xFFFF, 0x10000, 0xFFFF0000, 0xFFFFFFFE, 0xFFFFFFFF])
    blocks = blocks_of(torch.randint(0, 2**32, (1 << 20,)))
    blocks[: 1 << 16, :6] = edges[torch.randint(0, len(edges), (1 << 16, 6))]
    out = compute(blocks)
    c = blocks.to(DEVICE)
    expected = torch.stack(noise.philox4x32_10((c[:, 0], c[:, 1], c[:, 2], c[:, 3]), (c[:, 4], c[:, 5])), dim=1)
    for first in (0, 4):
        assert torch.equal(out[:, first : first + 4], expected)


def word_range():
    edge = torch.arange(0, 1 << 14)
    pieces = [
        edge,
        2**32 - 1 - edge,
        2**28 - (1 << 13) + edge,
        2**31 - (1 << 13) + edge,
        torch.randint(0, 2**32, (1 << 18,)),
    ]
    return torch.cat([*pieces, torch.logspace(0, 31.99, 1 << 16, base=2, dtype=torch.float64).long()])


def test_gumbel_error_over_the_word_range(compute):
    """The hardware's logarithm included: 3e-6 * max(1, |g|), at both ends, at the branch of the series, and between."""
    words = word_range()
    words = words[words > 0]
    g = -(as_float(compute(blocks_of(words))[:, 13:17]).flatten()[: len(words)] * math.log(2) + math.log(math.log(2)))
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-32)).to(DEVICE)
    assert ((g - exact).abs() / exact.abs().clamp(min=1.0)).max() <= 3e-6
    oracle = noise.gumbel_from_words(words.to(DEVICE)).double()
    assert ((g - oracle).abs() / exact.abs().clamp(min=1.0)).max() <= 5e-6


@pytest.mark.parametrize("refinement", [0, 1, 12345, 2**31, 2**32 - 1])
def test_the_word_zero(refinement, compute):
    g = -(as_float(compute(blocks_of(torch.zeros(4, dtype=torch.int64), refinement))[:, 13:17]) * math.log(2))
    exact = -math.log((refinement + 0.5) * 2.0**-64)
    assert (g - math.log(math.log(2)) - exact).abs().max() <= 3e-6 * exact


def test_the_bounds_hold_for_every_word(compute):
    """The whole search rests on this: the code's bound is never below the Gumbel, and what has no code has no bound."""
    from flashsampling.kernels.hopper.noise import BOUND_STEP, GREEDY_BYTE, GUMBEL_ABOVE, GUMBEL_BELOW, HALF

    words = word_range()
    words = torch.cat([words, words.new_full((-len(words) % 4,), 5)]).to(DEVICE)
    out = compute(blocks_of(words.cpu()))
    gumbel_bounds = torch.stack([out[:, 8] >> 8 * byte & 0xFF for byte in range(4)], dim=1).flatten()
    w = as_float(out[:, 9:13]).flatten()
    assert torch.equal(gumbel_bounds > 0x80, words < 3)
    assert torch.equal(w.isnan(), words < 3)
    coded = words >= 3
    assert (gumbel_bounds[coded] < 0x80).all()
    assert torch.equal(w[coded], (1 + gumbel_bounds[coded].double() / 128) * 2.0**127)
    base2 = -torch.log2(
        -torch.log1p(-(words.double() + 0.5) * 2.0**-32) / math.log(2)
    )  # up to the constant that drops out
    assert (base2 <= GUMBEL_BELOW + w * BOUND_STEP)[coded].all()
    half = coded & (words < 2**31)
    assert torch.equal(half, w >= HALF)
    assert (base2 >= GUMBEL_ABOVE + w * BOUND_STEP)[half].all()
    assert (base2 >= -5.1).all()
    assert (1 + GREEDY_BYTE / 128) * 2.0**127 == HALF
    assert GUMBEL_ABOVE + HALF * BOUND_STEP <= 0 <= GUMBEL_BELOW + HALF * BOUND_STEP


def test_signs_of_bounds_in_bfloat16_miss_no_candidate(compute):
    """What is at least 0, or NaN, never gets the sign of what is below; what does is at most rounding above it."""
    from flashsampling.kernels.hopper.noise import BOUND_STEP

    words = torch.cat(
        [torch.randint(0, 4, (4096,)), torch.logspace(0, 31.99, 1 << 16, base=2, dtype=torch.float64).long()]
    )
    words = words[torch.randperm(len(words))]
    blocks = blocks_of(words)
    w = as_float(compute(blocks)[:, 9:13])  # 32 to 64 of CODE_STEP
    # near what cancels w, and at all magnitudes
    bases = (
        -(w[:, :2] * BOUND_STEP).float().cpu()
        * torch.cat([torch.tensor([1.0]), torch.rand(len(blocks) - 1) + 0.5])[:, None]
    )
    bases = torch.where(bases.isnan(), torch.randn_like(bases) * 40, bases)
    bases[:64] = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 0.0, 1e-40, -1e-40]).repeat(8)[:, None]
    bits = bases.view(torch.int32).long() & 0xFFFFFFFF
    out = compute(torch.cat([blocks, bits], dim=1))
    for pair in range(2):
        for side in range(2):
            exact = bases[:, side].to(DEVICE).double() + w[:, 2 * pair + side] * BOUND_STEP
            below = out[:, 19 + pair] >> (15 + 16 * side) & 1 == 1
            assert not (below & ~(exact < 0)).any()
            assert below[exact < -0.26].all()


def test_keys_order_as_scores_and_give_them_back(compute):
    floats = torch.cat(
        [torch.randn(4096) * 50, torch.tensor([0.0, -0.0, 3e38, -3e38, 1e-40, -1e-40, math.inf, -math.inf])]
    )
    words = torch.zeros(len(floats), 4, dtype=torch.int64)
    words[:, 0] = floats.view(torch.int32).long() & 0xFFFFFFFF
    out = compute(blocks_of(words.flatten()))
    keys, back = out[:, 17], as_float(out[:, 18])
    assert torch.equal(back, floats.to(DEVICE).double())
    assert (keys > 0).all()
    order = sorted(range(len(floats)), key=lambda i: (floats[i].item(), -i))  # ties: the lower id is the greater key
    assert keys.argsort().tolist() == order
    nan = compute(blocks_of(torch.full((4,), 0x7FC00000)))[0, 17]
    assert nan == 2**63 - 1
