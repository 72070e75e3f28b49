"""Of one draw a kernel evaluates a few tokens, or quickly; of two it evaluates every token, with care. The tokens are
the same, bit for bit, at the ends of every range: traps 26, 27, 29."""

import importlib
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flashsampling import exchange_protocol
from flashsampling.exchange_protocol import Shard
from flashsampling.kernels.device import multiprocessors
from tests.conftest import DEVICE
from tests.problems import KERNELS, NEEDS_CUTE, Problem, make_problem

ON_GPU = DEVICE.type == "cuda"
DIM = 32


def awkward_weight(vocab: int, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """(V, DIM). Column 0 is one; 1 has a few values, so that there are ties; 2 is what an ulp or two are to column 1;
    then columns of zeros, an eighth of the values of the next ones, and normal ones."""
    device = generator.device

    def pick(*values: float) -> Tensor:
        choice = torch.randint(len(values), (vocab,), generator=generator, device=device)
        return torch.tensor(values, device=device)[choice]

    weight = torch.randn(vocab, DIM, generator=generator, device=device)
    weight[:, 0] = 1.0
    weight[:, 1] = pick(-2.0, -1.5, 0.0, 1.0, 1.5, 1.5, 1.5)
    weight[:, 2] = pick(-(2.0**-22), 0.0, 0.0, 2.0**-23, 2.0**-22)
    weight[:, 3] = 0.0
    weight[:, 4] = torch.randn(vocab, generator=generator, device=device) * 2.0**-22
    return weight.to(dtype)


def awkward_rows(weight: Tensor, batch: int, generator: torch.Generator, poisoned: bool) -> Problem:
    """Rows of every kind over the weight, scales from 1e-3 to the dtype's largest, temperatures from 1e-6 to 1e6 and
    greedy."""
    device, dtype = weight.device, weight.dtype
    largest = torch.finfo(dtype).max

    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(batch, generator=generator, device=device) * (high - low) + low

    def one_in(n: int) -> Tensor:
        return torch.randint(n, (batch,), generator=generator, device=device) == 0

    scale = 10.0 ** torch.where(one_in(3), uniform(-3, math.log10(largest)), uniform(-3, 3))
    scale = torch.where(one_in(8), largest / 4, scale)
    sign = torch.where(one_in(2), -1.0, 1.0)
    states = torch.zeros(batch, DIM, device=device)
    kind = torch.randint(6, (batch,), generator=generator, device=device)
    normal = torch.randn(batch, DIM - 5, generator=generator, device=device)
    states[:, 5:] = torch.where((kind == 0)[:, None], normal * scale[:, None] / DIM**0.5, 0.0)
    power = 2.0 ** scale.clamp(max=largest / 4).log2().floor()  # times which the ulps of columns 1 and 2 stay exact
    states[:, 0] = torch.where((kind == 1) | (kind == 2), sign * scale, 0.0)  # equal logits
    states[:, 4] = torch.where(kind == 2, scale, 0.0)  # ... but for an ulp or so
    states[:, 1] = torch.where((kind == 3) | (kind == 4), sign * power, 0.0)  # ties
    states[:, 2] = torch.where(kind == 4, power, 0.0)  # ... and what is an ulp away from one; kind 5 is zero
    if poisoned:
        states[:, 3] = torch.where(one_in(10), math.nan, torch.where(one_in(10), math.inf, 0.0))
    temperature = 10.0 ** torch.where(one_in(3), uniform(-6, -2), uniform(-6, 6))
    temperature = torch.where(one_in(8), 1e-6, torch.where(one_in(8), 1.0, temperature))
    temperature = torch.where(one_in(4), 0.0, torch.where(one_in(30), math.inf, temperature))
    bits = [torch.randint(-(2**63), 2**63 - 1, (batch,), generator=generator, device=device) for _ in range(2)]
    return Problem(states.to(dtype), weight, temperature.float(), *bits)


def shards(problem: Problem, impl: str, cuts: list[int], num_samples: int) -> Tensor:
    """(B, num_samples) tokens of a vocabulary cut in parts, by packed winners."""
    problem = replace(problem, num_samples=num_samples)
    parts = [problem.winners(impl, first, last) for first, last in itertools.pairwise([0, *cuts, problem.vocab])]
    return exchange_protocol.tokens_of(torch.stack(parts)).view(-1, num_samples)


def mismatches(impl: str, rows: int, seed: int) -> int:
    """Of at least that many awkward rows: how often a token of one draw is not the first of two, of the whole
    vocabulary or of one in shards."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    dtypes = (torch.bfloat16, torch.float16) if impl == "cute" else (torch.bfloat16, torch.float16, torch.float32)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator, device=DEVICE))

    wrong = done = problems = 0
    while done < rows:
        # small vocabularies, and those that give a CTA several tiles
        vocab = pick(1, 600) if not ON_GPU else pick(1, 3000) if pick(0, 3) == 0 else pick(3000, 70_000)
        weight = awkward_weight(vocab, dtypes[problems % len(dtypes)], generator)
        for _ in range(8 if ON_GPU else 2):
            batch = pick(1, 24) if not ON_GPU else pick(1, 520) if pick(0, 2) else (1, 64, 128, 256)[pick(0, 4)]
            problem = awkward_rows(weight, batch, generator, poisoned=problems % 4 == 3)
            expected = replace(problem, num_samples=2).sample(impl)[:, :1]
            wrong += int((problem.sample(impl) != expected).sum())
            if problems % 4 == 0:
                cuts = sorted(pick(0, vocab + 1) for _ in range(pick(1, 4)))
                wrong += int((shards(problem, impl, cuts, 1) != expected).sum())
            done += batch
            problems += 1
    return wrong


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize(
    ("rows", "seed"),
    [(100_000 if ON_GPU else 80, 1), pytest.param(1_000_000, 2, marks=[pytest.mark.gpu, pytest.mark.slow])],
)
def test_one_draw_is_the_first_of_two(impl, rows, seed):
    assert mismatches(impl, rows, seed) == 0


@pytest.mark.quick(1)
@NEEDS_CUTE
@pytest.mark.parametrize(
    ("temperature", "scale"), [(1e-6, 3.0), (1e-6, 10.0), (1e-6, 40.0), (1e-5, 40.0), (5e-6, 10.0)]
)
def test_no_row_is_lost_at_a_low_temperature(temperature, scale, device):
    """Trap 26: a bound that rounds once was above the score, which rounds twice."""
    for i in range(50 if ON_GPU else 12):
        problem = make_problem(8, 4096 if ON_GPU else 1024, 64, device, torch.bfloat16, logit_std=scale, seed=i)
        problem.temperature.fill_(temperature)
        tokens = problem.sample("cute")
        assert (tokens >= 0).all()
        assert torch.equal(tokens, replace(problem, num_samples=2).sample("cute")[:, :1])


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-4, 1.0, 1e6])
def test_logits_at_the_end_of_the_range_alone(impl, temperature, device):
    """Batches of one kind of row, which nothing but the ordinary path serves: all logits huge and negative, or
    positive."""
    generator = torch.Generator(device).manual_seed(3)
    vocab = 5000 if ON_GPU else 150
    weight = torch.zeros(vocab, 8, device=device)
    weight[:, 0] = torch.randint(1, 5, (vocab,), generator=generator, device=device) / 4
    for scale in (-3.3e38, -1e38, -6e37, 6e37, 3.3e38) if ON_GPU else (-3.3e38, 3.3e38):
        states = torch.zeros(5, 8, device=device)
        states[:, 0] = scale
        rows = torch.arange(5, device=device)
        problem = Problem(
            states.bfloat16(), weight.bfloat16(), torch.full((5,), temperature, device=device), rows, rows
        )
        tokens = problem.sample(impl)
        assert (tokens >= 0).all(), scale
        assert torch.equal(tokens, replace(problem, num_samples=2).sample(impl)[:, :1])
        assert torch.equal(tokens, problem.sample("reference")) or temperature == 1e6


@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("best", [1.5, 2.5, 3.5, -1.5, 2.0**-30])
@pytest.mark.parametrize("batch", [1, 8])
def test_an_ulp_more_wins_at_any_distance(impl, best, batch, device):
    """Trap 27: a late tile's best against what an early one has an ulp less of, greedy and at temperatures near it."""
    late = 132 * 128 + 7 if ON_GPU else 300
    vocab = late + 400
    weight = torch.zeros(vocab, 8, device=device)
    weight[:, 0] = -4.0
    weight[5, 0] = weight[late, 0] = best
    weight[5, 1] = -abs(best) * 2.0**-20
    ones = torch.ones(batch, 8, device=device, dtype=torch.bfloat16)
    temperature = torch.tensor([0.0, 1e-8, 0.0, 0.0] * 2, device=device)[:batch]
    rows = torch.arange(batch, device=device)
    problem = Problem(ones, weight.bfloat16(), temperature, rows, rows)
    assert (problem.sample(impl) == late).all()
    problem.weight[5, 1] = 0.0
    assert (problem.sample(impl) == 5).all()


@NEEDS_CUTE
@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "dim"), [(1, 512), (64, 512), (64, 4096), (160, 512), (192, 1024)])
@pytest.mark.parametrize("first_token", [0, 75_968])
def test_late_ctas_share_only_what_is_reached(batch, dim, first_token, device):
    """Greedy and sharp rows, an early token the best: CTAs that start late, or whose first tile is not the shard's,
    know its score before they share what they found themselves."""
    vocab = 75_968
    problem = make_problem(batch, vocab, dim, device, torch.bfloat16)
    problem.temperature[:] = torch.tensor([0.0, 1e-6, 1e-4, 0.0], device=device).repeat(batch)[:batch]
    problem.weight[vocab // 3] = problem.hidden_states[0] * 4
    problem.weight[70] = problem.hidden_states[-1] * 4
    run = importlib.import_module("flashsampling.kernels.hopper").run
    step = problem.step(shard=Shard(first_token, exchange_protocol.TOKENS))
    expected = run(step._replace(num_samples=2)).ids.view(batch, 2)[:, 0]
    busy, other = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16), torch.cuda.Stream()
    for turn in range(60):
        if turn % 2:
            with torch.cuda.stream(other):
                for _ in range(3):
                    busy @ busy
        assert torch.equal(run(step).ids, expected), turn


