"""Transport ``nccl``: an all-gather after the kernel. Across nodes, or where peers cannot map each other's memory.

A step is the device's work alone, in stream order, and can be captured. Step counter, header, all-gather of whole messages,
comparison; where headers differ, or the group has failed, tokens are -1, now and in every later step and replay.

What the device tells the host, in pinned memory, and the host the device:

    begun     the counts of steps and of all-gathers begun, before the all-gather
    headers   all ranks' headers of the step that failed first, else of the last one
    state     the counts of those ended, and whether one failed; after headers
    told      set by the host: the group has failed; read before and after the all-gather

NCCL waits for a rank that does not come for as long as the process group's time-out, and cannot say who it is: a thread of
every rank finds out (``watch``).

Hosts learn of a failure one after another, and hosts run ahead of their devices. The first to know issues no more all-gathers
when others have issued those of the next steps, which hang, and with them whoever waits for such a device. So the call that
raises a failure first takes part in all-gathers that others' devices have begun and this rank has not (``Nccl.drain``): with
a message of no winners that says that the group has failed, so that all tokens are -1. It does so until the host of every rank
knows and all its all-gathers have begun, as the threads post, for ``DRAIN_LIMIT`` seconds at most after the last that
it took part
in. Later calls that raise look once, and so does ``close`` again and again while it waits: graph replays, which no host counts
before they begin, are found there.

    Only what has begun: other collectives of the process group may lie before what a host has issued, and would meet these.
    The thread that calls: NCCL takes one thread at a time for a communicator, which may be the model's too.
    A stream of their own: nothing of the caller's waits for them. NCCL runs them after what this rank has issued before.
    None while a graph is captured.

An all-gather that hangs stays on the device until its missing rank calls or the process group is aborted: that of a process
that is gone, of a rank that never calls again, and what a host had issued behind it when its group was closed.
"""

import contextlib
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor

from .. import exchange_protocol
from ..exchange_protocol import Shard
from ..inputs import SampleInputs
from ..sampling_params import DEFAULT_PARAMS
from .failures import Failure
from .message import FAILED, HEADER, STEP, Hashes, difference
from .rendezvous import Rendezvous
from .store import StoreGoneError
from .watchdog import Heartbeat, Watchdog, posts_of

DRAIN_LIMIT = 5.0  # seconds
CATCH_UP_AT_MOST = 120.0  # seconds, whatever the store says that the others have begun
_LOOK_AFTER_FAILURE = 0.1  # seconds


