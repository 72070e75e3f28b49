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
from flashsampling.outputs import SampleResult  # noqa: E402
from flashsampling.reference import logit_transforms  # noqa: E402
from flashsampling.reference import oracle as reference  # noqa: E402
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402
from tests.mixes import Mix  # noqa: E402
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


@pytest.mark.every_triton
@pytest.mark.quick(4)
@pytest.mark.parametrize("part", range(12))
def test_mixes(part):
    """Of everything at once, but for a soft cap: torch has another tanh, of which logits near the cap are equal that
    are not equal here. On a GPU each is kernels of its own, which Triton compiles for a minute or two."""
    for seed in range(part, 12 if DEVICE.type == "cuda" else 96, 12):
        mix = Mix(seed, device=DEVICE)
        step = mix.make(vocab=mix.random.choice((1, 5, 33, 129, 130, VOCAB)))
        step = step._replace(params=step.params._replace(soft_cap=0.0))
        check(with_logits(step, step.logits.to(mix.random.choice((torch.float32, torch.float16, torch.bfloat16)))))


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


def test_any_number_but_0_is_a_joint_top_p():
    """Of 0.4 and 0.3, which top-k leaves, the first alone has 0.56; of all tokens it takes both."""
    joint = torch.tensor([-1, 0, 1, -(2**31)], dtype=torch.int32, device=DEVICE)
    params = SamplingParams(top_k=2, top_p=0.56, joint_top_p=joint)
    step = make_step(batch=4, vocab=4, num_samples=30, temperature=1.0, params=params)
    ids = run(with_logits(step, of([0.4, 0.3, 0.2, 0.1]).log().expand(4, 4)), SMALL).ids[:120].view(4, 30)
    assert [len(row.unique()) for row in ids] == [2, 1, 2, 2]


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


@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(top_k=20, top_p=0.9), SamplingParams(top_p=0.95, logprobs=True)]
)
def test_a_row_is_the_same_in_any_batch(params):
    """Bits of tokens and values; whatever lies beside it, and however its memory is strided."""
    step = make_step(batch=ROWS + 1, params=params, num_samples=2)
    whole = run(step, SMALL)
    for rows in ([1], [ROWS, 0]):
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
