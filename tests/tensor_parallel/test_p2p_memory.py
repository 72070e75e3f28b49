"""The memory of transport ``p2p`` and what ends it, over a driver that stands in for CUDA's."""

import os

import pytest
import torch
import torch.distributed as dist

from flashsampling.tensor_parallel import Failure, p2p
from flashsampling.tensor_parallel.rendezvous import Rendezvous

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="needs Linux")


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
    transport._rendezvous, transport._device, transport._context = meet, torch.device("cuda", 0), 0x1000
    transport._host_words, transport._table, transport._mappings = torch.zeros(2, dtype=torch.int64).numpy(), 0x2000, []
    transport._failure = transport._own_failure = None
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
    """After a device-side assert every call of the driver fails.

    Declaring gives the failure; closing does not raise."""
    driver = Driver(cuMemcpyHtoD_v2=710, cuCtxPopCurrent_v2=710)
    monkeypatch.setattr(p2p, "_library", lambda: driver)

    def broken(*_):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "device", broken)
    transport = _transport(Rendezvous(dist.HashStore, 0, 2, 1.0))
    failure = Failure("aborted", 0, what="RuntimeError: CUDA error")
    assert transport.declare(failure) == failure
    assert transport.failure() == failure
    transport.close(False)
    transport.close(True)
