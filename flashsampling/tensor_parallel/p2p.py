"""Transport ``p2p``: the sampling kernel stores its winners into the peers' memory (``exchange_protocol``).

The symmetric memory is made by CUDA's virtual memory management. A physical allocation lives as long as any rank maps
it, so a rank that dies or closes first takes nothing away from its peers' kernels. (Memory of ``cuIpcGetMemHandle``
belongs to the process that made it: in one of four runs a survivor of a killed rank had an illegal access.) Ranks pass
it to each other as file descriptors over Unix sockets, whose names go through the group's rendezvous. torch's symmetric
memory does the same, but its rendezvous has no bound, hangs if a sub-group made one before the whole group (pytorch
issue 196082), and refuses ranks that see one GPU each, as Ray and SLURM start them.

File-descriptor passing ends at the host. On an NVL72, ``_HANDLE_TYPE`` would be the fabric's, whose handles are 64
bytes that the rendezvous could carry. The rest works for up to ``capabilities._MAX_P2P_RANKS`` ranks; this is not
tested.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Iterator, Sequence
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
from .transport import Collectives, DryRun, Transport

_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY
_PINNED = 1  # CU_MEM_ALLOCATION_TYPE_PINNED
_HANDLE_TYPE = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_BUFFER_BYTES = 1 << 28
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE

_kept: list[Any] = []  # memory that captured graphs, and kernels that hang, may touch until the process ends


def message_words(rows: int, ranks: int) -> int:
    """Returns the words that fit in a message: 64 per row, so that results with log-probabilities usually take one.

    Slots hold at most 16 MiB, and a message's programs must fit on a device at once. Only words in use cross ranks."""
    return min(64 * rows, 1 << 16, (1 << 24) // (32 * ranks))


def rows_of_buffer(rows: int, ranks: int, vocab_size: int) -> int:
    """Returns how many rows of logits a rank holds: its share of a batch of ``rows``, but at most 256 MiB of them."""
    return min(-(-rows // ranks), max(_BUFFER_BYTES // (4 * vocab_size), 1))


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Properties(ctypes.Structure):
    """The driver's CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """The driver's CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments: Any) -> None:
    """Calls CUDA's driver on the current context. Passes integers (addresses, sizes, handles, flags) as 64 bits."""
    library = _library()
    status = getattr(library, name)(*(ctypes.c_uint64(a) if isinstance(a, int) else a for a in arguments))
    if status:
        text = ctypes.c_char_p()
        library.cuGetErrorName(status, ctypes.byref(text))
        error = MemoryError if status == _OUT_OF_MEMORY else RuntimeError
        raise error(f"{name} failed with {(text.value or b'CUDA error').decode()} ({status})")


@contextlib.contextmanager
def _current(context: int) -> Iterator[None]:
    """Makes a context current.

    A thread that has not used CUDA has none, and torch.cuda.device makes none for device 0."""
    _driver("cuCtxPushCurrent_v2", context)
    try:
        yield
    finally:
        _driver("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_uint64()))


def _zeroed(words: int) -> int:
    """Allocates int64 zeros on the current device, outside torch's allocator and its pools. They are never freed."""
    address = ctypes.c_uint64()
    _driver("cuMemAlloc_v2", ctypes.byref(address), 8 * words)
    _driver("cuMemsetD8_v2", address.value, ctypes.c_ubyte(0), 8 * words)
    return address.value


def _write(address: int, words: list[int]) -> None:
    """Copies int64 words to the device and waits for the copy."""
    _driver("cuMemcpyHtoD_v2", address, (ctypes.c_int64 * len(words))(*words), 8 * len(words))


class _Mapping:
    """Physical memory that this process maps, allocated by this rank or by a peer. ``handle`` is the driver's,
    ``size`` in bytes a multiple of its granularity."""

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
    def allocate(cls, device: torch.device, words: int) -> "_Mapping":
        """Allocates and maps at least ``words`` int64 zeros."""
        properties = _Properties(_PINNED, _HANDLE_TYPE, _Location(_DEVICE, device.index))
        granularity, handle = ctypes.c_uint64(), ctypes.c_uint64()
        _driver("cuMemGetAllocationGranularity", ctypes.byref(granularity), ctypes.byref(properties), 0)
        size = -(-8 * words // granularity.value) * granularity.value
        _driver("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), 0)
        mapping = cls(device, size, handle.value)
        _driver("cuMemsetD8_v2", mapping.address, ctypes.c_ubyte(0), size)
        return mapping

    def export_descriptor(self) -> int:
        """Returns a file descriptor of the memory; the caller closes it."""
        descriptor = ctypes.c_int()
        _driver("cuMemExportToShareableHandle", ctypes.byref(descriptor), self._handle, _HANDLE_TYPE, 0)
        return descriptor.value

    @classmethod
    def import_descriptor(cls, like: "_Mapping", descriptor: int) -> "_Mapping":
        """Maps memory that a peer exported. ``like``: this rank's own memory, of the same size and device."""
        handle = ctypes.c_uint64()
        _driver("cuMemImportFromShareableHandle", ctypes.byref(handle), descriptor, _HANDLE_TYPE)
        return cls(like._device, like._size, handle.value)

    def end(self) -> None:
        """Unmaps the memory here. Peers may still use it."""
        self._undo.close()


def _floats(address: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Returns device memory as a tensor (rows, columns) float32."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (rows, columns), "typestr": "<f4", "data": (address, False), "version": 2,
        }  # fmt: skip

    return torch.as_tensor(Memory(), device=device)


class _DryRun(DryRun):
    """Launches what ``PeerToPeer`` launches, with a group of this rank alone."""

    def __init__(self, table: int, rank: int, row_stride: int, hashes: Hashes) -> None:
        self._table, self._rank, self._row_stride, self._hashes = table, rank, row_stride, hashes

    def begin(self, step: SampleInputs) -> None:
        """Implements ``Collectives.begin``."""
        from ..kernels.triton.sharded.param_hash import besides_rows  # comes with torch for CUDA

        self._request = besides_rows(self._hashes, step)

    def gather_logits(
        self, logits: Tensor, bias: Tensor | None, ranges: Sequence[tuple[int, int]], step: SampleInputs
    ) -> Tensor:
        """Implements ``Collectives.gather_logits``."""
        from ..kernels.triton.sharded import collectives  # comes with torch for CUDA

        if logits.shape[1]:
            first = ranges[self._rank][0]
            collectives.push_logits(self._table, 0, logits, bias, (0, 1), 0, first, self._row_stride)
        word = torch.zeros(1, dtype=torch.int64, device=logits.device)
        collectives.all_gather(self._table, word, 1, self._request, step)
        return super().gather_logits(logits, bias, ranges, step)


class PeerToPeer(Transport):
    """Carries winners over symmetric memory.

    Holds this rank's memory of the peer-to-peer protocol and the table of all ranks' addresses, which kernels read. The
    ranks are on one host, on a GPU each, visible to this process or not.

    Raises:
        RuntimeError: memory cannot be passed or mapped; holds the driver's reason.
        OSError: the ranks cannot reach each other's sockets.
        MemoryError: the device has no memory left.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        device: torch.device,
        capacity: int,  # words that fit in a message: rows times draws, or more
        seconds: float,  # how long a kernel waits for a peer
        max_batch_size: int = 1,
        max_num_samples: int = 1,
        vocab_size: int = 1,  # of all ranks
    ) -> None:
        rank, ranks = rendezvous.rank, rendezvous.ranks
        self.room = capacity
        self._rank, self._ranks = rank, ranks
        self._share_rows = rows_of_buffer(max_batch_size, ranks, vocab_size)
        self.rows_at_once: int = ranks * self._share_rows
        self._row_stride = -(-vocab_size // 4) * 4
        self._vocab_size = vocab_size
        self._rendezvous = rendezvous
        self._device = device
        self._failure: Failure | None = None
        self._own_failure: Failure | None = None  # the failure that this rank declared
        self._mappings: list[_Mapping] = []
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)  # makes the context
            context = ctypes.c_uint64()
            _driver("cuCtxGetCurrent", ctypes.byref(context))
            self._context = context.value
            self._hashes = Hashes(max_batch_size, device)
            self._request: tuple[int, Tensor | None] = (0, None)
            self._in_passes = False
            self._failed: Tensor | None = None  # of the step, () bool, once it is known
            host_words = torch.zeros(2, dtype=torch.int64, device="cpu", pin_memory=True)
            _kept.append(host_words)
            self._host_words = host_words.numpy()  # an element costs a tenth of a tensor's
            self._table = _zeroed(protocol.TABLE_SHARED + ranks)
            # a group of this rank alone, for the dry run
            self._dry_run_table = _zeroed(protocol.TABLE_SHARED + 1)
            winners = max_batch_size * max_num_samples
            alone = _zeroed(protocol.shared_words(1, winners))
            try:
                # behind the protocol's words, at 16 bytes
                slots = -(-protocol.shared_words(ranks, capacity) // 2) * 2
                self._buffer_at = 8 * slots
                words = slots + self._share_rows * self._row_stride // 2
                addresses = self._share(rendezvous, words, seconds)
                self._buffer = _floats(addresses[rank] + self._buffer_at, self._share_rows, self._row_stride, device)
            except BaseException:
                self._unmap()
                raise
            nanoseconds, host = int(seconds * 1e9), host_words.data_ptr()
            _write(self._table, protocol.table_words(rank, capacity, nanoseconds, host, addresses))
            _write(self._dry_run_table, protocol.table_words(0, winners, nanoseconds, host + 8, [alone]))
            torch.cuda.synchronize(device)

    def _share(self, rendezvous: Rendezvous, words: int, seconds: float) -> list[int]:
        """Returns the addresses of all ranks' memory, by rank."""
        own = _Mapping.allocate(self._device, words)
        self._mappings.append(own)
        torch.cuda.synchronize(self._device)  # the memory is zero before a peer has it
        descriptors = exchange_file_descriptors(own.export_descriptor, rendezvous, seconds)
        addresses = {rendezvous.rank: own.address}
        try:
            for rank, descriptor in descriptors.items():
                mapping = _Mapping.import_descriptor(own, descriptor)
                self._mappings.append(mapping)
                addresses[rank] = mapping.address
        finally:
            for descriptor in descriptors.values():
                os.close(descriptor)
        return [addresses[rank] for rank in range(rendezvous.ranks)]

    def _unmap(self) -> None:
        while self._mappings:
            self._mappings.pop().end()

    def set_skipped_calls(self, count: int) -> None:
        """Implements ``Transport.set_skipped_calls``. The device's count follows in order of the current stream."""
        if torch.cuda.is_current_stream_capturing():  # a graph would repeat the write at every replay
            return
        stream = torch.cuda.current_stream(self._device).cuda_stream
        with _current(self._context):
            _driver("cuStreamWriteValue64_v2", stream, self._table + 8 * protocol.TABLE_LEFT_OUT, count, 0)

    def shard(self, first_token: int) -> Shard:
        """Implements ``Transport.shard``."""
        return Shard(first_token, self._table)

    def dry_run_transport(self, first_token: int) -> Shard:
        """Implements ``Transport.dry_run_transport``."""
        return Shard(first_token, self._dry_run_table)

    def compare(self, step: SampleInputs) -> None:
        """Implements ``Transport.compare`` as a launch that is a step of the protocol.

        It comes before the sampling kernel, so a rank that draws plainly meanwhile gets no token either. The sampling
        kernel finds the failure in its memory."""
        from ..kernels.triton.sharded.param_hash import of_request  # comes with torch for CUDA

        alone = step.draft_hash if step.params is DEFAULT_PARAMS else None
        request = of_request(self._hashes, step) if alone is None else alone.view(1)
        self._all_gather(request, (0, request), step._replace(params=DEFAULT_PARAMS))

    def finish(self, out: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Transport.finish``: the kernel has done the exchange."""
        return out

    def begin(self, step: SampleInputs) -> None:
        """Implements ``Collectives.begin``."""
        from ..kernels.triton.sharded.param_hash import besides_rows  # comes with torch for CUDA

        self._request = besides_rows(self._hashes, step)
        self._in_passes = len(step.hidden_states) > self.rows_at_once

    def all_gather(self, words: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Collectives.all_gather`` as a launch that is a step of the protocol."""
        return self._all_gather(words, self._request, step)

    def _all_gather(self, words: Tensor, request: tuple[int, Tensor | None], step: SampleInputs) -> Tensor:
        from ..kernels.triton.sharded import collectives  # comes with torch for CUDA

        return collectives.all_gather(self._table, words, self._ranks, request, step)

    def _share_of(self, batch: int) -> int:
        """Returns the rows of a batch that each rank draws, but the last ones."""
        return -(-batch // self._ranks)

    def drawn_rows(self, batch: int) -> tuple[int, int]:
        """Implements ``Collectives.drawn_rows``: rows are split evenly."""
        share = self._share_of(batch)
        return min(self._rank * share, batch), min((self._rank + 1) * share, batch)

    def gather_logits(
        self, logits: Tensor, bias: Tensor | None, ranges: Sequence[tuple[int, int]], step: SampleInputs
    ) -> Tensor:
        """Implements ``Collectives.gather_logits``: stores to the rows' owners, then a message with a word per row."""
        from ..kernels.triton.sharded import collectives  # comes with torch for CUDA

        batch = len(logits)
        if logits.shape[1]:
            collectives.push_logits(
                self._table, self._buffer_at, logits, bias, (self._rank, self._ranks), batch, ranges[self._rank][0],
                self._row_stride,
            )  # fmt: skip
        self.all_gather(step.rows().offset, step)
        first, last = self.drawn_rows(batch)
        return self._buffer[: last - first, : self._vocab_size]

    def gather_results(self, words: Tensor, batch: int, step: SampleInputs) -> Tensor:
        """Implements ``Collectives.gather_results``."""
        count, missing = words.shape[1], self._share_of(batch) - len(words)
        padded = words.flatten() if not missing else torch.nn.functional.pad(words, (0, 0, 0, missing)).flatten()
        many = self._in_passes or len(padded) > self.room
        if many:  # a message may fail after an earlier one, whose words were sound: the last word says so
            padded = torch.nn.functional.pad(padded, (0, 1))
        received = [self.all_gather(some, step) for some in padded.split(self.room)]
        theirs = received[0] if len(received) == 1 else torch.cat(received, dim=1)
        if many:
            self._failed, theirs = theirs[0, -1] != 0, theirs[:, :-1]
        return theirs.reshape(-1, count)[:batch]

    def dry_run(self) -> Collectives:
        """Implements ``Transport.dry_run``."""
        return _DryRun(self._dry_run_table, self._rank, self._row_stride, self._hashes)

    def end(self, error: BaseException | None = None) -> Tensor | None:
        """Implements ``Collectives.end``; the results of a step that failed are -1 already, unless they took several
        messages. Keeps no tensor of a graph under capture, which compilers take for a leak."""
        failed, self._failed, self._request = self._failed, None, (0, None)
        return failed

    def failure(self) -> Failure | None:
        """Implements ``Transport.failure``."""
        if self._failure is None and self._host_words[0]:
            verdict = Verdict.of(int(self._host_words[0]))
            self._failure = _to_failure(verdict)
            if verdict.kind == protocol.DECLARED:  # the verdict holds the rank, the store holds the reason
                own = self._own_failure
                if own is not None and own.rank == verdict.straggler:
                    self._failure = own
                self._failure = self._rendezvous.try_declared() or self._failure
        return self._failure

    def declare(self, failure: Failure) -> Failure:
        """Implements ``Transport.declare``."""
        known = self.failure()
        if known is not None:
            return known
        from ..kernels.triton.sharded.peer_exchange import declare  # comes with torch for CUDA

        # the store has its words; the ranks' memory decides that it is so
        failure = self._own_failure = self._rendezvous.declare(failure)
        verdict = Verdict(protocol.DECLARED, failure.rank, self._rendezvous.rank, step=(failure.step or 0) & 0x7FFFFFFF)
        # a broken device raises here; its peers' kernels then wait until their time-out
        with contextlib.suppress(Exception), torch.cuda.device(self._device):
            stream = torch.cuda.Stream(self._device)  # the current stream may wait for a peer
            with torch.cuda.stream(stream):
                declare[(1,)](self._table, verdict.word(), num_warps=1)
            stream.synchronize()
        self._failure = self.failure() or failure
        return self._failure

    def close(self, all_done: bool) -> bool:
        """Implements ``Transport.close``."""
        with contextlib.suppress(RuntimeError), _current(self._context):  # of a broken device, where no kernel runs
            _write(self._table + 8 * protocol.TABLE_RANKS, [0])
            if all_done:
                self._unmap()
        return False


def _to_failure(verdict: Verdict) -> Failure:
    if verdict.kind != protocol.DIFFERS:
        return Failure("timeout" if verdict.kind == protocol.LATE else "aborted", verdict.straggler, verdict.step)
    fields = tuple(name for i, name in enumerate(protocol.FIELDS) if verdict.fields & 8 >> i)
    if not fields and not verdict.ahead:  # sampling parameters are in the sequence tag alone
        fields = ("request",)
    if protocol.FIELDS[0] in fields:  # rows do not correspond then, so all other fields differ too
        fields = fields[:1]
    differs = (*(("step",) if verdict.ahead else ()), *fields)
    return Failure("mismatch", verdict.straggler, verdict.step, differs, what=f"rank {verdict.reporter}")
