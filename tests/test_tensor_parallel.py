"""Tensor parallelism: the scenarios of ``tensor_parallel`` with processes, on this machine's CPUs or GPUs."""

import functools
import random

import pytest
import torch

from flashsampling import exchange

from . import tensor_parallel
from .conftest import DEVICE
from .problems import KERNELS

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
CASES = [
    pytest.param(*kind, name, marks=pytest.mark.xdist_group("-".join(map(str, kind))))  # one worker per group of processes
    for kind in _kinds()
    for name in SCENARIOS
    if not (kind[2] == "gloo" and name in ("cuda_graphs", "no_sync"))  # it goes through the host
    and not (kind[1] == "triton" and not GPUS and name in ("module", "disagreements"))  # the same as without a kernel
]


@functools.cache
def _results(world: int, impl: str, transport: str) -> dict[str, dict[int, str]]:
    names = [case.values[3] for case in CASES if case.values[:3] == (world, impl, transport)]
    return tensor_parallel.run(world, names, device=DEVICE.type, impl=impl, transport=transport, long=LONG)


def _assert_ok(per_rank: dict[int, str], expected_dead: int | None = None) -> None:
    for rank, said in per_rank.items():
        assert said == ("died" if rank == expected_dead else "ok"), f"rank {rank}: {said}"


@pytest.mark.parametrize(("world", "impl", "transport", "name"), CASES)
def test_ranks(world, impl, transport, name):
    _assert_ok(_results(world, impl, transport)[name])


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
