"""``return_kept``: the set of tokens that a row is drawn from."""

from typing import Any

import pytest
import torch
from torch import Tensor

import flashsampling
from flashsampling import sample, score
from tests.api.test_score import VOCAB, make, mixes
from tests.conftest import DEVICE
from tests.problems import require


def unpack(words: Tensor | None) -> Tensor:
    """The kept tokens, (B, V) bool. Bits beyond the vocabulary are 0."""
    assert words is not None
    assert words.dtype == torch.int32
    bits = ((words[:, :, None] >> torch.arange(32, device=words.device)) & 1).flatten(1).bool()
    assert not bits[:, VOCAB:].any()
    return bits[:, :VOCAB]


@pytest.mark.quick(3)
@pytest.mark.parametrize("mix", range(6))
@pytest.mark.parametrize("impl", [None, "reference", "triton", "cute"])
def test_it_is_the_set_that_has_a_probability(impl, mix):
    """As ``score`` says of every token; the drawn ones among it. A greedy row's is its token."""
    if impl == "cute" and DEVICE.type == "cpu":
        pytest.skip("needs a CUDA device")
    rows = 8 if require(impl or "streaming") == "triton" and DEVICE.type == "cpu" else 40
    states, weight = make(rows, dtype=torch.bfloat16 if impl == "cute" else torch.float32)
    greedy = torch.arange(rows, device=DEVICE) % 4 == 0
    options: dict[str, Any] = {"temperature": torch.where(greedy, 0.0, 0.7), **mixes(rows)[mix]}
    seeds = torch.arange(rows, device=DEVICE)
    out = sample(states, weight, seed=seeds, num_samples=3, return_kept=True, impl=impl, **options)
    kept = unpack(out.kept_mask)
    assert out.kept_counts is not None
    assert torch.equal(kept.sum(1), out.kept_counts)
    assert kept.gather(1, out.token_ids).all()
    assert torch.equal(kept[greedy].int().argmax(1), out.token_ids[greedy, 0])
    assert (out.kept_counts[greedy] == 1).all()
    ids = torch.arange(VOCAB, device=DEVICE).expand(rows, -1)
    expected = ~score(states, weight, ids, impl="reference", **options).processed_logprobs.isneginf()
    assert (kept != expected)[~greedy].sum() <= 1  # a token at a filter's edge


def test_rows_without_a_token_keep_none_and_infinite_ones_the_first():
    states, weight = make(5)
    logits = states @ weight.T
    logits[0, 3] = torch.nan
    logits[1] = -torch.inf
    logits[2, [9, 4]] = torch.inf
    logits[3, 1:] = -torch.inf
    for impl in ("streaming", require("triton")):
        out = flashsampling.sample_from_logits(logits, seed=torch.arange(5, device=DEVICE), return_kept=True, impl=impl)
        assert out.kept_counts.tolist() == [0, 0, 1, 1, VOCAB]
        assert unpack(out.kept_mask).int().argmax(1).tolist() == [0, 0, 4, 0, 0]


def test_the_kept_set_of_a_rollout_scores_it():
    states, weight = make(30)
    seeds = torch.arange(30, device=DEVICE)
    out = sample(states, weight, seed=seeds, top_k=9, top_p=0.9, return_logprobs=True, return_kept=True)
    scored = score(states, weight, out.token_ids, token_mask=out.kept_mask)
    torch.testing.assert_close(scored.processed_logprobs, out.processed_logprobs, atol=1e-5, rtol=1e-5)


def test_drafts_have_none():
    states, weight = make(3)
    drafts = torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ValueError, match="return_kept must be left out: verify returns token ids alone"):
        flashsampling.verify(states[None], weight, drafts, seed=1, return_kept=True)
