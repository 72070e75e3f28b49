"""Tensor parallelism: the scenarios of ``tensor_parallel`` with processes, on this machine's CPUs or GPUs."""

import json

import pytest
import torch
from filelock import FileLock

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
