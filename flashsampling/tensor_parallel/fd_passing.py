"""How ranks of one host hand memory to each other: file descriptors, over Unix sockets whose names the rendezvous carries.

Every process of the network namespace can send to such a socket. A descriptor is taken from a socket that a rank named, and
only if the kernel says that its sender is of this process's user (SO_PASSCRED, unix(7)).
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
_NAMES = rb"\0flashsampling-[0-9a-z-]+"  # of no file: they go with their sockets
_LOOK_AGAIN = 0.05  # seconds between two looks, at most: is there room in a queue, has another rank given up
_ITS_REASON = 2.0  # seconds in which a rank that closed its socket says why


def exchange_file_descriptors(exported: Callable[[], int], meet: Rendezvous, seconds: float) -> dict[int, int]:
    """A collective of all ranks of one host, each with memory of its own to hand over.

    Args:
        exported: makes a file descriptor of this rank's memory, which is closed here.
        meet: the group's.
        seconds: how long another rank's is waited for.

    Returns:
        Every other rank's memory as a file descriptor, by rank; the caller closes them.

    Raises:
        RuntimeError: a rank's memory did not come, or came from another user's process, or this rank's could not be sent;
            nothing is left open.
        OSError: no socket can be made, or nothing sent by it.
    """
    descriptors: dict[int, int] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as box:
        box.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)  # before anybody knows where to send
        box.bind(f"\0flashsampling-{secrets.token_hex(16)}")  # a name of no file, which goes with the socket
        phase = "handing over memory"
        names = meet.read(_name_of, phase, meet.exchange(phase, box.getsockname()))  # type: ignore[arg-type] # nobody is excused
        others = {name: rank for rank, name in enumerate(names) if rank != meet.rank}
        own = exported()
        until = time.monotonic() + seconds
        unsent = dict(others)
        gone: list[int] = []  # ranks; the others still get this one's memory, and look for the reason where it is
        try:
            while True:
                gone += _send(box, own, unsent)
                if gone and not unsent:
                    raise _refused(meet, gone[0])
                if not unsent and len(descriptors) == len(others):
                    break
                _receive(box, others, descriptors)
                if meet.over():
                    raise RuntimeError("another rank could not hand over its memory")
                if time.monotonic() > until:
                    raise _refused(meet, gone[0]) if gone else _late(others, descriptors, unsent, seconds)
        except BaseException:
            for descriptor in descriptors.values():
                os.close(descriptor)
            raise
        finally:
            os.close(own)
    return descriptors


def _name_of(payload: bytes) -> bytes:
    """A rank's socket: in the store may be any path, and whoever listens there would get the memory."""
    if not re.fullmatch(_NAMES, payload):
        raise MalformedError("it is no name of a rank's socket")
    return payload


def _send(
    box: socket.socket,
    descriptor: int,
    unsent: dict[bytes, int],  # address -> rank; those who need no more tries are taken out
) -> list[int]:
    """To all who can take it now: a queue that is full, of 10 on many a system, keeps nothing from the others. Returns whose
    sockets are not there."""
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


def _refused(meet: Rendezvous, rank: int) -> RuntimeError:
    """A rank's socket is not there. If it gave up, because of a third rank perhaps, its own words come soon and are better."""
    until = time.monotonic() + _ITS_REASON
    while time.monotonic() < until:
        if meet.over():
            return RuntimeError("another rank could not hand over its memory")
        time.sleep(_LOOK_AGAIN)
    where = "it is gone, or in another network namespace (a container with a network of its own)"
    return RuntimeError(f"the Unix socket of rank {rank} refused this rank's memory: {where}")


def _late(
    others: dict[bytes, int], descriptors: dict[int, int], unsent: dict[bytes, int], seconds: float
) -> RuntimeError:
    """Who keeps this rank waiting: who sent nothing; or, where all did, who takes nothing from its queue, which is full."""
    silent = sorted(set(others.values()) - set(descriptors))
    if silent:
        return RuntimeError(f"no memory came from rank {silent[0]} within {seconds:g} s")
    return RuntimeError(f"rank {min(unsent.values())} did not take this rank's memory within {seconds:g} s")


def _receive(
    box: socket.socket,
    others: dict[bytes, int],  # address -> rank
    descriptors: dict[int, int],  # rank -> what it sent; one is added, if it comes soon
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
    is_ours = rank is not None and rank not in descriptors and user == os.getuid() and len(received) == 1
    if is_ours:
        descriptors[rank] = received[0]  # type: ignore[index]
        return
    for descriptor in received:
        os.close(descriptor)
    if rank is None or rank in descriptors:  # from nobody here: any process of the host may write to the socket
        return
    if user != os.getuid():
        users = f"a process of user {user}, and this is user {os.getuid()}"
        raise RuntimeError(f"the memory of rank {rank} came from {users}: ranks must run as one user")
    raise RuntimeError(f"the memory of rank {rank} came without its file descriptor: too many open files here?")
