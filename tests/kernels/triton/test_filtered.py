"""Tokens from logits in memory, by Triton: what the oracle says, at the ends of every range, whatever the batch."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from flashsampling.inputs import SampleInputs  # noqa: E402
from flashsampling.kernels.triton.filtered import dispatch  # noqa: E402
from flashsampling.kernels.triton.filtered.dispatch import CONFIG, Config, run, unsupported  # noqa: E402
from flashsampling.noise import Stream  # noqa: E402
from flashsampling.outputs import SampleResult  # noqa: E402
from flashsampling.reference import logit_transforms  # noqa: E402
from flashsampling.reference import oracle as reference  # noqa: E402
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402
from tests.problems import assert_same_rows, parts_of  # noqa: E402
from tests.zero_words import ZERO_WORDS  # noqa: E402

# several tiles and blocks of a small vocabulary; candidates that do not all fit
TINY = Config(columns=32, width=8, capacity=128, gathered=4, many=4, tile=64, ways=4)
SMALL = CONFIG if DEVICE.type == "cuda" else TINY
# the interpreter takes its time for every program, whatever its size
WIDE = CONFIG if DEVICE.type == "cuda" else replace(SMALL, columns=128)
VOCAB, ROWS, DRAWS = (40_000, 3, 300) if DEVICE.type == "cuda" else (400, 2, 40)
INF = math.inf


def make_step(
    batch: int = ROWS,
    vocab: int = VOCAB,
    params: SamplingParams = DEFAULT_PARAMS,
    num_samples: int = 1,
    dtype: torch.dtype = torch.float32,
    std: float = 3.0,
    temperature: Tensor | float | None = None,
) -> SampleInputs:
    """Random logits, seeds and offsets; a third of the rows are hot."""
    logits = (torch.randn(batch, vocab) * std).to(dtype).to(DEVICE)
    temperature = torch.rand(batch) * 1.5 + 0.2 if temperature is None else temperature
    if isinstance(temperature, Tensor):
        temperature = temperature.to(DEVICE)
    seed, offset = (torch.randint(-(2**63), 2**63 - 1, (batch,)).to(DEVICE) for _ in range(2))
    return SampleInputs(logits, logits, temperature, seed, offset, num_samples, vocab, params=params, logits=logits)


def with_logits(step: SampleInputs, logits: Tensor) -> SampleInputs:
    return step._replace(hidden_states=logits, weight=logits, logits=logits)


def rounded(step: SampleInputs) -> SampleInputs:
    """Many equal logits in the first row."""
    logits = step.hidden_states.clone()
    logits[0] = logits[0].round()
    return with_logits(step, logits)


def of(value: Any) -> Tensor:
    return torch.tensor(value, device=DEVICE)


def _excused(step: SampleInputs, row: int, draw: int, ours: int, theirs: int, tolerance: float) -> bool:
    """Whether arithmetic explains another token: two scores as good as equal, a nucleus that ends as near p, or two
    logits that are equal but for roundings, of which it has but one."""
    part = step.part(row, row + 1)
    rows = part.rows()
    logits = reference.transform_logits(reference.head_logits(part, torch.float64), rows.temperature, part.params)
    draws = torch.tensor([draw], device=logits.processed.device)
    scores = reference.token_scores(logits, part, draws)[0, 0]
    if ours < 0 or theirs < 0:
        return False
    gap = abs(scores[ours] - scores[theirs]).item()
    if gap <= tolerance / 3 + abs(scores[theirs]).item() * 2.0**-20:
        return True
    all_draws = part._replace(num_samples=step.num_samples)
    others = [*_other_nuclei(all_draws, tolerance), _other_rounding(all_draws, ours)]
    return any(moved.ids[draw].item() == ours for moved in others)


def _other_nuclei(step: SampleInputs, tolerance: float) -> list[SampleResult]:
    """The oracle's, of nuclei that end a little earlier and a little later: by a token, where the last one's mass ends
    at p."""
    moved = [step.params.top_p * (1 + slack) for slack in (-tolerance / 15, tolerance / 15)]
    return [reference.run(step._replace(params=step.params._replace(top_p=p))) for p in moved]


def _other_rounding(step: SampleInputs, token: int) -> SampleResult:
    """The oracle's of one row, were a token's logit a few roundings greater. Kernels fuse a penalty's product into the
    sum."""
    bias = torch.zeros(step.vocab_size, device=step.hidden_states.device)
    if step.params.dense_bias is not None:
        bias += step.params.dense_bias
    repetition = torch.as_tensor(step.params.repetition_penalty).flatten()[0].item()
    bias[token] += _roundings(step)[0].item() * max(repetition, 1 / repetition if repetition else 1.0, 1.0)
    return reference.run(step._replace(params=step.params._replace(dense_bias=bias)))


def _roundings(step: SampleInputs) -> torch.Tensor:
    """(B,) a few roundings of the logits near a row's highest: penalties for 10**5 times leave no fractions to a
    float32."""
    processed = reference.transform_logits(
        reference.head_logits(step, torch.float64), step.rows().temperature, step.params
    ).processed
    highest = processed.masked_fill(~processed.isfinite(), -math.inf).amax(dim=1).nan_to_num(0.0, 0.0, 0.0)
    return 4 * 2.0**-23 * highest.abs()


def _rounding(step: SampleInputs) -> torch.Tensor:
    """(B, 1) what they make of a log-probability."""
    temperature = step.rows().temperature
    temperature = torch.where(temperature < logit_transforms.GREEDY_BELOW, 1.0, temperature).nan_to_num(1.0)
    return (_roundings(step) / temperature).float()[:, None]


def test_a_rounding_explains_a_token_and_no_more():
    """Of two tokens that came 10**5 times a nucleus has one: which, a fused product rounds otherwise than two
    operations."""
    torch.manual_seed(0)
    rows, times = 200, 100_000
    logits = torch.full((rows, 40), -5.0, device=DEVICE)
    logits[:, [3, 7]] = torch.rand(rows, 2, device=DEVICE) * 0.02
    counts = torch.zeros(rows, 40, dtype=torch.int32, device=DEVICE)
    counts[:, [3, 7]] = times
    frequency = -1.5 - torch.rand(rows, device=DEVICE)
    params = SamplingParams(counts=counts, frequency_penalty=frequency, presence_penalty=0.4, top_p=0.26)
    step = make_step(batch=rows, vocab=40, num_samples=2, temperature=torch.ones(rows), params=params)
    step = with_logits(step, logits)
    fused = (logits.double() - frequency.double()[:, None] * counts.double()).float() - 0.4
    ours = torch.where(fused[:, 7] > fused[:, 3], 7, 3)[:, None].expand(rows, 2)
    theirs = reference.run(step).ids[: 2 * rows].view(rows, 2)
    assert (ours != theirs).any()
    agrees(SampleResult(ours.flatten()), step)
    logits[:, 3] = logits[:, 7] + 0.5
    assert not _excused(step, 0, 0, 7, 3, 3e-5)


def test_agreement_is_asked_where_the_step_is(monkeypatch):
    """Ranks have GPUs of their own, of which ``DEVICE`` is one."""
    step = make_step(vocab=40, num_samples=2, params=SamplingParams(top_p=0.6, logprobs=True))
    drawn = reference.run(step)
    token = int(drawn.ids[0])
    monkeypatch.setitem(globals(), "DEVICE", torch.device("meta"))
    agrees(drawn, step)
    assert _excused(step, 0, 0, token, token, 3e-5)
    others = [other for other in range(40) if other != token]
    assert not all(
        _excused(step, 0, 0, other, token, 3e-5) for other in others
    )  # the oracle is asked again, in three ways


def check(step: SampleInputs, config: Config = SMALL) -> SampleResult:
    """Equal to the oracle."""
    return agrees(run(step, config), step)


def agrees(drawn: SampleResult, step: SampleInputs, tolerance: float = 3e-5) -> SampleResult:
    """What was drawn is the oracle's; values but for a tolerance, which two matmuls of long rows need more of."""
    oracle = reference.run(step)
    batch, num_samples = step.hidden_states.shape[0], step.num_samples
    assert drawn.ids.shape == oracle.ids.shape
    ours, theirs = (out.ids[: batch * num_samples].view(batch, num_samples) for out in (drawn, oracle))
    same = (ours == theirs).all(dim=1)
    for row, draw in (ours != theirs).nonzero().tolist():
        tokens = int(ours[row, draw]), int(theirs[row, draw])
        assert _excused(step, row, draw, *tokens, tolerance), (row, draw, *tokens)
    if drawn.values is not None:
        assert oracle.values is not None
        mine, others = parts_of(drawn, step), parts_of(oracle, step)
        for name in mine:
            if name in ("top_token_ids", "ranks"):
                if tolerance > 3e-5:  # near ties change places
                    continue
                assert torch.equal(mine[name][same], others[name][same]), name
            elif name != "token_ids":
                expected, slack = others[name], torch.zeros(batch, 1, device=drawn.ids.device)
                if name == "processed_logprobs":  # relative to what is kept
                    slack = _rounding(step)
                    for moved in _other_nuclei(step, tolerance):
                        other = parts_of(moved, step)
                        rows = (other["token_ids"] == mine["token_ids"]).all(dim=1) & same
                        nearer = (other[name] - mine[name]).abs() < (expected - mine[name]).abs()
                        expected = torch.where(nearer & rows[:, None], other[name], expected)
                per_row = slack.view(batch, *[1] * (expected.ndim - 1))
                expected = torch.where((expected - mine[name]).abs() <= per_row, mine[name], expected)
                torch.testing.assert_close(
                    mine[name][same], expected[same], rtol=1e-5, atol=tolerance, equal_nan=True, msg=name
                )
    return drawn


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_unfiltered(dtype, num_samples):
    check(make_step(dtype=dtype, num_samples=num_samples))


