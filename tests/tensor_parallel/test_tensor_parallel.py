"""Tensor parallelism: the scenarios of ``tensor_parallel`` with processes, on this machine's CPUs or GPUs."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist

import flashsampling
from flashsampling import LMHeadSampler, ops
from flashsampling.sampling_params import SamplingParams
from flashsampling.tensor_parallel import (
    Failure,
    TensorParallel,
    TensorParallelTimeout,
    capabilities,
    p2p,
)
from flashsampling.tensor_parallel.gloo import Gloo
from flashsampling.tensor_parallel.message import FIRST_PARAM, HEADER, Hashes
from flashsampling.tensor_parallel.nccl import Nccl
from flashsampling.tensor_parallel.rendezvous import Rendezvous

from ..conftest import DEVICE
from ..problems import IMPLEMENTATIONS, KERNELS, rows_only
from . import scenarios

GPUS = torch.cuda.device_count()
LONG = GPUS > 0

Kind: TypeAlias = tuple[int, str, str]  # world size, implementation, transport

# Without a GPU a scenario runs with one kind, by what needs most of its time: with two ranks where they draw much, with
# three where they learn who is at fault, of whom most are right. The cuts and winners of kernels, and which header
# differs in what, are tested without processes.
ON_CPU: dict[Kind, list[str]] = {
    (2, "streaming", "gloo"): [
        *("disagreements", "memory_that_cannot_be_mapped", "generate", "two_at_once", "one_request"),
        "slots_and_scores",
        *("requests_of_a_sampler", "parameters_of_the_first_rank", "steps_that_a_compiler_could_drop"),
        *("messages_of_others", "surroundings", "device_mesh"),
    ],
    (3, "streaming", "gloo"): [
        *("same_tokens", "many_steps", "delayed_ranks", "rejection", "requests", "other_requests"),
        *("other_drafts", "out_of_step", "out_of_step_in_a_round", "other_parameters", "construction_that_fails"),
        *("ranks_that_do_not_come", "ranks_that_are_busy", "leaving_while_others_wait"),
    ],
    (4, "streaming", "gloo"): ["sub_groups"],  # two groups of two
    (3, "streaming", "nccl"): [  # all but NCCL itself, for which gloo stands in
        *("many_steps", "sub_groups", "requests", "out_of_step", "other_parameters", "other_requests"),
        *("out_of_step_in_a_round", "out_of_step_in_bulk", "hosts_that_learn_late"),
    ],
    (2, "cute", "gloo"): ["other_requests"],  # what it does in one launch, the other implementations in rounds
}
ON_ONE_GPU = [  # whose ranks share it
    *("requests", "other_requests", "other_drafts", "other_parameters", "out_of_step_in_a_round", "rejection"),
    *("no_sync", "cuda_graphs"),
]
NOT_FOR = {
    "gloo": ["cuda_graphs", "no_sync", "hosts_that_learn_late", "out_of_step_in_bulk"],  # goes through the host
    "p2p": ["hosts_that_learn_late", "out_of_step_in_bulk"],
    "nccl": [],
}


def _on_gpus(count: int) -> dict[Kind, list[str]]:
    if count == 1:
        return {(2, "triton", "p2p"): ON_ONE_GPU}
    kinds = [(world, impl, "p2p") for world in (2, 4, 8) if world <= count for impl in KERNELS]
    kinds += [(world, KERNELS[-1], "nccl") for world in (2, 4, 8) if world <= count]
    kinds += [(2, "streaming", "nccl"), (2, "triton", "gloo")] if count >= 2 else []
    names = [scenario.__name__ for scenario in scenarios.ON_GPU]
    return {kind: [name for name in names if name not in NOT_FOR[kind[2]]] for kind in kinds}


NAMES = _on_gpus(GPUS) if GPUS else {kind: ON_CPU[kind] for kind in ON_CPU if kind[1] in IMPLEMENTATIONS}
SHARES = [  # process groups that share a kind's scenarios: most of Triton's time on GPUs is compiling
    (*kind, names[first :: 4 if GPUS and kind[1] == "triton" else 1])
    for kind, names in NAMES.items()
    for first in range(4 if GPUS and kind[1] == "triton" else 1)
]


def _assert_ok(world, names, impl="streaming", transport="gloo", device=DEVICE.type, dead=None, **options):
    """Runs the scenarios; after a failure new processes run the remaining ones."""
    wrong, left = [], list(names)
    while left:
        ran = scenarios.run(world, left, device=device, impl=impl, transport=transport, **{"long": LONG} | options)
        while left:
            name = left.pop(0)
            others = {rank: said for rank, said in ran[name].items() if said != ("died" if rank == dead else "ok")}
            if others:
                wrong += [f"{name}, rank {rank}: {said}" for rank, said in others.items()]
                break
    assert not wrong, "\n".join(wrong)


@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    ("world", "impl", "transport", "names"),
    SHARES,
    ids=["-".join(map(str, (*share[:3], share[3][0]))) for share in SHARES],
)
def test_ranks(world, impl, transport, names):
    _assert_ok(world, names, impl, transport)


DEAD = {"a_rank_dies": 1, "the_first_rank_dies": 0}
_FAILURES = [
    (*kind, scenario.__name__)
    for scenario in scenarios.LAST
    for kind in (NAMES if GPUS > 1 else [(3, "streaming", "gloo")] if GPUS == 0 else [])
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "impl", "transport", "name"), _FAILURES)
def test_ranks_that_fail(world, impl, transport, name):
    _assert_ok(world, [name], impl, transport, dead=DEAD.get(name))


def test_gloo_never_names_the_wrong_rank():
    _assert_ok(3, [scenario.__name__ for scenario in scenarios.OF_GLOO], device="cpu", long=False)


@pytest.mark.parametrize("world", [world for world in (2, 4, 8) if world <= GPUS])
def test_one_kernel_node(world):
    for impl in KERNELS:
        _assert_ok(world, ["one_node"], impl, "p2p", long=True)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("impl", KERNELS)
def test_one_visible_gpu_each(impl):
    """Ray and SLURM start ranks with one visible GPU each; p2p works by name and by choice."""
    names = ["many_steps", "out_of_step", "p2p_is_chosen"]
    _assert_ok(2, names, impl, "p2p", long=False, one_visible=True)


def _member(gpu, **options):
    fields = {"shape": (4, 8), "dtype": "torch.bfloat16", "device": "cuda", "gpu": gpu, "no_peers": (), "host": "one"}
    fields |= {"first_token": None, "vocab_size": None, "max_batch_size": 1, "max_num_samples": 1, "transport": None}
    fields |= {"impl": None, "timeout": 1.0, "backends": "cpu:gloo,cuda:nccl", "cannot": {}}
    return capabilities.RankCapabilities(**fields | options)


@pytest.mark.parametrize(
    ("other", "impl", "transport", "why"),
    [
        ({}, "triton", "p2p", None),  # neither process sees the other's GPU: it is tried
        ({"gpu": "A"}, "triton", "nccl", "ranks 0 and 1 share a GPU"),
        ({"no_peers": ("A",)}, "triton", "nccl", "the GPU of rank 1 cannot map the memory of rank 0's"),
        ({}, "streaming", "nccl", "impl 'streaming' has no kernel"),
        ({"host": "two"}, "triton", "nccl", None),  # p2p is not expected there
    ],
)
def test_why_not_p2p(other, impl, transport, why):
    members = [_member("A"), _member(**{"gpu": "B"} | other)]
    name, reason = capabilities.choose_transport(members, impl)
    assert name == transport
    assert reason is None if why is None else reason.startswith(why)
    assert capabilities.choose_transport(members, impl, no_p2p="tried") == ("nccl", "tried")
    named = [replace(rank_capabilities, transport="nccl") for rank_capabilities in members]
    assert capabilities.choose_transport(named, impl) == ("nccl", None)
    named = [replace(rank_capabilities, transport="p2p") for rank_capabilities in members]
    if transport != "p2p":
        with pytest.raises(ValueError, match="transport='p2p' cannot be used"):
            capabilities.choose_transport(named, impl)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *(("dtype", "torch.float16"), ("device", "cpu"), ("vocab_size", 7), ("max_batch_size", 2)),
        *(("max_num_samples", 2), ("transport", "nccl"), ("impl", "triton"), ("timeout", 2.0)),
    ],
)
def test_what_ranks_must_have_alike(name, other):
    """Buffers and messages are made for it."""
    assert capabilities.check([_member("A"), _member("B")]) == [(0, 4), (4, 8)]
    with pytest.raises(ValueError, match=f"^{name} must be the same on all ranks, got rank 0: .*, rank 1: {other}"):
        capabilities.check([_member("A"), _member("B", **{name: other})])


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("vocab_size must be from 1 to the 300 rows of all shards, got 301", {"vocab_size": 301}),
        ("vocab_size must be an int, got float", {"vocab_size": 300.5}),
        ("first_token must be an int, got str", {"first_token": "0"}),
        ("timeout must be above 0", {"timeout": 0}),
        ("timeout must be a number, got str", {"timeout": "soon"}),
        ("transport must be None or one of", {"transport": "smoke"}),
        ("impl must be None or one of", {"impl": "reference"}),
    ],
)
def test_arguments_that_are_wrong(message, options, process_group):
    with pytest.raises((TypeError, ValueError), match=message):
        TensorParallel(None, torch.ones(300, 8), **options)


def test_room_for_results_and_logits():
    """64 words of every row, in slots that fit; a rank's share of the rows, up to 256 MiB."""
    assert [p2p.message_words(rows, ranks) for rows, ranks in ((1, 2), (256, 8), (1024, 2), (256, 72))] == [
        *(64, 16384, 65536, 7281)
    ]
    sizes = ((1, 2, 128256), (255, 2, 128256), (4096, 2, 128256), (256, 8, 128256), (9, 2, 2**30))
    assert [p2p.rows_of_buffer(*size) for size in sizes] == [1, 128, 523, 32, 1]


