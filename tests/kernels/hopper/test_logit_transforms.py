"""What the Hopper kernel makes of its logits in registers: the bits that Triton's kernels make of the products, in any
batch and shape, and the oracle's tokens, of one launch; what is masked out is never drawn."""

import itertools
import math
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from flashsampling import exchange_protocol, workspace
from flashsampling.exchange_protocol import Shard
from flashsampling.inputs import SampleInputs
from flashsampling.kernels.hopper import config, launch
from flashsampling.kernels.hopper import dispatch as module
from flashsampling.kernels.triton.filtered import dispatch as filtered
from flashsampling.kernels.triton.filtered.block_stats_kernel import StatsOutputs
from flashsampling.outputs import SampleResult
from flashsampling.reference import logit_transforms
from flashsampling.sampling_params import DEFAULT_PARAMS, SamplingParams
from tests.conftest import DEVICE
from tests.kernels.hopper.test_logits import (  # noqa: F401, a fixture
    CONFIGS,
    IDS,
    ON_GPU,
    check,
    left_zero,
    make_step,
    ragged,
)
from tests.kernels.test_cuda import kernel_nodes
from tests.kernels.triton.test_filtered import agrees
from tests.mixes import Mix
from tests.problems import NEEDS_CUTE, assert_same_rows

pytestmark = NEEDS_CUTE

INF, NAN = math.inf, math.nan


