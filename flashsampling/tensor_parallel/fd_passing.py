"""File-descriptor passing: ranks of one host pass memory over Unix sockets, whose names go through the rendezvous.

Every rank connects to the sockets of all others and sends its memory; a connection waits in the listener's queue, so no
rank waits for another before it has sent. Every process of the network namespace can connect to such a socket. A rank
sends memory to, and takes it from, processes of its own user alone, by the kernel's word (SO_PEERCRED, unix(7)).
"""

import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

from .rendezvous import Rendezvous
from .serialization import MalformedError

_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
_LOOK_AGAIN = 0.05  # seconds between two looks for a peer that gave up
_REASON_WAIT = 2.0  # seconds in which a rank that closed its socket posts its reason


def exchange_file_descriptors(exported: Callable[[], int], rendezvous: Rendezvous, seconds: float) -> dict[int, int]:
    """Exchanges memory between all ranks of one host. A collective call.

    Args:
        exported: makes a file descriptor of this rank's memory; it is closed here.
        rendezvous: the group's rendezvous.
        seconds: how long to wait for the peers' descriptors.

    Returns:
        The peers' memory as file descriptors, by rank; the caller closes them.

    Raises:
        RuntimeError: a peer's memory did not come, or this rank's could not be sent, or a peer is a process of another
            user. No descriptor is left open.
        OSError: no socket can be made, or sending fails.
    """
    descriptors: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX) as listener:
        token = secrets.token_hex(16)
        listener.bind(_address(token))
        listener.listen()
        tokens = rendezvous.exchange("handing over memory", token, _check_token)
        others = [rank for rank in range(rendezvous.ranks) if rank != rendezvous.rank]
        until = time.monotonic() + seconds
        own = exported()
        try:
            # the others still get this rank's memory
            unreachable = [rank for rank in others if not _send(own, rendezvous.rank, rank, _address(tokens[rank]))]
            if unreachable:  # that rank's own error says more, and comes soon
                until = min(until, time.monotonic() + _REASON_WAIT)
            while unreachable or len(descriptors) < len(others):
                if rendezvous.next_has_failed():
                    raise RuntimeError("another rank could not hand over its memory")
                if time.monotonic() > until:
                    raise _late(others, descriptors, unreachable, seconds)
                _receive(listener, until, others, descriptors)
        except BaseException:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise
        finally:
            os.close(own)
    return descriptors


def _address(token: str) -> str:
    """Returns an abstract name, which ends with its socket."""
    return f"\0flashsampling-{token}"


def _check_token(value: Any) -> str:
    """Checks the name of a peer's socket: the store may hold anything."""
    if not (isinstance(value, str) and re.fullmatch("[0-9a-f]{32}", value)):
        raise MalformedError("it is no name of a rank's socket")
    return value


def _user(connection: socket.socket) -> int:
    """Returns the user of the process at the other end."""
    _, user, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return user  # type: ignore[no-any-return]


def _send(descriptor: int, rank: int, to: int, address: str) -> bool:
    """Sends this rank's memory to another one. Returns whether it has a socket, whose queue has room."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.setblocking(False)
        try:
            connection.connect(address)
            if _user(connection) != os.getuid():
                users = f"a process of user {_user(connection)}, and this is user {os.getuid()}"
                raise RuntimeError(f"rank {to} is {users}: ranks must run as one user")
            socket.send_fds(connection, [str(rank).encode()], [descriptor])
        except (ConnectionError, BlockingIOError):  # it may close its socket at any time
            return False
    return True


def _late(others: list[int], descriptors: dict[int, int], unreachable: list[int], seconds: float) -> RuntimeError:
    """Returns the error that names a rank without a socket, else one that sent nothing."""
    if unreachable:
        where = "it is gone, or in another network namespace (a container with a network of its own)"
        return RuntimeError(f"the Unix socket of rank {unreachable[0]} refused this rank's memory: {where}")
    silent = next(rank for rank in others if rank not in descriptors)
    return RuntimeError(f"no memory came from rank {silent} within {seconds:g} s")


def _receive(
    listener: socket.socket,
    until: float,  # how long to wait for a rank that has connected
    others: list[int],
    descriptors: dict[int, int],  # rank -> its descriptor; one is added if a rank connects soon
) -> None:
    listener.settimeout(_LOOK_AGAIN)
    try:
        connection, _ = listener.accept()
    except TimeoutError:
        return
    with connection:
        if _user(connection) != os.getuid():
            return
        connection.settimeout(max(until - time.monotonic(), _LOOK_AGAIN))
        try:
            message, received, _, _ = socket.recv_fds(connection, 16, 1, socket.MSG_CMSG_CLOEXEC)
        except (TimeoutError, ConnectionError):
            return
    rank = next((rank for rank in others if message == str(rank).encode()), None)
    if rank is not None and received:
        descriptors[rank] = received[0]
        return
    for descriptor in received:
        os.close(descriptor)
    if rank is not None:
        raise RuntimeError(f"the memory of rank {rank} came without its file descriptor: too many open files here?")
