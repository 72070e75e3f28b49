"""Every implementation gives the oracle's tokens, and a row's token depends on nothing but the row."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import flashsampling
from tests.conftest import DEVICE
from tests.mixes import INF, NAN
from tests.problems import (
    CUTE_SHAPES,
    IMPLEMENTATIONS,
    KERNELS,
    NEEDS_CUTE,
    assert_agreement,
    check,
    fit,
    gumbel_at,
    make_problem,
)
from tests.zero_words import ZERO_WORDS

ON_GPU = DEVICE.type == "cuda"
SHAPES = [  # B, V, D
    (1, 1, 1),
    (2, 2, 3),
    (1, 127, 64),
    (3, 129, 8),
    (5, 700, 40),
    (16, 256, 61),  # prime D
    (17, 300, 128),
    (33, 513, 16),
]
if ON_GPU:
    SHAPES += [(1, 128256, 8192), (7, 151936, 2048), (64, 50257, 768), (65, 32001, 127), (300, 20011, 1024)]
    SHAPES += [(256, 4099, 8192), (129, 201088, 2880), (300, 1, 64), (40, 131, 8192)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.quick(12)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("batch", "vocab", "dim"), SHAPES)
def test_ragged_shapes(impl, batch, vocab, dim, device):
    for dtype in DTYPES if ON_GPU else DTYPES[batch % 3 :][:1]:
        check(impl, make_problem(batch, vocab, dim, device, dtype))


@settings(max_examples=300 if ON_GPU else 25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    impl=st.sampled_from(IMPLEMENTATIONS),
    batch=st.integers(1, 300 if ON_GPU else 20),
    vocab=st.integers(1, 40_000 if ON_GPU else 400),
    dim=st.integers(1, 1024 if ON_GPU else 80),
    dtype=st.sampled_from(DTYPES),
    num_samples=st.sampled_from([1, 1, 2, 5]),
    padding=st.integers(0, 200),
    seed=st.integers(0, 2**31),
)
def test_random_problems(impl, batch, vocab, dim, dtype, num_samples, padding, seed):
    check(impl, make_problem(batch, vocab + padding, dim, DEVICE, dtype, num_samples, vocab, seed=seed))


@pytest.mark.parametrize("impl", [impl for impl in IMPLEMENTATIONS if impl != "cute"])
def test_strided_and_offset_weights(impl, device):
    problem = make_problem(5, 400, 48, device)
    for pad, start in ((16, 0), (5, 0), (16, 3)):  # aligned rows; unaligned rows; unaligned base
        wide = torch.full((400, 48 + pad + start), torch.nan, device=device)
        wide[:, start : start + 48] = problem.weight
        strided = wide[:, start : start + 48]
        states = torch.full((5, 64), torch.nan, device=device)
        states[:, :48] = problem.hidden_states
        expected = problem.sample("reference")
        view = make_problem(5, 400, 48, device)
        view.weight, view.hidden_states = strided, states[:, :48]
        assert torch.equal(view.sample(impl), expected)


@NEEDS_CUTE
@pytest.mark.parametrize(
    ("dim", "pad", "start", "taken"), [(48, 16, 0, True), (45, 3, 8, True), (48, 5, 0, False), (48, 16, 3, False)]
)
def test_cute_takes_rows_that_start_at_16_bytes(dim, pad, start, taken, device):
    """A weight of any row stride that TMA can address, D itself of any size; hidden states of any layout."""
    problem = make_problem(5, 400, dim, device, torch.bfloat16)
    expected = problem.sample("reference")
    wide = torch.full((400, dim + pad + start), torch.nan, dtype=torch.bfloat16, device=device)
    wide[:, start : start + dim] = problem.weight
    problem.weight = wide[:, start : start + dim]
    columns_first = problem.hidden_states.T.contiguous().T
    for states in (problem.hidden_states, columns_first):
        problem.hidden_states = states
        if taken:
            assert torch.equal(problem.sample("cute"), expected)
        else:
            with pytest.raises(
                ValueError, match="rows of weight must be contiguous and start at multiples of 16 bytes"
            ):
                problem.sample("cute")
            assert_agreement(problem.sample(None), problem)  # None goes to Triton


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_padded_vocabulary_is_never_sampled(impl, device):
    """Trap 15. The padding would win every draw, or poison it."""
    for poison in (100.0, NAN, INF):
        problem = make_problem(9, 500, 32, device, vocab_size=333, impl=impl)
        expected = problem.sample("reference")
        problem.weight[333:] = poison
        assert torch.equal(problem.sample(impl), expected)
        assert (problem.sample(impl) < 333).all()


def column_of(floor, logits):
    """A vocabulary's logits, equal but for some."""
    column = torch.full((300,), floor)
    for token, logit in logits.items():
        column[token] = logit
    return column


