"""Bounds every operation of a process group's store."""

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore, distributed_c10d

T = TypeVar("T")
# Seconds that a store gets to answer, however short the time-out of steps. At every connection torch resolves a host
# name on both sides. A name server that does not answer costs 10 s (resolv.conf(5)), and the store serves no rank
# meanwhile.
_LEAST = 15.0


class StoreGoneError(RuntimeError):
    """The store raised, or did not answer in time."""


class BoundedStore:
    """The store operations that the ranks need, each with a bound. Thread-safe.

    ``TCPStore.check`` and ``set`` have no time-out and block for ever if the host does not answer, so a thread calls
    them. ``connect`` opens the store.
    """

    def __init__(self, connect: Callable[[], Store], seconds: float) -> None:
        self.prefix = ""  # of every key
        self._connect, self.seconds = connect, max(seconds, _LEAST)  # the bound
        self._requests: queue.SimpleQueue[tuple[Future[Any], Callable[[Store], Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._gone: str | None = None

    def set(self, key: str, value: str) -> None:
        """Sets a key."""
        name = self.prefix + key
        self._call(lambda store: store.set(name, value))

    def get(self, key: str) -> bytes | None:
        """Returns the value, or None if there is none now."""
        name = self.prefix + key
        return self._call(lambda store: store.get(name) if store.check([name]) else None)

    def decide(self, key: str, value: str) -> bytes:
        """Sets the key unless a rank has set it before. Returns the value that the key has."""
        name = self.prefix + key
        return self._call(lambda store: store.compare_set(name, "", value))

    def delete(self, key: str) -> None:
        """Deletes a key, if the store can."""
        name = self.prefix + key

        def delete(store: Store) -> None:
            with contextlib.suppress(RuntimeError, NotImplementedError):
                store.delete_key(name)

        with contextlib.suppress(StoreGoneError):
            self._call(delete)

    def end(self) -> None:
        """Ends the thread. Later operations raise StoreGoneError."""
        self._gone = self._gone or "the group has been closed"
        self._requests.put(None)

    def _call(self, operation: Callable[[Store], T]) -> T:
        if self._gone is not None:
            raise StoreGoneError(self._gone)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="flashsampling store", daemon=True)
                _with_threads.add(self)
                self._thread.start()
        reply: Future[T] = Future()
        self._requests.put((reply, operation))
        try:
            return reply.result(self.seconds)
        except Exception as error:
            why = str(error) or f"no answer within {self.seconds:g} s"
            self._gone = f"the process group's store does not answer, the process that holds it may be gone ({why})"
            raise StoreGoneError(self._gone) from error

    def _work(self) -> None:
        store: Store | None = None  # the connection closes when the thread ends
        while (request := self._requests.get()) is not None:
            reply, operation = request
            try:
                if store is None:
                    store = self._connect()
                reply.set_result(operation(store))
            except Exception as error:
                reply.set_exception(error)


_with_threads: weakref.WeakSet[BoundedStore] = weakref.WeakSet()
_LINGER_AT_EXIT = 1.0  # seconds


@atexit.register
def _end_threads() -> None:
    """Ends the threads before the interpreter.

    A thread that returns into an interpreter that has ended aborts it (SIGABRT)."""
    stores = list(_with_threads)
    for store in stores:
        store.end()
    until = time.monotonic() + _LINGER_AT_EXIT
    for store in stores:
        if store._thread is not None:
            store._thread.join(max(until - time.monotonic(), 0.0))


def open_store(group: ProcessGroup | None) -> Store:
    """Opens the default store under the group's prefix, by a new connection: a wait may block the process's own."""
    store = distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if isinstance(inner, TCPStore) and hasattr(store, "clone"):  # torch 2.8 has none
        store = store.clone()
    group = group or distributed_c10d._get_default_group()
    # the key holds the ranks too: torch 2.8's split_group, and so DeviceMesh, gives all groups of one split the same
    # name
    ranks = ",".join(map(str, distributed_c10d.get_process_group_ranks(group)))
    return PrefixStore(f"flashsampling/{group.group_name}/{ranks}", store)