def test_a_message_that_raised_leaves_nothing_behind(monkeypatch):
    """Otherwise the next step's header would hold old parameters, and ranks that differ could agree."""
    it = object.__new__(Nccl)
    it._hashes, header = Hashes(4, torch.device("cpu")), torch.zeros(HEADER, dtype=torch.int64)
    it._message = header
    monkeypatch.setattr(it, "_count_skipped_call", lambda: None)

    def interrupted(_):
        assert header[FIRST_PARAM:].any()
        raise KeyboardInterrupt

    monkeypatch.setattr(it, "_gather", interrupted)
    with pytest.raises(KeyboardInterrupt):
        it.finish(torch.zeros(2, dtype=torch.int64), rows_only(2)._replace(params=SamplingParams(soft_cap=20.0)))
    assert not header[FIRST_PARAM:].any()


def test_an_open_group_lives_without_anybody_holding_it(process_group):
    """A captured graph does not keep its group, and needs it."""
    group = TensorParallel(None, torch.ones(300, 8))
    name, there = group.name, weakref.ref(group)
    del group
    gc.collect()
    assert there() is ops.find_group(name)
    there().close()
    gc.collect()
    assert there() is None
    with pytest.raises(ValueError, match="tp must be open, it has been closed"):
        ops.find_group(name)


