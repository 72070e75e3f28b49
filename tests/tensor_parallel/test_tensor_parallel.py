"""Tensor parallelism: the scenarios of ``tensor_parallel`` with processes, on this machine's CPUs or GPUs."""

import contextlib
import copy
import gc
import itertools
import json
import pathlib
import pickle
import time
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import TypeAlias

import pytest
import torch
import torch.distributed as dist
from filelock import FileLock, Timeout

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
Share: TypeAlias = tuple[int, str, str, int]  # a kind, and which of how many

# Without a GPU a scenario runs with one kind, by what needs most of its time: with two ranks where they draw much, with
# three where they learn who is at fault, of whom most are right. The cuts and winners of kernels, and which header
# differs in what, are tested without processes.
ON_CPU: dict[Kind, list[str]] = {
    (2, "streaming", "gloo"): [
        *("many_steps", "disagreements", "memory_that_cannot_be_mapped", "generate", "two_at_once", "module"),
        *("speculative_sequences", "requests_of_a_sampler", "parameters_of_the_first_rank", "one_request"),
        *("steps_that_a_compiler_could_drop", "messages_of_others", "surroundings", "device_mesh"),
        "a_broadcast_of_what_cannot_be_said",
    ],
    (3, "streaming", "gloo"): [
        *("same_tokens", "rare_rows", "changing_batches", "delayed_ranks", "rejection", "requests", "other_requests"),
        *("other_drafts", "out_of_step", "out_of_step_in_a_round", "other_parameters", "construction_that_fails"),
        *("ranks_that_do_not_come", "ranks_that_are_busy", "leaving_by_an_exception", "leaving_while_others_wait"),
        "collective_check",
    ],
    (4, "streaming", "gloo"): ["sub_groups"],  # two groups of two
    (3, "streaming", "nccl"): [  # all but NCCL itself, for which gloo stands in
        *("changing_batches", "sub_groups", "requests", "out_of_step", "other_parameters", "other_requests"),
        *("out_of_step_in_a_round", "out_of_step_in_bulk", "leaving_by_an_exception", "an_all_gather_that_hangs"),
        "hosts_that_learn_late",
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
CASES = [(*kind, name) for kind, names in NAMES.items() for name in names]


def _shares(impl: str) -> int:
    """Returns the number of process groups that share a kind's scenarios: most of Triton's time is compiling."""
    return 4 if GPUS and impl == "triton" else 1


def _run(share: Share) -> dict[str, dict[int, str]]:
    """Returns each rank's result of each scenario. After a failure new processes run the remaining scenarios."""
    world, impl, transport, first = share
    reported: dict[str, dict[int, str]] = {}
    left = NAMES[world, impl, transport][first :: _shares(impl)]
    while left:
        ran = scenarios.run(world, left, device=DEVICE.type, impl=impl, transport=transport, long=LONG)
        failed = (place for place, name in enumerate(left) if set(ran[name].values()) != {"ok"})
        done = next(failed, len(left)) + 1
        reported |= {name: ran[name] for name in left[:done]}
        left = left[done:]
    return reported


@pytest.fixture
def results(request, tmp_path_factory, worker_id):
    """Returns the ranks' results of a scenario.

    Starting processes takes longer than most scenarios, so the first pytest worker that asks for a share runs all its
    scenarios. Later workers run another share instead of waiting. (xdist 3.8 does not keep groups together under
    pytest 9.2.)"""
    base = tmp_path_factory.getbasetemp()
    folder = base if worker_id == "master" else base.parent

    def share_of(world: int, impl: str, transport: str, name: str) -> Share:
        return world, impl, transport, NAMES[world, impl, transport].index(name) % _shares(impl)

    def reported(share: Share) -> pathlib.Path:
        return folder / f"{'-'.join(map(str, share))}.json"

    def run(share: Share) -> None:
        path = reported(share)
        with contextlib.suppress(Timeout), FileLock(f"{path}.lock", blocking=False):
            if not path.exists():
                part = path.with_suffix(".part")
                part.write_text(json.dumps(_run(share)))
                part.rename(path)

    items = [item for item in request.session.items if getattr(item, "function", None) is test_ranks]
    asked_for = [
        share_of(*(item.callspec.params[name] for name in ("world", "impl", "transport", "name"))) for item in items
    ]

    def of(*case) -> dict[str, str]:
        share = share_of(*case)
        others = itertools.cycle(dict.fromkeys((share, *asked_for)))
        while not reported(share).exists():
            run(next(others))
            time.sleep(0.1)
        return json.loads(reported(share).read_text())[case[3]]

    return of


def _assert_ok(per_rank, expected_dead=None):
    for rank, reported in per_rank.items():
        assert reported == ("died" if int(rank) == expected_dead else "ok"), f"rank {rank}: {reported}"


def _assert_runs(world, names, impl="streaming", transport="gloo", device="cpu", **options):
    options = {"long": False} | options
    for per_rank in scenarios.run(world, names, device=device, impl=impl, transport=transport, **options).values():
        _assert_ok(per_rank)


@pytest.mark.timeout(1300)  # a share's scenarios are run by the first test that asks, and the others wait
@pytest.mark.parametrize(("world", "impl", "transport", "name"), CASES)
def test_ranks(world, impl, transport, name, results):
    _assert_ok(results(world, impl, transport, name))


DEAD = {"a_rank_dies": 1, "the_first_rank_dies": 0, "a_rank_dies_in_a_round": 1}
_FAILURES = [
    (*kind, scenario.__name__)
    for scenario in scenarios.LAST
    for kind in (NAMES if GPUS > 1 else [(3, "streaming", "gloo")] if GPUS == 0 else [])
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("world", "impl", "transport", "name"), _FAILURES)
def test_ranks_that_fail(world, impl, transport, name):
    results = scenarios.run(world, [name], device=DEVICE.type, impl=impl, transport=transport, long=LONG)
    _assert_ok(results[name], expected_dead=DEAD.get(name))


def test_gloo_never_names_the_wrong_rank():
    _assert_runs(3, [scenario.__name__ for scenario in scenarios.OF_GLOO])


@pytest.mark.quick(0)
def test_a_hostile_store():
    _assert_runs(2, ["a_hostile_store"])


@pytest.mark.parametrize("world", [world for world in (2, 4, 8) if world <= GPUS])
def test_one_kernel_node(world):
    for impl in KERNELS:
        _assert_runs(world, ["one_node"], impl, "p2p", "cuda", long=True)


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("impl", KERNELS)
def test_one_visible_gpu_each(impl):
    """Ray and SLURM start ranks with one visible GPU each; p2p works by name and by choice."""
    _assert_runs(2, ["changing_batches", "out_of_step", "p2p_is_chosen"], impl, "p2p", "cuda", one_visible=True)


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


def test_room_for_results_and_logits():
    """64 words of every row, in slots that fit; a rank's share of the rows, up to 256 MiB."""
    assert [p2p.message_words(rows, ranks) for rows, ranks in ((1, 2), (256, 8), (1024, 2), (256, 72))] == [
        *(64, 16384, 65536, 7281)
    ]
    sizes = ((1, 2, 128256), (255, 2, 128256), (4096, 2, 128256), (256, 8, 128256), (9, 2, 2**30))
    assert [p2p.rows_of_buffer(*size) for size in sizes] == [1, 128, 523, 32, 1]


@pytest.mark.parametrize("transport", [Gloo, Nccl])
def test_a_message_that_raised_leaves_nothing_behind(transport, monkeypatch):
    """Otherwise the next step's header would hold old parameters, and ranks that differ could agree."""
    it = object.__new__(transport)
    it._hashes, it._seconds = Hashes(4, torch.device("cpu")), 1.0
    header = it._header = it._message = torch.zeros(HEADER, dtype=torch.int64)
    monkeypatch.setattr(transport, "_count_skipped_call", lambda _: None, raising=False)

    def interrupted(*_):
        assert header[FIRST_PARAM:].any()
        raise KeyboardInterrupt

    for name in ("_gathered_words", "_gather"):
        monkeypatch.setattr(transport, name, interrupted, raising=False)
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

        @property
        def skipped_calls(self):
            return 0

        @skipped_calls.setter
        def skipped_calls(self, count):
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
    """The bound is shared by all rounds; work between two rounds does not count."""
    transport, waits, clock = timed_gloo(17.0, 2.0, 2.0 - 1e-5)
    for step in range(2):
        transport.begin(rows_only(3, 1.0, 7, 0))
        for message in range(2):
            assert transport._all_gather(torch.zeros(12), torch.zeros(3, 12), 2 * step + message) is None
            clock.now += 100
        assert [round(bound, 3) for bound in waits] == [17, 15, 13, 11, 9, 7, 5, 3]
        waits.clear()
    transport.begin(rows_only(3, 1.0, 7, 0))
    for message in range(2):
        assert transport._all_gather(torch.zeros(12), torch.zeros(3, 12), message) is None
    assert transport._all_gather(torch.zeros(12), torch.zeros(3, 12), 6) == Failure("timeout", 1, 6)


def test_gloo_says_nothing_of_drafts_that_were_alike_in_the_next_step(monkeypatch):
    monkeypatch.setattr(Gloo, "_all_gather", lambda *_: None)
    transport = Gloo(None, Rendezvous(dist.HashStore, 0, 1, 1.0), 4, 4, 1.0)
    step = rows_only(3, 1.0, 7, 0)
    headers = []
    for draft_hash in (None, torch.tensor(5), None):
        transport.begin(step._replace(draft_hash=draft_hash))
        headers.append(transport._header.tolist())
        transport.finish(torch.ones(3, dtype=torch.int64), step._replace(draft_hash=draft_hash))
    assert headers[0] == headers[2] != headers[1]
