"""The Hopper kernel that leaves its logits: they are the products, blocks are summarised as Triton's kernel does it, a
row's bits are the same in any batch and shape, the tokens are those of the plain kernel, and nothing is written
beside all that."""

import math
from typing import Any

import pytest
import torch

import flashsampling
from flashsampling import workspace
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config, dispatch, launch
from flashsampling.kernels.hopper.config import KINDS, NO_CUTOFFS
from flashsampling.outputs import DEFERRED_DRAW
from flashsampling.sampling_params import SamplingParams
from tests.api.test_token_counts import seen_of
from tests.conftest import DEVICE
from tests.kernels.triton.test_filtered import agrees
from tests.kernels.triton.test_filtered_kernel import by_token, in_blocks, key_of, masses_of, may_be_deferred
from tests.problems import CUTE_SHAPES, NEEDS_CUTE, parts_of

pytestmark = NEEDS_CUTE

ON_GPU = DEVICE.type == "cuda"
CONFIGS = CUTE_SHAPES
IDS = [f"{one.block_b}/{one.bound_buffers}" for one in CONFIGS]
WIDE = [one for one in (config.CONFIGS if ON_GPU else CONFIGS) if one.halves == 2]
INF, LOG2_E = math.inf, math.log2(math.e)
BOTH = True, True


@pytest.fixture(autouse=not ON_GPU)
def left_zero(monkeypatch):
    """Where there is no GPU every launch has a workspace of its own: each is left zero."""
    buffers = []

    def zeroed_words(words, device):
        buffers.append(torch.zeros(words, dtype=torch.int64, device=device))
        return buffers[-1]

    monkeypatch.setattr(launch, "zeroed_words", zeroed_words)
    yield
    assert not any(int(buffer.count_nonzero()) for buffer in buffers)


def make_step(
    batch: int, vocab: int, dim: int = 72, dtype: torch.dtype = torch.bfloat16, num_samples: int = 1
) -> SampleInputs:
    """Of a padded weight, whose rows beyond the vocabulary are NaN."""
    weight = torch.randn(vocab + 3, dim, device=DEVICE).to(dtype)
    weight[vocab:] = math.nan
    temperature = torch.rand(batch, device=DEVICE) * 1.5 + 0.2
    temperature[::3] = 0.0
    return SampleInputs(
        torch.randn(batch, dim, device=DEVICE).to(dtype),
        weight,
        temperature,
        torch.randint(-(2**63), 2**63 - 1, (batch,), device=DEVICE),
        torch.randint(-(2**63), 2**63 - 1, (batch,), device=DEVICE),
        num_samples,
        vocab,
    )


def check(
    step: SampleInputs,
    shape: config.TileConfig | None = None,
    draws: int | None = None,
    transforms: tuple[int | float, ...] = dispatch.NO_TRANSFORMS,
) -> tuple:
    """What is left of a step: (logits, keys, sums, raw sums), all of it right."""
    draws = step.num_samples if draws is None else draws
    logits, (keys, sums, raw_sums), drawn = dispatch.run_with_logits(step, draws, BOTH, shape, transforms)
    batch, vocab = step.hidden_states.shape[0], step.vocab_size
    assert logits.shape == (batch, vocab)
    assert logits.stride(0) % 4 == 0
    blocks = in_blocks(logits)
    assert torch.equal(keys, key_of(blocks.amax(2)))
    known = ~blocks.isnan().any(2)
    ones = torch.ones(batch, device=DEVICE)
    for found, temperature in ((sums, step.rows().temperature), (raw_sums, ones)):
        expected = masses_of(blocks, temperature)
        torch.testing.assert_close(found.double()[known], expected[known], rtol=1e-5, atol=0)
    if draws:
        assert torch.equal(drawn, launch.run(step, shape).ids)
    assert all(int(buffer.count_nonzero()) == 0 for buffer in workspace._per_stream.values())
    return logits, keys, sums, raw_sums


def ragged(shape: config.TileConfig) -> list[tuple[int, int]]:
    """(batch, vocab): full and ragged blocks of rows and of tokens, one and several."""
    if not ON_GPU:
        return [(shape.block_b - 3, 300), (1, 1)]
    return [(shape.block_b - 3, 1000), (shape.block_b + 5, 129), (shape.block_b, 31), (1, 1)]


