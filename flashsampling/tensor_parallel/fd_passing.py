"""File-descriptor passing: ranks of one host pass memory over Unix sockets, whose names go through the rendezvous.

Every process of the network namespace can send to such a socket. A rank accepts a descriptor only from a socket that a
rank named, and only if the kernel says that the sender has this process's user (SO_PASSCRED, unix(7)).
"""

import array
import os
import re
import secrets
import socket
import struct
import time
from collections.abc import Callable

from .rendezvous import Rendezvous
from .serialization import MalformedError

_CREDENTIALS = struct.Struct("iII")  # struct ucred: process, user, group
_ANCILLARY = socket.CMSG_SPACE(_CREDENTIALS.size) + socket.CMSG_SPACE(struct.calcsize("i"))
_NAMES = rb"\0flashsampling-[0-9a-z-]+"  # abstract names, which end with their sockets
_LOOK_AGAIN = 0.05  # seconds between two looks for room in a queue and for a peer that gave up
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
        RuntimeError: a peer's memory did not come, or came from another user's process, or this rank's could not be
            sent. No descriptor is left open.
        OSError: no socket can be made, or sending fails.
    """
    descriptors: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as box:
        box.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before a peer knows the name
        box.bind(f"\0flashsampling-{secrets.token_hex(16)}")  # an abstract name
        phase = "handing over memory"
        payloads = rendezvous.exchange(phase, box.getsockname())
        names = rendezvous.decode_payloads(_parse_name, phase, payloads)  # type: ignore[arg-type] # no rank is excused
        others = {name: rank for rank, name in enumerate(names) if rank != rendezvous.rank}
        own = exported()
        until = time.monotonic() + seconds
        unsent = dict(others)
        gone: list[int] = []  # ranks without a socket; the others still get this rank's memory
        try:
            while True:
                gone += _send(box, own, unsent)
                if gone and not unsent:
                    raise _refused(rendezvous, gone[0])
                if not unsent and len(descriptors) == len(others):
                    break
                _receive(box, others, descriptors)
                if rendezvous.next_has_ended():
                    raise RuntimeError("another rank could not hand over its memory")
                if time.monotonic() > until:
                    raise _refused(rendezvous, gone[0]) if gone else _late(others, descriptors, unsent, seconds)
        except BaseException:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise
        finally:
            os.close(own)
    return descriptors


def _parse_name(payload: bytes) -> bytes:
    """Checks the name of a peer's socket: the store may hold any path, and a process that listens there would get the
    memory."""
    if not re.fullmatch(_NAMES, payload):
        raise MalformedError("it is no name of a rank's socket")
    return payload


def _send(
    box: socket.socket,
    descriptor: int,
    unsent: dict[bytes, int],  # address -> rank; ranks that need no further attempt are removed
) -> list[int]:
    """Sends to all peers whose queue has room; a full queue (often of 10) does not block the others.

    Returns the ranks whose sockets do not exist."""
    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor)
    gone = []
    box.setblocking(False)
    for name, rank in list(unsent.items()):
        try:
            box.sendmsg([b"memory"], [rights], 0, name)  # socket.send_fds takes an address and ignores it
        except BlockingIOError:
            continue
        except ConnectionRefusedError:
            gone.append(rank)
        del unsent[name]
    return gone


def _refused(rendezvous: Rendezvous, rank: int) -> RuntimeError:
    """Returns the error for a rank without a socket. Waits briefly for that rank's own error, which says more."""
    until = time.monotonic() + _REASON_WAIT
    while time.monotonic() < until:
        if rendezvous.next_has_ended():
            return RuntimeError("another rank could not hand over its memory")
        time.sleep(_LOOK_AGAIN)
    where = "it is gone, or in another network namespace (a container with a network of its own)"
    return RuntimeError(f"the Unix socket of rank {rank} refused this rank's memory: {where}")


def _late(
    others: dict[bytes, int], descriptors: dict[int, int], unsent: dict[bytes, int], seconds: float
) -> RuntimeError:
    """Returns the error that names the straggler: a rank that sent nothing, else a rank whose queue stays full."""
    silent = sorted(set(others.values()) - set(descriptors))
    if silent:
        return RuntimeError(f"no memory came from rank {silent[0]} within {seconds:g} s")
    return RuntimeError(f"rank {min(unsent.values())} did not take this rank's memory within {seconds:g} s")


def _receive(
    box: socket.socket,
    others: dict[bytes, int],  # address -> rank
    descriptors: dict[int, int],  # rank -> its descriptor; one is added if it comes soon
) -> None:
    box.settimeout(_LOOK_AGAIN)
    try:
        _, ancillary, _, sender = box.recvmsg(16, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    except TimeoutError:
        return
    received, user = array.array("i"), None
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            received.frombytes(data[: len(data) - len(data) % received.itemsize])
        elif (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(data) == _CREDENTIALS.size:
            _, user, _ = _CREDENTIALS.unpack(data)
    rank = others.get(sender) if sender else None
    is_valid = rank is not None and rank not in descriptors and user == os.getuid() and len(received) == 1
    if is_valid:
        descriptors[rank] = received[0]  # type: ignore[index]
        return
    for descriptor in received:
        os.close(descriptor)
    if rank is None or rank in descriptors:  # from no peer: any process of the host may write to the socket
        return
    if user != os.getuid():
        users = f"a process of user {user}, and this is user {os.getuid()}"
        raise RuntimeError(f"the memory of rank {rank} came from {users}: ranks must run as one user")
    raise RuntimeError(f"the memory of rank {rank} came without its file descriptor: too many open files here?")
