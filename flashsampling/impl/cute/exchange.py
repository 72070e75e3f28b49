"""Packed winners between GPUs, from inside the sampling kernel: ``flashsampling.exchange`` has the protocol."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, select_

from ... import exchange as protocol
from .memory import global_pointer


def _word(table: Int64, index) -> Int64:
    return global_pointer(Int64, table + Int64(index) * 8).load()


def _uses(table: Int64, index: Int64) -> Int64:
    """Address of a row's use count."""
    return _word(table, protocol.TABLE_STATE) + (1 + index) * 8


def _slot(table: Int64, owner, rank, use: Int64, index: Int64) -> Int64:
    """Address of the slot in ``owner``'s memory that ``rank`` fills."""
    buffer = (use % 2) * _word(table, protocol.TABLE_RANKS) + rank
    return _word(table, Int64(protocol.TABLE_RECEIVED) + owner) + (buffer * _word(table, protocol.TABLE_CAPACITY) + index) * 8


@cute.jit
def send(table: Int64, index: Int64, winner: Int64):
    """Stores this rank's packed winner of a row into every rank's slot; its own last, the others' travel longer."""
    rank, ranks = _word(table, protocol.TABLE_RANK), _word(table, protocol.TABLE_RANKS)
    use = global_pointer(Int64, _uses(table, index)).load()
    cute.arch.fence_acq_rel_sys()
    for step in cutlass.range(1, Int32(ranks) + 1, unroll=1):
        owner = (rank + step) % ranks
        cute.arch.store(global_pointer(Int64, _slot(table, owner, rank, use, index)), winner, sem="relaxed", scope="sys")


@cute.jit
def receive(table: Int64, index: Int64) -> Int64:
    """Waits for every rank's packed winner of a row: the row's token id, -1 if one did not come in time."""
    rank, ranks = _word(table, protocol.TABLE_RANK), _word(table, protocol.TABLE_RANKS)
    uses = _uses(table, index)
    use = global_pointer(Int64, uses).load()
    best = Int64(0)
    defined = Boolean(False)
    complete = Boolean(True)
    for peer in cutlass.range(Int32(ranks), unroll=1):
        slot = _slot(table, rank, Int64(peer), use, index)
        winner = _wait(table, slot, peer)
        global_pointer(Int64, slot).store(Int64(0))
        if winner == Int64(0):
            complete = Boolean(False)
        if winner > Int64(0):
            defined = Boolean(True)
        below = winner & Int64(protocol.NAN)
        best = Int64(select_(below > best, below, best))
    global_pointer(Int64, uses).store(use + 1)
    token = (best & Int64(protocol.NO_TOKEN)) ^ Int64(protocol.NO_TOKEN)
    return Int64(select_(complete & defined & (best != Int64(protocol.NAN)), token, Int64(-1)))


@cute.jit
def _wait(table: Int64, slot: Int64, peer: Int32) -> Int64:
    """A packed winner, or 0 after the time-out."""
    pointer = global_pointer(Int64, slot)
    winner = cute.arch.load(pointer, Int64, sem="acquire", scope="sys")
    if winner == Int64(0):
        failure = global_pointer(Int64, _word(table, protocol.TABLE_STATE))
        patience = _word(table, protocol.TABLE_TIMEOUT)
        if cute.arch.load(failure, Int64, sem="relaxed", scope="gpu") != Int64(0):
            patience = Int64(0)
        start = Int64(cute.arch.globaltimer())
        waiting = Int32(1)
        while waiting != 0:
            winner = cute.arch.load(pointer, Int64, sem="acquire", scope="sys")
            if winner != Int64(0):
                waiting = Int32(0)
            else:
                if Int64(cute.arch.globaltimer()) - start >= patience:
                    waiting = Int32(0)
        if (winner == Int64(0)) & (patience != Int64(0)):
            first = cute.arch.atomic_cas(failure, cmp=Int64(0), val=Int64(peer) + 1, sem="relaxed", scope="gpu")
            if first == Int64(0):
                host = global_pointer(Int64, _word(table, protocol.TABLE_FAILED))
                cute.arch.store(host, Int64(peer) + 1, sem="relaxed", scope="sys")
    return winner
