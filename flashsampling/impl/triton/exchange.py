"""Packed winners between GPUs, from inside the sampling kernel: ``flashsampling.exchange`` has the protocol.

Stores to peers are ``atomic_xchg``: the one system-scope store that Triton makes once per element. Inline assembly would run in
every thread that holds a copy of the element, and a copy's late store could fill a slot that the peer has cleared already.
"""

import triton
import triton.language as tl

from ... import exchange as protocol

_NO_TOKEN = tl.constexpr(protocol.NO_TOKEN)
_NAN = tl.constexpr(protocol.NAN)
_RANK = tl.constexpr(protocol.TABLE_RANK)
_RANKS = tl.constexpr(protocol.TABLE_RANKS)
_CAPACITY = tl.constexpr(protocol.TABLE_CAPACITY)
_TIMEOUT = tl.constexpr(protocol.TABLE_TIMEOUT)
_FAILED = tl.constexpr(protocol.TABLE_FAILED)
_STATE = tl.constexpr(protocol.TABLE_STATE)
_RECEIVED = tl.constexpr(protocol.TABLE_RECEIVED)


@triton.jit
def _pointer(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def _word(table, index):
    return tl.load(_pointer(table) + index)


@triton.jit
def _slots(table, owner, rank, use, index):
    """Pointers to the slots in ``owner``'s memory that ``rank`` fills."""
    buffer = (use % 2) * _word(table, _RANKS) + rank
    return _pointer(_word(table, _RECEIVED + owner)) + buffer * _word(table, _CAPACITY) + index


@triton.jit
def _nanoseconds():
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def send(table, index, live, winner):
    """Stores this rank's packed winners, (N,), into every rank's slots; its own last, the others' travel longer."""
    rank, ranks = _word(table, _RANK), _word(table, _RANKS)
    use = tl.load(_pointer(_word(table, _STATE)) + 1 + index, mask=live, other=0)
    for step in range(1, ranks + 1):
        slots = _slots(table, (rank + step) % ranks, rank, use, index)
        tl.atomic_xchg(slots, winner, mask=live, sem="release", scope="sys")


@triton.jit
def receive(table, index, live):
    """Waits for every rank's packed winners: token ids, (N,), -1 where one did not come in time."""
    rank, ranks = _word(table, _RANK), _word(table, _RANKS)
    uses = _pointer(_word(table, _STATE)) + 1 + index
    use = tl.load(uses, mask=live, other=0)
    best = tl.zeros(index.shape, tl.int64)
    defined = tl.zeros(index.shape, tl.int1)
    complete = tl.full(index.shape, 1, tl.int1)
    for peer in range(ranks):
        slots = _slots(table, rank, peer, use, index)
        winner = _wait(table, slots, live, peer)
        tl.store(slots, tl.zeros(index.shape, tl.int64), mask=live)
        complete = complete & (winner != 0)
        defined = defined | (winner > 0)
        best = tl.maximum(best, winner & _NAN)
    tl.store(uses, use + 1, mask=live)
    return tl.where(complete & defined & (best != _NAN), (best & _NO_TOKEN) ^ _NO_TOKEN, -1)


@triton.jit
def _wait(table, slots, live, peer):
    """Packed winners; 0 where one is missing after the time-out."""
    winner = tl.atomic_add(slots, 0, mask=live, sem="acquire", scope="sys")
    missing = tl.max((live & (winner == 0)).to(tl.int32), axis=0)
    if missing != 0:
        failure = _pointer(_word(table, _STATE))
        patience = tl.where(tl.atomic_add(failure, 0, sem="relaxed") != 0, 0, _word(table, _TIMEOUT))
        start = _nanoseconds()
        waiting = 1
        while waiting != 0:
            winner = tl.atomic_add(slots, 0, mask=live, sem="acquire", scope="sys")
            missing = tl.max((live & (winner == 0)).to(tl.int32), axis=0)
            waiting = ((missing != 0) & (_nanoseconds() - start < patience)).to(tl.int32)
        if (missing != 0) & (patience != 0):
            said = peer.to(tl.int64) + 1
            if tl.atomic_cas(failure, tl.zeros((), tl.int64), said, sem="relaxed") == 0:
                tl.store(_pointer(_word(table, _FAILED)), said)
    return winner