HOT = (1.0, 1e35, 1e36, 1e37, 1e38, 3e38, INF)


def hottest(params: SamplingParams, vocab: int = 401) -> SampleInputs:
    """Temperatures and logits up to the largest float, and logits that are further apart than that; the last rows also
    have infinite ones, but for the endless temperature, at which they leave no token."""
    logits = (torch.rand(2 * len(HOT) - 1, vocab) * 2 - 1) * 3.3e38
    logits[len(HOT) :, [7, vocab - 1]] = INF
    logits[len(HOT) :, 9] = torch.finfo(torch.float32).max
    step = make_step(batch=len(logits), vocab=vocab, params=params, temperature=torch.tensor(HOT + HOT[:-1]))
    return with_logits(step, logits.to(DEVICE))


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.5, logprobs=True),
        SamplingParams(top_p=0.0),
        SamplingParams(top_p=0.05, logprobs=True),
        SamplingParams(min_p=0.3, logprobs=True),
        SamplingParams(top_k=151, top_p=0.7, logprobs=True),
        SamplingParams(logprobs=True),
    ],
)
def test_masses_at_the_largest_temperatures(params):
    check(hottest(params))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=7),
        SamplingParams(top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(top_k=40, top_p=0.8),
        SamplingParams(top_k=40, top_p=0.8, min_p=0.02),
        SamplingParams(top_p=0.9, min_p=0.02),
        SamplingParams(top_k=100, min_p=0.01),
        SamplingParams(epsilon_cutoff=0.01),
        SamplingParams(top_p=0.8, epsilon_cutoff=0.02),
        SamplingParams(top_k=40, top_p=0.8, min_p=0.02, epsilon_cutoff=0.03),
        SamplingParams(top_n_sigma=2.0),
        SamplingParams(top_n_sigma=2.5, top_p=0.6, min_p=0.1),
        SamplingParams(top_n_sigma=2.5, top_k=9, top_p=0.5, joint_top_p=1, epsilon_cutoff=0.05),
        SamplingParams(stream=Stream.RECOVERY),
        SamplingParams(stream=Stream.ACCEPTANCE_COIN, top_p=0.9),
    ],
)
def test_filters(params):
    check(make_step(params=params, num_samples=2))


