"""What the Triton kernel does besides giving the right tokens: passes, padding, parameters of any stride."""

import math
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")

from flashsampling.exchange_protocol import PACKED, Shard, tokens_of  # noqa: E402
from flashsampling.kernels.triton.fused import exact_pass  # noqa: E402
from flashsampling.kernels.triton.fused.config import TritonTileConfig, shape_for  # noqa: E402
from flashsampling.kernels.triton.fused.launch import run  # noqa: E402
from flashsampling.kernels.triton.fused.logits_gemm import logits_gemm  # noqa: E402
from tests.conftest import DEVICE  # noqa: E402
from tests.problems import assert_agreement, make_problem  # noqa: E402
from tests.zero_words import ZERO_WORDS  # noqa: E402

on_cpu = pytest.mark.skipif(DEVICE.type == "cuda", reason="counts calls in the interpreter")


@pytest.fixture
def careful_tiles(monkeypatch):
    """How many tiles the careful pass evaluated so far, in the interpreter."""
    calls = []
    real = exact_pass._publish_exact

    def counted(*arguments, **named):
        calls.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(exact_pass, "_publish_exact", counted)
    return calls


def _special(problem, name):
    """The problem with special rows, all but the first: NaN through the states, the temperature or one weight; equal
    logits."""
    rows = slice(1, None)
    if name == "nan states":
        problem.hidden_states[rows] = math.nan
    elif name == "nan temperature":
        problem.temperature[rows] = math.nan
    elif name == "zero states, greedy":
        problem.hidden_states[rows] = 0.0
        problem.temperature[rows] = 0.0
    elif name == "equal logits":
        problem.hidden_states[rows] = 0.0
        problem.temperature[rows] = 1.0
    elif name == "-inf":
        problem.weight[rows] = -math.inf
        problem.hidden_states.abs_()
    return problem


@pytest.mark.every_triton
@on_cpu
@pytest.mark.parametrize("name", ["nan states", "nan temperature", "zero states, greedy", "equal logits", "-inf"])
@pytest.mark.parametrize("config", [None, TritonTileConfig(128, 16, 16, 4, 2, 1, use_tma=True, rest_b=16)])
def test_special_rows_take_no_second_pass(name, config, careful_tiles, device):
    """Contract section 4: any number of such rows, also beside a padded vocabulary's poison."""
    for batch in (2, 20):
        problem = _special(make_problem(batch, 400, 16, device, vocab_size=300), name)
        problem.weight[300:] = math.nan
        tokens = run(problem.step(), config).ids
        assert careful_tiles == []
        assert_agreement(tokens[:, None], problem)
        if name.startswith("nan"):
            assert (tokens[1:] == -1).all()


@pytest.mark.every_triton
@on_cpu
def test_infinite_rows_and_words_of_zero_take_it(careful_tiles, device):
    """The counter counts; and a word 0 that cannot win costs nothing."""
    problem = make_problem(2, 300, 16, device)
    problem.hidden_states[1] = math.inf
    problem.weight.abs_()
    assert problem.sample("triton")[1] == -1
    assert len(careful_tiles) > 0
    careful_tiles.clear()
    seed, offset, token, _ = ZERO_WORDS[0]
    for logit, tiles in ((0.0, True), (-200.0, False)):
        problem = make_problem(1, 300, 1, device)
        problem.weight = torch.zeros(300, 1, device=device)
        problem.weight[token] = logit
        problem.hidden_states, problem.temperature = torch.ones(1, 1, device=device), torch.ones(1, device=device)
        problem.seed[:], problem.offset[:] = seed, offset
        assert_agreement(problem.sample("triton"), problem)
        assert (len(careful_tiles) > 0) == tiles
        careful_tiles.clear()


