"""Transport ``p2p``: the sampling kernel itself stores its winners into the peers' memory. See ``exchange`` for the protocol.

The memory is made by CUDA's virtual memory management: a physical allocation lives as long as any rank maps it, so that a rank
that dies, or closes first, takes nothing away from the others' kernels. (With ``cuIpcGetMemHandle`` it belongs to the process
that made it: in one of four runs whoever survived a killed rank had an illegal access.) Ranks hand it to each other as file
descriptors over Unix sockets, whose names the group's rendezvous carries. torch's symmetric memory does the same, but its
rendezvous knows no bound, hangs where a sub-group made one before the whole group (pytorch issue 196082), and refuses ranks
that see one GPU each, as Ray and SLURM start them.

Beyond one host (NVL72) file descriptors do not reach: there ``_HANDLE_TYPE`` is the fabric's, whose handles are 64 bytes that
the rendezvous can carry itself. All else is as it is for up to ``agreement``'s number of ranks; no such machine was at hand.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import exchange_protocol as protocol
from ..exchange_protocol import Shard, Verdict
from ..inputs import SampleInputs
from ..sampling_params import DEFAULT_PARAMS
from .failures import Failure
from .fd_passing import exchange_file_descriptors
from .message import Hashes
from .rendezvous import Rendezvous

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_HANDLE_TYPE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE

_kept: list[Any] = []  # what captured graphs, and kernels that hang, may touch for as long as the process lives


def room_for_digits(rows: int, ranks: int) -> int:
    """Words of a message, of which only those that there are cross: of each row all values of 8 bits (``limits.Shards``), but
    no more than slots of 16 MiB hold, and than programs that are on a device at once store."""
    return min(256 * rows, 1 << 16, (1 << 24) // (32 * ranks))


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments: Any) -> None:
    """A call of CUDA's driver, on the current context. Integers are 64 bits wide: addresses, sizes, handles and flags are."""
    library = _library()
    status = getattr(library, name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments))
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        error = MemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name} failed with {(text.value or b'CUDA error').decode()} ({status})")