@pytest.fixture(scope="module")
def evaluations():
    """Counts what the Hopper kernel evaluates exactly, one by one and by whole tiles, with a kernel that counts."""
    from flashsampling.kernels.hopper import config, launch

    compiled = {}

    def compiled_for(shape):
        if not ON_GPU:
            from tests.emulator import hopper

            return hopper.machine_for(torch.bfloat16, shape, config.Features(counts_evaluations=True))
        import cutlass

        from flashsampling.kernels.hopper.kernel import compile_kernel

        return compile_kernel(cutlass.BFloat16, shape, counts_evaluations=True)

    def count(problem: Problem) -> tuple[int, int]:
        words = torch.zeros(1 << 16, dtype=torch.int64, device=DEVICE)

        def kernel_for(dtype, shape, features):
            assert features == config.KINDS["plain"]
            if shape not in compiled:
                compiled[shape] = compiled_for(shape)
            return compiled[shape]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(launch, "kernel_for", kernel_for)
            patch.setattr(launch, "zeroed_words", lambda needed, device: words[2 : 2 + needed])
            launch._plan.cache_clear()
            tokens = launch.run(problem.step()).ids
        launch._plan.cache_clear()
        assert torch.equal(tokens, problem.sample("cute")[:, 0])
        assert int(words[2:].count_nonzero()) == 0
        assert config.choose_config(*problem.hidden_states.shape) in compiled
        return int(words[1]), int(words[0])

    return count


