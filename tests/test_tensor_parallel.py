"""Tensor parallelism: the scenarios of ``tensor_parallel`` with processes, on this machine's CPUs or GPUs."""

import importlib
import json
import random
from dataclasses import replace

import pytest
import torch
from filelock import FileLock

from flashsampling import exchange
from flashsampling.exchange import Shard

from . import tensor_parallel
from .conftest import DEVICE
from .problems import IMPLEMENTATIONS, KERNELS, assert_agreement, fit, make_problem

GPUS = torch.cuda.device_count()
LONG = GPUS > 0


def _kinds() -> list[tuple[int, str, str]]:
    """World size, implementation, transport."""
    if not GPUS:
        return [(2, "streaming", "gloo"), (3, "streaming", "gloo"), (4, "streaming", "gloo"), (2, "triton", "gloo")]
    kinds = [(world, impl, "p2p") for world in (2, 4, 8) if world <= GPUS for impl in KERNELS]
    kinds += [(world, KERNELS[-1], "nccl") for world in (2, 4, 8) if world <= GPUS]
    return kinds + ([(2, "streaming", "nccl"), (2, "triton", "gloo")] if GPUS >= 2 else [])


SCENARIOS = [scenario.__name__ for scenario in (tensor_parallel.ON_GPU if GPUS else tensor_parallel.ON_CPU)]


def _names(impl: str, transport: str) -> list[str]:
    if impl == "triton" and not GPUS:  # the interpreter is slow, and what its packed winners are is tested without processes
        return ["rare_rows", "sub_groups"]
    # gloo goes through the host
    return [name for name in SCENARIOS if transport != "gloo" or name not in ("cuda_graphs", "no_sync")]


CASES = [(world, impl, transport, name) for world, impl, transport in _kinds() for name in _names(impl, transport)]


@pytest.fixture
def results(tmp_path_factory, worker_id):
    """What the ranks of a kind said of every scenario. Starting processes takes longer than most scenarios, so a kind is run
    once, by whichever of pytest's workers asks first. (xdist 3.8 does not keep groups together under pytest 9.2.)"""
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent

    def of(world: int, impl: str, transport: str) -> dict[str, dict[str, str]]:
        path = folder / f"{world}-{impl}-{transport}.json"
        with FileLock(f"{path}.lock"):
            if not path.exists():
                names = _names(impl, transport)
                run = tensor_parallel.run(world, names, device=DEVICE.type, impl=impl, transport=transport, long=LONG)
                path.write_text(json.dumps(run))
        return json.loads(path.read_text())

    return of


def _assert_ok(per_rank, expected_dead=None):
    for rank, said in per_rank.items():
        assert said == ("died" if int(rank) == expected_dead else "ok"), f"rank {rank}: {said}"


@pytest.mark.parametrize(("world", "impl", "transport", "name"), CASES)
def test_ranks(world, impl, transport, name, results):
    _assert_ok(results(world, impl, transport)[name])


@pytest.mark.parametrize(("world", "impl", "transport"), [kind for kind in _kinds() if kind[2] != "nccl"])
@pytest.mark.parametrize("name", [scenario.__name__ for scenario in tensor_parallel.LAST])
def test_ranks_that_fail(world, impl, transport, name):
    if impl == "triton" and not GPUS:
        pytest.skip("the same as without a kernel")
    results = tensor_parallel.run(world, [name], device=DEVICE.type, impl=impl, transport=transport, long=LONG)
    _assert_ok(results[name], expected_dead=1 if name == "a_rank_dies" else None)


@pytest.mark.parametrize("world", [world for world in (2, 4, 8) if world <= GPUS])
def test_one_kernel_node(world):
    for impl in KERNELS:
        _assert_ok(tensor_parallel.run(world, ["one_node"], device="cuda", impl=impl, transport="p2p", long=True)["one_node"])


def test_packed_winners_of_any_split_are_the_whole_rows_winner():
    """Every class of scores a shard can hold, in every combination over three shards."""
    numbers = random.Random(0)
    inf, nan = float("inf"), float("nan")
    classes = [[-inf, -inf], [-inf, inf], [1.5, inf], [-2.0, 0.0], [-0.0, -inf], [nan, 1.0], [nan, inf], [3e38, -3e38], []]
    for _ in range(400):
        shards = [numbers.choice(classes) for _ in range(3)]
        scores = [score for shard in shards for score in shard]
        winners, start = [], 0
        for shard in shards:
            row = torch.tensor(shard)
            best = row.max() if len(shard) else torch.tensor(-inf)
            token = start + int((row == best).nonzero()[0]) if len(shard) and not best.isnan() else -1
            winners.append(exchange.pack(best[None], torch.tensor([token]), row.isfinite().any()[None]))
            start += len(shard)
        assert all(winner.item() != 0 for winner in winners)
        expected = -1
        if any(abs(score) < inf for score in scores) and not any(score != score for score in scores):
            expected = scores.index(max(scores))
        assert exchange.tokens_of(torch.stack(winners)).item() == expected, shards


def _shard_winners(impl, problem, ends):
    """(shards, B * num_samples) packed winners of one device that plays all ranks."""
    sample = importlib.import_module(f"flashsampling.impl.{impl}").sample
    rows = problem.temperature, problem.seed, problem.offset, problem.num_samples
    winners, first = [], 0
    for end in ends:
        part = problem.weight[first:end].clone()
        winners.append(sample(problem.hidden_states, part, *rows, end - first, shard=Shard(first, exchange.PACKED)).flatten())
        first = end
    return torch.stack(winners)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize(("batch", "num_samples"), [(5, 1), (70, 1), (130, 1), (6, 3)])
def test_winners_of_shards_are_the_whole_vocabulary_s(impl, batch, num_samples, device):
    """Cut anywhere, also in the middle of a tile and of a Philox group; some shards are empty."""
    if impl == "triton" and device.type == "cpu" and batch > 70:
        pytest.skip("minutes in the interpreter")
    problem = make_problem(batch, 700, 64, device, torch.bfloat16, num_samples, impl=impl)
    whole = problem.sample(impl)
    for ends in ((350, 700), (0, 1, 129, 129, 511, 700), (100, 200, 300, 400, 500, 600, 700), (127, 640, 640, 700)):
        tokens = exchange.tokens_of(_shard_winners(impl, problem, ends)).view(batch, num_samples)
        if impl == "streaming":
            assert_agreement(tokens, problem)
        else:
            assert torch.equal(tokens, whole), ends


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rare_scores_on_shards(impl, device):
    """NaN, infinities and rows without a finite score, on either side of a cut."""
    inf, nan = float("inf"), float("nan")
    rows = {
        0: {},
        1: {299: nan},
        2: {3: inf, 298: inf},
        3: {298: inf, 5: -inf},
        4: dict.fromkeys(range(300), -inf),
        5: {token: inf if token == 280 else -inf for token in range(300)},
        6: {token: -inf for token in range(299)},
        7: {token: inf if token == 130 else -inf for token in range(200)},
    }
    for row, logits in rows.items():
        weight = torch.zeros(300, 8, device=device)
        for token, logit in logits.items():
            weight[token, 0] = logit
        states = torch.ones(1, 8, device=device)  # not 0: times inf it is NaN
        problem = replace(make_problem(1, 300, 8, device), weight=fit(impl, weight), hidden_states=fit(impl, states))
        problem.temperature[:] = 1.0
        tokens = exchange.tokens_of(_shard_winners(impl, problem, (150, 300)))
        assert torch.equal(tokens[:, None], problem.sample("reference")), row
