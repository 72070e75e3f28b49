"""``TokenCounts``: how often tokens have come, and where there are any."""

import pytest
import torch

import flashsampling
from flashsampling import TokenCounts
from flashsampling.token_counts import Counted, num_token_groups

pytestmark = pytest.mark.every_triton


def seen_of(counts: torch.Tensor) -> torch.Tensor:
    """``SamplingParams.seen``."""
    groups = num_token_groups(counts.shape[1])
    padded = torch.nn.functional.pad(counts != 0, (0, 16 * groups - counts.shape[1]))
    return padded.view(len(counts), groups, 16).any(2).to(torch.uint8)


def assert_known(state: TokenCounts) -> None:
    """The state knows the groups with a count, and no other group."""
    counts, seen = state.read(state.max_batch_size)
    assert torch.equal(seen, seen_of(counts))


def test_a_state_of_counts(device):
    vocab = 300
    state = TokenCounts(4, vocab, device=device)
    assert_known(state)
    state.reset([0, 2], [[5, 299], [17, 17, 290]])
    assert_known(state)
    state.add(torch.tensor([100, 16, 31, 0], device=device))
    assert_known(state)
    state.add(torch.tensor([[200, 201, 5], [40, 41, 42]], device=device), rows=[3, 1])
    assert_known(state)
    state.reset([1])
    assert_known(state)


def test_counts_that_other_code_may_write_to(device):
    state = TokenCounts(2, 400, device=device)
    before, seen = state.read(2)
    state.counts[0, 150] = 1
    state.add(torch.tensor([5, 5], device=device))
    assert state.read(2).seen is None
    state.recount()
    assert_known(state)
    assert torch.equal(seen, seen_of(before))  # a CUDA graph reads this memory


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_a_kernel_counts_as_torch_does(dtype, device):
    """Tokens that come twice, rows that do, ids out of range, any strides, more of a row than are looked at
    together."""
    pytest.importorskip("triton")
    from flashsampling.kernels.triton import token_counts

    vocab = 200
    for length, rows in ((1, None), (1, [4, 4, 0]), (70, [1, 3, 1]), (33, None), (0, None)):
        ids = torch.randint(0 if dtype is torch.uint8 else -3, vocab + 20, (length, 3), device=device).to(dtype).T
        state, other = TokenCounts(5, vocab, device=device), TokenCounts(5, vocab)
        state.reset(prompt_token_ids=[[7, 150]] * 5)
        other.reset(prompt_token_ids=[[7, 150]] * 5)
        chosen = None if rows is None else torch.tensor(rows, device=device)
        token_counts.count(state.counts, state._seen, ids, chosen, 16)
        other.add(ids.cpu(), rows=rows)
        assert torch.equal(state.counts.cpu(), other.counts)
        assert torch.equal(state._seen, seen_of(state.counts))


COMPILE = """
import sys
import torch
from flashsampling.kernels.triton import token_counts
from tests.kernels.triton.target import compile_only

compiled = compile_only(int(sys.argv[1]))
counts, seen = torch.zeros(3, 1000, dtype=torch.int32), torch.zeros(3, 64, dtype=torch.uint8)
for rows in (None, torch.zeros(2, dtype=torch.int64)):
    token_counts.count(counts, seen, torch.zeros(2, 1, dtype=torch.int64), rows, 16)
print(len(compiled), min(len(kernel.asm["cubin"]) for kernel in compiled))
"""


@pytest.mark.quick(1)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_kernel_compiles(capability, tmp_path):
    """For every architecture that we name."""
    pytest.importorskip("triton")
    from tests.kernels.triton.target import output_of

    count, least = map(int, output_of(COMPILE, capability, cache=tmp_path).split())
    assert count == 2
    assert least > 1000


def test_a_row_that_begins_twice(device):
    """It has one of the prompts, and what is known is of that one."""
    state = TokenCounts(8, 20_000, device=device)
    for rows in ([3] * 8, [1, -7, 1]):
        state.reset(rows, [[1000 * i + 5] for i in range(len(rows))])
        assert_known(state)


def test_what_is_said_beside_counts_is_checked(device):
    states, weight = torch.zeros(2, 8, device=device), torch.zeros(300, 8, device=device)
    counts, seen = TokenCounts(2, 300, device=device).read(2)
    assert seen is not None
    flashsampling.sample(states, weight, presence_penalty=1.0, token_counts=Counted(counts, seen))
    for wrong in (seen[:1], seen[:, :8], seen.float(), seen[0], seen.to("meta")):
        with pytest.raises(ValueError, match=r"token_counts\.seen must be"):
            flashsampling.sample(states, weight, presence_penalty=1.0, token_counts=Counted(counts, wrong))