class Nccl:
    """See ``transport.Transport``.

    Args:
        group: the process group, None for the default one.
        rendezvous: of the group's construction.
        device: of the shard.
        max_batch_size: rows, at most.
        capacity: winners of a step, at most.
        seconds: how long another rank is waited for.
        holder: rank that probably holds the store.
    """

    name = "nccl"
    skips = False

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rendezvous: Rendezvous,
        device: torch.device,
        max_batch_size: int,
        capacity: int,
        seconds: float,
        holder: int = 0,
    ) -> None:
        self._group, self._rendezvous, self._device, self._seconds = group, rendezvous, device, seconds
        self._rank, self._ranks, self._holder = rendezvous.rank, rendezvous.ranks, holder
        self._hashes = Hashes(max_batch_size, device)
        self.room = capacity
        on_gpu = device.type == "cuda"

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        def pinned(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)

        self._message = words(HEADER + capacity)
        self._messages = words(self._ranks, HEADER + capacity)
        self._state = words(
            4
        )  # steps, all-gathers that the host issued, those of graph replays, whether the group failed
        self._counts, self._step, self._failed = self._state[:3], self._state[:1], self._state[3:]
        self._one_called, self._one_replayed = (torch.tensor(one, device=device) for one in ([1, 1, 0], [1, 0, 1]))
        self._first_failed = words(self._ranks, HEADER)
        self._told = words(1)
        self._host_begun, self._host_state, self._host_told = pinned(3), pinned(4), pinned(1)
        self._host_headers = pinned(self._ranks, HEADER)
        # views that cost the host a tenth of a tensor's element
        self._begun_view, self._state_view = self._host_begun.numpy(), self._host_state.numpy()
        self._left_out = self._left_out_on_device = 0
        self._failure: Failure | None = None
        # of failing: a host that knows issues nothing more
        self._lock = threading.Lock()
        self._issued = 0  # all-gathers, by this host; those of captured graphs are not
        self._no_winners, self._nobody_reads = words(HEADER + capacity), words(self._ranks, HEADER + capacity)
        self._no_winners[FAILED] = 1
        self._aside = torch.cuda.Stream(device) if on_gpu else None
        self._caught_up = 0  # all-gathers for the sake of others
        self._catching_up = threading.Lock()
        self._waited_for_others = False
        self._woken, self._closed, self._everybody = threading.Event(), threading.Event(), False
        self._watcher = threading.Thread(target=self._watch, name="flashsampling nccl", daemon=True)

    def connect(self) -> None:
        """A first all-gather, in which NCCL makes its communicator, and then the thread. Blocks until all ranks do it."""
        gather_flat(self._messages, self._message, self._group)
        if self._device.type == "cuda":
            torch.cuda.synchronize(
                self._device
            )  # this may be another thread and stream than the one that made the buffers
        self._rendezvous.share()
        self._watcher.start()

    @property
    def skipped_calls(self) -> int:
        """As the protocol says. The device's counter follows in order of the current stream."""
        return self._left_out

    @skipped_calls.setter
    def skipped_calls(self, count: int) -> None:
        self._left_out = count
        self._count_skipped_call()

    def _count_skipped_call(self) -> None:
        missing = self._left_out - self._left_out_on_device
        if not missing or self._capturing():
            return  # a graph would count it at every replay; the next step outside one does
        self._left_out_on_device = self._left_out
        self._step.add_(missing)

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def shard(self, first_token: int) -> Shard:
        """As the protocol says."""
        return Shard(first_token, exchange_protocol.PACKED)

    dry_run_transport = shard

    def compare(self, step: SampleInputs) -> None:
        """As the protocol says: the message says all."""

    def finish(self, out: Tensor, step: SampleInputs) -> Tensor:
        """As the protocol says. Raises nothing: tokens of a failed step are -1, and later ``failure`` says why."""
        try:
            self.begin(step)
            messages = self._gathered(out)
        finally:  # the next step's message says nothing of this one
            if step.params is not DEFAULT_PARAMS or step.draft_hash is not None:
                self._hashes.clear(self._message)
        if messages is None:
            return torch.full_like(out, -1)
        return torch.where((self._failed | self._told) != 0, -1, exchange_protocol.tokens_of(messages))

    def begin(self, step: SampleInputs) -> None:
        """As the protocol says."""
        self._count_skipped_call()
        self._hashes.write(self._message, step)

    def all_gather(self, words: Tensor, step: SampleInputs, wanted: Tensor | None = None) -> Tensor:
        """As the protocol says. Raises nothing."""
        messages = self._gathered(words)
        return words.expand(self._ranks, -1) if messages is None else messages.clone()  # the next message's place

    def end(self, error: BaseException | None = None) -> Tensor:
        """As the protocol says."""
        self._hashes.clear(self._message)
        self._told.copy_(self._host_told, non_blocking=True)  # of what was not issued nothing has told the device
        return (self._failed | self._told)[0] != 0

    def _gathered(self, out: Tensor) -> Tensor | None:
        """(ranks, n) of (n,), until the next message. None: the host knows that the group has failed, and issued nothing."""
        count, mine = out.numel(), self._message
        one = self._one_replayed
        if not self._capturing():
            one = self._one_called
            with self._lock:
                if (
                    self._failure is not None
                ):  # since the call began; the other ranks count on it that nothing more is issued
                    return None
                self._issued += 1
        mine[HEADER : HEADER + count].copy_(out)
        self._told.copy_(self._host_told, non_blocking=True)
        torch.bitwise_or(self._failed, self._told, out=mine[FAILED : FAILED + 1])
        mine[STEP : STEP + 1].copy_(self._step)
        self._counts.add_(one)
        self._host_begun.copy_(self._counts, non_blocking=True)
        gather_flat(self._messages, mine, self._group)
        headers = self._messages[:, :HEADER]
        torch.where(self._failed != 0, self._first_failed, headers, out=self._first_failed)
        self._failed.bitwise_or_((headers != headers[:1]).any())
        self._host_headers.copy_(self._first_failed, non_blocking=True)
        self._host_state.copy_(self._state, non_blocking=True)  # after the headers that it speaks of
        self._told.copy_(self._host_told, non_blocking=True)
        return self._messages[:, HEADER : HEADER + count]

    def failure(self) -> Failure | None:
        """As the protocol says."""
        if self._failure is None and self._state_view[3]:
            found = difference(self._host_headers.tolist())
            assert found is not None
            self.declare(found)
        return self._failure

    def declare(self, failure: Failure) -> Failure:
        """As the protocol says."""
        if self._failure is None:
            self._take(self._rendezvous.declare(failure))
        assert self._failure is not None
        return self._failure

    def _take(self, failure: Failure) -> None:
        self._host_told[0] = 1
        with self._lock:
            self._failure = failure
        self._woken.set()

    def drain(self) -> None:
        """As the protocol says; see the module's docstring. Raises nothing."""
        if self._failure is None or self._capturing() or not self._catching_up.acquire(blocking=False):
            return
        try:
            # of a rank that is late it is known that no waiting brings it
            wait = not self._waited_for_others and (self._failure.kind != "late" or self._failure.rank == self._rank)
            self._waited_for_others = True
            began = last = time.monotonic()
            while time.monotonic() - began < CATCH_UP_AT_MOST:
                mine, posts = self._progress(), posts_of(self._rendezvous)
                others = [post or Heartbeat(0, 0) for rank, post in enumerate(posts) if rank != self._rank]
                ahead = any(post.begun > mine.begun for post in others)
                # while one of its own has not ended this rank is in none, and it is not this one that others wait for
                if ahead and mine.issued == 0 and mine.begun == mine.ended:
                    self._take_part_without_winners()
                    last = time.monotonic()
                    continue
                settled = not ahead and mine.issued == 0 and all(post.knows and post.issued == 0 for post in others)
                if settled or not wait or time.monotonic() - last > min(self._seconds, DRAIN_LIMIT):
                    return
                time.sleep(_LOOK_AFTER_FAILURE / 4)
        except (
            StoreGoneError,
            RuntimeError,
        ):  # nobody can say what is missing; or a broken device, an aborted process group
            return
        finally:
            self._catching_up.release()

    def _take_part_without_winners(self) -> None:
        with contextlib.nullcontext() if self._aside is None else torch.cuda.stream(self._aside):
            gather_flat(self._nobody_reads, self._no_winners, self._group)
        self._caught_up += 1

    def _progress(self) -> Heartbeat:
        knows = self._failure is not None  # first: what is issued is final then
        with self._lock:
            issued = self._issued
        _, called, replayed = self._begun_view.tolist()
        _, called_ended, replayed_ended, _ = self._state_view.tolist()
        extra = self._caught_up
        return Heartbeat(
            called + replayed + extra, called_ended + replayed_ended + extra, 0, issued - called, int(knows)
        )

    def close(self, everybody: bool) -> None:
        """As the protocol says."""
        self._everybody = everybody
        self._closed.set()
        self._woken.set()
        if not everybody:
            _kept.append(self)

    def _watch(self) -> None:
        watch = Watchdog(self._rendezvous, self._seconds, self._holder)
        while not self._woken.wait(watch.period):
            if self._state_view[3]:
                self.failure()
                break
            step = int(self._begun_view[0]) - 1
            failure = watch.look(self._progress(), step, time.monotonic())
            if failure is not None and self._failure is None:
                self._take(failure)
        # also when closed, while something hangs: a rank that comes late looks for how far it must go
        with contextlib.suppress(StoreGoneError):
            while not (self._closed.is_set() and self._everybody):
                progress = self._progress()
                watch.post(progress)
                if self._closed.is_set() and progress.issued == 0 and progress.begun == progress.ended:
                    break
                time.sleep(_LOOK_AFTER_FAILURE)
        self._rendezvous.end()


_kept: list[Nccl] = []  # their buffers belong to all-gathers that hang, or to graphs


def gather_flat(gathered: Tensor, mine: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """All-gather of contiguous tensors of one size on all ranks, one after the other into ``gathered``. A collective.

    Args:
        gathered: written; as many elements as all ranks' ``mine`` together, of their dtype and on their device.
        mine: this rank's.
        group: the process group, None for the default one. Its time-out bounds the call.

    Raises:
        RuntimeError: torch's, where sizes or dtypes do not fit, or the process group's time is up.

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
