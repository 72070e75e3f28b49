"""Hashes of requests by kernels: beside torch's, and of the numbers of rows in the kernel that compares them."""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import triton.language as tl

from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.jit import jit
from flashsampling.kernels.triton.sharded import param_hash
from flashsampling.kernels.triton.sharded.collectives import RowNumbers, hash_numbers, row_numbers
from flashsampling.sampling_params import DEFAULT_PARAMS, ROW_FIELDS, SamplingParams
from flashsampling.tensor_parallel.message import Hashes
from tests.conftest import DEVICE

V = 640_010
REQUESTS: dict[str, SamplingParams] = {
    "top_p": SamplingParams(top_p=torch.rand(5)),
    "int32, zeros": SamplingParams(top_k=torch.arange(5, dtype=torch.int32), min_p=torch.tensor([0.0, -0.0, 1, -1, 2])),
    "int64": SamplingParams(top_k=torch.randint(-(2**63), 2**63 - 1, (5,))),
    "numbers": SamplingParams(top_k=7, top_p=0.5, presence_penalty=-0.5),
    "strides": SamplingParams(top_p=torch.rand(10)[::2], logprob_ids=torch.randint(-1, V, (3, 5)).T, logprobs=True),
    "mask": SamplingParams(token_mask=torch.randint(-(2**31), 2**31 - 1, (5, 20_001), dtype=torch.int32)),
    "biases": SamplingParams(bias_ids=torch.randint(-1, V, (5, 9), dtype=torch.int32), bias_values=torch.randn(5, 9)),
    "a bias of all": SamplingParams(dense_bias=torch.randn(V)),
    "counts": SamplingParams(counts=torch.ones(5, 8, dtype=torch.int32), repetition_penalty=torch.rand(5)),
}


def hash_of(params: SamplingParams, by: Any, draft_hash: Tensor | None = None) -> int:
    moved = {name: value.to(DEVICE) for name, value in params._asdict().items() if isinstance(value, Tensor)}
    step = SampleInputs(
        torch.zeros(5, 8, device=DEVICE),
        torch.zeros(1, 8, device=DEVICE),
        1.0,
        0,
        0,
        1,
        V,
        params=params._replace(**moved),
    )
    return int(by(Hashes(8, DEVICE), step._replace(draft_hash=draft_hash)))


@pytest.mark.every_triton
@pytest.mark.parametrize("name", REQUESTS)
def test_hashes(name):
    params = REQUESTS[name]
    ours = hash_of(params, param_hash.of_request)
    assert ours == hash_of(params, Hashes.of_request)
    for field, value in params._asdict().items():  # every element counts
        if isinstance(value, Tensor) and field != "counts":
            other = value.clone(memory_format=torch.contiguous_format)
            other.view(-1)[-1] += 1
            assert hash_of(params._replace(**{field: other}), param_hash.of_request) != ours


@pytest.mark.parametrize("by", [param_hash.of_request, Hashes.of_request])
def test_a_hash_is_of_the_numbers_whatever_their_dtype(by):
    values = [-1, 0, 20, 2**31 - 1, -(2**31)]
    wide, narrow = (
        hash_of(SamplingParams(top_k=torch.tensor(values, dtype=dtype)), by) for dtype in (torch.int64, torch.int32)
    )
    assert wide == narrow
    assert hash_of(SamplingParams(top_k=torch.tensor([2**32 - 1, *values[1:]])), by) != wide


def test_hashes_of_drafts_to_be_matched():
    """Which come hashed."""
    found = set()
    for value in (0, 1, -(2**63), 2**63 - 1):
        draft_hash = torch.tensor(value, device=DEVICE)
        ours = hash_of(REQUESTS["top_p"], param_hash.of_request, draft_hash)
        assert ours == hash_of(REQUESTS["top_p"], Hashes.of_request, draft_hash)
        found.add(ours)
    assert len(found) == 4


def test_numbers_of_rows_are_no_part_of_the_rest_s_hash():
    """They are hashed row by row; what the host knows alone takes no launch."""
    hashes = Hashes(8, DEVICE)

    def besides_rows(**params: Any) -> tuple[int, Tensor | None]:
        zeros = torch.zeros(5, 8, device=DEVICE)
        return param_hash.besides_rows(
            hashes, SampleInputs(zeros, zeros, 1.0, 0, 0, 1, V, params=SamplingParams(**params))
        )

    of_filters = {"top_k": torch.ones(5, dtype=torch.int64, device=DEVICE), "top_p": 0.5}
    assert besides_rows(**of_filters) == besides_rows() == (0, None)
    known, none = besides_rows(**of_filters, logprobs=True)
    assert known != 0
    assert none is None
    mask = torch.ones(5, 20_001, dtype=torch.int32, device=DEVICE)
    _, first = besides_rows(**of_filters, token_mask=mask)
    _, other = besides_rows(min_p=0.5, token_mask=mask)
    assert first is not None
    assert other is not None
    assert torch.equal(first, other)


@jit(structs={"numbers": RowNumbers})
def _numbers_kernel(numbers, out, BLOCK: tl.constexpr):
    row = tl.arange(0, BLOCK)
    tl.store(out + row, hash_numbers(numbers, row).to(tl.int64))


def numbers_of(**params: Any) -> list[int]:
    out = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    _numbers_kernel[(1,)](row_numbers(SamplingParams(**params)), out, BLOCK=4)
    return out.tolist()


@pytest.mark.parametrize("name", ROW_FIELDS)
def test_each_number_of_a_row_counts(name):
    """A number is a tensor of it, of either width, and each row has its own hash."""
    default = getattr(DEFAULT_PARAMS, name)
    integers = {"top_k": (torch.int32, torch.int64), "joint_top_p": (torch.int32,)}
    plain = numbers_of()
    assert len(set(plain)) == 1
    for dtype in integers.get(name, (torch.float32,)):
        values = torch.full((4,), default, dtype=dtype, device=DEVICE)
        assert numbers_of(**{name: values}) == plain
        values[2] += 1
        found = numbers_of(**{name: values})
        assert [one == other for one, other in zip(found, plain)] == [True, True, False, True]
        assert numbers_of(**{name: default + 1}) == [found[2]] * 4
    wide = torch.tensor([5, 5, 5, 5 + 2**40], device=DEVICE)
    assert numbers_of(top_k=wide)[3] != numbers_of(top_k=5)[3]
    assert numbers_of(presence_penalty=-0.0) == plain
