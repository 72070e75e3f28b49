"""Parameters that are packed for one copy, and tokens without a score."""

import numpy as np
import pytest
import torch

from flashsampling.integrations.engine.transfer import aligned_width, pack_rows, sanitize_token_ids, unpack_rows


@pytest.mark.parametrize("batch", [1, 3, 4, 9])
def test_rows_that_are_packed_are_unpacked(batch):
    """Every column begins at 16 bytes; padding repeats the last row."""
    rng = np.random.default_rng(batch)
    seeds = rng.integers(-(2**63), 2**63 - 1, batch)
    top_k, top_p = rng.integers(0, 99, batch).astype(np.int32), rng.random(batch).astype(np.float32)
    width = aligned_width(batch)
    assert width % 4 == 0 <= width - batch < 4
    packed = torch.from_numpy(pack_rows(seeds, [top_k, top_p], width))
    for count in (batch, width):
        rows = unpack_rows(packed, count, ("top_k", "top_p"))
        for name, wanted in (("seed", seeds), ("top_k", top_k), ("top_p", top_p)):
            assert rows[name].numpy().tolist() == [*wanted, *[wanted[-1]] * (count - batch)]
            assert rows[name].data_ptr() % 16 == packed.data_ptr() % 16


@pytest.mark.parametrize("batch", [1, 5, 300])
def test_tokens_of_minus_one_by_a_kernel(batch, device):
    pytest.importorskip("triton")
    from flashsampling.integrations.engine.kernels import sanitize_kernel

    ids = torch.arange(batch + 1, device=device)
    ids[::3] = -1
    before, undefined = ids.clone(), torch.full((1,), 10, device=device)
    clean, ones = torch.full_like(ids, -7), torch.full((batch + 1,), -7, dtype=torch.int32, device=device)
    sanitize_kernel[(-(-batch // 256),)](ids, clean, ones, undefined, batch, BLOCK=256)
    assert torch.equal(ids, before)
    assert clean.tolist() == [*ids[:batch].clamp(min=0).tolist(), -7]
    assert ones.tolist() == [1] * batch + [-7]
    assert int(undefined) == 10 + int((ids[:batch] < 0).sum())
    undefined = torch.zeros(1, dtype=torch.int64)
    ids, ones = sanitize_token_ids(before[:batch].cpu(), undefined)
    assert (ids.tolist(), ones.tolist()) == (before[:batch].clamp(min=0).tolist(), [1] * batch)
    assert int(undefined) == int((before[:batch] < 0).sum())
