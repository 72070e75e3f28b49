"""File-descriptor passing, with threads for ranks and files in memory for GPU memory."""

import contextlib
import os
import secrets
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from flashsampling.tensor_parallel import TensorParallelError
from flashsampling.tensor_parallel.fd_passing import exchange_file_descriptors
from flashsampling.tensor_parallel.rendezvous import RemoteError, Rendezvous

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


class File:
    """Stands in for a mapping: its file holds the rank's name."""

    def __init__(self, rank: int) -> None:
        self._file = os.memfd_create("flashsampling-test")
        os.write(self._file, f"memory of rank {rank}".encode())

    def exported(self) -> int:
        return os.dup(self._file)


def _ranks(size, work):
    store = dist.HashStore()
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: work(Rendezvous(lambda: store, rank, size, 20.0)), range(size)))


def _box() -> socket.socket:
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    box.bind(f"\0flashsampling-test-{secrets.token_hex(8)}")
    return box


def _open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def files():
    """Makes the files of so many ranks. No other one is open in the end."""
    before = []

    def make(ranks: int) -> list[File]:
        made = [File(rank) for rank in range(ranks)]
        before.append(_open_files())
        return made

    yield make
    assert [_open_files()] == before


def _received(meet, file) -> dict[int, str]:
    """Returns what the peers' memory holds, by rank."""
    descriptors = exchange_file_descriptors(file.exported, meet, 20.0)
    reported = {rank: os.pread(descriptor, 100, 0).decode() for rank, descriptor in descriptors.items()}
    for descriptor in descriptors.values():
        os.close(descriptor)
    return reported


def _refused(meet, exported, seconds: float, message: str) -> Exception:
    """The exchange raises, and the rank says so, as who calls it does. Returns what all ranks raise."""
    with pytest.raises(RuntimeError, match=message) as error:
        exchange_file_descriptors(exported, meet, seconds)
    return meet.fail("mapping peers' memory", error.value)


@pytest.mark.parametrize("size", [2, 3, 8, 24])  # 24: a Unix socket's queue holds 10, all send before they receive
def test_everybody_has_everybody_else_s(size, files):
    made = files(size)
    for rank, reported in enumerate(_ranks(size, lambda meet: _received(meet, made[meet.rank]))):
        assert reported == {other: f"memory of rank {other}" for other in range(size) if other != rank}


def test_another_rank_s_error_ends_the_wait_for_its_memory(files):
    made = files(3)

    def work(meet):
        if meet.rank == 1:
            with _box() as box:  # the others reach it, and wait for its memory, which does not come
                meet.exchange("handing over memory", box.getsockname())
                return meet.fail("mapping peers' memory", MemoryError("none left"))
        return _refused(meet, made[meet.rank].exported, 20.0, "another rank could not")

    started = time.monotonic()
    reported = _ranks(3, work)
    assert time.monotonic() - started < 10
    assert all(isinstance(each, RemoteError) and each.rank == 1 and "none left" in str(each) for each in reported)


def test_a_socket_that_is_gone_is_not_blamed_before_its_rank_says_why(files):
    """A rank that gives up closes its socket, and then says why.

    Who sent to it in between must not name it for the reason."""
    made = files(2)

    def work(meet):
        if meet.rank == 1:
            with _box() as box:
                name = box.getsockname()
            meet.exchange("handing over memory", name)
            time.sleep(0.3)
            return meet.fail("mapping peers' memory", MemoryError("none left"))
        return _refused(meet, made[0].exported, 20.0, "another rank could not")

    for reported in _ranks(2, work):
        assert isinstance(reported, RemoteError)
        assert reported.rank == 1
        assert "none left" in str(reported)


def test_what_strangers_send_is_not_memory(files):
    """The names of sockets can be read in /proc/net/unix by every process of the host."""
    made = files(2)

    def work(meet):
        exchange = meet.exchange

        def and_then_a_stranger(phase, payload):
            names = exchange(phase, payload)
            for name in names:
                with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger, open("/dev/null") as file:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, file.fileno().to_bytes(4, "little"))]
                    stranger.sendmsg([b"x"], [], 0, name)
                    stranger.sendmsg([b"1"], rights, 0, name)
            return names

        meet.exchange = and_then_a_stranger
        return _received(meet, made[meet.rank])

    assert _ranks(2, work) == [{1: "memory of rank 1"}, {0: "memory of rank 0"}]