@pytest.mark.quick(4)
@pytest.mark.parametrize("std", [0.0, 0.01])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=VOCAB // 2),
        SamplingParams(top_p=0.9),
        SamplingParams(top_k=VOCAB - 50, top_p=0.5),
        SamplingParams(min_p=0.99),
        SamplingParams(epsilon_cutoff=1 / VOCAB),
        SamplingParams(top_n_sigma=3.0, top_p=0.9, epsilon_cutoff=1.1 / VOCAB),
        SamplingParams(),
    ],
)
def test_flat_rows(params, std):
    """More candidates than there is room for, all of them ties or next to it."""
    check(make_step(batch=1, params=params, std=std))


@pytest.mark.parametrize("top_k", [1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1, 0, -3])
def test_ties_at_the_boundary(top_k):
    """Exactly k are kept, of equal ones those of the lowest ids."""
    check(rounded(make_step(batch=1, params=SamplingParams(top_k=top_k), num_samples=2)))


ENDS = {
    "top_p": [-1.0, 0.0, 1e-30, 1e-7, 0.3, 1 - 1e-7, 1.0, 2.0],
    "min_p": [-1.0, 0.0, 1e-30, 1e-7, 1.0, 1.5],
    "epsilon_cutoff": [-1.0, 0.0, 1e-30, 0.5, 0.999, 2.0],
    "top_n_sigma": [-1.0, 0.0, 1e-30, 1e30, INF],
}


