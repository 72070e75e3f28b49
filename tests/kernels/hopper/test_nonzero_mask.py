"""Which tokens have counts, as a ``TokenCounts`` knows it and the Hopper kernel marks it in the codes of their noise:
whatever is known, the bits are those of a kernel that looks at all counts."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
pytest.importorskip("cutlass")

from cutlass import Uint32

from flashsampling import TokenCounts
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config, launch, noise
from flashsampling.kernels.hopper import dispatch as module
from flashsampling.outputs import SampleResult
from flashsampling.sampling_params import SamplingParams
from flashsampling.token_counts import num_token_groups
from tests.api.test_token_counts import seen_of
from tests.conftest import DEVICE
from tests.kernels.hopper.on_device import on_device
from tests.kernels.hopper.test_logit_transforms import by_shards, everything
from tests.kernels.hopper.test_logits import CONFIGS, IDS, ON_GPU, left_zero, make_step, ragged  # noqa: F401, a fixture
from tests.problems import NEEDS_CUTE
from tests.zero_words import ZERO_WORDS

pytestmark = NEEDS_CUTE
BATCH = 20 if ON_GPU else 7  # of a shape that is compiled in any case
MARKED = 0x80
RARE = 0x81, 0x85  # codes of the words 0, 1 and 2


def known(params: SamplingParams) -> SamplingParams:
    assert params.counts is not None
    return params._replace(seen=seen_of(params.counts))


def thinned(params: SamplingParams, share: float) -> SamplingParams:
    """A part of its counts."""
    assert params.counts is not None
    return params._replace(counts=torch.where(torch.rand(params.counts.shape, device=DEVICE) < share, params.counts, 0))


def left_and_drawn(
    step: SampleInputs, params: SamplingParams, shape: config.TileConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Processed logits, and what is drawn in the launch that makes them."""
    transforms, _held = module.transform_arguments(params, step.vocab_size)
    logits, _, drawn = module.run_with_logits(step, 1, None, shape, transforms)
    return logits, drawn


def assert_same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], what: str) -> None:
    (logits, drawn), (logits_then, drawn_then) = found, expected
    torch.testing.assert_close(logits, logits_then, rtol=0, atol=0, equal_nan=True, msg=what)
    assert torch.equal(drawn, drawn_then), what


def _bound(word: Uint32) -> Uint32:
    return noise.encode_bounds([word] * 4) & Uint32(0xFF)


def test_codes_with_marks():
    """Every code, beside every neighbour's mark: its own is found and taken away, what is left bounds as much noise;
    but for the words 0, 1 and 2, which are evaluated in any case."""
    gumbel_bounds = on_device(_bound)([0, 1, 2, 3, 2**32 - 1]).tolist()
    assert set(gumbel_bounds[:3]) == set(RARE)
    assert max(gumbel_bounds[3:]) == 127
    for code, other in itertools.product((*range(128), *RARE), (0, 1, 5, 127, *RARE)):
        word = code | other << 8 | code << 16 | other << 24
        for marks in (0x80, 0x800000, 0x80808080, 0):
            marked = noise.add_marks(Uint32(word), Uint32(marks)).value
            back = noise.remove_marks(Uint32(marked), Uint32(marks)).value
            for place in range(4):
                before, between, after = (each >> 8 * place & 0xFF for each in (word, marked, back))
                if before in RARE or not marks >> 8 * place & MARKED:
                    assert before == between == after
                else:
                    assert between & MARKED
                    assert between not in RARE
                    assert after == before + (before in (1, 5)) == between & 0x7F


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
def test_bits_are_those_of_all_counts(shape):
    """Of none, few, many and all tokens, with and without the rest."""
    for batch, vocab in ragged(shape):
        step = make_step(batch, vocab)
        every = everything(batch, vocab)
        for name, share in itertools.product(("one for all", "everything"), (0.01, 0.1, 1.0)):
            params = thinned(every[name], share)
            found, expected = (left_and_drawn(step, each, shape) for each in (known(params), params))
            assert_same(found, expected, f"{batch} {vocab} {name} {share}")


def test_what_is_not_known_to_have_counts_is_not_looked_at():
    """And too much that is known does no harm."""
    step, params = make_step(BATCH, 1000), everything(BATCH, 1000)["penalties"]
    assert params.counts is not None
    none = torch.zeros(BATCH, num_token_groups(1000), dtype=torch.uint8, device=DEVICE)
    without = left_and_drawn(step, params._replace(counts=torch.zeros_like(params.counts)))
    assert_same(left_and_drawn(step, params._replace(seen=none)), without, "nothing")
    few = thinned(params, 0.05)
    assert_same(left_and_drawn(step, few._replace(seen=none + 255)), left_and_drawn(step, few), "everything")


def test_what_lies_elsewhere_is_not_read_by_words():
    """Flags that no row of which begins at 8 bytes: all counts are looked at."""
    step, params = make_step(BATCH, 1000), thinned(everything(BATCH, 1000)["penalties"], 0.05)
    flags = known(params).seen
    assert flags is not None
    apart = torch.zeros(BATCH, 67, dtype=torch.uint8, device=DEVICE)[:, 3:]
    for other in (apart, torch.zeros(64, BATCH, dtype=torch.uint8, device=DEVICE).T):
        other.copy_(flags)
        assert module._nonzero_mask_argument(params._replace(seen=other), 0) == (0, 0)
        assert_same(left_and_drawn(step, params._replace(seen=other)), left_and_drawn(step, params), "elsewhere")