@pytest.fixture
def alone(process_group):
    """A group of this process alone."""
    with TensorParallel(None, torch.ones(300, 8)) as group:
        yield group


def test_a_copy_of_a_module_has_the_same_group_and_no_pickle_has_it(alone):
    sampler = LMHeadSampler(torch.ones(300, 8), tp=alone)
    assert copy.deepcopy(sampler).tp is alone
    with pytest.raises(TypeError, match="a TensorParallel cannot be pickled"):
        pickle.dumps(sampler)


def test_a_broken_device_does_not_hide_the_named_error(alone):
    """Counting a call that raised is a device call, and after a device-side assert every device call raises."""

    class Broken:
        def failure(self):
            return Failure("timeout", 1, 7)

        def close(self, all_done):
            pass

        def drain(self):
            pass

        def set_skipped_calls(self, count):
            raise RuntimeError("CUDA error: device-side assert triggered")

    alone._transport = Broken()
    with pytest.raises(TensorParallelTimeout, match="rank 1 did not take part"):
        flashsampling.sample(torch.ones(2, 8), torch.ones(300, 8), seed=torch.arange(2), tp=alone)


@pytest.fixture
def timed_gloo(monkeypatch):
    """Makes rank 0 of three over gloo, whose messages take ``takes`` seconds, and time out if they may wait less than
    ``least``. Also returns the bounds of all waits, and a clock."""

    def make(seconds, takes, least):
        waits, clock = [], SimpleNamespace(now=5.0)
        clock.monotonic = lambda: clock.now

        class Work:
            def wait(self, bound):
                waits.append(bound.total_seconds())
                clock.now += takes if waits[-1] >= least else waits[-1]
                if waits[-1] < least:
                    raise RuntimeError("timed out")

        monkeypatch.setattr("flashsampling.tensor_parallel.gloo.time", clock)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
        transport = Gloo(None, Rendezvous(dist.HashStore, 0, 3, seconds), 4, 4, seconds)
        connections = type("Connections", (), {"send": lambda *_: Work(), "recv": lambda *_: Work()})
        transport._connections = connections()
        return transport, waits, clock

    return make


@pytest.mark.parametrize("seconds", [0.0004, 0.3])
def test_gloo_waits_for_all_ranks_together_no_longer_than_the_bound(seconds, timed_gloo):
    """The bound is shared by all peers. gloo rounds less than a millisecond to 0, which would be no bound."""
    long = seconds > 0.25
    transport, waits, _ = timed_gloo(seconds, min(0.2, seconds), 0.25 if long else 0.0)
    failure = transport._all_gather(torch.zeros(12), torch.zeros(3, 12), 5)
    assert failure == (Failure("timeout", 2, 5) if long else None)
    assert waits[0] == pytest.approx(max(seconds, 1e-3), abs=2e-6)
    assert min(waits) >= 1e-3
    assert not long or waits[1] == pytest.approx(0.1, abs=2e-6)


def test_gloo_waits_for_all_messages_of_a_step_together_no_longer_than_the_bound(timed_gloo):
    """Work between two messages does not count."""
    transport, waits, clock = timed_gloo(17.0, 2.0, 2.0 - 1e-5)
    for _ in range(2):
        transport.begin(rows_only(3, 1.0, 7, 0))
        waits.clear()
        for message in range(2):
            assert transport._all_gather(torch.zeros(12), torch.zeros(3, 12), message) is None
            clock.now += 100
        assert [round(bound, 3) for bound in waits] == [17, 15, 13, 11, 9, 7, 5, 3]
    assert transport._all_gather(torch.zeros(12), torch.zeros(3, 12), 6) == Failure("timeout", 1, 6)