def one_column(impl, logits, temperature, num_samples, device):
    """A problem of a row per temperature whose logits are the weight's one column."""
    problem = make_problem(len(temperature), len(logits), 1, device, num_samples=num_samples)
    problem.hidden_states = fit(impl, torch.ones(len(temperature), 1, device=device))
    problem.weight = fit(impl, logits.to(device)[:, None].contiguous())
    problem.temperature = torch.tensor(temperature, device=device)
    return problem


# num_samples, since of several draws kernels evaluate every token
ONE_AND_SEVERAL = [("reference", 1), ("streaming", 1), *((impl, n) for impl in KERNELS for n in (1, 2))]
SPECIAL_ROWS = {  # the expected token, or None for "as the oracle"
    "ordinary": (0.0, {}, None),
    "nan": (0.0, {7: NAN}, -1),
    "nan in the last tile": (0.0, {299: NAN}, -1),
    "all nan": (NAN, {}, -1),
    "all -inf": (-INF, {}, -1),
    "all +inf": (INF, {}, -1),
    "+inf and -inf only": (-INF, {5: INF}, -1),
    "one finite": (-INF, {211: 0.0}, 211),
    "one +inf": (0.0, {130: INF}, 130),
    "two +inf": (0.0, {130: INF, 40: INF}, 40),
    "+inf and nan": (0.0, {130: INF, 7: NAN}, -1),
    "+inf in the first tile, the only finite one in the last": (-INF, {0: INF, 299: -3e38}, 0),
    "huge": (0.0, {3: 3e38, 4: -3e38}, 3),
}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("impl", "num_samples"), ONE_AND_SEVERAL)
@pytest.mark.parametrize("name", SPECIAL_ROWS)
def test_special_rows(impl, name, num_samples, device):
    floor, logits, expected = SPECIAL_ROWS[name]
    problem = one_column(impl, column_of(floor, logits), [1.0, 0.0, 1e-6, 1e-3], num_samples, device)
    tokens = problem.sample(impl)
    assert_agreement(tokens, problem)
    assert expected is None or (tokens == expected).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize(("impl", "num_samples"), ONE_AND_SEVERAL)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_undefined_rows_stay_alone(impl, num_samples, poison, device):
    """Trap 14: a special row gives its own answer, and its batch mates theirs."""
    problem = make_problem(4, 300, 2, device, num_samples=num_samples)
    problem.hidden_states, problem.weight = fit(impl, problem.hidden_states), fit(impl, problem.weight)
    clean = problem.sample(impl)
    problem.hidden_states[2, 0] = poison
    mixed = problem.sample(impl)
    assert torch.equal(mixed[[0, 1, 3]], clean[[0, 1, 3]])
    assert torch.equal(mixed[2], problem.sample("reference")[2])


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_nan_temperature_is_undefined_and_infinite_is_uniform(impl, device):
    problem = make_problem(3, 300, 16, device, impl=impl)
    problem.temperature = torch.tensor([1.0, NAN, INF], device=device)
    tokens = problem.sample(impl)
    assert tokens[1] == -1
    assert tokens[2] == gumbel_at(problem)[2, 0].argmax()
    assert_agreement(tokens[[0]], problem.rows([0]))


