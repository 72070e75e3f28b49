"""Sampling problems for the tests, and the one statement of when two implementations agree."""

import importlib.util
import os
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import flashsampling
from flashsampling import exchange_protocol, noise
from flashsampling.backends import BACKENDS
from flashsampling.exchange_protocol import Shard
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper.config import CONFIGS
from flashsampling.outputs import SampleResult, layout
from flashsampling.reference import oracle as reference
from flashsampling.tensor_parallel import TensorParallel
from tests import emulator


def _runs_cute() -> bool:
    """On a Hopper GPU; without any GPU on the machine of ``tests.emulator``."""
    if not torch.cuda.is_available():
        return emulator.why_not() is None
    packages = all(importlib.util.find_spec(name) for name in ("cutlass", "tvm_ffi"))
    return packages and torch.cuda.get_device_capability() == (9, 0)


KERNELS = ("triton", "cute") if _runs_cute() else ("triton",)
IMPLEMENTATIONS = ("streaming", *KERNELS)
NEEDS_CUTE = pytest.mark.skipif("cute" not in KERNELS, reason="needs a Hopper GPU, or none and gcc, and the CuTe DSL")

# shapes of the Hopper kernel; without a GPU, where each is compiled for half a minute, some, unless all are wanted: one
# CTA and two, one instruction and two, one buffer of codes and two
ALL_SHAPES = torch.cuda.is_available() or bool(os.environ.get("FLASHSAMPLING_ALL_SHAPES"))
CUTE_SHAPES = CONFIGS if ALL_SHAPES else tuple(CONFIGS[number] for number in (0, 3, 8, 15))


def require(impl: str) -> str:
    """Skips a test where an implementation is missing."""
    missing = BACKENDS[impl].missing
    return impl if missing is None else pytest.skip(str(missing))


@dataclass
class Problem:
    hidden_states: Tensor  # (B, D)
    weight: Tensor  # (V, D)
    temperature: Tensor  # (B,)
    seed: Tensor  # (B,)
    offset: Tensor  # (B,)
    num_samples: int = 1
    vocab_size: int | None = None

    @property
    def vocab(self) -> int:
        return self.weight.shape[0] if self.vocab_size is None else self.vocab_size

    def sample(self, impl: str | None, tp: TensorParallel | None = None, package: ModuleType = flashsampling) -> Tensor:
        """(B, num_samples). ``package``: another version of it."""
        out = package.sample(
            self.hidden_states,
            self.weight,
            temperature=self.temperature,
            seed=self.seed,
            offset=self.offset,
            num_samples=self.num_samples,
            vocab_size=self.vocab_size,
            impl=impl,
            tp=tp,
        )
        return out.token_ids.view(-1, self.num_samples)

    def step(self, **others: Any) -> SampleInputs:
        """As implementations take it. ``others``: further fields."""
        rows = self.temperature, self.seed, self.offset
        return SampleInputs(self.hidden_states, self.weight, *rows, self.num_samples, self.vocab)._replace(**others)

    def winners(self, impl: str, first: int, last: int) -> Tensor:
        """(B * num_samples,) packed winners of the tokens from ``first`` up to ``last``, a shard."""
        shard = self.weight[first:last].clone()
        step = self.step(weight=shard, vocab_size=last - first, shard=Shard(first, exchange_protocol.PACKED))
        return BACKENDS[impl].run(step).ids

    def rows(self, index: slice | list[int] | Tensor) -> "Problem":
        return replace(
            self,
            hidden_states=self.hidden_states[index],
            temperature=self.temperature[index],
            seed=self.seed[index],
            offset=self.offset[index],
        )


def make_problem(
    batch: int,
    vocab: int,
    dim: int,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    num_samples: int = 1,
    vocab_size: int | None = None,
    logit_std: float = 3.0,
    seed: int = 0,
    impl: str = "",
) -> Problem:
    """Every third row is greedy, one in three is hot; seeds and offsets use all 64 bits. ``impl``: fitted to what it
    takes."""
    if impl == "cute":
        dtype, dim = torch.bfloat16 if dtype == torch.float32 else dtype, -(-dim // 8) * 8
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    temperature = torch.rand(batch, generator=generator) * 1.5 + 0.2
    temperature[::3] = 0.0
    bits = [torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator) for _ in range(2)]
    return Problem(
        normal(batch, dim).to(device, dtype),
        (normal(vocab, dim) * (logit_std / dim**0.5)).to(device, dtype),
        temperature.to(device),
        bits[0].to(device),
        bits[1].to(device),
        num_samples,
        vocab_size,
    )


