"""Offsets of 2**31 elements and more: draws times blocks, strides of ids, ranks times rows, words. In the interpreter,
whose integers are as wide as a GPU's, with tensors that are address space alone: a page that nobody touches takes no
memory."""

import math
import mmap
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from flashsampling.kernels.triton.filtered import dispatch as of_logits
from flashsampling.kernels.triton.filtered.block_stats_kernel import StatsOutputs, block_stats_kernel
from flashsampling.kernels.triton.filtered.draw import Draws
from flashsampling.kernels.triton.jit import jit
from flashsampling.kernels.triton.sharded.collectives import row_of_word
from flashsampling.kernels.triton.token_counts import count
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.test_filtered import SMALL, make_step, with_logits

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="address space is as large in the interpreter alone"
)

_NO_RESERVE = 0x4000  # mmap.MAP_NORESERVE, which Python 3.13 is the first to have


def address_space(elements: int) -> Tensor:
    """(elements,) int64, zeros. As many as 2**31 lie before it: an offset that has become negative is no crash."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    return torch.frombuffer(mmap.mmap(-1, 8 * (2**31 + elements), flags=flags), dtype=torch.int64)[2**31 :]


@pytest.mark.parametrize("temperature", [0.0, 1.0, math.inf])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(logprobs=True)])
def test_slots_of_many_draws_and_blocks(params, temperature, monkeypatch):
    """As if there were 2**30 blocks."""
    vocab = 2 * SMALL.block
    step = make_step(batch=1, vocab=vocab, num_samples=3, params=params, temperature=temperature)
    logits = step.logits.clone()
    if temperature > 1:
        logits[0, 7] = math.inf  # of which no token has a score
    step = with_logits(step, logits)
    expected = of_logits.run(step, SMALL)
    assert (expected.ids[:3] >= 0).all() == (temperature < 2)
    slots = address_space(3 * 2**30)

    class FarApart:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *arguments, **options: block_stats_kernel[grid](
                *arguments[:10], 2**30, *arguments[11:], **options
            )

    def outputs_far_apart(*addresses: int) -> Any:
        return StatsOutputs(*addresses[:-1], slots.data_ptr())

    def draws_far_apart(winners_at: int, tiles: int, *others: int) -> Any:
        return Draws(slots.data_ptr(), 2**30, *others)

    monkeypatch.setattr(of_logits, "block_stats_kernel", FarApart())
    monkeypatch.setattr(of_logits, "StatsOutputs", outputs_far_apart)
    monkeypatch.setattr(of_logits, "Draws", draws_far_apart)
    ours = of_logits.run(step, SMALL)
    assert ours.ids.tolist() == expected.ids.tolist()
    assert slots[2**31] != 0  # the last draw's, of the first block


def test_ids_far_apart():
    ids, counts, seen = (
        address_space(2**31 + 1),
        torch.zeros(1, 8, dtype=torch.int32),
        torch.zeros(1, 1, dtype=torch.uint8),
    )
    ids[0], ids[2**30], ids[2**31] = 3, 5, 7
    count(counts, seen, ids.as_strided((1, 3), (3, 2**30), ids.storage_offset()), None, 16)
    assert counts.tolist() == [[0, 0, 0, 1, 0, 1, 0, 1]]


@jit
def _rows_kernel(index_ptr, out_ptr, batch: tl.int32, num_samples: tl.int32, COUNT: tl.constexpr):
    place = tl.arange(0, COUNT)
    tl.store(out_ptr + place, row_of_word(tl.load(index_ptr + place), batch, num_samples))


@pytest.mark.parametrize(("batch", "draws"), [(2**20, 2**12), (2**16, 2**15), (3, 5)])
def test_rows_of_words(batch, draws):
    words = [0, 1, 14, 15, 16, 2**12, 2**30 + 5, 2**31 - 1]
    out = torch.zeros(8, dtype=torch.int32)
    _rows_kernel[(1,)](torch.tensor(words, dtype=torch.int32), out, batch, draws, COUNT=8)
    assert out.tolist() == [word // draws if word < batch * draws else word % batch for word in words]