BF16_MAX = torch.finfo(torch.bfloat16).max


@pytest.mark.quick(20)
@pytest.mark.parametrize(("impl", "num_samples"), ONE_AND_SEVERAL)
@pytest.mark.parametrize(
    ("floor", "logits", "expected"),
    [
        (0.0, {3: 2.5e38, 200: 3e38}, 200),
        (0.0, {7: 3e38}, 7),
        (-BF16_MAX, {211: -2.7e38}, 211),
        (-3e38, {}, 0),  # no noise tells such scores apart: the lowest id
        (0.0, {290: BF16_MAX, 291: BF16_MAX}, 290),
        (-BF16_MAX, {}, 0),
        (-INF, {130: -BF16_MAX}, 130),
    ],
)
def test_no_finite_logit_overflows(impl, num_samples, floor, logits, expected, device):
    """Trap 29: nothing finite becomes infinite in base 2, or by a temperature below 1; nor is -1 for such a row."""
    problem = one_column(impl, column_of(floor, logits), [1.0, 1e-6, 0.0, 0.3, 1e6, 2.0], num_samples, device)
    tokens = problem.sample(impl)
    assert (tokens == expected).all()
    assert torch.equal(tokens, problem.sample("reference"))


@pytest.mark.parametrize(("impl", "num_samples"), ONE_AND_SEVERAL)
def test_hot_rows_of_huge_and_of_infinite_logits(impl, num_samples, device):
    problem = one_column(impl, torch.full((300,), -1e38), [1e6, 1e20], num_samples, device)
    assert (problem.sample(impl) == 0).all()
    for infinity in (INF, -INF):  # times 1 / inf is NaN
        problem = one_column(impl, column_of(0.0, {5: infinity}), [INF, 1e6, 1.0, 0.0], num_samples, device)
        tokens = problem.sample(impl)
        assert (tokens[0] == -1).all()
        assert_agreement(tokens, problem)


@pytest.mark.quick(3)
@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_ties_go_to_the_lowest_id(impl, device):
    """Trap 9: equal logits, among them 0.0 and -0.0, greedy; and equal logits with noise stay distinct tokens."""
    for low, high in ((0, 299), (131, 140), (6, 70), (8, 0), (72, 64), (255, 256)):
        weight = torch.full((300, 1), -1.0, device=device)
        weight[[low, high]] = 2.0
        ones = fit(impl, torch.ones(3, 1, device=device))
        out = flashsampling.sample(ones, fit(impl, weight), temperature=0.0, seed=0, impl=impl)
        assert (out.token_ids == min(low, high)).all()
    weight = torch.zeros(300, 1, device=device)
    weight[200:] = -0.0  # times a negative number: the lower ids' logits are -0.0, which ties with 0.0
    # noise times 0 has either sign too: rows of many seeds
    small, seed = fit(impl, torch.full((16, 1), -1e-30, device=device)), torch.arange(16, device=device)
    assert (flashsampling.sample(small, fit(impl, weight), temperature=0.0, seed=seed, impl=impl).token_ids == 0).all()
    problem = make_problem(64, 300, 4, device, impl=impl)
    problem.weight = torch.zeros_like(problem.weight)
    problem.temperature = torch.ones_like(problem.temperature)
    tokens = problem.sample(impl)
    assert torch.equal(tokens[:, 0], gumbel_at(problem)[:, 0].argmax(dim=-1))
    assert len(tokens.unique()) > 40