def logits_gemm(step: SampleInputs) -> torch.Tensor:
    return step.hidden_states.double() @ step.weight[: step.vocab_size].double().T


@pytest.mark.quick(2)
@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
@pytest.mark.parametrize("vocab", [1, 17, 127, 128, 1000, 5003] if ON_GPU else [17, 300])
def test_every_shape(vocab, shape):
    """Full and ragged blocks of rows, one and several."""
    for batch in {1, shape.block_b - 3, shape.block_b, 2 * shape.block_b - 5}:
        step = make_step(batch, vocab)
        logits, *_ = check(step, shape)
        torch.testing.assert_close(logits.double(), logits_gemm(step), rtol=2e-5, atol=2e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "vocab", "dim"), [(1, 151936, 512), (67, 128256, 256), (256, 151936, 256), (300, 50257, 64)]
)
def test_large_vocabularies(batch, vocab, dim, dtype):
    """Many tiles per CTA, one stage per tile, hidden states of whatever stride."""
    step = make_step(batch, vocab, dim, dtype)
    logits, *_ = check(step)
    assert (logits - logits_gemm(step)).abs().max() < 2e-3
    wide = torch.nn.functional.pad(step.hidden_states, (0, 1))[:, :dim]  # rows that the copy engine does not read
    assert torch.equal(check(step._replace(hidden_states=wide))[0], logits)


@pytest.mark.gpu
def test_more_logits_than_32_bits_count():
    """B * V above 2**31: 9 GB of them."""
    batch, vocab = 4096, 2**31 // 4096 + 1000
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB")
    step = make_step(batch, vocab, 64)
    logits, (keys, *_), drawn = dispatch.run_with_logits(step, 1, BOTH)
    rows = [0, 1, 2000, batch - 1]
    assert torch.equal(keys[rows], key_of(in_blocks(logits[rows]).amax(2)))
    exact = step.hidden_states[rows].double() @ step.weight[:vocab].double().T
    assert (logits[rows] - exact).abs().max() < 2e-3
    assert torch.equal(drawn, launch.run(step).ids)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 0.3, INF, None])
def test_temperatures(temperature):
    """One of all rows, or one of each."""
    step = make_step(150 if ON_GPU else 40, 300)
    if temperature is None:
        step.rows().temperature[:8] = torch.tensor([0.0, 9e-7, 1e-6, 1e-5, 7e-4, 1.0, 1e6, INF], device=DEVICE)
    else:
        step = step._replace(temperature=temperature)
    check(step)


@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
def test_special_values(shape):
    """Rows of NaN, zeros, infinities with and without finite logits beside them, and the largest numbers."""
    vocab, big = 1000, 3e38
    step = make_step(shape.block_b, vocab)
    states, weight = step.hidden_states.clone(), step.weight.clone()
    states[:, :3] = 0.0
    weight[:vocab, :3] = 0.0
    weight[:vocab, 0] = torch.randint(-1, 2, (vocab,), device=DEVICE).bfloat16() * big  # times big: infinities
    weight[:128, 0] = -big
    weight[200:260, 1] = big
    weight[:vocab, 2] = 1.0
    for row, values in enumerate(
        [(big, 0, 0), (0, big, 0), (0, 0, big), (math.nan, 0, 0), (0, 0, 0), (0, 0, INF), (0, 0, -INF)]
    ):
        states[row] = torch.tensor([*values, *[0.0] * 69], device=DEVICE).bfloat16()
    logits, keys, *_ = check(step._replace(hidden_states=states, weight=weight), shape)
    assert (logits[0, :128] == -INF).all()
    assert (logits[0] == INF).any()
    assert logits[3].isnan().all()
    assert (logits[5] == INF).all()
    assert (keys[3] == 0x7FFFFFFF).all()


@pytest.mark.quick(3)
@pytest.mark.parametrize("draws", [0, 1, 5])
@pytest.mark.parametrize("batch", [3, 64, 150, 256] if ON_GPU else [40, 256])
def test_draws(batch, draws):
    """None, with which there are neither noise nor search, and several, with which there are no codes."""
    step = make_step(batch, 3001 if ON_GPU else 300, num_samples=max(draws, 1))
    none = check(step, draws=0)
    for a, b in zip(check(step, draws=draws), none):
        assert torch.equal(a, b)


