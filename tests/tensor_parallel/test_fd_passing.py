"""File-descriptor passing, with threads for ranks and files in memory for GPU memory."""

import contextlib
import os
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from flashsampling.tensor_parallel import TensorParallelError, fd_passing
from flashsampling.tensor_parallel.fd_passing import exchange_file_descriptors
from flashsampling.tensor_parallel.rendezvous import RemoteError, Rendezvous
from tests.conftest import run_python

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")
PHASE = "handing over memory"


@pytest.fixture
def files():
    """Makes a file for each of so many ranks, which holds the rank's name. No other one is open in the end."""
    before = []

    def make(ranks: int) -> list[int]:
        made = [os.memfd_create("flashsampling-test") for _ in range(ranks)]
        for rank, file in enumerate(made):
            os.write(file, f"memory of rank {rank}".encode())
        before.append(len(os.listdir("/proc/self/fd")))
        return made

    yield make
    assert [len(os.listdir("/proc/self/fd"))] == before


def _ranks(size, work):
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Rendezvous(lambda: store, rank, size, 20.0)), range(size)))


def _received(meet, files) -> dict[int, str]:
    """Returns what the peers' memory holds, by rank."""
    descriptors = exchange_file_descriptors(lambda: os.dup(files[meet.rank]), meet, 20.0)
    reported = {rank: os.pread(descriptor, 100, 0).decode() for rank, descriptor in descriptors.items()}
    for descriptor in descriptors.values():
        os.close(descriptor)
    return reported


def _refused(meet, files, message: str, seconds: float = 20.0) -> Exception:
    """The exchange raises, and the rank says so, as who calls it does. Returns what all ranks raise."""
    with pytest.raises(RuntimeError, match=message) as error:
        exchange_file_descriptors(lambda: os.dup(files[meet.rank]), meet, seconds)
    return meet.fail(error.value)


@contextlib.contextmanager
def _listener():
    """The socket of a rank that sends nothing, and its name."""
    token = secrets.token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(fd_passing._address(token))
        listener.listen()
        yield token


@pytest.mark.parametrize("size", [2, 24])
def test_everybody_has_everybody_else_s(size, files):
    made = files(size)
    for rank, reported in enumerate(_ranks(size, lambda meet: _received(meet, made))):
        assert reported == {other: f"memory of rank {other}" for other in range(size) if other != rank}


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_rank_that_gives_up_says_why(is_gone, files):
    """That ends the wait for its memory; also if it has closed its socket before it says so."""
    made = files(3)

    def work(meet):
        if meet.rank != 1:
            return _refused(meet, made, "another rank could not")
        with _listener() as token:
            if not is_gone:
                meet.exchange(PHASE, token)
                return meet.fail(MemoryError("none left"))
        meet.exchange(PHASE, token)
        time.sleep(0.3)
        return meet.fail(MemoryError("none left"))

    started = time.monotonic()
    for error in _ranks(3, work):
        assert isinstance(error, RemoteError)
        assert str(error) == "rank 1: MemoryError: none left"
    assert time.monotonic() - started < 10


def test_a_rank_that_sends_nothing_is_the_one_to_blame(files):
    made = files(4)

    def work(meet):
        if meet.rank != 2:
            return _refused(meet, made, r"no memory came from rank 2 within 0\.5 s|another rank could not", 0.5)
        with _listener() as token:
            meet.exchange(PHASE, token)
            while not meet.next_has_failed():
                time.sleep(0.01)
        return meet.fail(MemoryError("too late"))

    (reported,) = {str(error) for error in _ranks(4, work)}
    assert "no memory came from rank 2" in reported


def test_what_strangers_send_is_not_memory(files):
    """The names of sockets can be read in /proc/net/unix by every process of the host."""
    made = files(2)

    def work(meet):
        exchange = meet.exchange

        def and_then_a_stranger(phase, token, check):
            tokens = exchange(phase, token, check)
            for other in tokens:
                for message in (b"x", b"", b"7"):
                    with socket.socket(socket.AF_UNIX) as stranger, open("/dev/null") as file:
                        stranger.connect(fd_passing._address(other))
                        if message:
                            socket.send_fds(stranger, [message], [file.fileno()])
            return tokens

        meet.exchange = and_then_a_stranger
        return _received(meet, made)

    assert _ranks(2, work) == [{1: "memory of rank 1"}, {0: "memory of rank 0"}]


CONNECT_AS_NOBODY = """
import os, socket
os.setuid(65534)
stranger = socket.socket(socket.AF_UNIX)
stranger.connect({address!r})
socket.send_fds(stranger, [b"1"], [os.memfd_create("hostile")])
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_memory_of_another_user_is_not_taken(files):
    made = files(2)

    def work(meet):
        exchange = meet.exchange

        def and_then_another_user(phase, token, check):
            if meet.rank == 0:
                run_python(CONNECT_AS_NOBODY.format(address=fd_passing._address(token)))
            return exchange(phase, token, check)

        meet.exchange = and_then_another_user
        return _received(meet, made)

    assert _ranks(2, work) == [{1: "memory of rank 1"}, {0: "memory of rank 0"}]


def test_memory_is_not_sent_to_another_user(files, monkeypatch):
    made = files(2)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    message = r"rank [01] is a process of user \d+, and this is user 12345: ranks must run as one user|another rank"
    (reported,) = {str(error) for error in _ranks(2, lambda meet: _refused(meet, made, message))}
    assert "ranks must run as one user" in reported


@pytest.mark.parametrize("name", ["/tmp/a-file", "", "x/../y", 7, None])
def test_a_name_that_is_no_rank_s_socket_is_refused(name, files):
    """The store may hold any: memory goes to abstract sockets of ours alone."""
    made = files(2)

    def work(meet):
        if meet.rank == 1:
            return meet.exchange(PHASE, name)
        message = r"holds what no rank wrote .*of rank 1: it is no name of a rank's socket"
        with pytest.raises(TensorParallelError, match=message):
            exchange_file_descriptors(lambda: os.dup(made[0]), meet, 20.0)

    _ranks(2, work)


def test_a_socket_that_cannot_be_reached_says_why(files, monkeypatch):
    """Every rank may be in a container with its own network, where abstract names do not reach the others."""
    made = files(2)
    monkeypatch.setattr(fd_passing, "_REASON_WAIT", 0.2)

    def work(meet):
        exchange = meet.exchange
        meet.exchange = lambda *args: [secrets.token_hex(16) for _ in exchange(*args)]
        with pytest.raises(RuntimeError, match=rf"socket of rank {1 - meet.rank} refused .* another network namespace"):
            exchange_file_descriptors(lambda: os.dup(made[meet.rank]), meet, 20.0)

    _ranks(2, work)
