"""A sparse bias by blocks: every entry is where its block's word says, by tokens, of one in the row's order, and
nothing else is anywhere."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

from flashsampling.kernels.triton import jit
from flashsampling.kernels.triton.filtered import sparse_bias
from flashsampling.sampling_params import SamplingParams
from tests.conftest import DEVICE
from tests.kernels.triton.target import output_of


def read(words: torch.Tensor, blocks: int) -> list[tuple[int, int, float]]:
    """Row, token from the first block's start, value, in the order in which they are added; all that a word says is
    checked."""
    found = []
    for row, line in enumerate(words.cpu().tolist()):
        free = 0
        for block, word in enumerate(line[:blocks]):
            count, place = word >> 7 & 0x7FF, (word & 0xFFFFFFFF) >> 18
            assert count or word == 0
            assert not count or place == free
            free += count
            some = line[blocks + place : blocks + place + count]
            assert not count or some[0] == word & ~0xFFFFFFFF | word & 0x7F | block << 7
            for entry in some:
                token = entry & 0xFFFFFFFF
                assert token // 128 == block
                value = torch.tensor((entry >> 32) & 0xFFFFFFFF).to(torch.uint32).view(torch.float32)
                found.append((row, token, float(value)))
    return found


def expected(ids: torch.Tensor, values: torch.Tensor, first: int, last: int, base: int) -> list[tuple[int, int, float]]:
    rows = zip(ids.tolist(), values.tolist())
    every = [
        (row, id - base, value) for row, (i, v) in enumerate(rows) for id, value in zip(i, v) if first <= id < last
    ]
    return sorted(every, key=lambda entry: entry[:2])  # stable: the row's order


RANGES = [(0, 1000), (0, 1), (0, 128), (37, 449), (640, 1001), (1000, 150_000)]
SIZES = [*itertools.product((1, 2, 33), RANGES), (300, (37, 449)), (1024, (0, 128)), (1024, (1000, 150_000))]


@pytest.mark.quick(9)
@pytest.mark.parametrize(("n", "ids_from_to"), SIZES)
def test_entries(n, ids_from_to):
    """Of whole vocabularies and of shards; ids twice and often, of no token and of other ranks; infinities and -0.0."""
    first, last = ids_from_to
    base, batch = first // 128 * 128, 3
    ids = torch.randint(first - 40, last + 40, (batch, n), device=DEVICE, dtype=torch.int32)
    ids[0] = torch.randint(first, min(last, first + 5), (n,), device=DEVICE, dtype=torch.int32)
    ids[1, ::3] = torch.tensor([-1, 2**31 - 1, -(2**31)], device=DEVICE).repeat(n)[: len(ids[1, ::3])]
    values = torch.randn(batch, n, device=DEVICE)
    values[:, ::5] = torch.tensor([float("inf"), -float("inf"), -0.0], device=DEVICE).repeat(n)[: len(values[0, ::5])]
    words = sparse_bias.sort_by_tile(SamplingParams(bias_ids=ids, bias_values=values), first, last, base)
    blocks = -(-(last - base) // 128)
    assert words.shape == (batch, blocks + n)
    assert read(words, blocks) == expected(ids, values, first, last, base)


@pytest.mark.every_triton
def test_rows_of_any_stride():
    ids = torch.randint(0, 500, (4, 9), device=DEVICE, dtype=torch.int32)
    values = torch.randn(4, 9, device=DEVICE)
    for some_ids, some_values in (
        (ids.T.contiguous().T, values.repeat(1, 3)[:, :9]),
        (ids[:1].expand(4, -1), values[:1].expand(4, -1)),
        (ids[:, :1], values[:, 4:5]),
    ):
        words = sparse_bias.sort_by_tile(SamplingParams(bias_ids=some_ids, bias_values=some_values), 0, 500, 0)
        assert read(words, 4) == expected(some_ids, some_values, 0, 500, 0)


def test_what_is_only_compiled_leaves_no_entries(monkeypatch):
    """A kernel that is launched meanwhile reads them."""
    monkeypatch.setattr(sparse_bias, "sparse_bias_kernel", {(2,): lambda *arguments, **options: None})
    params = SamplingParams(bias_ids=torch.ones(2, 3, dtype=torch.int32), bias_values=torch.ones(2, 3))
    assert jit._only_compiles.set(True)
    try:
        assert not sparse_bias.sort_by_tile(params, 0, 500, 0).any()
    finally:
        jit._only_compiles.set(False)


COMPILE = """
import torch
from flashsampling.kernels.triton.filtered import sparse_bias
from flashsampling.sampling_params import SamplingParams
from tests.kernels.triton.target import compile_only, spills_of

compiled = compile_only(90)
for n in (1, 64, 1024):
    params = SamplingParams(bias_ids=torch.zeros(2, n, dtype=torch.int32), bias_values=torch.zeros(2, n))
    sparse_bias.sort_by_tile(params, 0, 1000, 0)
    (kernel,) = compiled
    compiled.clear()
    print(spills_of(kernel))
"""


def test_it_compiles_without_spills(tmp_path):
    assert output_of(COMPILE, cache=tmp_path).split() == ["0", "0", "0"]