@pytest.mark.parametrize(("name", "end"), [(name, end) for name, ends in ENDS.items() for end in ends])
def test_ends(name, end):
    check(rounded(make_step(batch=2, params=SamplingParams(**{name: end}))))


@pytest.mark.quick(2)
@pytest.mark.parametrize("more", [{}, {"top_k": 200, "top_p": 0.9}, {"top_p": 0.7}, {"logprobs": True}])
def test_min_p_of_one_keeps_what_is_as_probable(more):
    """One ulp less is less probable at any temperature at which fp64 can tell; at the last ones nothing is."""
    logits = torch.full((6, 300), 2.0, device=DEVICE)
    logits[:, 1:-1] = torch.nextafter(logits, -logits)[:, 1:-1]
    temperature = torch.tensor([1.0, 8.0, 1e3, 1e6, 1e30, math.inf])
    step = make_step(
        batch=6, vocab=300, num_samples=5, temperature=temperature, params=SamplingParams(min_p=1.0, **more)
    )
    drawn = run(with_logits(step, logits), SMALL).ids[:30].view(6, 5)
    assert torch.equal(drawn, reference.run(with_logits(step, logits)).ids[:30].view(6, 5))
    assert drawn[:4].unique().tolist() == [0, 299]
    assert len(drawn[4:].unique()) > 3


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 2), (0.25, 1), (0.75, 3)])
def test_a_nucleus_that_ends_at_p_ends_there(top_p, kept):
    """Of four equal ones a half is two, to the bit."""
    logits = torch.full((1, 40), -INF, device=DEVICE)
    ids = [7, 11, 20, 33]
    logits[0, ids] = 1.0
    step = make_step(batch=1, vocab=40, num_samples=60, temperature=1.0, params=SamplingParams(top_k=4, top_p=top_p))
    assert run(with_logits(step, logits), SMALL).ids[:60].unique().tolist() == ids[:kept]


