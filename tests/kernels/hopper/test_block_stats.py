"""Where the Hopper kernel keeps what it says of blocks: in words of each warp's own codes, each once. Nothing is
compiled."""

import pytest

pytest.importorskip("cutlass")

from flashsampling.kernels.hopper.block_stats import _AT_ONCE, BlockStatsWriter
from flashsampling.kernels.hopper.config import CONFIGS
from flashsampling.kernels.hopper.fragments import Fragments

ALL = [
    pytest.param(BlockStatsWriter(Fragments(config)), id=f"{config.block_b}")
    for config in {c.block_b: c for c in CONFIGS}.values()
]


@pytest.mark.parametrize("room", ALL)
def test_words_lie_in_the_warp_s_own_codes(room):
    """So that no other warp's search reads them; and no two of them are in one place."""
    vector, vectors = room.fragments.vector, room.fragments.vectors
    for warp in range(8):
        threads = range(32 * warp, 32 * warp + 32)
        own = {(256 * q + thread) * vector + v for q in range(vectors) for thread in threads for v in range(vector)}
        places = [
            room._word_index(word, half, column, warp)
            for word in range(4)
            for half in range(room.halves)
            for column in range(room.own_columns)
        ]
        assert len(set(places)) == len(places)
        assert set(places) == own
        # two columns side by side are read as one
        assert all(a % 2 == 0 and b == a + 1 for a, b in zip(places[::2], places[1::2], strict=True))


@pytest.mark.parametrize("room", ALL)
def test_every_half_chunk_is_kept_where_it_is_looked_for(room):
    """What a thread has after the exchange of its group, as ``reduction._scatter`` does it."""
    kept: dict[int, tuple[int, int]] = {}
    for first, count in room.groups:
        values = room._ordered(
            {
                (j, c, half): (j, c, half)
                for j in range(first, first + count)
                for c in range(2)
                for half in range(room.halves)
            }
        )
        assert len(values) <= _AT_ONCE
        for lane in range(32):
            own, mine = 0, list(range(len(values)))
            for distance in (16, 8, 4):
                if len(mine) > 1:
                    middle = len(mine) // 2
                    upper = lane & distance != 0
                    mine = mine[middle:] if upper else mine[:middle]
                    own += middle if upper else 0
            assert mine == [own]
            j, c, half = values[own]
            place = room._own_word_index(0, first, own, 5, lane)
            assert kept.setdefault(place, (half, 8 * j + 2 * (lane % 4) + c)) == (half, 8 * j + 2 * (lane % 4) + c)
    expected = {
        room._word_index(0, half, column, 5): (half, column)
        for half in range(room.halves)
        for column in range(room.own_columns)
    }
    assert kept == expected
