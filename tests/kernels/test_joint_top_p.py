"""``joint_top_p`` in an int32 tensor: any number but 0 is yes, -1 too, whoever draws."""

import math
from typing import Any

import pytest
import torch

from flashsampling import LMHeadSampler, sample, sample_from_logits, verify, verify_from_logits
from flashsampling.backends import BACKENDS
from flashsampling.inputs import SampleInputs
from flashsampling.sampling_params import SamplingParams
from tests.conftest import DEVICE
from tests.problems import NEEDS_CUTE, parts_of, require
from tests.tensor_parallel.test_drafts import REJECT, ranks  # noqa: F401, a fixture
from tests.tensor_parallel.test_filters import run, shared_memory  # noqa: F401, a fixture

# of 0.4 and 0.3, which top-k leaves, the first alone has 0.56; of all tokens it takes both
LOGITS = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
FILTERS: dict[str, Any] = {"top_k": 2, "top_p": 0.56}
KINDS = [-1, 0, 1, -(2**31)]
EACH = 2  # rows, with the seeds 0 and 1, of which the latter draws the second token if it can
ROWS = EACH * len(KINDS)
JOINT, SEEDS = torch.tensor(KINDS, dtype=torch.int32).repeat_interleave(EACH), torch.arange(EACH).repeat(len(KINDS))
IS_JOINT = JOINT != 0
WEIGHT, STATES = LOGITS[:, None].expand(4, 8) / 8, torch.ones(ROWS, 8)
HEADS = [
    "reference", "streaming", "triton", pytest.param("cute", marks=NEEDS_CUTE), "module", "ranks triton",
]  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("by", [*HEADS, "logits triton"])
def test_of_each_row(by):
    impl, seeds, joint, logprobs = by.split()[-1], SEEDS.to(DEVICE), JOINT.to(DEVICE), "module" not in by
    if impl in BACKENDS:
        require(impl)
    dtype = torch.bfloat16 if impl == "cute" else torch.float32
    states, weight = STATES.to(DEVICE, dtype), WEIGHT.to(DEVICE, dtype)
    request = {"joint_top_p": joint, "return_logprobs": logprobs, **FILTERS}
    if "ranks" in by:
        params = SamplingParams(joint_top_p=joint, logprobs=logprobs, **FILTERS)
        step = SampleInputs(
            states, weight, torch.ones(ROWS, device=DEVICE), seeds, torch.zeros_like(seeds), 1, 4, params=params
        )
        parts = parts_of(run(step, [(1, 4), (0, 1)], impl)[0], step)
        token_ids, processed = parts["token_ids"][:, 0], parts.get("processed_logprobs")
    else:
        if by == "module":
            out: Any = LMHeadSampler(weight, max_batch_size=ROWS, seed=seeds.tolist())(states, **request)
        elif "logits" in by:
            out = sample_from_logits(LOGITS.to(DEVICE).expand(ROWS, 4), seed=seeds, impl=impl, **request)
        else:
            out = sample(states, weight, seed=seeds, impl=impl, **request)
        token_ids, processed = out.token_ids, out.processed_logprobs if logprobs else None
    for kind in KINDS:
        of_kind = token_ids[joint == kind]
        assert set(of_kind.tolist()) == ({0, 1} if kind else {0}), kind
    if logprobs:
        assert processed is not None
        of_both = torch.tensor([math.log(4 / 7), math.log(3 / 7)], device=DEVICE)[token_ids]
        expected = torch.where(IS_JOINT.to(DEVICE), of_both, 0.0)
        assert torch.allclose(processed.flatten(), expected, atol=4e-3)


@pytest.mark.parametrize("by", ["reference", "logits", "kernels", "ranks", "module"])
def test_drafts(by, monkeypatch, ranks):  # noqa: F811
    """Rejection accepts the second token where it is kept at all."""
    drafts, q = torch.ones(ROWS, 1, dtype=torch.int64), torch.zeros(ROWS, 1, 4)
    states, joint = STATES[:, None].expand(ROWS, 2, 8), JOINT
    options: dict[str, Any] = {"joint_top_p": joint, "draft_probs": q, **FILTERS, **REJECT}
    if by == "module":
        out = LMHeadSampler(WEIGHT, max_batch_size=ROWS, seed=SEEDS.tolist()).verify(states, drafts, **options)
    elif by == "ranks":
        out = verify(states, WEIGHT, drafts, seed=SEEDS, tp=ranks(WEIGHT, [(1, 4), (0, 1)]), **options)
    elif by == "reference":
        out = verify(states, WEIGHT, drafts, seed=SEEDS, impl=by, **options)
    else:
        impl = None if by == "logits" else "triton"
        if by == "kernels":
            require("triton")
            monkeypatch.setattr(
                "flashsampling.speculative.acceptance._runs_kernels", lambda states, given: given.batch > 0
            )
        options |= {"joint_top_p": joint.to(DEVICE), "draft_probs": q.to(DEVICE)}
        logits = LOGITS.to(DEVICE).expand(ROWS, 2, 4)
        out = verify_from_logits(logits, drafts.to(DEVICE), seed=SEEDS.to(DEVICE), impl=impl, **options)
    assert out.num_accepted.tolist() == IS_JOINT.int().tolist()