@pytest.mark.parametrize(("temperature", "less"), [(1e17, 5.0), (1e17, 5.54), (1e17, 5.56), (1e17, 8.0), (1e6, 8e-11)])
def test_min_p_of_one_ends_where_fp64_rounds_to_one(temperature, less):
    """2**-54 below 1: half of what lies between 1 and the number before it."""
    logits = torch.full((1, 40), -less, device=DEVICE)
    logits[0, 0] = 0.0
    step = make_step(
        batch=1, vocab=40, num_samples=20, temperature=torch.tensor([temperature]), params=SamplingParams(min_p=1.0)
    )
    drawn = run(with_logits(step, logits), SMALL).ids[:20]
    assert torch.equal(drawn, reference.run(with_logits(step, logits)).ids[:20])
    assert (len(drawn.unique()) == 1) == (less / temperature > 2.0**-54)


@pytest.mark.quick(1)
@pytest.mark.parametrize("more", [{}, {"top_k": 200, "top_p": 0.95}, {"logprobs": True}])
def test_an_epsilon_above_all_probabilities_keeps_the_most_probable(more):
    logits = torch.full((2, 300), 2.0, device=DEVICE)
    logits[1, 1:-1] = 1.999
    step = make_step(
        batch=2, vocab=300, num_samples=20, temperature=1.0, params=SamplingParams(epsilon_cutoff=0.999, **more)
    )
    drawn = run(with_logits(step, logits), SMALL).ids[:40].view(2, 20)
    assert torch.equal(drawn, reference.run(with_logits(step, logits)).ids[:40].view(2, 20))
    assert len(drawn[0].unique()) > 3
    assert drawn[1].unique().tolist() == [0, 299]


@pytest.mark.parametrize("more", [{}, {"top_p": 0.9}, {"top_k": 200, "logprobs": True}])
def test_top_n_sigma_of_masked_infinite_equal_and_distant_logits(more):
    """Masked tokens do not count; a row of equal logits keeps all; squares of float32's range do not overflow."""
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    logits[1, 100:] = -INF
    logits[2] = 1.5
    logits[3, 7] = INF
    logits[4] *= 1e37
    logits[5] = -INF
    logits[5, 33] = 1.0
    step = make_step(batch=6, vocab=300, num_samples=3, temperature=1.0, params=SamplingParams(top_n_sigma=1.2, **more))
    check(with_logits(step, logits))


def test_epsilon_and_sigma_by_row():
    nan = math.nan
    params = SamplingParams(
        top_k=of([0, 0, 0, 0, 40, 0, 0, 0]),
        top_p=of([1.0, 1.0, 0.8, 0.7, 0.7, 1.0, 0.8, 1.0]),
        epsilon_cutoff=of([0.0, 0.01, 0.01, 0.0, 0.02, 0.01, nan, 0.0]),
        top_n_sigma=of([0.0, 0.0, 0.0, 2.5, 2.2, 2.7, 0.0, nan]),
        logprobs=True,
    )
    drawn = check(make_step(batch=8, vocab=300, params=params, temperature=0.8))
    assert drawn.ids[6:8].tolist() == [-1, -1]


def test_filters_by_row():
    """Every row its own; NaN gives -1."""
    nan = math.nan
    params = SamplingParams(
        top_k=of([0, 5, 0, 0, 5, 1, 0, 0]),
        top_p=of([1.0, 1.0, 0.7, 1.0, 0.7, 0.5, nan, 0.5]),
        min_p=of([0.0, 0.0, 0.0, 0.1, 0.1, 0.1, 0.0, nan]),
    )
    temperature = torch.tensor([1.0, 0.0, 0.7, 2.0, 1e-6, 1.0, 1.0, 1.0])
    drawn = check(make_step(batch=8, vocab=300, params=params, temperature=temperature))
    assert drawn.ids[6:].tolist() == [-1, -1]
    narrow = SamplingParams(top_k=of([0, 5]).int())
    check(make_step(batch=2, vocab=300, params=narrow, temperature=temperature[:2]))


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.5, 1.0, 1e6, math.nan])
@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=5, top_p=0.9), SamplingParams(top_p=0.9)])
def test_temperatures(params, temperature):
    check(make_step(batch=1, params=params, temperature=temperature))