@pytest.mark.quick(8)
@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize("temperature", [1e-3, 2e-6, 1.001e-6])
def test_low_temperatures_are_no_greedy_ones(impl, temperature, device):
    """Only below 1e-6 is a row greedy: above, equal logits are told apart by their noise, however little of it there
    is."""
    problem = make_problem(16, 300, 4, device, num_samples=2, impl=impl)
    problem.weight = torch.zeros_like(problem.weight)
    both = gumbel_at(problem).argmax(dim=-1)
    problem.temperature = torch.full_like(problem.temperature, temperature)
    assert torch.equal(problem.sample(impl), both)
    problem.num_samples, drawn = 1, both[:, 0]
    assert (drawn != 0).all()
    assert torch.equal(problem.sample(impl)[:, 0], drawn)
    arguments = {"seed": problem.seed, "offset": problem.offset, "impl": impl}
    out = flashsampling.sample(problem.hidden_states, problem.weight, temperature=temperature, **arguments)
    assert torch.equal(out.token_ids, drawn)
    problem.temperature = torch.full_like(problem.temperature, 0.999e-6)
    assert (problem.sample(impl) == 0).all()
    # and a rival whose logit is lower by less than the noise makes up for, or by more
    rival, best = 256, 3
    noise_apart = (gumbel_at(problem)[:, 0, rival] - gumbel_at(problem)[:, 0, best]).tolist()
    problem.temperature = torch.full_like(problem.temperature, temperature)
    gap = temperature * sum(abs(apart) for apart in noise_apart) / 16
    weight = torch.full((300, 1), -1.0, device=device)
    weight[best], weight[rival] = gap, 0.0
    problem.weight = fit(impl, weight)
    problem.hidden_states = fit(impl, torch.ones(16, 1, device=device))
    gap = problem.weight[best, 0].item() / temperature  # rounded to bf16, perhaps
    assert all(abs(apart - gap) > 1e-3 for apart in noise_apart)
    assert problem.sample(impl)[:, 0].tolist() == [rival if apart > gap else best for apart in noise_apart]
    assert 0 < sum(apart > gap for apart in noise_apart) < 16


@pytest.mark.parametrize("num_samples", [1, 3])
def test_special_values_in_streaming_s_chunks(num_samples, device, monkeypatch):
    """Any two in two of four chunks, the last a short one; a draw's state goes through all of them, and through
    blocks of draws."""
    from flashsampling.reference import streaming

    monkeypatch.setattr(streaming, "_MAX_TOKENS", {device.type: 1024})
    monkeypatch.setattr(streaming, "_SCORES_AT_ONCE", {device.type: 2 * 2 * 1024})
    assert streaming.chunk_tokens(2 * num_samples, 10**6, device.type) == 1024
    values = itertools.product((NAN, INF, -INF, 2.0, -1.0), repeat=2)
    for floor, some, chunks in itertools.product((0.0, -INF), values, ((0, 1), (0, 3), (1, 2))):
        column = torch.full((3 * 1024 + 300,), floor)
        for value, chunk in zip(some, chunks):
            column[1024 * chunk + 77] = value
        problem = one_column("streaming", column, [0.0, 1e-3], num_samples, device)
        assert torch.equal(problem.sample("streaming"), problem.sample("reference")), (floor, some, chunks)


@pytest.mark.quick(2)
@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
@pytest.mark.parametrize(("seed", "offset", "token", "refinement"), ZERO_WORDS)
def test_the_refined_tail_decides(impl, seed, offset, token, refinement, device):
    """A token whose word is 0 wins or loses by its refined Gumbel, not by -log(2**-33) = 22.9 or infinity."""
    refined = -math.log((refinement + 0.5) * 2.0**-64)
    for margin in (-1e-3, 1e-3):
        rival = (token + 1) % 1000
        weight = torch.full((1000, 3), -50.0 / 3, device=device)
        weight[token] = 0.0
        rows = torch.tensor([seed, 5, 6], device=device)
        offsets = torch.tensor([offset, 0, 0], device=device)
        problem = make_problem(3, 1000, 1, device)
        problem.weight = weight
        problem.seed, problem.offset, problem.temperature = rows, offsets, torch.ones(3, device=device)
        rest = torch.tensor(refined - gumbel_at(problem)[0, 0, rival].item() + margin)
        for column in range(3):  # a sum of three bf16 numbers is as good as a float
            weight[rival, column] = rest.bfloat16().item()
            rest = rest - rest.bfloat16()
        problem.hidden_states, problem.weight = fit(impl, torch.ones(3, 3, device=device)), fit(impl, weight)
        assert problem.sample(impl)[0, 0] == (rival if margin > 0 else token)
        assert_agreement(problem.sample(impl)[1:], problem.rows(slice(1, 3)))


