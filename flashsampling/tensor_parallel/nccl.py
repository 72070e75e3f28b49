"""Transport ``nccl``: an all-gather after the kernel. Works across nodes and where peers cannot map each other's
memory.

A step is device work in stream order and can be captured: count the step, write the header, all-gather whole messages,
compare headers. If headers differ or the group has failed, tokens are -1, in this and every later step and replay. The
device reads the host's word that the group has failed: on a host that runs ahead, earlier steps may give -1 too.

Logits of filtered rows go by a second communicator, which only this module uses, in bulk messages of one size: NCCL
does not take messages of different sizes from ranks in different steps. A filtered step is a message that compares,
the bulk messages, and a last message that compares: bulk messages have no header, and a rank that has failed after the
first message fills them with anything.

Words in pinned memory, for each of the two communicators (lanes):

    word      written by   content
    begun     device       steps and all-gathers begun; before the all-gather
    state     device       steps and all-gathers ended, whether one failed; after headers
    headers   device       all ranks' headers of the first failed step, else of the last step (one lane)
    failed    host         1: the group has failed; the device reads it before and after the all-gather (one lane)

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

The watchdog's thread drains bulk messages, by the same rule: only this module uses their communicator. A rank that left
out a filtered step may wait for its device in a message that peers send behind their bulk messages, so its calling
thread cannot join these. Every message that this rank sends after it joined one says that the group has failed.

An all-gather stays on the device until its missing rank calls or the process group is aborted, if a process is gone, a
rank never calls again, or a host had issued it when its group was closed.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..exchange_protocol import tokens_of
from ..inputs import SampleInputs
from ..sampling_params import DEFAULT_PARAMS
from .failures import Failure, TensorParallelError, abort_failure
from .message import FAILED, HEADER, STEP, Hashes, difference
from .rendezvous import Rendezvous
from .store import StoreGoneError, open_store
from .transport import Transport, empty_rows
from .watchdog import Heartbeat, Watchdog, read_heartbeats

BULK_PARTS, LEAST_BULK_WORDS = 16, 1 << 16  # bulk messages of the largest batch, at most; int64 words of one, at least
DRAIN_LIMIT = 5.0  # seconds
DRAIN_AT_MOST = 120.0  # seconds, whatever number of all-gathers the store claims
_LOOK_AFTER_FAILURE = 0.1  # seconds


class _Counts(NamedTuple):
    begun: int  # all-gathers of a lane
    ended: int
    issued: int  # by the host, and not begun


class _Lane:
    """A communicator's messages of one size, and the counts of its all-gathers on the host and on the device."""

    send: Callable[[Tensor, Tensor], None]  # all-gathers to (ranks, words) from (words,)

    def __init__(self, ranks: int, words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"

        def pinned(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=on_gpu)

        self.message = torch.zeros(words, dtype=torch.int64, device=device)
        self.messages = torch.zeros((ranks, words), dtype=torch.int64, device=device)
        self.drain_message, self.drain_messages = self.message, self.messages
        self.drain_stream = torch.cuda.Stream(device) if on_gpu else None  # one a lane: neither waits for the other
        # steps, all-gathers that the host issued, all-gathers of graph replays, whether the group failed
        self.state = torch.zeros(4, dtype=torch.int64, device=device)
        self.counts, self.step, self.failed = self.state[:3], self.state[:1], self.state[3:]
        self.host_begun, self.host_state = pinned(3), pinned(4)
        # views: an element costs the host a tenth of a tensor's
        self.begun_view, self.state_view = self.host_begun.numpy(), self.host_state.numpy()
        self.issued = 0  # all-gathers that this host issued, without those of captured graphs
        self.drained = 0  # all-gathers that this rank joined without a message of its own
        self.captured = False  # whether a graph may hold an all-gather

    def gather(self, one: Tensor) -> None:
        """All-gathers ``message`` to ``messages``. ``one``: what the device adds to its counts."""
        self.counts.add_(one)
        self.host_begun.copy_(self.counts, non_blocking=True)
        self.send(self.messages, self.message)

    def end(self) -> None:
        """Reports the last all-gather's end to the host."""
        self.host_state.copy_(self.state, non_blocking=True)

    def progress(self, issued: int) -> _Counts:
        """Returns the counts now; ``issued``: as read before."""
        _, called, replayed = self.begun_view.tolist()
        _, called_ended, replayed_ended, _ = self.state_view.tolist()
        extra = self.drained
        return _Counts(called + replayed + extra, called_ended + replayed_ended + extra, issued - called)

    def join(self, begun: int) -> bool:
        """Joins an all-gather if a peer has ``begun`` more than this rank. Returns whether there was one."""
        own = self.progress(self.issued)
        # while one of its own has not ended, peers do not wait for this rank to join another
        if begun <= own.begun or own.issued != 0 or own.begun != own.ended:
            return False
        with contextlib.nullcontext() if self.drain_stream is None else torch.cuda.stream(self.drain_stream):
            self.send(self.drain_messages, self.drain_message)
        self.drained += 1
        return True


class Nccl(Transport):
    """Carries winners and logits by NCCL's all-gather."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,  # None: the default one
        rendezvous: Rendezvous,
        device: torch.device,
        max_batch_size: int,
        capacity: int,  # the most winners of a step
        widest: int,  # tokens of the widest shard
        seconds: float,  # how long to wait for a peer
    ) -> None:
        self._group, self._rendezvous, self._device, self._timeout = group, rendezvous, device, seconds
        self._rank, self._ranks = rendezvous.rank, rendezvous.ranks
        self._hashes = Hashes(max_batch_size, device)

        def words(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self._bulk_rows = min(max(-(-max_batch_size // BULK_PARTS), 2 * LEAST_BULK_WORDS // widest), max_batch_size)
        self._widest = widest
        self._small = _Lane(self._ranks, HEADER + capacity, device)
        self._small.send = lambda gathered, mine: gather_flat(gathered, mine, group)
        self._bulk = _Lane(self._ranks, -(-self._bulk_rows * widest // 2), device)
        self._bulk_group: dist.ProcessGroup | None = None  # ``connect`` makes it
        self._lanes = self._small, self._bulk
        # a bulk message has no header, and no rank reads one of a failed step: that lane drains in its own buffers
        self._small.drain_message = words(HEADER + capacity)
        self._small.drain_messages = words(self._ranks, HEADER + capacity)
        self._small.drain_message[FAILED] = 1
        self._message, self._failed = self._small.message, self._small.failed
        self._one_called, self._one_replayed = (torch.tensor(one, device=device) for one in ([1, 1, 0], [1, 0, 1]))
        self._first_failed = words(self._ranks, HEADER)
        self._told_failed, self._no_words = words(1), words(0)
        self._host_failed, self._host_headers = (
            torch.zeros(shape, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
            for shape in ((1,), (self._ranks, HEADER))
        )
        self._skipped_calls = self._skipped_on_device = 0
        self._sent = False  # whether a message of the step has been sent
        self._failure: Failure | None = None
        self._lock = threading.Lock()  # orders _failure and issued: a host that knows a failure issues no more
        self._draining = threading.Lock()
        self._has_waited = False
        self._woken, self._closed, self._all_done = threading.Event(), threading.Event(), False
        self._watchdog_thread = threading.Thread(target=self._run_watchdog, name="flashsampling nccl", daemon=True)

    def connect(self) -> None:
        """Makes the second communicator, runs first all-gathers, in which NCCL connects ranks, and starts the thread.

        Blocks until all ranks do."""
        self._bulk_group = _new_group(self._group, self._rendezvous, self._device)
        self._bulk.send = functools.partial(_gather_bulk, self._bulk_group)
        for lane in self._lanes:
            lane.send(lane.messages, lane.message)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # another thread and stream may have made the buffers
        self._watchdog_thread.start()

    def set_skipped_calls(self, count: int) -> None:
        """Implements ``Transport.set_skipped_calls``. The device's count follows in order of the current stream."""
        self._skipped_calls = count
        self._count_skipped_call()

    def _count_skipped_call(self) -> None:
        missing = self._skipped_calls - self._skipped_on_device
        if not missing or self._capturing():
            return  # a graph would count it at every replay; the next step outside a graph does
        self._skipped_on_device = self._skipped_calls
        self._small.step.add_(missing)

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
        self._sent = False
        self._count_skipped_call()
        self._hashes.write(self._message, step)

    def gather_logits(
        self, logits: Tensor, bias: Tensor | None, ranges: Sequence[tuple[int, int]], step: SampleInputs
    ) -> Tensor:
        """Implements ``Collectives.gather_logits``. A message that compares precedes the logits, and ``end`` sends one
        behind them."""
        self._gather(self._no_words)
        batch, width = logits.shape
        vocab_size, widest = max(last for _, last in ranges), self._widest
        # shards as wide as the widest, but for the last: one copy puts all of them in place
        even = all(first == min(rank * widest, vocab_size) for rank, (first, _) in enumerate(ranges))
        rows = empty_rows(batch, len(ranges) * widest if even else vocab_size, logits.device)
        own = self._bulk.message.view(torch.float32)[: self._bulk_rows * widest].view(-1, widest)
        received = self._bulk.messages.view(torch.float32)[:, : self._bulk_rows * widest].unflatten(1, (-1, widest))
        for row in range(0, batch, self._bulk_rows):
            part, place = logits[row : row + self._bulk_rows], rows[row : row + self._bulk_rows]
            count = len(part)
            if bias is None:
                own[:count, :width].copy_(part)
            else:
                torch.add(part, bias, out=own[:count, :width])
            one = self._issue(self._bulk)
            if one is None:
                break
            self._bulk.gather(one)
            self._bulk.end()
            if even:
                place.unflatten(1, (-1, widest)).copy_(received[:, :count].transpose(0, 1))
            else:
                for rank, (first, last) in enumerate(ranges):
                    place[:, first:last].copy_(received[rank, :count, : last - first])
        return rows[:, :vocab_size]

    def end(self, error: BaseException | None = None) -> Tensor:
        """Implements ``Collectives.end``: compares once more, because logits have no header.

        If ``error`` comes after a message, the group fails: peers wait for the next one."""
        try:
            if error is None:
                self._gather(self._no_words)
            elif self._sent and not isinstance(error, TensorParallelError):
                self.declare(abort_failure(self._rank, error))
                self.drain()
        finally:
            self._hashes.clear(self._message)
        self._told_failed.copy_(self._host_failed, non_blocking=True)  # the device has not seen skipped all-gathers
        return (self._failed | self._told_failed)[0] != 0

    def _issue(self, lane: _Lane) -> Tensor | None:
        """Counts an all-gather that the caller issues. Returns what the device is to add to its counts.

        Returns None if the host knows that the group has failed, and issues none."""
        if self._capturing():
            lane.captured = True
            return self._one_replayed
        with self._lock:
            if self._failure is not None:  # peers rely on it that a host that knows issues no more
                return None
            lane.issued += 1
        self._sent = True
        return self._one_called

    def _gather(self, out: Tensor) -> Tensor | None:
        """All-gathers (n,) to (ranks, n), which is valid until the next message.

        Returns None without an all-gather if the host knows that the group has failed."""
        count, lane, message = out.numel(), self._small, self._message
        one = self._issue(lane)
        if one is None:
            return None
        message[HEADER : HEADER + count].copy_(out)
        self._told_failed.copy_(self._host_failed, non_blocking=True)
        torch.bitwise_or(self._failed, self._told_failed, out=message[FAILED : FAILED + 1])
        message[STEP : STEP + 1].copy_(lane.step)
        lane.gather(one)
        headers = lane.messages[:, :HEADER]
        torch.where(self._failed != 0, self._first_failed, headers, out=self._first_failed)
        self._failed.bitwise_or_((headers != headers[:1]).any())
        self._host_headers.copy_(self._first_failed, non_blocking=True)
        lane.end()  # after the headers
        self._told_failed.copy_(self._host_failed, non_blocking=True)
        return lane.messages[:, HEADER : HEADER + count]

    def failure(self) -> Failure | None:
        """Implements ``Transport.failure``."""
        if self._failure is None and self._small.state_view[3]:
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
            before = self._progress()
            while time.monotonic() - began < DRAIN_AT_MOST:
                own, peers = self._progress(), self._peers()
                if own.begun != before.begun:
                    before, last = own, time.monotonic()
                if self._small.join(max(peer.begun - peer.bulk for peer in peers)):
                    continue
                ahead = any(peer.begun > own.begun for peer in peers)
                done = not ahead and own.issued == 0 and all(peer.knows and peer.issued == 0 for peer in peers)
                if done or not wait or time.monotonic() - last > min(self._timeout, DRAIN_LIMIT):
                    return
                time.sleep(_LOOK_AFTER_FAILURE / 4)
        except RuntimeError:  # StoreGoneError, a broken device, or an aborted process group
            return
        finally:
            self._draining.release()

    def _peers(self) -> list[Heartbeat]:
        heartbeats = enumerate(read_heartbeats(self._rendezvous))
        return [beat or Heartbeat(0, 0) for rank, beat in heartbeats if rank != self._rank]

    def _progress(self) -> Heartbeat:
        knows = self._failure is not None  # read first: no more all-gathers are issued after it
        with self._lock:
            issued = [lane.issued for lane in self._lanes]
        small, bulk = (lane.progress(count) for lane, count in zip(self._lanes, issued))
        begun, ended, issued_now = (sum(counts) for counts in zip(small, bulk))
        return Heartbeat(begun, ended, 0, issued_now, int(knows), bulk.begun)

    def close(self, all_done: bool) -> bool:
        """Implements ``Transport.close``: the thread, if it has begun, goes on with the rendezvous and ends it."""
        self._all_done = all_done
        self._closed.set()
        self._woken.set()
        if not all_done or self._bulk.captured:  # NCCL frees a communicator once no graph holds it, and waits for that
            _kept.append(self)
        elif self._watchdog_thread.ident is not None and self._bulk_group is not None:  # connected
            with contextlib.suppress(RuntimeError):
                self._bulk_group.abort()  # nothing is in flight; ``shutdown`` waits for the other ranks'
        return self._watchdog_thread.ident is not None

    def _run_watchdog(self) -> None:
        watchdog = Watchdog(self._rendezvous, self._timeout)
        while not self._woken.wait(watchdog.period):
            if self._small.state_view[3]:
                self.failure()
                break
            step = int(self._small.begun_view[0]) - 1
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
                self._join_bulk()
                time.sleep(_LOOK_AFTER_FAILURE)
        self._rendezvous.store.end()

    def _join_bulk(self) -> None:
        if self._failure is not None:  # else the group was closed
            with contextlib.suppress(RuntimeError):  # from a broken device, or a store that holds what no rank writes
                self._bulk.join(max(peer.bulk for peer in self._peers()))


_kept: list[Nccl] = []  # their buffers belong to all-gathers that hang, or to graphs


def _new_group(group: dist.ProcessGroup | None, rendezvous: Rendezvous, device: torch.device) -> dist.ProcessGroup:
    """Returns a new communicator of the group's ranks. Blocks until all ranks make it.

    torch does not register it: ``new_group`` is a call of all ranks of the default group, or names groups by how many a
    process has, so that ranks with other groups beside this one would wait for each other under different names."""
    number, rank, ranks = rendezvous.number, rendezvous.rank, rendezvous.ranks
    parent = group or dist.group.WORLD
    # absent where torch's debug mode wraps the backend
    options: Any = getattr(parent._get_backend(device), "options", None)  # type: ignore[union-attr]
    timeout = getattr(options, "_timeout", dist.default_pg_timeout)
    store = dist.PrefixStore(f"{number}/bulk", open_store(group))
    made: Any = dist.ProcessGroup(store, rank, ranks)
    backend: Any
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout, options.group_name = timeout, f"flashsampling/{number}"
        options.global_ranks_in_group = dist.get_process_group_ranks(parent)
        backend = dist.ProcessGroupNCCL(store, rank, ranks, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    else:  # tests, without NCCL
        backend = dist.ProcessGroupGloo(store, rank, ranks, timeout=timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    made._set_default_backend(kind)
    made._register_backend(torch.device(device.type), kind, backend)
    return made  # type: ignore[no-any-return]


def _gather_bulk(group: Any, gathered: Tensor, mine: Tensor) -> None:
    """All-gathers over a group that torch has not registered. ``torch.distributed`` would hide an error behind the one
    that it does not know the group."""
    options: Any = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = False
    gather = getattr(group, "all_gather_single", None) or group._allgather_base  # the name before torch 2.13
    work = gather(gathered.view(-1), mine.view(-1), options)
    if work is not None:
        work.wait()


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