@pytest.mark.quick(1)
@on_cpu
@pytest.mark.parametrize(("rest", "narrow"), [(0, 16), (32, 32)])
@pytest.mark.parametrize("use_tma", [False, True])
def test_the_careful_pass_takes_the_columns_in_doubt_alone(rest, narrow, use_tma, careful_tiles, device):
    """Of each block of rows, also of the last one, which shares rows with the one before."""
    config = TritonTileConfig(128, 32, 16, 4, 2, 1, use_tma=use_tma, chunk_b=16, rest_b=rest)
    seed, offset, token, _ = ZERO_WORDS[1]
    for batch, doubtful in ((20, [3, 5, 17]), (70, [69]), (70, [0, 33, 47, 48])):
        problem = make_problem(batch, 700, 16, device)
        problem.temperature[:] = 0.5
        problem.weight[:, 0] = 0.01
        problem.weight[[5, 650], 0] = 4.0
        for row in doubtful:
            if row % 2:
                problem.seed[row], problem.offset[row] = seed, offset
                problem.hidden_states[row] *= 1e-3  # the word 0 wins
            else:
                problem.hidden_states[row] = 0.0
                problem.hidden_states[row, 0] = 3e38  # two tokens' logits are +inf
        tokens = run(problem.step(), config).ids[:, None]
        assert_agreement(tokens, problem)
        assert all(tokens[row] == (token if row % 2 else 5) for row in doubtful)
        width = config.columns
        firsts = [max(min(first, batch - width), 0) for first in range(0, batch, width)]
        places = {(row // width, (row - firsts[row // width]) // narrow) for row in doubtful}
        assert len(places) <= len(careful_tiles) <= 6 * len(places)  # of six tiles
        careful_tiles.clear()


@pytest.mark.every_triton
@pytest.mark.quick(8)
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("poison", [1e30, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("use_tma", [False, True])
def test_poison_around_a_shard(num_samples, poison, use_tma, device):
    """Rows before a shard's first and after its last real one: of no pass, of no kind of load, of no draw. Its own +inf
    and -inf are its own."""
    if device.type == "cuda" and (not use_tma or torch.cuda.get_device_capability() < (9, 0)):
        use_tma = False
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = make_problem(5, 700, 16, device, dtype, num_samples)
    problem.weight[[130, 400]] *= 1e30  # some rows' best is +inf or -inf there
    problem.weight[[131, 401]] *= 3e38
    config = TritonTileConfig(128, 16, 16, 4, 2, 1, use_tma=use_tma)
    whole = run(problem.step(), config).ids
    assert_agreement(whole.view(-1, num_samples), problem)
    winners = []
    for first, last in ((0, 131), (131, 140), (140, 401), (401, 700)):
        poisoned = torch.full((900, 16), poison, dtype=dtype, device=device)
        poisoned[100 : 100 + last - first] = problem.weight[first:last]
        part = problem.step(weight=poisoned[100:], vocab_size=last - first, shard=Shard(first, PACKED))
        winners.append(run(part, config).ids)
    assert torch.equal(tokens_of(torch.stack(winners)), whole)


HALVES = TritonTileConfig(128, 128, 64, 8, 6, 1, use_tma=True, chunk_b=64, preload=True, halves=True)
PIECES = [  # of columns, the second of which ends with the batch: rows of both are evaluated twice
    *((HALVES, batch) for batch in ((65, 96, 127, 128) if torch.cuda.is_available() else (65, 127))),
    (replace(HALVES, use_tma=False, chunk_b=32, preload=False), 81),
    (replace(HALVES, halves=False, rest_b=16), 135),
    (replace(HALVES, halves=False, block_b=64, rest_b=64, num_stages=3, use_tma=False), 70),
    # half a minute each in the interpreter; the second has blocks that share rows
    pytest.param(shape_for(170, 64, torch.bfloat16, 1, use_tma=True), 170, marks=pytest.mark.gpu),
    pytest.param(shape_for(200, 64, torch.bfloat16, 1, use_tma=True), 200, marks=pytest.mark.gpu),
]


def _mixed_rows(batch, vocab, device):
    """Every kind of row that a kernel treats in a way of its own, all around the batch, and ordinary ones between
    them."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = make_problem(batch, vocab, 64, device, dtype)
    problem.weight[:, 0] = 0.01
    problem.weight[[5, vocab - 3], 0] = 4.0
    seed, offset, _, _ = ZERO_WORDS[1]
    for row in range(batch):
        if row % 7 == 1:
            problem.hidden_states[row, 3] = math.nan
        elif row % 7 == 2:  # equal logits, greedy: the first id
            problem.hidden_states[row], problem.temperature[row] = 0.0, 0.0
        elif row % 7 == 3:
            problem.hidden_states[row] = 0.0
        elif row % 63 == 4:  # two infinite logits
            problem.hidden_states[row], problem.hidden_states[row, 0] = 0.0, 3e38
        elif row % 63 == 60:  # the word 0 wins
            problem.seed[row], problem.offset[row], problem.temperature[row] = seed, offset, 0.5
            problem.hidden_states[row] *= 1e-3
        elif row % 63 == 18:
            problem.temperature[row] = math.nan
    return problem


@pytest.mark.quick(3)
@pytest.mark.parametrize(("config", "batch"), PIECES)
def test_rows_in_two_pieces_of_a_tile(config, batch, device):
    """Rows that a tile evaluates twice: tokens, shards' winners, products, and a workspace that is zero afterwards."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("shapes of GPUs with copy engines")
    vocab = 5000 if device.type == "cuda" else 700  # the token of the word 0 is among them
    problem = _mixed_rows(batch, vocab, device)
    tokens = run(problem.step(), config).ids
    assert_agreement(tokens[:, None], problem)
    row = torch.arange(batch, device=device)
    assert (tokens[(row % 7 == 1) | (row % 63 == 18)] == -1).all()
    assert (tokens[row % 7 == 2] == 0).all()
    assert (tokens[row % 63 == 4] == 5).all()
    assert (tokens[row % 63 == 60] == ZERO_WORDS[1][2]).all()
    winners = []
    for shard in ((0, 130), (130, vocab)):
        part = problem.weight[slice(*shard)].clone()
        step = problem.step(weight=part, vocab_size=len(part), shard=Shard(shard[0], PACKED))
        winners.append(run(step, config).ids)
    assert torch.equal(tokens_of(torch.stack(winners)), tokens)
    made = logits_gemm(problem.hidden_states, problem.weight, vocab - 50, config)
    wanted = problem.hidden_states.double() @ problem.weight[:-50].double().T
    torch.testing.assert_close(made.double(), wanted.float().double(), rtol=1e-5, atol=1e-4, equal_nan=True)


ROWS_ON_M = TritonTileConfig(128, 64, 16, 4, 2, 1, use_tma=True, chunk_b=64, rows_on_m=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "config",
    [
        ROWS_ON_M,
        pytest.param(replace(ROWS_ON_M, block_v=256, num_warps=8), marks=pytest.mark.gpu),
        pytest.param(replace(ROWS_ON_M, use_tma=False, rest_b=32, preload=True), marks=on_cpu),
    ],
)
def test_rows_on_m(config, device):
    """Of rows and tokens, each thread has others: ties, greedy rows and rows of NaN all the same, whatever the
    batch."""
    if device.type == "cuda" and torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("shapes of GPUs with copy engines")
    for batch in (9, 70):
        problem = _mixed_rows(batch, 700, device)
        problem.weight[300:420:7] = problem.weight[130].clone()
        problem.weight[[29, 30, 36, 44, 60, 92, 156, 636]] = problem.weight[
            28
        ].clone()  # one bit, or several, in other places
        for matrix in (problem.weight, problem.hidden_states):  # sums are exact, in any order that numpy takes
            matrix.copy_(torch.where(matrix.abs() < 100, (matrix * 64).round() / 64, matrix))
        problem.temperature[::4] = 0.0
        for row in range(0, batch, 8):  # greedy, with equal logits of many tokens in front
            problem.hidden_states[row] = 8 * problem.weight[130 if row % 16 else 28].to(problem.hidden_states.dtype)
        tokens = run(problem.step(), config).ids
        assert_agreement(tokens[:, None], problem)
        other = TritonTileConfig(128, 64, 16, 4, 2, 1, use_tma=config.use_tma, chunk_b=64)
        assert torch.equal(tokens, run(problem.step(), other).ids)
        assert (tokens[::16] == 28).all()
        assert (tokens[8::16] == 130).all()


@pytest.mark.every_triton
@pytest.mark.parametrize("num_samples", [2, 3])
def test_several_draws_of_rows_in_two_blocks(num_samples, device):
    """The second block ends with the batch there too."""
    problem = make_problem(40, 300, 16, device, num_samples=num_samples)
    problem.hidden_states[[5, 30]] = math.nan
    problem.hidden_states[[7, 29]] = 0.0
    config = TritonTileConfig(128, 32, 16, 4, 2, 1, use_tma=False, chunk_b=16, rest_b=16)
    tokens = run(problem.step(), config).ids
    assert_agreement(tokens.view(-1, num_samples), problem)
    assert torch.equal(tokens, run(problem.step(), TritonTileConfig(128, 16, 16, 4, 2, 1, use_tma=False)).ids)


@pytest.mark.every_triton
def test_no_batch_is_padded_far():
    """The shapes of a GPU with copy engines: the padded batch grows with the batch, and is not far above it. From 65 to
    127 rows what pads it are rows of the batch."""
    padded = []
    for batch in range(1, 1025):
        config = shape_for(batch, 4096, torch.bfloat16, 1, use_tma=True)
        padded.append(-(-batch // config.columns) * config.columns)
        assert padded[-1] - batch < (64 if batch <= 128 else 32 if batch <= 192 else 128)
        assert config.halves == (64 < batch < 128)
    assert padded == sorted(padded)
