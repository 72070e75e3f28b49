"""Packed winners between GPUs, from inside the sampling kernel: ``flashsampling.exchange`` has the protocol.

Between the last CTA's arrival and the store of a token lie one trip over NVLink and one poll; what can be known before is read
before (``look_up``), while the matmul still runs: the table, the peers' addresses, and the fence that orders the last launch's
clearing before this launch's stores.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, range_constexpr, select_

from ... import exchange as protocol
from .memory import global_pointer

_KNOWN_PEERS = 8  # whose addresses are kept in registers: one host's


class Table(NamedTuple):
    """What ``flashsampling.exchange`` keeps in its table, read."""

    address: Int64
    rank: Int32
    ranks: Int32
    capacity: Int64
    timeout: Int64
    failed: Int64
    state: Int64
    own: Int64  # address of this rank's received
    others: list  # addresses of the received of the ranks after this one, in turn


def _word(address: Int64, index) -> Int64:
    return global_pointer(Int64, address + Int64(index) * 8).load()


@cute.jit
def look_up(address: Int64) -> Table:
    """Reads the table. ``address`` may be TOKENS or PACKED, then nothing is read."""
    words = cute.make_rmem_tensor(protocol.TABLE_RECEIVED, Int64)
    received = cute.make_rmem_tensor(_KNOWN_PEERS, Int64)
    for i in range_constexpr(protocol.TABLE_RECEIVED):
        words[i] = Int64(0)
    for i in range_constexpr(_KNOWN_PEERS):
        received[i] = Int64(0)
    if (address != Int64(protocol.TOKENS)) & (address != Int64(protocol.PACKED)):
        for i in range_constexpr(protocol.TABLE_RECEIVED):
            words[i] = _word(address, i)
        for i in range_constexpr(_KNOWN_PEERS):
            owner = (words[protocol.TABLE_RANK] + i) % words[protocol.TABLE_RANKS]
            received[i] = _word(address, Int64(protocol.TABLE_RECEIVED) + owner)
        cute.arch.fence_acq_rel_sys()
    return Table(
        address,
        Int32(words[protocol.TABLE_RANK]),
        Int32(words[protocol.TABLE_RANKS]),
        words[protocol.TABLE_CAPACITY],
        words[protocol.TABLE_TIMEOUT],
        words[protocol.TABLE_FAILED],
        words[protocol.TABLE_STATE],
        received[0],
        [received[i] for i in range(1, _KNOWN_PEERS)],
    )


def use_count(table: Table, index: Int64):
    """Pointer to how often a row was used."""
    return global_pointer(Int64, table.state + (1 + index) * 8)


def _slot(table: Table, received: Int64, rank: Int32, use: Int64, index: Int64):
    """Pointer to the slot that ``rank`` fills, in the memory whose ``received`` is given."""
    buffer = (use & 1) * table.ranks + rank
    return global_pointer(Int64, received + (buffer * table.capacity + index) * 8)


@cute.jit
def send(table: Table, use: Int64, index: Int64, winner: Int64):
    """Stores this rank's packed winner of a row into every rank's slot."""
    for i in range_constexpr(1, _KNOWN_PEERS):
        if i < table.ranks:
            slot = _slot(table, table.others[i - 1], table.rank, use, index)
            cute.arch.store(slot, winner, sem="relaxed", scope="sys")
    for i in cutlass.range(_KNOWN_PEERS, table.ranks, unroll=1):
        received = _word(table.address, Int64(protocol.TABLE_RECEIVED + (table.rank + i) % table.ranks))
        cute.arch.store(_slot(table, received, table.rank, use, index), winner, sem="relaxed", scope="sys")
    cute.arch.store(_slot(table, table.own, table.rank, use, index), winner, sem="relaxed", scope="sys")


@cute.jit
def receive(table: Table, use: Int64, index: Int64) -> Int64:
    """Waits for every rank's packed winner of a row: the row's token id, -1 if one did not come in time."""
    best = Int64(0)
    defined = Boolean(False)
    complete = Boolean(True)
    for first in cutlass.range(0, table.ranks, _KNOWN_PEERS, unroll=1):
        winners = _wait(table, use, index, first)
        for i in range_constexpr(_KNOWN_PEERS):
            if winners[i] == Int64(0):
                complete = Boolean(False)
            if winners[i] > Int64(0):
                defined = Boolean(True)
            below = winners[i] & Int64(protocol.NAN)
            best = Int64(select_(below > best, below, best))
            if first + i < table.ranks:
                _slot(table, table.own, first + i, use, index).store(Int64(0))
    use_count(table, index).store(use + 1)
    token = (best & Int64(protocol.NO_TOKEN)) ^ Int64(protocol.NO_TOKEN)
    return Int64(select_(complete & defined & (best != Int64(protocol.NAN)), token, Int64(-1)))


@cute.jit
def _wait(table: Table, use: Int64, index: Int64, first: Int32):
    """Packed winners of the ranks from ``first`` on, of the last one as often as it takes to be eight; 0 after the time-out.

    Eight loads at once and one fence after them: ``ld.acquire`` would wait for each before the next.
    """
    winners = cute.make_rmem_tensor(_KNOWN_PEERS, Int64)
    slots = [_slot(table, table.own, cutlass.min(first + i, table.ranks - 1), use, index) for i in range(_KNOWN_PEERS)]
    patience = table.timeout
    start = Int64(cute.arch.globaltimer())
    waiting = Int32(1)
    while waiting != 0:
        missing = Int32(_KNOWN_PEERS)
        for i in range_constexpr(_KNOWN_PEERS):
            winners[i] = cute.arch.load(slots[i], Int64, sem="relaxed", scope="sys")
        for i in range_constexpr(_KNOWN_PEERS):
            missing = Int32(select_(winners[_KNOWN_PEERS - 1 - i] == Int64(0), Int32(_KNOWN_PEERS - 1 - i), missing))
        waiting = Int32(0)
        if missing < Int32(_KNOWN_PEERS):
            failure = global_pointer(Int64, table.state)
            if cute.arch.load(failure, Int64, sem="relaxed", scope="gpu") != Int64(0):
                patience = Int64(0)
            if Int64(cute.arch.globaltimer()) - start < patience:
                waiting = Int32(1)
            else:
                late = Int64(cutlass.min(first + missing, table.ranks - 1)) + 1
                known = cute.arch.atomic_cas(failure, cmp=Int64(0), val=late, sem="relaxed", scope="gpu")
                if known == Int64(0):
                    cute.arch.store(global_pointer(Int64, table.failed), late, sem="relaxed", scope="sys")
    cute.arch.fence_acq_rel_sys()
    return winners