@contextlib.contextmanager
def _current(context: int) -> Iterator[None]:
    """Makes a context the thread's. One that has not used CUDA yet has none; torch.cuda.device gives it none for device 0."""
    _driver("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_uint64()))


def _zeroed(words: int) -> int:
    """Address of int64 zeros on the current device, beside torch's allocator and its pools, until the process ends."""
    address = ctypes.c_uint64()
    _driver("cuMemAlloc_v2", ctypes.byref(address), 8 * words)
    _driver("cuMemsetD8_v2", address.value, ctypes.c_ubyte(0), 8 * words)
    return address.value


def _write(address: int, words: list[int]) -> None:
    """Copies int64 words to the device, and waits until they are there."""
    _driver("cuMemcpyHtoD_v2", address, (ctypes.c_int64 * len(words))(*words), 8 * len(words))


class _Mapping:
    """Physical memory that this process maps: made here, or handed over by another rank.

    Args:
        device: from which it is used.
        size: in bytes, a multiple of ``granularity``.
        handle: the driver's.
    """

    def __init__(self, device: torch.device, size: int, handle: int) -> None:
        self._device, self._size, self._handle = device, size, handle
        address = ctypes.c_uint64()
        with contextlib.ExitStack() as undo:
            undo.callback(_driver, "cuMemRelease", handle)
            _driver("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
            self.address = address.value
            undo.callback(_driver, "cuMemAddressFree", self.address, size)
            _driver("cuMemMap", self.address, size, 0, handle, 0)
            undo.callback(_driver, "cuMemUnmap", self.address, size)
            access = _Access(_Location(_DEVICE, device.index), _READ_WRITE)
            _driver("cuMemSetAccess", self.address, size, ctypes.byref(access), 1)
            self._undo = undo.pop_all()

    @classmethod
    def made(cls, device: torch.device, words: int) -> "_Mapping":
        """Zeros, of at least that many int64."""
        properties = _Properties(_PINNED, _HANDLE_TYPE, _Location(_DEVICE, device.index))
        granularity, handle = ctypes.c_uint64(), ctypes.c_uint64()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        size = -(-8 * words // granularity.value) * granularity.value
        _driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0)
        mapping = cls(device, size, handle.value)
        _driver("cuMemsetD8_v2", mapping.address, ctypes.c_ubyte(0), size)
        return mapping

    def exported(self) -> int:
        """A file descriptor of it; the caller closes it."""
        descriptor = ctypes.c_int()
        _driver("cuMemExportToShareableHandle", ctypes.byref(descriptor), self._handle, _HANDLE_TYPE, 0)
        return descriptor.value

    @classmethod
    def imported(cls, like: "_Mapping", descriptor: int) -> "_Mapping":
        """What another rank exported, ``like`` this rank's own in size and use."""
        handle = ctypes.c_uint64()
        _driver("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _HANDLE_TYPE)
        return cls(like._device, like._size, handle.value)

    def end(self) -> None:
        """Nothing here uses it any more. Other ranks may."""
        self._undo.close()


class PeerToPeer:
    """See ``transport.Transport``. A rank's memory of the peer-to-peer protocol, and the table that tells a kernel where
    everybody's is. The ranks are on one host, on a GPU each, visible to this process or not.

    Args:
        meet: the group's.
        device: this rank's.
        capacity: words of a message: rows times draws, or more.
        seconds: how long a kernel waits.
        max_batch_size: rows, at most.
        max_num_samples: draws per row, at most.

    Raises:
        RuntimeError: memory cannot be handed over or mapped; the driver's reason.
        OSError: the ranks cannot reach each other's sockets.
        MemoryError: the device has none left.
    """

    name = "p2p"
    skips = True

    def __init__(
        self,
        meet: Rendezvous,
        device: torch.device,
        capacity: int,
        seconds: float,
        max_batch_size: int = 1,
        max_num_samples: int = 1,
    ) -> None:
        rank, ranks = meet.rank, meet.ranks
        self.room = capacity
        self._ranks = ranks
        self._left_out = 0
        self._meet = meet
        self._device = device
        self._declared: Failure | None = None
        self._words: Failure | None = None  # of a failure that was declared here
        self._mappings: list[_Mapping] = []
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # there is a context then
            context = ctypes.c_uint64()
            _driver("cuCtxGetCurrent", ctypes.byref(context))
            self._context = context.value
            self._hashes = Hashes(max_batch_size, device)
            self._nothing_asked = torch.zeros(1, dtype=torch.int64, device=device)
            self._always = torch.ones(1, dtype=torch.int32, device=device)
            self._request = self._asked_failed = self._nothing_asked
            told = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
            _kept.append(told)
            self._told = told.numpy()  # reading an element of it costs a tenth of reading a tensor's
            self._table, self._rehearsal = _zeroed(protocol.TABLE_SHARED + ranks), _zeroed(protocol.TABLE_SHARED + 1)
            # a group of this rank alone, that a kernel can be run with before the first step
            winners = max_batch_size * max_num_samples
            alone = _zeroed(protocol.shared_words(1, winners))
            try:
                addresses = self._share(meet, protocol.shared_words(ranks, capacity), seconds)
            except BaseException:
                self._unmap()
                raise
            nanoseconds = int(seconds * 1e9)
            _write(self._table, protocol.table_words(rank, capacity, nanoseconds, told.data_ptr(), addresses))
            _write(self._rehearsal, protocol.table_words(0, winners, nanoseconds, told.data_ptr() + 8, [alone]))
            torch.cuda.synchronize(device)

    def _share(self, meet: Rendezvous, words: int, seconds: float) -> list[int]:
        """Addresses of all ranks' memory, by rank."""
        mine = _Mapping.made(self._device, words)
        self._mappings.append(mine)
        torch.cuda.synchronize(self._device)  # its zeros are there before anybody has it
        descriptors = exchange_file_descriptors(mine.exported, meet, seconds)
        addresses = {meet.rank: mine.address}
        try:
            for rank, descriptor in descriptors.items():
                mapping = _Mapping.imported(mine, descriptor)
                self._mappings.append(mapping)
                addresses[rank] = mapping.address
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return [addresses[rank] for rank in range(meet.ranks)]

    def _unmap(self) -> None:
        while self._mappings:
            self._mappings.pop().end()

    @property
    def skipped_calls(self) -> int:
        """As the protocol says. The device learns of it in order of the current stream."""
        return self._left_out

    @skipped_calls.setter
    def skipped_calls(self, count: int) -> None:
        if torch.cuda.is_current_stream_capturing():  # nothing is called, and replays would call it
            return
        self._left_out = count
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with _current(self._context):
            _driver("cuStreamWriteValue64_v2", stream, self._table + 8 * protocol.TABLE_LEFT_OUT, count, 0)

    def shard(self, first_token: int) -> Shard:
        """As the protocol says."""
        return Shard(first_token, self._table)

    def dry_run_transport(self, first_token: int) -> Shard:
        """As the protocol says."""
        return Shard(first_token, self._rehearsal)

    def compare(self, step: SampleInputs) -> None:
        """As the protocol says: a launch that is a step of the protocol. It comes first, so a rank that draws plainly meanwhile
        gets no token either. The kernel behind it finds the failure in its memory."""
        from ..kernels.triton.sharded.param_hash import of_request  # comes with torch for CUDA

        alone = step.draft_hash if step.params is DEFAULT_PARAMS else None
        request = of_request(self._hashes, step) if alone is None else alone.view(1)
        self._all_gather(request, torch.zeros_like(request), request, step)

    def finish(self, out: Tensor, step: SampleInputs) -> Tensor:
        """As the protocol says: the kernel did the exchange."""
        return out

    def begin(self, step: SampleInputs) -> None:
        """As the protocol says."""
        from ..kernels.triton.sharded.param_hash import of_request  # comes with torch for CUDA

        self._request = of_request(self._hashes, step)
        self._asked_failed = torch.zeros(1, dtype=torch.int64, device=self._device)

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        """As the protocol says: a launch that is a step of the protocol, whichever kernel the group's plain steps run; if it is
        not wanted, of no step."""
        return self._all_gather(words, self._asked_failed, self._request, step, wanted)

    def _all_gather(
        self, words: Tensor, failed: Tensor, request: Tensor, step: SampleInputs, wanted: Tensor | None = None
    ) -> Tensor:
        from ..kernels.triton.sharded import collectives  # comes with torch for CUDA

        return collectives.all_gather(
            self._table, words, self._ranks, failed, request, self._always if wanted is None else wanted, step
        )

    def end(self, error: BaseException | None = None) -> Tensor:
        """As the protocol says. Of a graph that is recorded just now nothing may be left over: compilers take it for a leak."""
        failed = self._asked_failed[0] != 0
        self._request = self._asked_failed = self._nothing_asked
        return failed

    def failure(self) -> Failure | None:
        """As the protocol says."""
        if self._declared is None and self._told[0]:
            verdict = Verdict.of(int(self._told[0]))
            self._declared = _failure_of(verdict)
            if verdict.kind == protocol.DECLARED:  # the verdict says whose it is, the store says what
                own = self._words if self._words is not None and self._words.rank == verdict.straggler else None
                self._declared = self._meet.known() or own or self._declared
        return self._declared

    def declare(self, failure: Failure) -> Failure:
        """As the protocol says."""
        known = self.failure()
        if known is not None:
            return known
        from ..kernels.triton.sharded.peer_exchange import declare  # comes with torch for CUDA

        failure = self._words = self._meet.declare(failure)  # its words; that it is so, the ranks' memory decides
        verdict = Verdict(protocol.DECLARED, failure.rank, self._meet.rank, step=(failure.step or 0) & 0x7FFFFFFF)
        # what a broken device raises says less than the failure; the other ranks' kernels then wait until their time is up
        with contextlib.suppress(Exception), torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)  # the current one may have work that waits for another rank
            with torch.cuda.stream(stream):
                declare[(1,)](self._table, verdict.word(), num_warps=1)
            stream.synchronize()
        self._declared = self.failure() or failure
        return self._declared

    def drain(self) -> None:
        """As the protocol says: nobody waits without a bound."""

    def close(self, everybody: bool) -> None:
        """As the protocol says."""
        with (
            contextlib.suppress(RuntimeError),
            _current(self._context),
        ):  # on a broken device no kernel runs that would read it
            _write(self._table + 8 * protocol.TABLE_RANKS, [0])
            if everybody:
                self._unmap()


def _failure_of(verdict: Verdict) -> Failure:
    if verdict.kind != protocol.DIFFERS:
        return Failure("late" if verdict.kind == protocol.LATE else "left", verdict.straggler, verdict.step)
    fields = tuple(name for i, name in enumerate(protocol.FIELDS) if verdict.fields & 8 >> i)
    if not fields and not verdict.ahead:  # what is asked for is in the tags alone
        fields = ("request",)
    if protocol.FIELDS[0] in fields:  # then a row is not the same row, and all of it differs
        fields = fields[:1]
    differs = (*(("step",) if verdict.ahead else ()), *fields)
    return Failure("differs", verdict.straggler, verdict.step, differs, what=f"rank {verdict.reporter}")