@pytest.mark.parametrize("impl", ["reference", *IMPLEMENTATIONS])
def test_every_row_parameter_is_read_per_row(impl, device):
    """Trap 6: changing one row's seed, offset or temperature changes that row alone."""
    base = make_problem(8, 1000, 16, device, logit_std=0.5, impl=impl)
    base.temperature = torch.full((8,), 1.0, device=device)
    tokens = base.sample(impl)
    for name, value in (("seed", 12345), ("offset", 99), ("temperature", 0.0)):
        changed = getattr(base, name).clone()
        changed[5] = value
        other = replace(base, **{name: changed}).sample(impl)
        assert other[5] != tokens[5]
        assert torch.equal(other[[0, 1, 2, 3, 4, 6, 7]], tokens[[0, 1, 2, 3, 4, 6, 7]])


@pytest.mark.quick(1)
@pytest.mark.parametrize("impl", KERNELS)
@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else [torch.bfloat16])
def test_kernels_are_bitwise_invariant_to_the_batch(impl, dtype, device):
    """Trap 3 and 11: a row alone, in any batch and in any place. Bit for bit, so over near ties too."""
    batch = 300 if ON_GPU else 40
    problem = make_problem(
        batch, 2000 if ON_GPU else 200, 1544 if ON_GPU else 24, device, dtype, logit_std=0.3, impl=impl
    )
    problem.hidden_states[1] = NAN  # its programs take their slow paths; nobody else may notice
    together = problem.sample(impl)
    order = torch.randperm(batch).to(device)
    assert torch.equal(problem.rows(order).sample(impl), together[order])
    for size in (1, 2, 15, 17, 33, 64, 65, 128, 200) if ON_GPU else (1, 7, 33):
        if size < batch:
            assert torch.equal(problem.rows(slice(batch - size, batch)).sample(impl), together[-size:])


@pytest.mark.parametrize("dtype", DTYPES if ON_GPU else DTYPES[-1:])  # half a minute each in the interpreter
def test_triton_is_bitwise_invariant_to_the_tile(dtype, device):
    from flashsampling.kernels.triton.fused.config import TritonTileConfig, shape_for
    from flashsampling.kernels.triton.fused.launch import run

    problem = make_problem(20, 5000 if ON_GPU else 300, 512 if ON_GPU else 64, device, dtype, logit_std=0.3)
    expected = run(problem.step()).ids
    configs = [
        TritonTileConfig(128, 16, 32, 4, 3, 1, use_tma=False),
        TritonTileConfig(256, 32, 16, 4, 2, 2, use_tma=False, chunk_b=32),
        TritonTileConfig(128, 64, 64, 8, 2, 1, use_tma=False, chunk_b=8),
        TritonTileConfig(256, 32, 32, 8, 2, 1, use_tma=False, chunk_b=32, preload=True),
        TritonTileConfig(128, 16, 32, 4, 2, 1, use_tma=False, rest_b=16),
        TritonTileConfig(128, 32, 32, 8, 2, 1, use_tma=False, chunk_b=32, preload=True, rest_b=16),
        TritonTileConfig(128, 32, 32, 4, 2, 1, use_tma=False, halves=True),
    ]
    rows_on_m = TritonTileConfig(128, 64, 32, 4, 2, 1, use_tma=True, chunk_b=64, rows_on_m=True)
    if not ON_GPU:  # seconds each in the interpreter
        configs = configs[::2] + [
            replace(rows_on_m, use_tma=False, **other) for other in ({}, {"block_v": 256, "chunk_b": 32, "rest_b": 16})
        ]
    if ON_GPU and dtype != torch.float32 and torch.cuda.get_device_capability() >= (9, 0):
        configs += [
            TritonTileConfig(128, 64, 128, 4, 2, 3, use_tma=True),
            TritonTileConfig(256, 16, 64, 8, 3, 1, use_tma=True),
        ]
        configs += [
            TritonTileConfig(128, 64, 64, 8, 4, 1, use_tma=True, chunk_b=64, preload=True, rest_b=rest)
            for rest in (16, 32, 64)
        ]
        configs.append(TritonTileConfig(128, 32, 64, 4, 3, 1, use_tma=True, halves=True))
        configs += [rows_on_m, shape_for(192, 512, dtype, 1, use_tma=True), shape_for(256, 512, dtype, 1, use_tma=True)]
    for config in configs:
        assert torch.equal(run(problem.step(), config).ids, expected), config


