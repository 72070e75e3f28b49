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
from flashsampling.kernels.triton.sharded.cutoff_kernels import radix_pass_kernel
from flashsampling.kernels.triton.sharded.output_kernels import ranks_kernel

from flashsampling.kernels.triton.filtered import dispatch as of_logits
from flashsampling.kernels.triton.filtered.block_stats_kernel import StatsOutputs, block_stats_kernel
from flashsampling.kernels.triton.filtered.draw import Draws
from flashsampling.kernels.triton.jit import jit
from flashsampling.kernels.triton.sharded.collectives import row_of_word
from flashsampling.kernels.triton.token_counts import count
from flashsampling.reference import logit_transforms
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


@pytest.mark.parametrize(
    ("params", "temperature"),
    [
        *(
            (params, temperature)
            for params in (SamplingParams(), SamplingParams(logprobs=True))
            for temperature in (0.0, 1.0, math.inf)
        ),
        (SamplingParams(top_k=SMALL.block + 2), 1.0),
    ],
)
def test_slots_of_many_draws_and_blocks(params, temperature, monkeypatch):
    """As if there were 2**30 blocks; of the row of equal logits the filter's draw reads the slots too."""
    vocab = 2 * SMALL.block
    step = make_step(batch=1, vocab=vocab, num_samples=3, params=params, temperature=temperature)
    logits = torch.zeros(1, vocab) if params.top_k else step.logits.clone()
    if temperature > 1:
        logits[0, 7] = math.inf  # of which no token has a score
    step = with_logits(step, logits)
    expected = of_logits.run(step, SMALL)
    assert (expected.ids[:3] >= 0).all() == (temperature < 2)
    assert not params.top_k or expected.ids[2] < SMALL.block  # which only its slot says: no logit of that block is read
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


def test_amounts_of_many_rows():
    """Of the last digit of a search, 256 of which 2**23 rows have on each of two ranks."""
    theirs = address_space(2**31 + 256)
    theirs[3], theirs[2**31 + 3] = 1, 5  # tokens with the key that is the third below the highest
    top = torch.ones(1)
    key = int(logit_transforms.keys_of(top)) - 3
    logits = torch.zeros(1, 20)
    logits[0, [2, 4, 9, 11, 12]] = float(logit_transforms.values_of(torch.tensor(key)))
    state, limit = torch.tensor([[0, 4, 8]]), torch.full((1,), logit_transforms.LOWEST)
    one, none = torch.ones(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    radix_pass_kernel[(1,)](
        one, none, theirs, state, limit, logits, 20, 20, top, top, 100, 1 << 40, 8, 2**23, 2, 1, 1, 0, MASSES=False,
        BINS=256, TILE=32,
    )  # fmt: skip
    # four are wanted, the first is another rank's
    assert limit.tolist() == logit_transforms.places_of(torch.tensor([key]), torch.tensor([109])).tolist()


def test_ranks_of_many_tokens(monkeypatch):
    """The last program, as if those before it had run."""
    tokens = 2**31 + 3
    theirs, ids, out = address_space(2 * tokens), address_space(tokens), address_space(tokens)
    theirs[2**31 : tokens] = torch.tensor([1, 2, 3])
    theirs[tokens + 2**31 :] = torch.tensor([10, 20, 30])
    ids[2**31 + 1] = -1
    builder: Any = triton.runtime.interpreter.interpreter_builder
    monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (2**24 + x, y, z)))
    ranks_kernel[(1,)](theirs, ids, out, tokens, 2, BLOCK=128)
    assert out[2**31 :].tolist() == [12, -1, 34]


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