def rows_of_kind(problem: Problem, kind: str) -> Problem:
    """The problem with all rows but one of that kind: "NaN", "zero", "equal" or "infinite"."""
    problem = replace(problem, hidden_states=problem.hidden_states.clone(), weight=problem.weight.clone())
    if kind == "equal":
        problem.weight[:, 0] = 1.0
    problem.hidden_states[1:] = math.nan if kind == "NaN" else 0.0
    if kind == "infinite":
        problem.hidden_states[1:, 0] = math.inf  # every logit is +inf or -inf
    elif kind == "equal":
        problem.hidden_states[1:, 0] = torch.linspace(-40, 40, len(problem.hidden_states) - 1).to(problem.hidden_states)
    return problem


KINDS = ["NaN", "zero", "equal", "infinite"]
TEMPERATURES = [0.0, 1e-6, 1e-4, 1.0]


@pytest.mark.quick(3)
@NEEDS_CUTE
@pytest.mark.parametrize("batch", [64, 256] if ON_GPU else [48])
@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_poisoned_and_equal_rows_evaluate_little(kind, temperature, batch, device, evaluations):
    """What a failed row costs is bounded: contract, section 4. Before it was, all tokens of such rows were
    evaluated."""
    vocab, dim = (151_936, 1024) if ON_GPU else (2_000, 64)
    problem = make_problem(batch, vocab, dim, device, torch.bfloat16)
    problem.temperature.fill_(temperature)
    few, crowd = evaluations(problem)
    many, dense_fallback = evaluations(rows_of_kind(problem, kind))
    print(f"{many} and {dense_fallback} evaluations, {few} and {crowd} of ordinary rows")
    if 0 < temperature < 1e-3 and kind in ("zero", "equal"):
        # so sharp that in a CTA's first tile some are as good as any: 8 to 10 of 1150 a row and multiprocessor, as the
        # evaluators happen to come in
        few += 4 * batch * multiprocessors(device)
    assert many <= 4 * few + batch
    assert dense_fallback <= (batch * vocab / 4 if kind == "infinite" else batch * vocab / 60)