@pytest.mark.parametrize("params", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"logprobs": True}], ids=str)
def test_special_values(params):
    """NaN, infinities and the largest numbers, with and without a finite logit beside them."""
    step = make_step(batch=9, vocab=300, params=SamplingParams(**params))
    logits = step.logits.clone()
    logits[0, 77] = math.nan
    logits[1, 77] = INF
    logits[2, [50, 290]] = INF
    logits[3] = -INF
    logits[3, 12] = INF
    logits[4] = -INF
    logits[5] = -INF
    logits[5, 290] = 3.0
    logits[6] = 3.4e38
    logits[7, 5], logits[7, 6] = -3.4e38, 3.4e38
    logits[8, 10] = -INF
    check(with_logits(step, logits))


def _requested(batch: int, vocab: int, generator: torch.Generator) -> SamplingParams:
    """Everything at once."""

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=generator)

    counts = ints(0, 4, batch, vocab).int() * (rand(batch, vocab) < 0.05) | (rand(batch, vocab) < 0.03).int() << 31
    bias_ids = ints(-1, vocab + 5, batch, 9).int()
    bias_ids[:, 3] = bias_ids[:, 4]
    words = -(-vocab // 32)
    mask = ints(-(2**31), 2**31, batch, words).int() | ints(-(2**31), 2**31, batch, words).int()
    params = SamplingParams(
        bias=torch.randn(vocab, generator=generator),
        logit_scale=0.7,
        soft_cap=20.0,
        dense_bias=torch.randn(vocab, generator=generator),
        bias_ids=bias_ids,
        bias_values=torch.randn(batch, 9, generator=generator) * 5,
        counts=counts,
        repetition_penalty=rand(batch) + 0.8,
        frequency_penalty=rand(batch),
        presence_penalty=0.3,
        token_mask=mask,
        top_k=ints(0, 60, batch),
        top_p=rand(batch) + 0.3,
        min_p=rand(batch) * 0.1,
        logprobs=True,
        top_logprobs=5,
        logprob_ids=ints(-1, vocab + 3, batch, 7),
        logsumexp=True,
    )
    return SamplingParams(*(part.to(DEVICE) if isinstance(part, Tensor) else part for part in params))


@pytest.mark.every_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_at_once(dtype):
    params = _requested(ROWS, VOCAB, torch.Generator().manual_seed(1))
    check(make_step(params=params, num_samples=2, dtype=dtype))


TOGETHER = {"bias": ("logit_scale", "soft_cap"), "bias_ids": ("bias_values",), "counts": ("repetition_penalty",)}
OUTPUTS = "logprobs", "top_logprobs", "logprob_ids", "logsumexp"


@pytest.mark.parametrize("name", [*TOGETHER, "dense_bias", "token_mask", *OUTPUTS])
@pytest.mark.parametrize("filtered", [False, True])
def test_each_by_itself(name, filtered):
    everything = _requested(2, VOCAB, torch.Generator().manual_seed(2))
    chosen = {part: getattr(everything, part) for part in (name, *TOGETHER.get(name, ()))}
    if filtered:
        chosen |= {"top_k": 20, "top_p": 0.9}
    check(make_step(batch=2, params=SamplingParams(**chosen)))


def test_masks_that_leave_one_token_or_none():
    mask = torch.zeros(3, -(-VOCAB // 32), dtype=torch.int32)
    mask[1, 5] = 1 << 7
    mask[2] = -1
    for params in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(top_p=0.5)):
        step = make_step(batch=3, params=params._replace(token_mask=mask.to(DEVICE)))
        logits = step.logits.clone()
        logits[1, 3] = math.nan  # masked out: not there
        assert check(with_logits(step, logits)).ids[:2].tolist() == [-1, 167]


def test_bias_of_infinities():
    values = torch.tensor([[-100.0, 100.0, -INF, 100.0]]).expand(2, 4).contiguous().to(DEVICE)
    ids = torch.tensor([[3, 9, 11, 12]], dtype=torch.int32).expand(2, 4).contiguous().to(DEVICE)
    for params in (SamplingParams(), SamplingParams(top_k=2), SamplingParams(top_p=0.99)):
        drawn = check(make_step(batch=2, params=params._replace(bias_ids=ids, bias_values=values)))
        assert set(drawn.ids.tolist()) <= {9, 12}


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=20, top_p=0.9), SamplingParams(top_p=0.95, logprobs=True)]
)
def test_a_row_is_the_same_in_any_batch(params):
    """Bits of tokens and values; whatever lies beside it, and however its memory is strided."""
    step = make_step(batch=ROWS + 1, params=params, num_samples=2)
    same_in_any_batch(step, [1], [ROWS, 0])


