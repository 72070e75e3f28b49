"""Transport ``nccl``: an all-gather after the kernel. Works across nodes and where peers cannot map each other's
memory.

A step is device work in stream order and can be captured: count the step, write the header, all-gather whole messages,
compare headers. If headers differ or the group has failed, tokens are -1, in this and every later step and replay.

Words in pinned memory:

    word      written by   content
    begun     device       steps and all-gathers begun; before the all-gather
    headers   device       all ranks' headers of the first failed step, else of the last step
    state     device       steps and all-gathers ended, whether one failed; after headers
    failed    host         1: the group has failed; the device reads it before and after the all-gather

NCCL waits for a missing rank until the process group's time-out and cannot name it. A thread of every rank does
(``watchdog``).

Hosts learn of a failure one after another, and hosts run ahead of their devices. The first host that knows issues no
more all-gathers, but its peers may have issued those of later steps, which then hang. A call that raises a failure
therefore drains outstanding collectives (``Nccl.drain``): it takes part in the all-gathers that peers' devices have
begun and this rank has not, with a message without winners that says that the group has failed. It does so until every
host knows of the failure and all its all-gathers have begun, as heartbeats say, and for at most ``DRAIN_LIMIT`` seconds
after its last all-gather. Later calls that raise look once. ``close`` looks repeatedly while it waits, to find graph
replays, which no host counts before they begin.

    Only all-gathers that have begun: other collectives of the process group may precede those that are only issued.
    On the calling thread: NCCL takes one thread at a time for a communicator, which the model may use too.
    On a stream of their own: the caller's work does not wait for them. NCCL runs them after this rank's earlier ones.
    Never while a graph is captured.

An all-gather stays on the device until its missing rank calls or the process group is aborted, if a process is gone, a
rank never calls again, or a host had issued it when its group was closed.
"""

import contextlib
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange_protocol import tokens_of
from ..inputs import SampleInputs
from ..sampling_params import DEFAULT_PARAMS
from .failures import Failure
from .message import FAILED, HEADER, STEP, Hashes, difference
from .rendezvous import Rendezvous
from .store import StoreGoneError
from .transport import Transport
from .watchdog import Heartbeat, Watchdog, read_heartbeats

LOGIT_WORDS, LEAST_LOGIT_WORDS = 16, 2048  # of a message, for each row of the largest batch, and in all
DRAIN_LIMIT = 5.0  # seconds
DRAIN_AT_MOST = 120.0  # seconds, whatever number of all-gathers the store claims
_LOOK_AFTER_FAILURE = 0.1  # seconds


