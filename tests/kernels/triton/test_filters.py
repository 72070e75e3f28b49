"""What requests ask for of a whole step, by kernels: what the oracle says, the same bits in any batch."""

import pytest
import torch

pytest.importorskip("triton")

import flashsampling
from flashsampling import ops
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import Shard
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.triton.fused.config import TritonTileConfig
from flashsampling.kernels.triton.fused.logits_gemm import logits_gemm
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from tests.conftest import DEVICE
from tests.kernels.triton.test_filtered import agrees
from tests.problems import KERNELS, assert_same_rows

pytestmark = pytest.mark.every_triton

CUDA = DEVICE.type == "cuda"
SHAPES = [None, TritonTileConfig(128, 16, 32, 4, 2, 1, False, rest_b=16)]


@pytest.mark.parametrize("config", SHAPES)
@pytest.mark.parametrize(("batch", "vocab", "dim"), [(1, 128, 8), (3, 300, 40), (37, 257, 33), (130, 500, 64)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_products(batch, vocab, dim, dtype, config):
    """Of a padded weight, whose rows beyond the vocabulary are NaN; hidden states any stride apart."""
    states = torch.randn(batch, 2 * dim, device=DEVICE).to(dtype)[:, ::2]
    weight = torch.randn(vocab + 5, dim, device=DEVICE).to(dtype)
    weight[vocab:] = float("nan")
    out = logits_gemm(states, weight, vocab, config)
    torch.testing.assert_close(out.double(), states.double() @ weight[:vocab].double().T, rtol=2e-5, atol=2e-4)
    if CUDA:  # the interpreter multiplies with numpy
        some = logits_gemm(states[batch // 2 :], weight, vocab)
        assert torch.equal(some, logits_gemm(states, weight, vocab)[batch // 2 :])


def _asked(batch: int, vocab: int) -> dict[str, SamplingParams]:
    mask = torch.randint(-(2**31), 2**31 - 1, (batch, -(-vocab // 32)), dtype=torch.int32, device=DEVICE)
    ids = torch.randint(0, vocab, (batch, 4), dtype=torch.int32, device=DEVICE)
    counts = torch.randint(0, 3, (batch, vocab), dtype=torch.int32, device=DEVICE)
    penalties = SamplingParams(counts=counts, repetition_penalty=1.2, frequency_penalty=0.3, presence_penalty=0.1)
    return {
        "top_k": SamplingParams(top_k=5),
        "top_p": SamplingParams(top_p=0.9),
        "head": SamplingParams(bias=torch.randn(vocab, device=DEVICE), logit_scale=0.5, soft_cap=3.0, top_k=20),
        "mask": SamplingParams(token_mask=mask, min_p=0.1),
        "logprobs": SamplingParams(logprobs=True, top_logprobs=3, logsumexp=True),
        "everything": penalties._replace(
            bias_ids=ids,
            bias_values=torch.randn(batch, 4, device=DEVICE),
            token_mask=mask,
            top_k=30,
            top_p=0.8,
            min_p=0.01,
        ),
    }


@pytest.mark.parametrize("name", list(_asked(1, 64)))
def test_steps_are_the_oracle_s(name):
    rows, wanted = 0, 1700 if CUDA else 3
    while rows < wanted:
        batch = 37 if CUDA else 3
        vocab, dim = (4099, 72) if CUDA else (200, 24)
        step = SampleInputs(
            torch.randn(batch, dim, device=DEVICE).bfloat16(),
            torch.randn(vocab + 3, dim, device=DEVICE).bfloat16(),
            torch.rand(batch, device=DEVICE) * 1.5,
            torch.randint(-(2**63), 2**63 - 1, (batch,), device=DEVICE),
            torch.randint(0, 2**20, (batch,), device=DEVICE),
            2,
            vocab,
            params=_asked(batch, vocab)[name],
        )
        step = step._replace(temperature=step.temperature.masked_fill(step.temperature < 0.2, 0.0))
        drawn = agrees(ops.sample(step, "triton"), step)
        rows += batch
        if not CUDA:
            continue
        some = step.part(batch // 3, batch)
        assert_same_rows(ops.sample(some, "triton"), some, drawn, step, slice(batch // 3, None))


def test_a_shard_is_refused_by_name():
    step = SampleInputs(
        torch.zeros(1, 8), torch.zeros(64, 8), 1.0, 0, 0, 1, 64, shard=Shard(64), params=SamplingParams(top_k=3)
    )
    assert BACKENDS["triton"].unsupported(step) == "a shard of a vocabulary with top_k"
    assert "shard" not in (BACKENDS["triton"].unsupported(step._replace(params=DEFAULT_PARAMS)) or "")


def test_vocabularies_that_are_too_wide_to_pick_from():
    """Refused by name where filters or log-probabilities are asked for: their code grows with the vocabulary."""
    weight = torch.zeros(1, 8, device=DEVICE).expand(2**20 + 1, 8)
    states = torch.zeros(1, 8, device=DEVICE)
    step = SampleInputs(states, weight, 1.0, 0, 0, 1, len(weight))
    for impl in KERNELS:
        unsupported = BACKENDS[impl].module.unsupported
        if unsupported(step) is None:  # cute: of a dtype and a stride that are not its own something else is said
            for params in (SamplingParams(top_k=5), SamplingParams(logsumexp=True)):
                assert "1048577 tokens with filters or log-probabilities" in unsupported(step._replace(params=params))
                assert unsupported(step._replace(params=params, vocab_size=2**20)) is None
            assert unsupported(step._replace(params=SamplingParams(soft_cap=2.0))) is None
    assert "triton" in KERNELS


@pytest.mark.parametrize("impl", ["streaming", *KERNELS])
@pytest.mark.parametrize("more", [{}, {"top_k": 3}, {"return_logsumexp": True}])
def test_no_given_ids_at_all(more, impl):
    """Asked for, and of no token."""
    states, weight = torch.randn(2, 16, device=DEVICE).bfloat16(), torch.randn(40, 16, device=DEVICE).bfloat16()
    rows = {"seed": torch.arange(2, device=DEVICE), "impl": impl, **more}
    none = torch.zeros(2, 0, dtype=torch.int64, device=DEVICE)
    for given, draw in (
        ((states, weight), flashsampling.sample),
        ((states @ weight.T,), flashsampling.sample_from_logits),
    ):
        if impl == "cute" and len(given) == 1:
            continue
        out = draw(*given, **rows, logprob_ids=none)
        assert out.given_logprobs.shape == (2, 0)
        assert torch.equal(out.token_ids, draw(*given, **rows).token_ids)