@pytest.mark.parametrize("sends", [False, True])
def test_a_rank_that_takes_nothing_is_the_one_to_blame(sends, files):
    """A stopped rank's full queue blocks no other rank, so no other rank is named."""
    made = files(5)

    def work(meet):
        if meet.rank == 2:
            with _box() as box, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                stranger.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        stranger.sendto(b"x", box.getsockname())
                names = meet.exchange("handing over memory", box.getsockname())
                if sends:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", made[2]._file))]
                    for rank in (0, 1, 3, 4):
                        box.sendmsg([b"memory"], rights, 0, names[rank])
                while not meet.next_has_ended():
                    time.sleep(0.01)
            return meet.fail("mapping peers' memory", MemoryError("too late"))
        blamed = "rank 2 did not take this rank's memory" if sends else "no memory came from rank 2"
        return _refused(meet, made[meet.rank].exported, 1.0, f"{blamed} within 1 s|another rank could not")

    reported = {str(each) for each in _ranks(5, work)}
    assert len(reported) == 1
    assert "rank 2" in reported.pop().split(":", 2)[2]


def test_strangers_that_keep_writing_do_not_keep_it_waiting(files):
    """Messages of unknown senders do not extend the time-out."""
    made, ended = files(2), threading.Event()

    def work(meet):
        if meet.rank == 1:
            with _box() as box, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
                name, _ = meet.exchange("handing over memory", box.getsockname())
                with contextlib.suppress(ConnectionRefusedError):  # it has ended
                    while not ended.wait(0.0):
                        stranger.sendto(b"x", name)
            return
        started = time.monotonic()
        with pytest.raises(RuntimeError, match=r"no memory came from rank 1 within 0\.2 s"):
            exchange_file_descriptors(made[0].exported, meet, 0.2)
        ended.set()
        assert time.monotonic() - started < 10

    late = threading.Timer(12.0, ended.set)
    late.start()
    _ranks(2, work)
    late.cancel()


# A process that gives up root and then sends the file of argv[2] through the socket argv[1] to the address argv[3].
_SEND_AS_NOBODY = """
import os, socket, struct, sys
box = socket.socket(fileno=int(sys.argv[1]))
os.setuid(65534)
rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", int(sys.argv[2])))]
box.sendmsg([b"memory"], rights, 0, bytes.fromhex(sys.argv[3]))
"""


@pytest.mark.parametrize(
    "real", [False, pytest.param(True, marks=pytest.mark.skipif(os.getuid() != 0, reason="needs root"))]
)
def test_memory_of_another_user_is_refused(real, files, monkeypatch):
    """The kernel names the sender's user. ``real``: a process that has given up root uses the rank's socket."""
    made = files(2)
    if not real:
        monkeypatch.setattr(os, "getuid", lambda: 12345)

    def work(meet):
        if meet.rank == 1:
            with _box() as box:
                name, _ = meet.exchange("handing over memory", box.getsockname())
                sent = [box.fileno(), made[1]._file]
                if real:
                    command = [sys.executable, "-c", _SEND_AS_NOBODY, *map(str, sent), name.hex()]
                    subprocess.run(command, pass_fds=sent, check=True)
                else:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", sent[1]))]
                    box.sendmsg([b"memory"], rights, 0, name)
                while not meet.next_has_ended():
                    time.sleep(0.01)
            return
        message = "memory of rank 1 came from a process of user .*, and this is user .*: ranks must run as one user"
        _refused(meet, made[0].exported, 20.0, message)

    _ranks(2, work)


@pytest.mark.parametrize("name", [b"/tmp/a-file", b"\0of somebody else", b"", b"\0flashsampling-x/../y"])
def test_a_name_that_is_no_rank_s_socket_is_refused(name, files):
    """The store may hold any: memory goes to abstract sockets of ours alone."""
    made = files(2)

    def work(meet):
        if meet.rank == 1:
            return meet.exchange("handing over memory", name)
        message = r"holds what no rank wrote .*of rank 1: it is no name of a rank's socket"
        with pytest.raises(TensorParallelError, match=message):
            exchange_file_descriptors(made[0].exported, meet, 20.0)

    _ranks(2, work)


def test_a_socket_that_cannot_be_reached_says_why(files):
    """Every rank may be in a container with its own network, where abstract names do not reach the others."""
    made = files(2)

    def work(meet):
        exchange = meet.exchange
        meet.exchange = lambda phase, payload: [name + b"elsewhere" for name in exchange(phase, payload)]
        with pytest.raises(RuntimeError, match=rf"socket of rank {1 - meet.rank} refused .* another network namespace"):
            exchange_file_descriptors(made[meet.rank].exported, meet, 20.0)

    _ranks(2, work)