def same_in_any_batch(step: SampleInputs, *some: list[int]) -> None:
    whole = run(step, SMALL)
    for rows in some:
        logits = torch.nn.functional.pad(step.hidden_states[rows], (0, 3))[:, : step.vocab_size]
        parameters = {name: getattr(step, name)[rows] for name in ("temperature", "seed", "offset")}
        part = with_logits(step._replace(**parameters), logits)
        assert_same_rows(run(part, SMALL), part, whole, step, rows)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_more_tiles_than_the_second_launch_reads(temperature, monkeypatch):
    """A vocabulary without filters may have any number; rows of NaN, of infinities and of nothing among them."""
    tiles = 256 if DEVICE.type == "cuda" else 4
    monkeypatch.setattr(dispatch, "_TILES", tiles)
    step = make_step(batch=6, vocab=(tiles + 2) * SMALL.block - 1, num_samples=2, temperature=temperature)
    logits = step.logits.clone()
    logits[1, -1] = 50.0
    logits[2, -2:] = INF
    logits[3, 5] = math.nan
    logits[4] = -INF
    logits[5] = 0.0
    assert check(with_logits(step, logits)).ids.view(6, 2)[1].eq(step.vocab_size - 1).all()
    check(with_logits(step._replace(params=SamplingParams(logit_scale=-1.0)), logits))


def test_padded_vocabulary_and_rows_apart():
    """What lies beyond the vocabulary is not read as a logit."""
    step = make_step(batch=2, params=SamplingParams(top_k=10, top_p=0.9, logprobs=True))
    wide = torch.full((2, 2 * VOCAB), math.nan, device=DEVICE)
    wide[:, :VOCAB] = step.hidden_states
    assert torch.equal(run(with_logits(step, wide), SMALL).ids, run(step, SMALL).ids)


def test_filters_keep_what_the_oracle_keeps():
    """Many draws of one row see every kept token, and no other."""
    step = make_step(
        batch=1, vocab=300, params=SamplingParams(top_k=12, top_p=0.95), num_samples=DRAWS, temperature=1.5
    )
    kept = reference.transform_logits(step.logits, step.rows().temperature, step.params).kept
    drawn = check(step).ids
    assert kept is not None
    assert set(drawn.tolist()) <= set(kept[0].nonzero()[:, 0].tolist())
    assert logit_transforms.GREEDY_BELOW == 1e-6


def test_what_it_does_not_take():
    step = make_step(batch=1)
    assert unsupported(step) is None
    assert "takes logits" in str(unsupported(step._replace(logits=None)))


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(logprobs=True), SamplingParams(top_p=of([1.0, 0.9, 0.9]))]
)
@pytest.mark.parametrize("logit", [0.0, -30.0, -200.0])
def test_words_of_zero(params, logit):
    """A token whose noise needs the refinement wins or does not as the oracle says, filtered or not."""
    seeds, offsets, tokens, _ = zip(*ZERO_WORDS, strict=True)
    step = make_step(batch=3, vocab=900, params=params, temperature=1.0, std=1.0)
    logits = step.hidden_states.clone()
    logits[range(3), tokens] = logit
    check(with_logits(step._replace(seed=of(seeds), offset=of(offsets)), logits), WIDE)
