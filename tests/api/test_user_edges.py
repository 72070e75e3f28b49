"""What users give that is at the edge of what is promised."""

import numpy as np
import pytest
import torch

from flashsampling import LMHeadSampler, TokenCounts, sample, sample_from_logits, warmup
from tests.conftest import run_python

STATES, WEIGHT, SEEDS = torch.randn(3, 8), torch.randn(50, 8), torch.arange(3)


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "setting", ["torch.set_float32_matmul_precision('medium')", "torch.backends.fp32_precision = 'tf32'"]
)
def test_logits_are_exact_whatever_precision_the_process_allows(setting, dtype):
    """Fails only where the CPU multiplies bfloat16 (avx512_bf16, amx_bf16)."""
    code = f"""
import torch
from flashsampling.reference import oracle, streaming
{setting}
states, weight = torch.randn(64, 256).to({dtype}), torch.randn(1024, 256).to({dtype})
exact = states.double() @ weight.double().T
for product in (oracle.exact_logits, streaming.head_logits):
    assert (product(states, weight) - exact).abs().max() < 1e-3, product
"""
    run_python(code)


def test_new_settings_of_tf32_do_not_raise():
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from flashsampling.reference import oracle
torch.backends.cuda.matmul.fp32_precision = "tf32"
with FakeTensorMode():
    states = torch.empty(2, 8, device="cuda")
    assert oracle.may_round(states)
    assert not oracle.may_round(states.half())
"""
    run_python(code)


@pytest.mark.parametrize("name", ["num_samples", "vocab_size"])
@pytest.mark.parametrize("value", [2.0, True, [2]])
def test_names_a_count_of_another_type(name, value):
    for call in (
        lambda **x: sample(STATES, WEIGHT, **x),
        lambda **x: sample_from_logits(STATES @ WEIGHT.T, **x),
        lambda **x: warmup(WEIGHT, **x),
    ):
        with pytest.raises(TypeError, match=f"{name} must be an int, got {type(value).__name__}"):
            call(**{name: value})


@pytest.mark.parametrize("impl", ["reference", "streaming"])
def test_takes_numpy_s_integers(impl):
    expected = sample(STATES, WEIGHT, seed=SEEDS, num_samples=2, vocab_size=20, impl=impl).token_ids
    out = sample(STATES, WEIGHT, seed=SEEDS, num_samples=np.int64(2), vocab_size=np.int64(20), impl=impl)
    assert torch.equal(out.token_ids, expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64])
def test_rows_are_numbers_in_every_integer_dtype(dtype):
    rows = torch.tensor([0, 1, 1, 3], dtype=torch.int64).to(dtype)  # as a mask it would be rows 1 to 3
    sampler, counts = LMHeadSampler(WEIGHT, max_batch_size=4), TokenCounts(4, 5)
    sampler.offsets.fill_(7)
    sampler.reset(rows=rows)
    assert sampler.offsets.tolist() == [0, 0, 7, 0]
    counts.add(torch.tensor([1, 2, 2, 3]), rows)
    assert counts.counts[:, 1:4].tolist() == [[1, 0, 0], [0, 2, 0], [0, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(
    ("rows", "error"),
    [([True, False], ValueError), (True, ValueError), ("a", TypeError), ({0}, TypeError), ([None], TypeError)],
)
def test_names_rows(rows, error):
    for reset in (LMHeadSampler(WEIGHT, max_batch_size=4).reset, TokenCounts(4, 5).reset):
        with pytest.raises(error, match="rows must be"):
            reset(rows=rows)


def test_a_sampler_of_one_row_has_a_temperature_of_its_row():
    sampler = LMHeadSampler(WEIGHT, max_batch_size=1, seed=[0], temperature=[1.0])
    sampler.reset(seed=[0], temperature=[0.0])
    assert sampler(STATES[:1]).token_ids.item() == int((STATES[0] @ WEIGHT.T).argmax())


@pytest.mark.parametrize("prompts", [5, [None, [1]], {1: 2}])
def test_names_prompts(prompts):
    with pytest.raises(TypeError, match="prompt_token_ids must be token ids"):
        TokenCounts(4, 5).reset([0, 1], prompts)


def test_made_in_inference_mode_and_used_outside():
    with torch.inference_mode():
        sampler, counts = LMHeadSampler(WEIGHT, max_batch_size=3, temperature=[1.0, 1.0, 0.5]), TokenCounts(3, 50)
    sampler(STATES, token_counts=counts, presence_penalty=0.1)
    sampler.reset(temperature=0.3)
    assert counts.counts.sum() == 3


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_traces_log_probabilities():
    def step(states):
        return sample(states, WEIGHT, seed=SEEDS, top_k=3, return_logprobs=True, top_logprobs=2).top_logprobs

    traced = torch.jit.trace(step, (STATES,))
    assert torch.equal(traced(STATES.flip(0)), step(STATES.flip(0)))