@pytest.mark.parametrize("masses", [None, (False, False), (True, False), (False, True)])
def test_what_is_not_wanted_is_not_there(masses):
    step = make_step(*((250, 3001) if ON_GPU else (40, 300)))
    logits, keys, *both = check(step)
    fewer, (fewer_keys, *some), _ = dispatch.run_with_logits(step, 1, masses)
    assert torch.equal(fewer, logits)
    assert torch.equal(fewer_keys, keys)
    for wanted, found, expected in zip(masses or (False, False), some, both):
        assert torch.equal(found, expected) if wanted else found is None


def test_a_row_is_the_same_in_any_batch_and_shape():
    step = make_step(256, *((4001, 512) if ON_GPU else (300, 200)))
    whole = check(step)
    for shape in CONFIGS:
        for first in (0, 97):
            part = step.part(first, min(first + 2 * shape.block_b - 3, 256))
            for some, all_of_it in zip(check(part, shape), whole):
                assert torch.equal(some, all_of_it[first : first + len(some)])


@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
@pytest.mark.parametrize("vocab", [127, 1000] if ON_GPU else [300])
def test_nothing_is_written_beside(vocab, shape):
    """Rows beyond the batch, tokens beyond the vocabulary; and all of the rest is written."""
    blocks, poison = -(-vocab // 128) * 4, -12345.0
    for batch in (1, shape.block_b - 1, shape.block_b + 1):
        step = make_step(batch, vocab)
        logits = torch.full((2 * shape.block_b + 8, 1024), poison, device=DEVICE)
        others = [torch.full((2 * shape.block_b + 8, blocks), poison, device=DEVICE) for _ in range(3)]
        at = 4  # rows before
        outputs = [tensor[at:].data_ptr() for tensor in (logits, *others)]
        launch.run(step, shape, KINDS["logits"], (*dispatch.NO_TRANSFORMS, outputs[0], 4096, *outputs[1:], *NO_CUTOFFS))
        for tensor, columns in ((logits, vocab), *((other, blocks) for other in others)):
            written = torch.zeros_like(tensor, dtype=torch.bool)
            written[at : at + batch, :columns] = True
            assert torch.equal(tensor != poison, written)


@pytest.mark.gpu
def test_a_graph_replays_it():
    step = make_step(70, 5003, num_samples=1)
    eager = dispatch.run_with_logits(step, 1, BOTH)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits, (keys, sums, raw_sums), drawn = dispatch.run_with_logits(step, 1, BOTH)
    for _ in range(20):
        step.hidden_states.copy_(torch.randn_like(step.hidden_states))
        graph.replay()
        eager = dispatch.run_with_logits(step, 1, BOTH)
        for a, b in zip((logits, keys, sums, raw_sums, drawn), (eager[0], *eager[1], eager[2])):
            assert torch.equal(a, b)


@pytest.mark.gpu
def test_launches_that_follow_each_other_share_nothing():
    """Plain, with logits and without draws, in turn, on one workspace."""
    step = make_step(256, 20_000, 64)
    expected = launch.run(step).ids
    logits = dispatch.run_with_logits(step, 1, BOTH)[0]
    for _ in range(50):
        assert torch.equal(dispatch.run_with_logits(step, 0, None)[0], logits)
        assert torch.equal(launch.run(step).ids, expected)
        again, _, drawn = dispatch.run_with_logits(step, 1, BOTH)
        assert torch.equal(again, logits)
        assert torch.equal(drawn, expected)


LOWEST, POISON = -(2**31), -12345.0
VOCAB = 6_005 if ON_GPU else 2_005  # of ``several_tiles``


@pytest.fixture
def several_tiles(monkeypatch):
    """Of every CTA of a vocabulary of 20,000 and more, which are as many as cutoffs need; without a GPU of 2,000."""
    if not ON_GPU:
        monkeypatch.setattr(launch, "multiprocessors", lambda device: 8)
        launch._plan.cache_clear()
        yield
        launch._plan.cache_clear()
    else:
        yield


def run_with_cutoffs(
    step: SampleInputs,
    wanted: SamplingParams,
    shape: config.TileConfig | None,
    outputs: tuple[torch.Tensor | None, ...],  # logits by block, keys, masses
    cutoffs: torch.Tensor,
) -> torch.Tensor:
    """What it draws; the rest is written to ``outputs`` and ``cutoffs``."""
    logits, keys, masses = (0 if output is None else output.data_ptr() for output in outputs)
    addresses = logits, outputs[0].stride(0) * 4, keys, masses, 0
    arguments = (*dispatch.NO_TRANSFORMS, *addresses, *dispatch._cutoff_arguments(wanted, cutoffs))
    return launch.run(step, shape, KINDS["logits"], arguments).ids


def are_deferred(step: SampleInputs, wanted: SamplingParams, shape: config.TileConfig | None = None) -> torch.Tensor:
    """(B,) bool: rows of a block all of whose draws are deferred to the filtered-sampling kernel."""
    batch, dim = step.hidden_states.shape
    left = may_be_deferred(step._replace(params=wanted)) & (
        torch.as_tensor(wanted.top_k, device=DEVICE) <= config.CUTOFF_KEYS
    )
    block = (shape or config.choose_config(batch, dim)).block_b
    return torch.cat([of_block.all().expand(len(of_block)) for of_block in left.split(block)])


def stored_share(
    step: SampleInputs,
    wanted: SamplingParams,
    shape: config.TileConfig | None = None,
    without: tuple[Any, ...] | None = None,
) -> torch.Tensor:
    """How much of a row's logits is stored, (B,), where those below cutoffs need not be: all that must be is.
    ``without``: the step's without cutoffs, where it has been made."""
    batch, vocab = len(step.hidden_states), step.vocab_size
    logits, (keys, sums, _), drawn = without or dispatch.run_with_logits(step, 1, (True, False), shape)
    stored = torch.full((batch, -(-vocab // 128) * 128), POISON, device=DEVICE)
    again, cutoffs = torch.zeros_like(keys), torch.full((batch,), 77, dtype=torch.int32, device=DEVICE)
    masses = torch.full_like(sums, math.nan)
    ids = torch.where(are_deferred(step, wanted, shape), DEFERRED_DRAW, drawn)
    assert torch.equal(run_with_cutoffs(step, wanted, shape, (stored, again, masses), cutoffs), ids)
    assert torch.equal(again, keys)
    top_k = torch.zeros(batch, dtype=torch.int64, device=DEVICE) + wanted.top_k
    by_top_k = (top_k > 0) & (top_k < vocab)
    made = ~by_top_k | wanted.may_be_joint()
    assert torch.equal(masses.view(torch.int32)[made], sums.view(torch.int32)[made])
    stored = by_token(stored)
    assert (stored[:, vocab:] == POISON).all()
    stored = stored[:, :vocab]
    there = stored != POISON
    assert torch.equal(stored[there], logits[there])
    needed = (in_blocks(torch.ones_like(logits)) > 0) & (keys >= cutoffs[:, None])[:, :, None]
    assert (in_blocks(there.float()) > 0)[needed].all()
    min_p = torch.zeros(batch, device=DEVICE) + wanted.min_p
    ordered = keys.sort(dim=1, descending=True).values
    rank = config.cutoff_rank(top_k)
    found = ordered.gather(1, (rank.clamp(1, keys.shape[1]) - 1)[:, None])[:, 0]
    assert (cutoffs <= found)[by_top_k & (rank <= keys.shape[1])].all()
    assert (cutoffs == LOWEST)[by_top_k & (rank > config.CUTOFF_KEYS)].all()
    least = logits.double().amax(1) + min_p.clamp(max=1).double().log() * step.rows().temperature.double()
    assert (cutoffs <= key_of(least.float()))[~by_top_k & (min_p > 0)].all()
    assert (cutoffs == LOWEST)[~by_top_k & ~(min_p > 0)].all()
    assert all(int(buffer.count_nonzero()) == 0 for buffer in workspace._per_stream.values())
    return there.float().mean(1)


@pytest.mark.quick(0)
@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
def test_cutoffs(shape, several_tiles):
    """Found in time or not: what they leave out is below them. By numbers, and by rows of either kind, of both and of
    none."""
    for batch, vocab, dim in (
        [(shape.block_b, 30_000, 1024), (shape.block_b // 2 + 1, 20_005, 512), (2 * shape.block_b - 3, 70_001, 64)]
        if ON_GPU
        else [(shape.block_b - 1 if shape.block_b > 8 else 21, 2_005, 72)]
    ):
        step = make_step(batch, vocab, dim)
        top_k = torch.randint(-1, 600 if ON_GPU else 60, (batch,), device=DEVICE)
        top_k[::4] = 0
        top_k[1::7] = vocab
        min_p = torch.rand(batch, device=DEVICE) ** 4
        min_p[::3] = 0
        min_p[1::5] = 1.0
        without = dispatch.run_with_logits(step, 1, (True, False), shape)
        for wanted in (
            SamplingParams(top_k=50),
            SamplingParams(top_k=1),
            SamplingParams(top_k=600, min_p=0.5),
            SamplingParams(min_p=0.05),
            SamplingParams(top_k=top_k, min_p=min_p),
            SamplingParams(top_k=top_k.int(), min_p=0.3),
            SamplingParams(top_k=top_k, top_p=0.8, joint_top_p=1),
        ):
            stored_share(step, wanted, shape, without)
        stored_share(step._replace(temperature=1.7), SamplingParams(min_p=0.02), shape)


@pytest.mark.quick(0)
@pytest.mark.parametrize("shape", WIDE, ids=lambda shape: f"{shape.block_b}")
def test_masses_of_rows_without_a_top_k_beside_rows_with_one(shape, several_tiles):
    """Above 192 columns a thread may sum up a column that another warpgroup has; each looks at its own rows."""
    step = make_step(shape.block_b, VOCAB)
    check(step, shape, draws=0)  # or the kernel is compared with itself
    without = dispatch.run_with_logits(step, 1, (True, False), shape)
    for rows in (
        slice(0, shape.block_b // 2),
        slice(shape.block_b // 2, None),
        slice(0, 0),
        slice(96, 128),
        slice(128, 129),
    ):
        top_k = torch.full((shape.block_b,), 20, device=DEVICE)
        top_k[rows] = 0
        stored_share(step, SamplingParams(top_k=top_k), shape, without)


@pytest.mark.quick(0)
@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
def test_deferred_draws(shape, several_tiles):
    """By a block whose rows all have a top-k. One row that is greedy or hot without limit, or whose top-k is none or
    great, has all of its block drawn. Cutoffs are found as before."""
    rows = shape.block_b
    step = make_step(2 * rows - 3, VOCAB, 64)._replace(temperature=torch.rand(2 * rows - 3, device=DEVICE) + 0.2)
    without = dispatch.run_with_logits(step, 1, (True, False), shape)
    top_k = torch.randint(1, 513, (len(step.hidden_states),), device=DEVICE)
    assert are_deferred(step, SamplingParams(top_k=top_k), shape).all()
    stored_share(step, SamplingParams(top_k=top_k), shape, without)
    for row, value in ((0, 0), (rows - 1, 513), (rows, step.vocab_size), (2 * rows - 4, -1)):
        some = top_k.clone()
        some[row] = value
        assert are_deferred(step, SamplingParams(top_k=some), shape).sum() == (rows - 3 if row < rows else rows)
        stored_share(step, SamplingParams(top_k=some), shape, without)
    for row, warmth in ((0, 0.0), (rows, 9.9e-7), (rows - 1, 2.0**100), (1, INF), (rows + 1, math.nan)):
        temperature = step.rows().temperature.clone()
        temperature[row] = warmth
        other = step._replace(temperature=temperature)
        assert 0 < are_deferred(other, SamplingParams(top_k=9), shape).sum() < 2 * rows - 3
        stored_share(other, SamplingParams(top_k=9), shape)


@pytest.mark.quick(0)
@pytest.mark.parametrize("batch", [1, 16, 100, 256, 300] if ON_GPU else [7])
def test_whose_draws_are_left_does_not_matter(batch):
    """The oracle's tokens; and the others' bits, where one row of the block wants its draw. With rows of infinities and
    NaN, and what else is done with the codes that are not made."""
    step = make_step(batch, 4099 if ON_GPU else 1001, 64)
    temperature = torch.rand(batch, device=DEVICE) * 1.5 + 0.2
    step.weight[: step.vocab_size, :3] = 0.0
    step.weight[[50, 700], 0], step.weight[90, 1], step.weight[: step.vocab_size, 2] = 1e38, 1e38, 1.0
    step.hidden_states[:, :3] = 0.0
    step.hidden_states[1::5, 0] = 1e4  # two of +inf
    step.hidden_states[2::5, 1] = -1e4  # -inf
    step.hidden_states[3::5, 2] = math.nan
    counts = torch.where(torch.rand(batch, step.vocab_size, device=DEVICE) < 0.05, 2, 0).int()
    penalties = SamplingParams(counts=counts, seen=seen_of(counts), frequency_penalty=0.3, repetition_penalty=1.2)
    mask = torch.randint(-(2**31), 2**31 - 1, (batch, -(-step.vocab_size // 32)), dtype=torch.int32, device=DEVICE)
    top_k = torch.randint(1, 200, (batch,), device=DEVICE)
    for wanted in (
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(top_k=top_k, min_p=0.01),
        SamplingParams(top_k=top_k.int(), top_p=0.4, joint_top_p=1),
        penalties._replace(top_k=top_k, top_p=0.9),
        penalties._replace(top_k=5, token_mask=mask),
        SamplingParams(top_k=top_k, top_p=0.9, logprobs=True, top_logprobs=3),
    ):
        whole = step._replace(params=wanted, temperature=temperature)
        drawn = agrees(launch.run(whole), whole)
        assert (drawn.ids[:batch] >= 0).float().mean() >= 0.7 - 1 / batch
        others = torch.arange(batch, device=DEVICE) != batch // 2
        greedy = whole._replace(temperature=torch.where(others, temperature, 0.0))
        again = parts_of(launch.run(greedy), greedy)
        for part, values in parts_of(drawn, whole).items():
            assert torch.equal(values[others].nan_to_num(7.0), again[part][others].nan_to_num(7.0)), part


@pytest.mark.quick(0)
@pytest.mark.skipif(ON_GPU, reason="there a launch so small may be over first; test_cutoffs_leave_most_out asks more")
def test_cutoffs_are_found(several_tiles):
    """And leave something out, or what the others assert says nothing."""
    shape = config.CONFIGS[0]
    step = make_step(2 * shape.block_b, VOCAB, 64)
    for wanted in (SamplingParams(top_k=5), SamplingParams(min_p=0.5)):
        assert min(float(stored_share(step, wanted, shape).mean()) for _ in range(5)) < 1


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16, 64, 130, 256, 300])
def test_cutoffs_leave_most_out(batch):
    """Of a launch of nine tiles per CTA and more, by its first."""
    step = make_step(batch, 151_936, 2048)._replace(temperature=1.0)
    step.hidden_states.mul_(0.1)
    assert stored_share(step, SamplingParams(top_k=50)).max() < 0.7
    assert stored_share(step, SamplingParams(min_p=0.1)).max() < 0.7
    assert stored_share(step, SamplingParams(top_p=0.9)).min() == 1.0


def test_cutoffs_of_special_rows(several_tiles):
    """Ties, infinities, NaN, rows of equal logits, any temperature."""
    batch, vocab, dim = (48, 40_000, 1024) if ON_GPU else (48, 2_500, 64)
    step = make_step(batch, vocab, dim)
    states, weight = torch.zeros_like(step.hidden_states), torch.zeros_like(step.weight)
    states[:, 0], states[1::4, 1], states[2::4, 2], states[3::4, 3] = 1.0, 1.0, 1.0, 1.0
    weight[:vocab, 0] = torch.randint(-3, 4, (vocab,), device=DEVICE).bfloat16()
    states[::5, 0] = 0.0
    states[:, 1:3] *= 10.0
    weight[[700, vocab - 100], 1], weight[200:, 2] = 3e38, -3e38  # ten times that is infinite
    weight[300, 3] = 3e38
    states[3::8, 3], states[7::8, 3] = INF, -INF
    temperature = torch.tensor([1.0, 1e-6, 1e6, INF, 0.0, 3e-5], device=DEVICE).repeat(8)
    step = step._replace(hidden_states=states, weight=weight, temperature=temperature)
    logits, (keys, *_), drawn = dispatch.run_with_logits(step, 1, (False, False))
    for wanted in (SamplingParams(top_k=50), SamplingParams(min_p=0.1), SamplingParams(min_p=1.0)):
        again = torch.full((batch, -(-vocab // 128) * 128), POISON, device=DEVICE)
        cutoffs = torch.empty(batch, dtype=torch.int32, device=DEVICE)
        assert torch.equal(run_with_cutoffs(step, wanted, None, (again, keys, None), cutoffs), drawn)
        needed = (in_blocks(torch.ones_like(logits)) > 0) & (keys >= cutoffs[:, None])[:, :, None]
        again = by_token(again)[:, :vocab]
        same = in_blocks((again.view(torch.int32) == logits.view(torch.int32)).float()) > 0
        assert same[needed].all()


@pytest.mark.quick(0)
@pytest.mark.parametrize("batch", [1, 16, 100, 256, 300] if ON_GPU else [6])
def test_steps_do_not_depend_on_cutoffs(batch, monkeypatch, several_tiles):
    """Of nine tiles per CTA, with rubbish where nothing is stored; the oracle's tokens. Flat rows among them, whose
    candidates are more than have room, and rows without a filter."""
    vocab = 151_936 if ON_GPU else 2_500
    step = make_step(batch, vocab, 256 if ON_GPU else 64)
    step.hidden_states.mul_(torch.rand(batch, 1, device=DEVICE).bfloat16() * (0.3 if ON_GPU else 0.6))
    step.hidden_states[::6] *= 1e-3
    top_k = torch.randint(0, 300, (batch,), device=DEVICE)
    min_p = torch.rand(batch, device=DEVICE) ** 3
    top_k[::3], min_p[::2] = 0, 0.0
    top_p = torch.rand(batch, device=DEVICE)
    for wanted in (
        SamplingParams(top_k=50, top_p=0.9),
        SamplingParams(min_p=0.05),
        SamplingParams(min_p=1e-4, top_p=0.95),
        SamplingParams(top_k=500, min_p=0.01),
        SamplingParams(top_k=top_k, top_p=0.8, min_p=min_p),
        SamplingParams(top_k=50, top_p=0.4, joint_top_p=1),
        SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p, joint_top_p=top_k.int() % 2),
        SamplingParams(top_k=top_k.int(), min_p=min_p, soft_cap=30.0),
    ):
        whole = step._replace(params=wanted)
        with monkeypatch.context() as patch:
            patch.setattr(dispatch, "_allocate_cutoffs", lambda step: None)
            expected = launch.run(whole).ids
        for value in (math.nan, INF, 1e38) if ON_GPU else (math.nan,):
            torch.full((batch, vocab), value, device=DEVICE)  # and given back: what the step's logits are written to
            assert torch.equal(launch.run(whole).ids, expected)
        some = whole.part(0, min(batch, 8))
        agrees(launch.run(some), some, tolerance=2e-3)


@pytest.mark.gpu
def test_sample_takes_it_and_warmup_compiles_it(monkeypatch):
    from flashsampling.kernels.hopper import cache

    step = make_step(20, 4099)
    weight = step.weight[: step.vocab_size].contiguous()
    names = flashsampling.warmup(weight, max_batch_size=20, top_k=50, top_p=0.9)
    assert names
    assert all(name.startswith("cute") and name.endswith("with top_k, top_p") for name in names)

    def refuse(*_):
        raise AssertionError("compiled while serving")

    monkeypatch.setattr(cache, "_compile", refuse)
    rows = step.rows()._asdict()
    for batch in (1, 9, 20):
        some = {name: value[:batch] for name, value in rows.items()}
        out = flashsampling.sample(step.hidden_states[:batch], weight, **some, top_k=50, top_p=0.9)
        same = flashsampling.sample(step.hidden_states[:batch], weight, **some, top_k=50, top_p=0.9, impl="cute")
        assert torch.equal(out.token_ids, same.token_ids)