def by_block_stats(step: SampleInputs) -> torch.Tensor:
    """Processed logits of stored ones, by the block-statistics kernel alone."""
    assert step.logits is not None
    stride = -(-step.vocab_size // 4) * 4
    out = torch.empty((len(step.logits), stride), device=step.logits.device)
    transforms, _held = filtered.request_transforms(step.params)
    outputs = StatsOutputs(0, out.data_ptr(), stride, 0, 0, 0, 0, 0)
    rows, filters = filtered.rows_argument(step), filtered.filters_argument(step.params)
    filtered.block_stats(step, step.logits, rows, filters, filtered.head_transform(step.params), transforms, outputs)
    return out[:, : step.vocab_size]


def by_triton(logits_gemm: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Processed logits as Triton's kernels make them; by its interpreter, which takes long, the first rows, the last
    ones and some between, the others the oracle's."""
    batch, vocab = logits_gemm.shape
    step = SampleInputs(logits_gemm, logits_gemm, 1.0, 0, 0, 1, vocab, params=params, logits=logits_gemm)
    if ON_GPU or batch <= 6:
        return by_block_stats(step)
    made = logit_transforms.processed(logit_transforms.raw(logits_gemm, params), params)
    for first in (0, batch // 2, batch - 2):
        some = step.part(first, first + 2)
        made[first : first + 2] = by_block_stats(some._replace(weight=some.logits))
    return made


def assert_same_bits(found: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Of Triton's kernels; its interpreter fuses no products into sums, and has other exponentials."""
    if ON_GPU:
        assert torch.equal(found.isnan(), expected.isnan()), what
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0)), what
    else:
        torch.testing.assert_close(
            found, expected, rtol=2e-6, atol=2e-5, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )


def random_mask(batch: int, vocab: int, share: float = 0.5) -> torch.Tensor:
    bits = torch.rand(batch, -(-vocab // 32), 32, device=DEVICE) < share
    return (bits.int() << torch.arange(32, device=DEVICE, dtype=torch.int32)).sum(2, dtype=torch.int32)


def sparse(batch: int, vocab: int, n: int = 9) -> dict[str, torch.Tensor]:
    """Entries of tokens and of none, one of them twice; what is added first is seen in the bits."""
    ids = torch.randint(-2, vocab + 2, (batch, n), device=DEVICE, dtype=torch.int32)
    ids[:, n // 2] = ids[:, n // 2 - 1]
    return {"bias_ids": ids, "bias_values": torch.randn(batch, n, device=DEVICE) * 100}


def everything(batch: int, vocab: int) -> dict[str, SamplingParams]:
    counts = (torch.rand(batch, vocab, device=DEVICE) < 0.3).int() * torch.randint(
        1, 100_000, (batch, vocab), device=DEVICE
    )
    counts = counts.int() | torch.where(torch.rand(batch, vocab, device=DEVICE) < 0.3, -(2**31), 0).int()
    a, b, c = torch.rand(3, batch, device=DEVICE)
    penalties = {"repetition_penalty": a + 0.5, "frequency_penalty": b * 1e-3, "presence_penalty": c * 2 - 1}
    parts: dict[str, dict[str, Any]] = {
        "bias": {"bias": torch.randn(vocab, device=DEVICE)},
        "scale": {"logit_scale": 0.0625},
        "cap": {"soft_cap": 20.0},
        "dense": {"dense_bias": torch.randn(vocab, device=DEVICE) * 100},
        "sparse": sparse(batch, vocab),
        "mask": {"token_mask": random_mask(batch, vocab)},
        "penalties": {"counts": counts, **penalties},
        "one for all": {"counts": counts, **dict(zip(penalties, (1.3, 0.01, -0.5)))},
    }
    of_each = {name: SamplingParams(**part) for name, part in parts.items()}
    whole = {name: value for part in list(parts.values())[:7] for name, value in part.items()}
    return of_each | {"everything": SamplingParams(**whole)}


def processed(step: SampleInputs, params: SamplingParams, shape: config.TileConfig | None = None) -> torch.Tensor:
    transforms, _held = module.transform_arguments(params, step.vocab_size)
    return module.run_with_logits(step, 0, None, shape, transforms)[0]


def against_the_oracle(step: SampleInputs) -> SampleResult:
    """Of the kernel's own products, so that its sums are not what is compared; with a soft cap of what the kernel makes
    of the head. Torch has another tanh, of which logits near the cap are equal that are not equal here, and the
    reverse."""
    logits_gemm, params = module.run_with_logits(step, 0, None)[0], step.params
    if params.soft_cap:
        head = DEFAULT_PARAMS._replace(bias=params.bias, logit_scale=params.logit_scale, soft_cap=params.soft_cap)
        expected = logit_transforms.raw(logits_gemm, head)
        logits_gemm = processed(step, head)
        torch.testing.assert_close(logits_gemm, expected, rtol=1e-5, atol=1e-5 * params.soft_cap, equal_nan=True)
        params = params._replace(bias=None, logit_scale=1.0, soft_cap=0.0)
    return agrees(
        launch.run(step),
        step._replace(hidden_states=logits_gemm, weight=logits_gemm, logits=logits_gemm, params=params),
    )


@pytest.mark.quick(0)
@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
def test_bits_are_those_of_triton(shape):
    for batch, vocab in ragged(shape):
        step = make_step(batch, vocab)
        step.hidden_states[:, :8] *= 10
        logits_gemm = module.run_with_logits(step, 0, None, shape)[0]
        for name, params in everything(batch, vocab).items():
            assert_same_bits(processed(step, params, shape), by_triton(logits_gemm, params), name)


def by_shards(step: SampleInputs) -> torch.Tensor:
    """Tokens of a vocabulary of 1001 that is cut anywhere, by each rank's winners."""
    bias, winners = step.params.bias, []
    for first, last in itertools.pairwise((0, 37, 37, 449, 640, 1001)):
        params = step.params if bias is None else step.params._replace(bias=bias[first:last].clone())
        shard = Shard(first, exchange_protocol.PACKED)
        part = step._replace(weight=step.weight[first:last], vocab_size=last - first, shard=shard, params=params)
        assert module.runs_on_shard(part)
        winners.append(launch.run(part).ids[: len(step.hidden_states) * step.num_samples])
    return exchange_protocol.tokens_of(torch.stack(winners))


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [1, 40, 150, 256, 300] if ON_GPU else [7])
@pytest.mark.parametrize("name", ["bias", "everything"])
def test_shards(name, batch):
    """Each rank's winners of a whole vocabulary's request are together what one draws; of tensors that end with the
    vocabulary."""
    step = make_step(batch, 1001)._replace(params=everything(batch, 1001)[name])
    step.rows().temperature[1::7] = INF
    for one in (step, step._replace(num_samples=2)):
        assert torch.equal(by_shards(one), launch.run(one).ids)


def test_logits_of_a_shard():
    """Raw ones, whatever the parameters: the rank that draws a row applies these."""
    batch, vocab = 7, 700
    step = make_step(batch, vocab)
    logits_gemm = module.run_with_logits(step, 0, None)[0]
    for params in (DEFAULT_PARAMS, everything(batch, vocab)["everything"]):
        part = step._replace(params=params, shard=Shard(4096, exchange_protocol.PACKED))
        assert torch.equal(module.shard_logits(part), logits_gemm)


def test_matrices_of_any_stride():
    """Wider than the vocabulary, rows apart, one row for all, not contiguous."""
    batch, vocab = 37 if ON_GPU else 7, 1000
    step = make_step(batch, vocab)
    logits_gemm = module.run_with_logits(step, 0, None)[0]
    params = everything(batch, vocab)["everything"]
    assert params.counts is not None
    assert params.token_mask is not None
    expected = processed(step, params)
    assert_same_bits(expected, by_triton(logits_gemm, params))
    wide = [torch.nn.functional.pad(part, (0, 5), value=-1) for part in (params.counts, params.token_mask)]
    columns_first = [part.T.contiguous().T for part in (params.counts, params.token_mask)]
    for counts, mask in (wide, columns_first):
        assert torch.equal(processed(step, params._replace(counts=counts, token_mask=mask)), expected)
    counts, mask = params.counts[:1].expand(batch, -1), params.token_mask[:1].expand(batch, -1)
    one = params._replace(counts=counts, token_mask=mask)
    copied = params._replace(counts=counts.contiguous(), token_mask=mask.contiguous())
    assert torch.equal(processed(step, one), processed(step, copied))


@pytest.mark.quick(1)
@pytest.mark.parametrize("shape", CONFIGS, ids=IDS)
def test_many_entries_of_a_tile(shape):
    """More than a warp's lanes, of one token too, added in the row's order: 1e8 - 1e8 + 1 is not 1e8 + 1 - 1e8;
    beside rows with one entry and with none."""
    batch, vocab, n = shape.block_b + 3, 300, 70
    step = make_step(batch, vocab)
    logits_gemm = module.run_with_logits(step, 0, None, shape)[0]
    ids = torch.randint(128, 256, (batch, n), device=DEVICE, dtype=torch.int32)
    ids[::4] = torch.randint(0, vocab, (len(ids[::4]), n), device=DEVICE, dtype=torch.int32)
    ids[1::4, 1:] = -1
    ids[2::8] = 131
    ids[6::8] = torch.tensor([-1, 2**31 - 1, -(2**31), vocab, 2**30], device=DEVICE).repeat(n // 5)
    values = torch.tensor([1e8, 1.0, -1e8, 0.25, -3.0], device=DEVICE)[torch.randint(0, 5, (batch, n), device=DEVICE)]
    found = processed(step, SamplingParams(bias_ids=ids, bias_values=values), shape)
    rows = torch.arange(batch, device=DEVICE)
    for id, value in zip(ids.T, values.T):
        there = rows[(id >= 0) & (id < vocab)]
        logits_gemm[there, id[there]] += value[there]
    assert torch.equal(found, logits_gemm)


def test_special_values():
    """Of products and of what is done to them; what is masked out is -inf, NaN too."""
    batch, vocab = 40 if ON_GPU else 8, 700
    step = make_step(batch, vocab)
    states, weight = torch.zeros_like(step.hidden_states), torch.zeros_like(step.weight)
    weight[:vocab, 0] = torch.randn(vocab, device=DEVICE).bfloat16()
    weight[5:9, 1] = torch.tensor([NAN, INF, -INF, 3e38], device=DEVICE).bfloat16()
    states[:, 0] = torch.linspace(-300, 300, batch, device=DEVICE).bfloat16()
    states[: batch // 2, 1] = 1.0
    states[3, 0] = 3e38
    step = step._replace(hidden_states=states, weight=weight)
    logits_gemm = module.run_with_logits(step, 0, None)[0]
    bias = torch.zeros(vocab, device=DEVICE)
    bias[:6] = torch.tensor([INF, -INF, NAN, 3e38, -100, 100], device=DEVICE)
    mask = random_mask(batch, vocab)
    few = {
        "bias_ids": torch.arange(-1, 7, device=DEVICE, dtype=torch.int32).expand(batch, -1),
        "bias_values": torch.nn.functional.pad(bias[:6], (1, 1), value=1.0).expand(batch, -1),
    }
    for params in (
        SamplingParams(**few),
        SamplingParams(**few, token_mask=mask, soft_cap=30.0),
        SamplingParams(soft_cap=30.0),
        SamplingParams(bias=bias, soft_cap=30.0),
        SamplingParams(dense_bias=bias),
        SamplingParams(dense_bias=bias, token_mask=mask),
        *everything(batch, vocab).values(),
    ):
        assert_same_bits(processed(step, params), by_triton(logits_gemm, params))


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "seed",
    [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 40))] if ON_GPU else range(8),
)
def test_mixes(seed):
    """Of everything at once: the oracle's, and a row's bits in another batch. Each is kernels of its own to Triton,
    which compiles those of a seed for a minute or two."""
    torch.manual_seed(seed)
    mix, batch, vocab = Mix(seed, device=DEVICE), (7, 50, 150, 256)[seed % 4] if ON_GPU else 8, 600
    for _ in range(4):
        step = mix.make(batch=batch, vocab=vocab)
        head = make_step(batch, vocab, num_samples=step.num_samples)
        whole = head._replace(temperature=step.temperature, seed=step.seed, offset=step.offset, params=step.params)
        drawn, part = against_the_oracle(whole), whole.part(batch // 3, batch)
        assert_same_rows(launch.run(part), part, drawn, whole, slice(batch // 3, batch))
    assert all(int(buffer.count_nonzero()) == 0 for buffer in workspace._per_stream.values())


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-3, 1.0, 1e6, INF])
@pytest.mark.parametrize("batch", [2, 64, 250] if ON_GPU else [8])
def test_masks_that_leave_few_tokens(batch, temperature):
    """One, in the last tile or the first; none; all. What is left is drawn, whatever the rest is."""
    vocab = 5003 if ON_GPU else 803
    step = make_step(batch, vocab)._replace(temperature=temperature)
    weight = step.weight.clone()
    weight[17] = NAN  # masked out everywhere
    step = step._replace(weight=weight)
    left = torch.randint(18, vocab, (batch,), device=DEVICE)
    left[0] = vocab - 1
    mask = torch.zeros(batch, -(-vocab // 32), dtype=torch.int32, device=DEVICE)
    mask.scatter_(1, (left // 32)[:, None], (torch.ones_like(left) << left % 32).int()[:, None])
    expected = left.clone()
    mask[1] = 0
    expected[1] = -1
    params = SamplingParams(token_mask=mask)
    assert torch.equal(launch.run(step._replace(params=params)).ids, expected)
    assert torch.equal(launch.run(step._replace(params=params._replace(top_k=3, top_p=0.5))).ids, expected)
    twice = launch.run(step._replace(params=params, num_samples=2)).ids.view(batch, 2)
    assert torch.equal(twice, expected[:, None].expand(-1, 2))


@pytest.mark.parametrize("name", ["top_k", "token_mask", "logit_scale", "dense_bias", "bias_ids"])
def test_infinite_logits_at_an_infinite_temperature(name):
    """What the head gives as -inf makes a row undefined there, as the oracle says; what is masked out does not."""
    batch, vocab = 20 if ON_GPU else 8, 700
    step = make_step(batch, vocab)._replace(temperature=INF)
    weight, states = step.weight.clone(), torch.ones_like(step.hidden_states)
    weight[100] = 0.0
    weight[100, 0] = -3e38
    states[:, 0] = 0.0
    states[1::2, 0] = 1e30  # times that: -inf
    mask, bias = random_mask(batch, vocab), torch.zeros(vocab, device=DEVICE)
    mask[: batch // 2], bias[5] = -1, -INF
    mask[batch // 2 :, 100 // 32] &= ~(1 << 100 % 32)
    of_name = {"top_k": 300, "token_mask": mask, "logit_scale": 2.0, "dense_bias": bias}
    few = {"bias_ids": mask[:, :1] * 0 + 5, "bias_values": bias[5].expand(batch, 1)}
    wanted = few if name in few else {name: of_name[name]}
    step = step._replace(hidden_states=states, weight=weight, params=DEFAULT_PARAMS._replace(**wanted))
    assert (module.run_with_logits(step, 0, None)[0][1] == -INF).any()
    drawn = against_the_oracle(step)
    assert (drawn.ids == -1).any()
    assert (drawn.ids >= 0).any() or name in ("dense_bias", "bias_ids")
    assert torch.equal(launch.run(step._replace(num_samples=2)).ids.view(-1, 2)[:, 0], drawn.ids)


@pytest.mark.quick(1)
@pytest.mark.parametrize("batch", [8, 64, 256] if ON_GPU else [8])
@pytest.mark.parametrize("deviation", [0.1, 1.0, 40.0])
def test_the_search_misses_nothing(batch, deviation):
    """One draw, searched, and two, of which every token is evaluated, bit for bit, from the lowest temperatures on."""
    vocab = 40_000 if ON_GPU else 1_000
    weight = (torch.randn(vocab, 64, device=DEVICE) * deviation / 8).bfloat16()
    for round in range(12 if ON_GPU else 9):
        temperature = torch.exp(torch.empty(batch, device=DEVICE).uniform_(math.log(1e-6), math.log(1e6)))
        temperature[::5] = 0.0
        states = torch.randn(batch, 64, device=DEVICE).bfloat16()
        states[1::7] = 0.0  # equal logits
        seed = torch.randint(-(2**63), 2**63 - 1, (batch,), device=DEVICE)
        every = list(everything(batch, vocab).values())
        params = every[round % len(every)]
        step = SampleInputs(states, weight, temperature, seed, 11, 1, vocab, params=params)
        one, two = launch.run(step).ids, launch.run(step._replace(num_samples=2)).ids.view(batch, 2)[:, 0]
        assert torch.equal(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("with_sparse", [False, True])
@pytest.mark.parametrize(("extra", "launches"), [({}, 1), ({"top_k": 20, "top_p": 0.95}, 2)])
def test_launches(extra, launches, with_sparse, tmp_path):
    """And a graph whose every replay reads the biases, masks and counts as they are then."""
    batch, vocab = 70, 5003
    step = make_step(batch, vocab)._replace(params=everything(batch, vocab)["everything"]._replace(**extra))
    if not with_sparse:
        step = step._replace(params=step.params._replace(bias_ids=None, bias_values=None))
    launch.run(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    graph.enable_debug_mode()
    with torch.cuda.graph(graph):
        drawn = launch.run(step).ids
    assert kernel_nodes(graph, tmp_path) == (launches + with_sparse, 0)
    mask, counts = step.params.token_mask, step.params.counts
    assert mask is not None
    assert counts is not None
    for _ in range(5):
        other = everything(batch, vocab)["penalties"].counts
        assert other is not None
        mask.copy_(random_mask(batch, vocab))
        counts.copy_(other)
        if with_sparse:
            for name, changed in sparse(batch, vocab).items():
                getattr(step.params, name).copy_(changed)
        graph.replay()
        assert torch.equal(drawn, launch.run(step).ids)


def test_summaries_are_of_what_was_made():
    """Keys and masses of the processed logits; ``check`` compares them with the logits that are stored."""
    vocab = 4099 if ON_GPU else 1001
    batch = 150 if ON_GPU else 7
    step = make_step(batch, vocab)
    params = everything(batch, vocab)["everything"]
    transforms, _held = module.transform_arguments(params, step.vocab_size)
    expected = processed(step, params)
    logits, *_ = check(step, None, 0, transforms)
    assert torch.equal(logits, expected)
