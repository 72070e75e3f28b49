"""Exchanges outside of steps, with threads for ranks, and conclusions of transports without a device. Late and busy
ranks and errors of one of them are scenarios (``construction_that_fails``, ``ranks_that_do_not_come``,
``ranks_that_are_busy``)."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore, HashStore, PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from flashsampling.tensor_parallel import nccl, rendezvous
from flashsampling.tensor_parallel.failures import Failure, TensorParallelError, TensorParallelTimeout
from flashsampling.tensor_parallel.message import STEP
from flashsampling.tensor_parallel.rendezvous import Rendezvous
from flashsampling.tensor_parallel.serialization import to_text
from flashsampling.tensor_parallel.store import StoreGoneError, open_store
from flashsampling.tensor_parallel.watchdog import Heartbeat, Watchdog, heartbeat_key, read_heartbeats, straggler
from tests.conftest import run_python
from tests.problems import rows_only

SOON = 10.0  # seconds; a loaded machine may stop a thread for some


def _tcp(folder):
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    return lambda: TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=30))


def _hash(folder=None):
    store = HashStore()
    return lambda: store


def _file(folder):
    return lambda: FileStore(str(folder / "store"))


@pytest.fixture(params=[_tcp, _hash, _file])
def connect(request, tmp_path):
    """Gives a connection to one store, as each rank has it."""
    connect = request.param(tmp_path)
    return lambda: PrefixStore("outer", PrefixStore("inner", connect()))


def ranks(world, work, connect, seconds=1.0, late=()):
    """Runs ``work`` in a thread per rank. Returns the results or exceptions, and the seconds.

    Ranks of ``late`` begin when the others are done."""
    results: list[Any] = [None] * world

    def run(rank):
        if rank in late:
            for other in set(range(world)).difference(late):
                threads[other].join()
        started = time.monotonic()
        try:
            meet = Rendezvous(connect, rank, world, seconds)
            results[rank] = work(meet)
        except Exception as error:
            results[rank] = error
        times[rank] = time.monotonic() - started

    times = [0.0] * world
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, times


@pytest.fixture
def clock(monkeypatch):
    """The clock of ``rendezvous``, which tests move."""
    made = SimpleNamespace(now=100.0)
    made.monotonic = lambda: made.now
    made.sleep = lambda seconds: setattr(made, "now", made.now + seconds)
    monkeypatch.setattr(rendezvous, "time", made)
    return made


def test_a_store_that_serves_nobody_makes_nobody_late(clock, monkeypatch):
    store = HashStore()
    meet, other = (Rendezvous(lambda: store, rank, 2, 1.0) for rank in range(2))
    get = meet.store.get

    def slow(key):
        value = get(key)
        if key == "0/1" and clock.now == 100.0:
            clock.now += 1.5
            other.store.set("0/1", to_text(("construction", 7)))
        return value

    monkeypatch.setattr(meet.store, "get", slow)
    assert meet.exchange("construction", 5) == [5, 7]


def test_a_beat_from_before_is_no_sign_of_life(clock):
    store = HashStore()
    meet, other = Rendezvous(lambda: store, 0, 2, 4.0), Rendezvous(lambda: store, 1, 2, 4.0)
    with other.heartbeat():
        pass
    with pytest.raises(TensorParallelTimeout, match="rank 1 did not take part in a collective check within 4 s"):
        meet.exchange("a collective check")
    assert clock.now - 100 < 4.1


def test_values_of_all(connect):
    """Keys that all have read are deleted."""

    def work(meet):
        values = [meet.exchange(f"phase {i}", (meet.rank, i)) for i in range(20)]
        return values, meet.store.get(f"17/{meet.rank}"), meet.store.get(f"19/{meet.rank}") is None

    results, _ = ranks(3, work, connect, seconds=10.0)
    assert results == [([[(rank, i) for rank in range(3)] for i in range(20)], None, False)] * 3


def test_a_rank_that_is_busy_does_not_hide_one_that_does_not_come():
    over = threading.Event()

    def work(meet):
        if meet.rank == 1:
            with meet.heartbeat():
                assert over.wait(SOON)
        try:
            return meet.exchange("meeting")
        finally:
            over.set()

    results, _ = ranks(3, work, _hash(), seconds=2.0, late=(2,))
    for error in results:
        assert isinstance(error, TensorParallelTimeout)
        assert error.failure == Failure("timeout", 2, what="meeting")


def test_who_need_not_come_to_closing():
    """The rank at fault, and one that has left."""

    def work(meet):
        if meet.rank == 2:
            return meet.leave()
        return meet.close(True, lambda: 1)

    results, times = ranks(3, work, _hash(), seconds=2 * SOON, late=(1,))
    assert results == [False, False, None]
    assert max(times) < SOON
    assert ranks(2, lambda meet: meet.close(True, lambda: None), _hash())[0] == [True, True]


def test_a_failure_after_all_have_come_is_learnt_in_the_next_call():
    store = HashStore()
    meets = [Rendezvous(lambda: store, rank, 2, 0.1) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda meet: meet.exchange("a"), meets))
    failure = meets[0].declare(Failure("timeout", 1, what="a"))
    for meet in meets:
        with pytest.raises(TensorParallelTimeout) as error:
            meet.exchange("b")
        assert error.value.failure == failure


def test_the_first_failure_stands(connect):
    def work(meet):
        reported = meet.declare(Failure("mismatch", meet.rank, 3, ("seed", "offset"), f"rank {meet.rank}'s opinion"))
        return reported, meet.declared()

    results, _ = ranks(4, work, connect)
    assert len({failure for reported in results for failure in reported}) == 1


class _Wedged:
    """A store on a host that does not answer."""

    def __getattr__(self, name):
        threading.Event().wait(60)


def test_a_store_that_does_not_answer_is_an_error_within_a_bound(monkeypatch):
    monkeypatch.setattr("flashsampling.tensor_parallel.store._LEAST", 0.5)
    started = time.monotonic()
    with pytest.raises(TensorParallelError, match="store does not answer") as error:
        Rendezvous(_Wedged, 1, 2, 0.5, store_host=0)
    assert error.value.failure.rank == 0

    def unreachable():
        raise RuntimeError("Connection refused")

    with pytest.raises(TensorParallelError, match=r"store does not answer, .*Connection refused"):
        Rendezvous(unreachable, 1, 2, 0.5)
    assert time.monotonic() - started < SOON


# -- the thread of nccl


def p(begun, ended, beat=0):
    return Heartbeat(begun, ended, beat)


@pytest.mark.parametrize(
    ("before", "now", "expected"),
    [
        ([p(5, 4, 1), p(4, 4, 1)], [p(5, 4, 2), p(4, 4, 2)], 1),  # it does not call
        ([p(5, 4, 1), p(4, 4, 3)], [p(5, 4, 2), p(4, 4, 3)], 1),  # it is dead
        ([p(5, 4, 1), p(5, 4, 3)], [p(5, 4, 2), p(5, 4, 3)], 1),  # it died in the step
        ([p(5, 4, 1), None], [p(5, 4, 2), None], 1),  # it died before its first post
        ([p(5, 4, 1), p(5, 4, 3)], [p(5, 4, 2), p(5, 4, 4)], None),  # both are there
        # rank 1 hangs in step 4, which rank 2 never came to
        ([p(5, 4, 1), p(4, 3, 1), p(3, 3, 1)], [p(5, 4, 2), p(4, 3, 2), p(3, 3, 2)], 2),
        ([p(5, 4, 1), p(4, 3, 1), p(4, 4, 1)], [p(5, 4, 2), p(4, 3, 2), p(4, 4, 2)], 2),
        # rank 2 is dead and rank 1 is behind because of it
        ([p(5, 4, 1), p(4, 3, 1), p(5, 4, 1)], [p(5, 4, 2), p(4, 3, 2), p(5, 4, 1)], 2),
        ([p(5, 4, 1), p(4, 4, 1), p(4, 4, 1)], [p(5, 4, 2), p(4, 4, 2), p(4, 4, 2)], 1),
    ],
)
def test_whom_a_rank_that_hangs_waits_for(before, now, expected):
    assert straggler(before, now, 5) == expected


class _Group:
    """Ranks whose threads look at a clock that is not the wall's."""

    def __init__(self, world, seconds, connect=None):
        connect = connect or _hash()
        self.meets = [Rendezvous(connect, rank, world, 30.0) for rank in range(world)]
        self.watches = [Watchdog(meet, seconds) for meet in self.meets]
        self.progress = [(0, 0)] * world
        self.dead = set()
        self.now = 100.0

    def until_failure(self, most):
        started, heard = self.now, {}
        while self.now - started < most:
            self.now += self.watches[0].period
            for rank, watch in enumerate(self.watches):
                if rank not in self.dead and rank not in heard:
                    failure = watch.look(Heartbeat(*self.progress[rank]), self.progress[rank][0] - 1, self.now)
                    if failure is not None:
                        heard[rank] = failure, self.now - started
            if len(heard) + len(self.dead) == len(self.watches):
                break
        return heard