@pytest.mark.parametrize("share", [0.02, 0.3])
def test_rows_without_penalties_may_have_any_counts(share):
    """Beside rows that have some: as vLLM's, which nobody writes."""
    step, params = make_step(BATCH, 1000), thinned(everything(BATCH, 1000)["penalties"], share)
    assert params.counts is not None
    without = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}
    for name, value in without.items():
        getattr(params, name)[1::2] = value
    some = known(params)
    assert some.seen is not None
    some.seen[1::2] = 0
    there = params.counts.clone()
    there[1::2] = 0
    assert_same(left_and_drawn(step, some), left_and_drawn(step, params._replace(counts=there)), "every second row")


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [1, 40, 150, 256, 300] if ON_GPU else [7])
@pytest.mark.parametrize("extra", [{}, {"top_k": 5, "top_p": 0.9}, {"logprobs": True}], ids=str)
def test_whole_steps(extra, batch):
    """Several draws, for which there are no codes, too; and rows of infinite, tiny and no temperatures."""
    vocab = 4099 if ON_GPU else 1001
    every = everything(batch, vocab)
    for num_samples, share in ((1, 0.02), (1, 0.5), (2, 0.1)):
        step = make_step(batch, vocab, num_samples=num_samples)
        temperature = step.rows().temperature
        temperature[1::5], temperature[2::7], temperature[3::7] = 0.0, float("inf"), 1e-6
        params = thinned(every["everything"], share)._replace(**extra)
        found, expected = (
            launch.run(step._replace(temperature=temperature, params=each)) for each in (known(params), params)
        )
        assert torch.equal(found.ids, expected.ids)
        if expected.values is not None and found.values is not None:
            assert torch.equal(found.values.nan_to_num(7.0), expected.values.nan_to_num(7.0))


def test_shards():
    """Of a whole vocabulary's counts, cut anywhere."""
    batch, vocab = 150 if ON_GPU else 8, 1001
    step = make_step(batch, vocab)._replace(params=known(thinned(everything(batch, vocab)["penalties"], 0.05)))
    assert torch.equal(by_shards(step), launch.run(step).ids)


@pytest.mark.parametrize(("seed", "offset", "token", "_refinement"), ZERO_WORDS)
def test_a_word_without_a_code_keeps_its_mark(seed, offset, token, _refinement):
    """A token that has counts, and the noise of the word 0: it wins, and by its processed logit."""
    step = make_step(3, 1000)
    states, weight = torch.zeros_like(step.hidden_states), torch.zeros_like(step.weight)
    states[:, 0], weight[token, 0] = 1.0, -8.0
    counts = torch.zeros(3, 1000, dtype=torch.int32, device=DEVICE)
    counts[0, token] = 1
    seeds, offsets = (torch.tensor([each, each, 5], device=DEVICE) for each in (seed, offset))
    step = step._replace(hidden_states=states, weight=weight, seed=seeds, offset=offsets, temperature=1.0)
    for presence in (0.5, 60.0):
        drawn = launch.run(step._replace(params=known(SamplingParams(counts=counts, presence_penalty=presence)))).ids
        assert (drawn[0] == token) == (presence < 1)
        assert drawn[1] == token
        assert drawn[2] != token


def test_a_step_reads_what_was_written_to_the_counts():
    """By its owner too, who knows nothing of groups."""
    vocab = 700
    states, weight = torch.ones(2, 8, device=DEVICE).bfloat16(), torch.zeros(vocab, 8, device=DEVICE).bfloat16()
    weight[5], weight[600] = 2.0, 1.9
    state = TokenCounts(2, vocab, device=DEVICE)

    def drawn() -> list[int]:
        params = SamplingParams(**state.read(2)._asdict(), presence_penalty=3.0)
        ids: SampleResult = launch.run(SampleInputs(states, weight, 0.0, 0, 0, 1, vocab, params=params))
        return ids.ids.tolist()  # type: ignore[no-any-return]

    assert drawn() == [5, 5]
    state.counts[1, 5] = 1
    assert drawn() == [5, 600]
    state.counts[1, 5] = 0
    assert drawn() == [5, 5]


@pytest.mark.gpu
def test_a_graph_counts_on():
    """A replay marks what replays before it have counted."""
    batch, vocab = 70, 5003
    step = make_step(batch, vocab)._replace(temperature=0.0)
    state, other = (TokenCounts(batch, vocab, device=DEVICE) for _ in range(2))

    def draw(state: TokenCounts) -> torch.Tensor:
        ids = launch.run(
            step._replace(params=SamplingParams(**state.read(batch)._asdict(), presence_penalty=100.0))
        ).ids
        state.add(ids)
        return ids

    draw(TokenCounts(batch, vocab, device=DEVICE))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drawn = draw(state)
    rounds = []
    for _ in range(5):
        graph.replay()
        rounds.append(drawn.clone())
        assert torch.equal(drawn, draw(other))
    assert all(len(set(row.tolist())) == 5 for row in torch.stack(rounds, 1))  # no token twice
    assert torch.equal(state.counts, other.counts)


@pytest.mark.parametrize("share", [0.05, 1.0])
@pytest.mark.parametrize("marks", [False, True])
def test_counts_of_other_rows(share, marks):
    """Rows of counts lie anywhere in a larger matrix, as those of a ``RequestPool`` do."""
    step, params = make_step(BATCH, 1000), thinned(everything(BATCH, 1000)["everything"], share)
    assert params.counts is not None
    rows = torch.randperm(2 * BATCH, device=DEVICE)[:BATCH]
    counts = torch.full((2 * BATCH, 1000), 7, dtype=torch.int32, device=DEVICE).index_copy(0, rows, params.counts)
    apart = params._replace(counts=counts, counts_rows=rows)
    expected = left_and_drawn(step, known(params) if marks else params)
    assert_same(left_and_drawn(step, known(apart) if marks else apart), expected, "rows")