class Nccl(Transport):
    """Carries winners by NCCL's all-gather."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,  # None: the default one
        rendezvous: Rendezvous,
        device: torch.device,
        max_batch_size: int,
        capacity: int,  # the most winners of a step
        seconds: float,  # how long to wait for a peer
        store_host: int = 0,  # as in ``Rendezvous``
    ) -> None:
        self._group, self._rendezvous, self._device, self._timeout = group, rendezvous, device, seconds
        self._rank, self._ranks, self._store_host = rendezvous.rank, rendezvous.ranks, store_host
        self._hashes = Hashes(max_batch_size, device)
        self.room = capacity
        on_gpu = device.type == "cuda"

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def pinned(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)

        self._message = words(HEADER + capacity)
        self._messages = words(self._ranks, HEADER + capacity)
        # steps, all-gathers that the host issued, all-gathers of graph replays, whether the group failed
        self._state = words(4)
        self._counts, self._step, self._failed = self._state[:3], self._state[:1], self._state[3:]
        self._one_called, self._one_replayed = (torch.tensor(one, device=device) for one in ([1, 1, 0], [1, 0, 1]))
        self._first_failed = words(self._ranks, HEADER)
        self._told_failed = words(1)
        self._host_begun, self._host_state, self._host_failed = pinned(3), pinned(4), pinned(1)
        self._host_headers = pinned(self._ranks, HEADER)
        # views: an element costs the host a tenth of a tensor's
        self._begun_view, self._state_view = self._host_begun.numpy(), self._host_state.numpy()
        self._skipped_calls = self._skipped_on_device = 0
        self._failure: Failure | None = None
        self._lock = threading.Lock()  # orders _failure and _issued: a host that knows a failure issues no more
        self._issued = 0  # all-gathers that this host issued, without those of captured graphs
        self._drain_message, self._drain_messages = words(HEADER + capacity), words(self._ranks, HEADER + capacity)
        self._drain_message[FAILED] = 1
        self._drain_stream = torch.cuda.Stream(device) if on_gpu else None
        self._drained = 0  # all-gathers that this rank joined in ``drain``
        self._draining = threading.Lock()
        self._has_waited = False
        self._woken, self._closed, self._all_done = threading.Event(), threading.Event(), False
        self._watchdog_thread = threading.Thread(target=self._run_watchdog, name="flashsampling nccl", daemon=True)

    def connect(self) -> None:
        """Runs a first all-gather, in which NCCL makes its communicator, and starts the thread.

        Blocks until all ranks do."""
        gather_flat(self._messages, self._message, self._group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # another thread and stream may have made the buffers
        self._rendezvous.share()
        self._watchdog_thread.start()

    @property
    def skipped_calls(self) -> int:
        """Implements ``Transport.skipped_calls``. The device's count follows in order of the current stream."""
        return self._skipped_calls

    @skipped_calls.setter
    def skipped_calls(self, count: int) -> None:
        self._skipped_calls = count
        self._count_skipped_call()

    def _count_skipped_call(self) -> None:
        missing = self._skipped_calls - self._skipped_on_device
        if not missing or self._capturing():
            return  # a graph would count it at every replay; the next step outside a graph does
        self._skipped_on_device = self._skipped_calls
        self._step.add_(missing)

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def finish(self, out: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Transport.finish``.

        Raises nothing: tokens of a failed step are -1, and ``failure`` has the reason."""
        try:
            self.begin(step)
            messages = self._gather(out)
        finally:  # the next step's header must not hold this step's parameters
            if step.params is not DEFAULT_PARAMS or step.draft_hash is not None:
                self._hashes.clear(self._message)
        if messages is None:
            return torch.full_like(out, -1)
        return torch.where((self._failed | self._told_failed) != 0, -1, tokens_of(messages))

    def begin(self, step: SampleInputs) -> None:
        """Implements ``Collectives.begin``."""
        self._count_skipped_call()
        self._hashes.write(self._message, step)

    def all_gather(self, words: Tensor, step: SampleInputs) -> Tensor:
        """Implements ``Collectives.all_gather``. Raises nothing."""
        messages = self._gather(words)
        return words.expand(self._ranks, -1) if messages is None else messages.clone()  # the next message overwrites it

    def end(self, error: BaseException | None = None) -> Tensor:
        """Implements ``Collectives.end``."""
        self._hashes.clear(self._message)
        self._told_failed.copy_(self._host_failed, non_blocking=True)  # the device has not seen skipped all-gathers
        return (self._failed | self._told_failed)[0] != 0

    def _gather(self, out: Tensor) -> Tensor | None:
        """All-gathers (n,) to (ranks, n), which is valid until the next message.

        Returns None without an all-gather if the host knows that the group has failed."""
        count, message = out.numel(), self._message
        one = self._one_replayed
        if not self._capturing():
            one = self._one_called
            with self._lock:
                if self._failure is not None:  # peers rely on it that a host that knows issues no more
                    return None
                self._issued += 1
        message[HEADER : HEADER + count].copy_(out)
        self._told_failed.copy_(self._host_failed, non_blocking=True)
        torch.bitwise_or(self._failed, self._told_failed, out=message[FAILED : FAILED + 1])
        message[STEP : STEP + 1].copy_(self._step)
        self._counts.add_(one)
        self._host_begun.copy_(self._counts, non_blocking=True)
        gather_flat(self._messages, message, self._group)
        headers = self._messages[:, :HEADER]
        torch.where(self._failed != 0, self._first_failed, headers, out=self._first_failed)
        self._failed.bitwise_or_((headers != headers[:1]).any())
        self._host_headers.copy_(self._first_failed, non_blocking=True)
        self._host_state.copy_(self._state, non_blocking=True)  # after the headers
        self._told_failed.copy_(self._host_failed, non_blocking=True)
        return self._messages[:, HEADER : HEADER + count]

    def failure(self) -> Failure | None:
        """Implements ``Transport.failure``."""
        if self._failure is None and self._state_view[3]:
            found = difference(self._host_headers.tolist())
            assert found is not None
            self.declare(found)
        return self._failure

    def declare(self, failure: Failure) -> Failure:
        """Implements ``Transport.declare``."""
        if self._failure is None:
            self._set_failure(self._rendezvous.declare(failure))
        assert self._failure is not None
        return self._failure

    def _set_failure(self, failure: Failure) -> None:
        self._host_failed[0] = 1
        with self._lock:
            self._failure = failure
        self._woken.set()

    def drain(self) -> None:
        """Implements ``Transport.drain``; the module's docstring has the rules. Raises nothing."""
        if self._failure is None or self._capturing() or not self._draining.acquire(blocking=False):
            return
        try:
            # after a time-out only the late rank waits: its peers have raised already
            wait = not self._has_waited and (self._failure.kind != "timeout" or self._failure.rank == self._rank)
            self._has_waited = True
            began = last = time.monotonic()
            while time.monotonic() - began < DRAIN_AT_MOST:
                own, heartbeats = self._progress(), read_heartbeats(self._rendezvous)
                peers = [beat or Heartbeat(0, 0) for rank, beat in enumerate(heartbeats) if rank != self._rank]
                ahead = any(peer.begun > own.begun for peer in peers)
                # while one of its own has not ended, peers do not wait for this rank to join another
                if ahead and own.issued == 0 and own.begun == own.ended:
                    self._join_without_winners()
                    last = time.monotonic()
                    continue
                done = not ahead and own.issued == 0 and all(peer.knows and peer.issued == 0 for peer in peers)
                if done or not wait or time.monotonic() - last > min(self._timeout, DRAIN_LIMIT):
                    return
                time.sleep(_LOOK_AFTER_FAILURE / 4)
        except RuntimeError:  # StoreGoneError, a broken device, or an aborted process group
            return
        finally:
            self._draining.release()

    def _join_without_winners(self) -> None:
        with contextlib.nullcontext() if self._drain_stream is None else torch.cuda.stream(self._drain_stream):
            gather_flat(self._drain_messages, self._drain_message, self._group)
        self._drained += 1

    def _progress(self) -> Heartbeat:
        knows = self._failure is not None  # read first: no more all-gathers are issued after it
        with self._lock:
            issued = self._issued
        _, called, replayed = self._begun_view.tolist()
        _, called_ended, replayed_ended, _ = self._state_view.tolist()
        extra = self._drained
        return Heartbeat(
            called + replayed + extra, called_ended + replayed_ended + extra, 0, issued - called, int(knows)
        )

    def close(self, all_done: bool) -> None:
        """Implements ``Transport.close``."""
        self._all_done = all_done
        self._closed.set()
        self._woken.set()
        if not all_done:
            _kept.append(self)

    def _run_watchdog(self) -> None:
        watchdog = Watchdog(self._rendezvous, self._timeout, self._store_host)
        while not self._woken.wait(watchdog.period):
            if self._state_view[3]:
                self.failure()
                break
            step = int(self._begun_view[0]) - 1
            failure = watchdog.look(self._progress(), step, time.monotonic())
            if failure is not None and self._failure is None:
                self._set_failure(failure)
        # posts go on after closing while an all-gather hangs: a late rank reads how many it must join
        with contextlib.suppress(StoreGoneError):
            while not (self._closed.is_set() and self._all_done):
                progress = self._progress()
                watchdog.post(progress)
                if self._closed.is_set() and progress.issued == 0 and progress.begun == progress.ended:
                    break
                time.sleep(_LOOK_AFTER_FAILURE)
        self._rendezvous.end()


_kept: list[Nccl] = []  # their buffers belong to all-gathers that hang, or to graphs


def gather_flat(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """All-gathers contiguous tensors of one size into ``gathered``, one after the other. A collective call.

    Args:
        gathered: the output, with as many elements as all ranks' ``mine`` together, of their dtype and on their device.
        mine: this rank's tensor.
        group: the process group, None for the default one. Its time-out bounds the call.

    Raises:
        RuntimeError: torch's, if sizes or dtypes do not fit, or at the process group's time-out.

    Example:
        >>> import torch
        >>> from flashsampling.tensor_parallel import gather_flat
        >>> torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        >>> gathered, mine = torch.zeros(1, 2, 3), torch.ones(2, 3)  # (ranks, ...), (...)
        >>> gather_flat(gathered, mine)
        >>> gathered.sum().item()
        6.0
        >>> torch.distributed.destroy_process_group()
    """
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
    gather(gathered.view(-1), mine.view(-1), group=group)