@pytest.mark.parametrize("seconds", [0.3, 2.0, 60.0])
@pytest.mark.parametrize("dead", [False, True])
def test_a_step_that_hangs_becomes_a_failure_of_all_within_the_bound(seconds, dead):
    group = _Group(3, seconds)
    for step in range(4):
        group.progress = [(step, step)] * 3
        assert not group.until_failure(seconds)
    group.progress = [(4, 3), (3, 3), (4, 3)]
    if dead:
        group.dead = {1}
    heard = group.until_failure(10 * seconds + 10)
    assert {failure for failure, _ in heard.values()} == {Failure("timeout", 1, 3)}
    assert set(heard) == ({0, 2} if dead else {0, 1, 2})
    assert seconds <= min(after for _, after in heard.values())
    assert max(after for _, after in heard.values()) <= seconds + 3


def test_no_failure_while_steps_end_and_while_none_is_called():
    group = _Group(2, 2.0)
    assert not group.until_failure(20)  # no rank calls
    for step in range(1, 20):  # each hangs for less than the time-out
        group.progress = [(step, step - 1), (step - 1, step - 1)]
        assert not group.until_failure(1.6)


def test_an_all_gather_that_hangs_with_all_ranks_in_it():
    group = _Group(2, 2.0)
    group.progress = [(4, 3), (4, 3)]
    heard = group.until_failure(20)
    assert len(heard) == 2
    (failure, after), _ = heard.values()
    assert failure.kind == "aborted"
    assert "all ranks are in this step" in failure.what
    assert 4 <= after <= 7