def rows_only(
    batch: int,
    temperature: Tensor | float = 1.0,
    seed: Tensor | int = 1,
    offset: Tensor | int = 0,
    num_samples: int = 1,
) -> SampleInputs:
    """A step of which only the rows' parameters matter."""
    return SampleInputs(torch.empty(batch, 1), torch.empty(1, 1), temperature, seed, offset, num_samples, 1)


def fit(impl: str | None, matrix: Tensor) -> Tensor:
    """The matrix as ``impl`` takes it: for the Hopper kernel in bf16 and with columns of zeros up to a multiple of
    eight."""
    if impl != "cute":
        return matrix
    return torch.nn.functional.pad(matrix.bfloat16(), (0, -matrix.shape[1] % 8))


def logit_error_bound(problem: Problem) -> Tensor:
    """(B,) bound on the error of an fp32 logit, as a multiple of what a random sum of D such products loses.

    A tensor core truncates its sum of 16 products to 24 bits or so, D / 16 times; fp32 arithmetic rounds D times.
    Partial sums are about as large as the norm of the products, at most norm(h) * norm(w) / sqrt(D) for unstructured
    data.
    """
    dim = problem.hidden_states.shape[1]
    norms = problem.hidden_states.double().norm(dim=1) * problem.weight.double().norm(dim=1).max()
    return (8 + dim / 8) * 2.0**-23 * norms / dim**0.5


def assert_agreement(tokens: Tensor, problem: Problem, slack: float = 1.0) -> int:
    """Tokens are the oracle's, but where the oracle's two scores in question are nearer than the arithmetic can tell.

    Returns how many draws needed that excuse.
    """
    oracle = problem.sample("reference")
    if torch.equal(tokens, oracle):
        return 0
    assert ((tokens >= -1) & (tokens < problem.vocab)).all(), "token id out of range"
    assert torch.equal(tokens == -1, oracle == -1), "undefined rows differ"
    differing = (tokens != oracle).any(dim=1)
    part = problem.rows(differing)
    exact = reference.scores(part.step(), torch.float64)
    ours, theirs = (exact.gather(-1, ids[differing].clamp(min=0)[..., None])[..., 0] for ids in (tokens, oracle))
    # scores are those of the contract times min(temperature, 1), and a greedy row's are its logits
    temperature = torch.where(part.temperature < 1e-6, 0.0, part.temperature).double()
    # logit error over temperature; the noise's own error; the rounding of the score itself
    noise_error = temperature.clamp(max=1.0) * 4e-6 * 4
    bound = logit_error_bound(part) / temperature.clamp(min=1.0) + noise_error + ours.abs().amax(dim=1) * 2.0**-21
    gap = (theirs - ours).abs().amax(dim=1)
    assert (gap <= slack * 2 * bound).all(), f"scores {gap.max():.3g} apart, arithmetic explains {2 * bound.min():.3g}"
    return int((tokens != oracle).sum())


def check(impl: str, problem: Problem) -> int:
    """Agreement with the oracle, or the error that says why the Hopper kernel does not take this problem."""
    unaligned = problem.vocab > 1 and problem.weight.stride(0) % 8 != 0  # of one row no stride matters
    if impl == "cute" and (problem.weight.dtype == torch.float32 or unaligned):
        reason = "float32" if problem.weight.dtype == torch.float32 else "multiples of 16 bytes"
        with pytest.raises(ValueError, match=f"impl='cute' cannot do this: .*{reason}"):
            problem.sample(impl)
        return 0
    return assert_agreement(problem.sample(impl), problem)


def parts_of(drawn: SampleResult, step: SampleInputs) -> dict[str, Tensor]:
    """What a step gave, by name: of every part a row for each of the step's."""
    batch = len(step.hidden_states)
    return layout(batch, step.num_samples, step.params).split(drawn, batch)


def assert_same_rows(
    drawn: SampleResult, step: SampleInputs, whole: SampleResult, whole_step: SampleInputs, rows: slice | list[int]
) -> None:
    """A step has the bits that ``rows`` of a larger one have."""
    expected = parts_of(whole, whole_step)
    for name, part in parts_of(drawn, step).items():
        assert torch.equal(part.nan_to_num(7.0), expected[name][rows].nan_to_num(7.0)), name


def gumbel_at(problem: Problem) -> Tensor:
    draws = torch.arange(problem.num_samples, device=problem.seed.device)
    return noise.gumbel(problem.seed, problem.offset, draws, 0, problem.vocab)
