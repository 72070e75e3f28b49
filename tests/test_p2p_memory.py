"""How ranks hand memory to each other under the transport ``p2p``: threads for ranks, files in memory for GPU memory."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from flashsampling.distributed import Failure, p2p
from flashsampling.distributed.rendezvous import RemoteError, Rendezvous

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


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("size", [2, 3, 8, 24])  # 24: a Unix socket's queue holds 10, all send before they receive
def test_everybody_has_everybody_else_s(size):
    files = [File(rank) for rank in range(size)]
    before = open_files()

    def work(meet):
        descriptors = p2p._handed_over(files[meet.rank], meet, 20.0)
        said = {rank: os.pread(descriptor, 100, 0).decode() for rank, descriptor in descriptors.items()}
        for descriptor in descriptors.values():
            os.close(descriptor)
        return said

    for rank, said in enumerate(_ranks(size, work)):
        assert said == {other: f"memory of rank {other}" for other in range(size) if other != rank}
    assert open_files() == before


def test_memory_that_does_not_come():
    """A rank that ends between saying where it listens and sending: the others name it, within the bound."""
    files = [File(rank) for rank in range(3)]
    before = open_files()

    def work(meet):
        if meet.rank == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(files[1], "exported", lambda: 1 / 0, raising=False)
                with pytest.raises(ZeroDivisionError):
                    p2p._handed_over(files[1], meet, 1.0)
        else:
            gone = r"no memory came from rank 1 within 1 s|rank 1 refused|another rank could not"
            with pytest.raises(RuntimeError, match=gone) as error:
                p2p._handed_over(files[meet.rank], meet, 1.0)
            meet.fail("mapping peers' memory", error.value)  # as who calls it does

    _ranks(3, work)
    assert open_files() == before  # what had come is closed again


def test_another_rank_s_error_ends_the_wait_for_its_memory():
    files = [File(rank) for rank in range(3)]
    before = open_files()

    def work(meet):
        if meet.rank == 1:
            meet.exchange("handing over memory", b"nobody's name")
            return meet.fail("mapping peers' memory", MemoryError("none left"))
        with pytest.raises(RuntimeError, match=r"another rank could not|refused") as error:
            p2p._handed_over(files[meet.rank], meet, 20.0)
        return meet.fail("mapping peers' memory", error.value)

    started = time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        # the others reach each other, and wait for rank 1's, which does not come
        sent = p2p._sent
        patch.setattr(p2p, "_sent", lambda box, own, name, rank: rank == 1 or sent(box, own, name, rank))
        said = _ranks(3, work)
    assert time.monotonic() - started < 10
    assert all(isinstance(each, RemoteError) and each.rank == 1 and "none left" in str(each) for each in said)
    assert open_files() == before


def test_what_strangers_send_is_not_memory():
    """The names of sockets can be read in /proc/net/unix by every process of the host."""
    files = [File(rank) for rank in range(2)]
    before = open_files()

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
        descriptors = p2p._handed_over(files[meet.rank], meet, 20.0)
        said = {rank: os.pread(descriptor, 100, 0) for rank, descriptor in descriptors.items()}
        for descriptor in descriptors.values():
            os.close(descriptor)
        return said

    assert _ranks(2, work) == [{1: b"memory of rank 1"}, {0: b"memory of rank 0"}]
    assert open_files() == before


def test_a_socket_that_cannot_be_reached_says_why():
    """As where every rank is in a container with a network of its own: abstract names do not reach beyond it."""
    files = [File(rank) for rank in range(2)]

    def work(meet):
        exchange = meet.exchange
        meet.exchange = lambda phase, payload: [name + b"elsewhere" for name in exchange(phase, payload)]
        with pytest.raises(RuntimeError, match=rf"socket of rank {1 - meet.rank} refused .* another network namespace"):
            p2p._handed_over(files[meet.rank], meet, 20.0)

    _ranks(2, work)


class Driver:
    """Stands in for libcuda: what was called, in order; some calls fail."""

    def __init__(self, **status: int) -> None:
        self.called: list[str] = []
        self.status = status

    def __getattr__(self, name):
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*arguments):
            if name != "cuGetErrorName":
                self.called.append(name)
            return self.status.get(name, 0)

        return call


@pytest.mark.parametrize("step", ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_mapped_is_given_back(step, monkeypatch):
    driver = Driver(**{step: 801})
    monkeypatch.setattr(p2p, "_library", lambda: driver)
    with pytest.raises(RuntimeError, match=rf"{step} failed with .*\(801\)"):
        p2p._Mapping(torch.device("cuda", 0), 4096, 1)
    steps = ["cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"]
    done = steps[: steps.index(step) + 1]
    assert driver.called[: len(done)] == done
    undone = {"cuMemMap": ["cuMemAddressFree"], "cuMemSetAccess": ["cuMemUnmap", "cuMemAddressFree"]}.get(step, [])
    assert driver.called[len(done) :] == [*undone, "cuMemRelease"]
    driver = Driver()
    monkeypatch.setattr(p2p, "_library", lambda: driver)
    p2p._Mapping(torch.device("cuda", 0), 4096, 1).end()
    assert driver.called == [*steps, "cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]


def _transport(meet=None):
    transport = p2p.PeerToPeer.__new__(p2p.PeerToPeer)
    transport._meet, transport._device, transport._context = meet, torch.device("cuda", 0), 0x1000
    transport._told, transport._table, transport._mappings = torch.zeros(2, dtype=torch.int64).numpy(), 0x2000, []
    transport._declared = transport._words = None
    return transport


def test_closing_makes_the_context_the_thread_s(monkeypatch):
    """One that has not used CUDA yet has none, and torch.cuda.device makes none for device 0."""
    driver = Driver()
    monkeypatch.setattr(p2p, "_library", lambda: driver)
    transport = _transport()
    transport._mappings = [p2p._Mapping(torch.device("cuda", 0), 4096, 1)]
    driver.called.clear()
    transport.close(True)
    unmapped = ["cuMemUnmap", "cuMemAddressFree", "cuMemRelease"]
    assert driver.called == ["cuCtxPushCurrent_v2", "cuMemcpyHtoD_v2", *unmapped, "cuCtxPopCurrent_v2"]


def test_a_broken_device_does_not_hide_the_failure(monkeypatch):
    """After a device-side assert every call of the driver fails. Declaring gives the failure; closing does not raise."""
    driver = Driver(cuMemcpyHtoD_v2=710, cuCtxPopCurrent_v2=710)
    monkeypatch.setattr(p2p, "_library", lambda: driver)

    def broken(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "device", broken)
    transport = _transport(Rendezvous(dist.HashStore, 0, 2, 1.0))
    failure = Failure("left", 0, what="RuntimeError: CUDA error")
    assert transport.declare(failure) == failure
    assert transport.failure() == failure
    transport.close(False)
    transport.close(True)