def test_a_store_that_is_gone_while_a_step_hangs():
    group = _Group(2, 2.0, HashStore)  # a store of its own for each rank
    group.watches = group.watches[1:]

    def gone(*_):
        raise StoreGoneError("gone")

    store = group.meets[1].store
    store.set = store.get = gone  # type: ignore[method-assign, assignment]
    group.progress = [(4, 3)]
    failure, after = group.until_failure(20)[0]
    assert failure == Failure("timeout", 0, 3)
    assert 2 <= after <= 5


def test_a_process_ends_well_with_open_groups():
    """Their threads are in the middle of something: back from the store in an interpreter that has ended, one would
    abort."""
    program = """
import threading, time
from datetime import timedelta
from torch._C._distributed_c10d import TCPStore
from flashsampling.tensor_parallel.rendezvous import Rendezvous

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))

def work(meet):
    while True:
        meet.store.set("key", "value" * 20000)

for rank in range(8):
    meet = Rendezvous(server.clone, rank, 8, 20.0)
    threading.Thread(target=work, args=(meet,), daemon=True).start()
time.sleep(0.3)
"""
    run_python(program)


def test_groups_of_one_name_and_other_ranks_do_not_meet(monkeypatch):
    """torch 2.8's split_group, which DeviceMesh uses with NCCL, gives all groups of one split the same name."""
    store, ranks = HashStore(), dict[Any, list[int]]()
    monkeypatch.setattr(distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setattr(distributed_c10d, "get_process_group_ranks", lambda group: ranks[group])

    class Group:
        group_name = "1"

    one, other = Group(), Group()
    ranks |= {one: [0, 1], other: [2, 3]}
    meetings = [Rendezvous(functools.partial(open_store, group), 0, 2, 1.0) for group in (one, other, one)]
    assert [meet.number for meet in meetings] == [0, 0, 1]


def test_who_holds_the_store_leaves_last(monkeypatch):
    """A process that ended with its store would make the others' closing fail."""
    store, left = HashStore(), []
    monkeypatch.setattr(rendezvous, "_LINGER", 2 * SOON)
    leave = Rendezvous.leave

    def late(meet):
        if meet.rank == 2:
            time.sleep(0.4)
            assert 1 not in left
        leave(meet)

    monkeypatch.setattr(Rendezvous, "leave", late)

    def work(rank):
        assert Rendezvous(lambda: store, rank, 3, 20.0, store_host=1).close(True, lambda: None)
        left.append(rank)

    started = time.monotonic()
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert time.monotonic() - started < SOON
    monkeypatch.setattr(rendezvous, "_LINGER", 0.2)
    meet = Rendezvous(lambda: store, 0, 2, 20.0)
    meet.store.set("0/1", to_text(("closing", True)))  # it died before it left
    started = time.monotonic()
    assert meet.close(True, lambda: None)
    assert 0.2 <= time.monotonic() - started < SOON


def test_a_rank_that_closes_between_two_looks_has_come(monkeypatch):
    """It leaves as soon as it has posted, and need not come then: its value counts all the same."""
    meet = Rendezvous(HashStore, 0, 2, 20.0)
    get = meet.store.get

    def look(key):
        value = get(key)
        if key == "0/1" and value is None:
            meet.store.set("0/1", to_text(("closing", True)))
            meet.store.set("left/1", "1")
        return value

    monkeypatch.setattr(meet.store, "get", look)
    assert meet.close(True, lambda: None)


# -- all-gathers that other ranks wait for


@pytest.fixture
def alone(monkeypatch):
    """Rank 0 of three on nccl, whose peers are what the test posts: it, and what it all-gathered to catch up."""
    store = HashStore()
    it: Any = nccl.Nccl(None, Rendezvous(lambda: store, 0, 3, 30.0), torch.device("cpu"), 4, 4, 8, 1.0)
    sent = []
    it.aborted = []
    monkeypatch.setattr(nccl, "gather_flat", lambda gathered, local, group: sent.append(local.tolist()))
    monkeypatch.setattr(nccl, "_new_group", lambda *_: SimpleNamespace(abort=lambda: it.aborted.append(True)))
    monkeypatch.setattr(nccl, "_gather_bulk", lambda *_: None)
    return it, sent


@pytest.fixture
def failed(alone):
    """The same, in a group that has failed."""
    alone[0]._set_failure(MISMATCH)
    return alone


@pytest.fixture
def pauses(monkeypatch):
    """Counts the pauses of ``drain``, which do not depend on the machine's load."""
    taken = []

    def sleep(seconds):
        taken.append(seconds)
        time.sleep(seconds)

    monkeypatch.setattr(nccl, "time", SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    return taken


def _post(it, rank, **fields):
    heartbeat = Heartbeat(**{"begun": 0, "ended": 0, "knows": 1} | fields)
    it._rendezvous.store.set(heartbeat_key(rank), to_text(heartbeat))


MISMATCH = Failure("mismatch", 1, 3, ("seed",), "rank 0")


def test_none_in_a_captured_graph(failed, monkeypatch):
    it, sent = failed
    _post(it, 1, begun=1)
    _post(it, 2)
    monkeypatch.setattr(it, "_capturing", lambda: True)
    it.drain()
    assert not sent
    monkeypatch.setattr(it, "_capturing", lambda: False)
    it.drain()
    assert len(sent) == 1


@pytest.mark.parametrize("its_own", ["not begun", "not ended"])
def test_none_while_one_of_its_own_is_under_way(failed, its_own):
    it, sent = failed
    it._small.issued = 1
    if its_own == "not ended":
        it._small.host_begun[:2] = 1
    _post(it, 1, begun=2)
    _post(it, 2, begun=2)

    def end():
        it._small.host_begun[:2] = it._small.host_state[:2] = 1

    threading.Timer(0.3, end).start()
    started = time.monotonic()
    it.drain()
    assert time.monotonic() - started >= 0.3
    assert len(sent) == 1


def test_it_waits_once_and_not_for_ever(failed, pauses):
    it, sent = failed
    _post(it, 1)  # rank 2 never posts
    started = time.monotonic()
    it.drain()
    assert 1 <= time.monotonic() - started < SOON  # the group's time-out is 1 s
    assert pauses
    pauses.clear()
    it.drain()
    assert not pauses
    assert not sent


@pytest.mark.parametrize("late", [0, 2])
def test_for_a_rank_that_is_late_only_that_rank_waits(alone, pauses, late):
    it, sent = alone
    it._set_failure(Failure("timeout", late, 0))
    _post(it, 1, begun=1)
    _post(it, 2, knows=0)
    it.drain()
    assert bool(pauses) == (late == 0)
    assert len(sent) == 1


def test_catching_up_raises_nothing(failed, monkeypatch):
    it, sent = failed
    _post(it, 1, begun=1)
    _post(it, 2)

    def broken(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    with monkeypatch.context() as patch:
        patch.setattr(nccl, "gather_flat", broken)
        it.drain()
    assert it._progress().begun == 0
    it._rendezvous.store.end()  # and so has the store
    it.drain()
    assert not sent


def test_a_host_that_knows_issues_nothing(failed):
    """It may come to know within a call, after which the others rely on what it posted."""
    it, sent = failed
    out = it.finish(torch.tensor([5, 6]), rows_only(2))
    assert out.tolist() == [-1, -1]
    assert it._progress() == Heartbeat(0, 0, knows=1)
    assert not sent


def test_what_is_issued_less_what_graphs_replay(alone, monkeypatch):
    it, sent = alone
    winners = torch.zeros(2, dtype=torch.int64)
    it.finish(winners, rows_only(2))
    monkeypatch.setattr(it, "_capturing", lambda: True)
    it.finish(winners, rows_only(2))
    it.set_skipped_calls(5)  # counts as steps, and no all-gather is theirs
    monkeypatch.setattr(it, "_capturing", lambda: False)
    it.finish(winners, rows_only(2))
    assert it._progress() == Heartbeat(3, 3)
    assert it._small.begun_view.tolist() == [8, 2, 1]
    assert [message[STEP] for message in sent] == [0, 1, 7]


@pytest.mark.parametrize("all_done", [False, True])
def test_posts_go_on_after_closing_while_an_all_gather_hangs(alone, all_done):
    """For a rank that comes late: it looks for how many there are."""
    it, _ = alone
    it.connect()
    it._small.issued = 2
    it._small.host_begun[:2] = 1
    it._set_failure(Failure("timeout", 1, 0))
    assert it.close(all_done)
    if not all_done:

        def posted(begun, issued):
            until = time.monotonic() + SOON
            while time.monotonic() < until:
                post = read_heartbeats(it._rendezvous)[0]
                if post == Heartbeat(begun, 0, post and post.beat, issued=issued, knows=1):
                    return post.beat
                time.sleep(0.01)
            raise AssertionError(post)

        first = posted(1, 1)
        it._small.host_begun[:2] = 2
        assert posted(2, 0) > first
        assert it._watchdog_thread.is_alive()
        it._small.host_state[:2] = 2
    it._watchdog_thread.join(SOON)
    assert not it._watchdog_thread.is_alive()
    with pytest.raises(StoreGoneError, match="has been closed"):
        it._rendezvous.store.get("any")


@pytest.mark.parametrize("captured", [False, True])
def test_a_communicator_ends_unless_a_graph_holds_it(alone, captured, monkeypatch):
    """Trap 53: NCCL frees what no graph holds, and waits for the end of those that do."""
    it, _ = alone
    kept: list[Any] = []
    monkeypatch.setattr(nccl, "_kept", kept)
    it.connect()
    with monkeypatch.context() as patch:
        patch.setattr(it, "_capturing", lambda: captured)
        it._issue(it._bulk)
    assert it.close(True)
    it._watchdog_thread.join(SOON)
    assert not it._watchdog_thread.is_alive()
    assert it.aborted == ([] if captured else [True])
    assert kept == ([it] if captured else [])