@pytest.mark.quick(1)
@NEEDS_CUTE
@pytest.mark.parametrize("dtype", DTYPES[1:] if ON_GPU else [torch.bfloat16])
@pytest.mark.parametrize(
    ("batch", "vocab", "dim"),
    [(70, 5000, 1544), (70, 130, 64), (70, 40_000, 72), (300, 40_000, 72)]
    if ON_GPU
    else [(40, 300, 968), (300, 300, 72)],
)
def test_cute_is_bitwise_invariant_to_the_tile(dtype, batch, vocab, dim, device):
    from flashsampling.kernels.hopper import run

    problem = make_problem(batch, vocab, dim, device, dtype, logit_std=0.3)
    expected = run(problem.step()).ids
    for config in CUTE_SHAPES:
        assert torch.equal(run(problem.step(), config).ids, expected), config


@pytest.mark.parametrize("impl", ["streaming", *(pytest.param(name, marks=pytest.mark.gpu) for name in KERNELS)])
def test_token_ids_above_2_to_the_24(impl, device):
    """Trap 17: ids that no fp32 holds."""
    vocab = 2**24 + 300
    weight = torch.zeros(vocab, 1, device=device)
    for token in (2**24 + 1, 2**24 + 255, vocab - 1) if ON_GPU else (2**24 + 1,):  # 9 s each on a CPU
        weight[token] = 60.0
        out = flashsampling.sample(fit(impl, torch.ones(1, 1, device=device)), fit(impl, weight), seed=3, impl=impl)
        assert (out.token_ids == token).all()
        weight[token] = 0.0


@pytest.mark.gpu
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_beyond_2_to_the_31_elements(impl, device):
    """Trap 16: V * D = 2**31 + 2**26; the last rows must be reached, and only they."""
    dim = 4096
    vocab = 2**31 // dim + 2**14
    weight = torch.zeros(vocab, dim, dtype=torch.bfloat16, device=device)
    states = torch.zeros(3, dim, dtype=torch.bfloat16, device=device)
    states[:, 0] = 1.0
    for token in (vocab - 1, 2**31 // dim, 2**31 // dim - 1, 5):
        weight[token, 0] = 40.0
        out = flashsampling.sample(states, weight, seed=torch.arange(3, device=device), impl=impl)
        assert (out.token_ids == token).all()
        weight[token, 0] = 0.0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))  # for as many processes
def test_ten_thousand_problems(part, device):
    """Contract section 3 over 10,000 random problems of all shapes; the excuse must stay rare."""
    generator = torch.Generator().manual_seed(1 + part)

    def pick(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    excused = draws = 0
    for index in range(1250 * part, 1250 * (part + 1)):
        batch = pick(1, 40) if index % 10 else pick(40, 300)
        vocab, dim = pick(1, 5000), pick(1, 400)
        if index % 3 == 0:
            dim = dim // 8 * 8 + 8
        problem = make_problem(batch, vocab, dim, device, DTYPES[index % 3], 1 if index % 5 else 2, seed=index)
        for impl in IMPLEMENTATIONS:
            excused += check(impl, problem)
            draws += batch * problem.num_samples
    print(f"{draws} draws, {excused} within arithmetic's reach of a tie")
    assert excused < 1e-4 * draws
