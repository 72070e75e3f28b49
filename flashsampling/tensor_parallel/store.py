"""Bounds every operation of a process group's store."""

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, ProcessGroup, Store, TCPStore, distributed_c10d

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
        self._store: Store | None = None
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._gone: str | None = None

    def set(self, key: str, value: bytes) -> None:
        """Sets a key."""
        self._call("set", key, value)

    def get(self, key: str) -> bytes | None:
        """Returns the value, or None if there is none now."""
        return self._call("get", key)  # type: ignore[no-any-return]

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter and returns its value."""
        return self._call("add", key, amount)  # type: ignore[no-any-return]

    def decide(self, key: str, value: str) -> bytes:
        """Sets the key unless a rank has set it before. Returns the value that the key has."""
        return self._call("compare_set", key, "", value)  # type: ignore[no-any-return]

    def delete(self, key: str) -> None:
        """Deletes a key, if the store can."""
        with contextlib.suppress(StoreGoneError):
            self._call("delete", key)

    def end(self) -> None:
        """Ends the thread. Later operations raise StoreGoneError."""
        self._gone = self._gone or "the group has been closed"
        self._requests.put(None)

    def _do(self, operation: str, key: str, *arguments: Any) -> Any:
        if self._store is None:
            self._store = self._connect()
        if operation == "get":
            return self._store.get(key) if self._store.check([key]) else None
        if operation == "delete":
            with contextlib.suppress(RuntimeError, NotImplementedError):
                self._store.delete_key(key)
            return None
        return getattr(self._store, operation)(key, *arguments)

    def _call(self, operation: str, key: str, *arguments: Any) -> Any:
        if self._gone is not None:
            raise StoreGoneError(self._gone)
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="flashsampling store", daemon=True)
                _with_threads.add(self)
                self._thread.start()
        reply: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._requests.put((reply, operation, self.prefix + key, *arguments))
        try:
            value, error = reply.get(timeout=self.seconds)
        except queue.Empty:
            value, error = None, TimeoutError(f"no answer within {self.seconds:g} s")
        if error is not None:
            self._gone = f"the process group's store does not answer, the process that holds it may be gone ({error})"
            raise StoreGoneError(self._gone) from error
        return value

    def _work(self) -> None:
        while (request := self._requests.get()) is not None:
            reply, *operation = request
            try:
                reply.put((self._do(*operation), None))
            except Exception as error:
                reply.put((None, error))
        self._store = None  # closes the connection


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
