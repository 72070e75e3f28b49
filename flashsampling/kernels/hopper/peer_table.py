"""The table of an exchange, the peers' shared memory that it leads to, and the verdict that stops all ranks.

``flashsampling.exchange_protocol`` has the protocol, and where everything lies; ``exchange`` sends and receives.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, range_constexpr, select_

from ... import exchange_protocol as protocol
from .memory import global_pointer

SLOT = 16  # bytes
_NOBODY = protocol.MAX_RANKS


class Table(NamedTuple):
    """What ``flashsampling.exchange_protocol`` keeps in its table, read; no ranks where nothing is to be exchanged."""

    address: Int64
    rank: Int32
    ranks: Int32
    capacity: Int64
    timeout: Int64
    told: Int64
    own: Int64  # address of this rank's shared memory; 0 if the group is closed
    failure: Int64  # as it was at the start
    launches: Int64
    number: Int32  # of the step
    shift: Int32  # lanes of a row = 1 << shift
    peer: Int64  # address of the shared memory of the rank that is this lane's first


def words_at(address: Int64, index):
    """The word number ``index`` from an address on."""
    return global_pointer(Int64, address + Int64(index) * 8)


def failure_of(own: Int64) -> Int64:
    """The verdict in a rank's shared memory; 0: none."""
    return cute.arch.load(words_at(own, protocol.SHARED_FAILURE), Int64, sem="relaxed", scope="sys")


def _tell(table: Table, verdict: Int64):
    cute.arch.store(global_pointer(Int64, table.told), verdict, sem="relaxed", scope="sys")


@cute.jit
def agreed(table: Table, failed: Boolean, thread: Int32) -> Table:
    """The table of a CTA's threads, of whom one has seen whether the group has failed."""
    if failed & (thread == 0) & (table.failure != Int64(0)):
        _tell(table, table.failure)
    return table._replace(ranks=Int32(select_(failed, Int32(0), table.ranks)))


@cute.jit
def look_up(address: Int64, thread: Int32) -> Table:
    """Reads the table. ``address`` may be TOKENS or PACKED, then nothing is read."""
    words = cute.make_rmem_tensor(protocol.TABLE_SHARED, Int64)
    for i in range_constexpr(protocol.TABLE_SHARED):
        words[i] = Int64(0)
    own = Int64(0)
    peer = Int64(0)
    failure = Int64(0)
    shift = Int32(0)
    if (address != Int64(protocol.TOKENS)) & (address != Int64(protocol.PACKED)):
        for i in range_constexpr(protocol.TABLE_SHARED):
            words[i] = words_at(address, i).load()
        ranks = Int32(words[protocol.TABLE_RANKS])
        if ranks > 0:
            own = words_at(address, protocol.TABLE_SHARED + words[protocol.TABLE_RANK]).load()
            while (shift < 5) & ((Int32(1) << shift) < ranks):
                shift = shift + 1
            first = cutlass.min(thread & ((Int32(1) << shift) - 1), ranks - 1)
            peer = words_at(address, protocol.TABLE_SHARED + first).load()
            failure = failure_of(own)
    return Table(
        address,
        Int32(words[protocol.TABLE_RANK]),
        Int32(words[protocol.TABLE_RANKS]),
        words[protocol.TABLE_CAPACITY],
        words[protocol.TABLE_TIMEOUT],
        words[protocol.TABLE_TOLD],
        own,
        failure,
        words[protocol.TABLE_STEPS],
        Int32(words[protocol.TABLE_STEPS] + words[protocol.TABLE_LEFT_OUT]),
        shift,
        peer,
    )


def slot_of(table: Table, shared: Int64, rank, index: Int64):
    """Address of the slot that ``rank`` fills, in the shared memory whose address is given."""
    buffer = (table.launches & 1) * table.ranks + rank
    return shared + protocol.first_slot(table.capacity) * 8 + (buffer * table.capacity + index) * SLOT


@cute.jit
def judge(table: Table, index: Int64, tag0: Int32, tag1: Int32, seen: Int32):
    """Says why the message of a row is missing or wrong, to all ranks, unless one of them was earlier. Of the ranks
    that differ the fewer are to blame; of two halves, the one without the first rank. ``seen``: a rank whose message
    was so, though a missing one may have come since."""
    verdict = failure_of(table.own)
    if verdict == Int64(0):
        missing = seen
        differing = Int32(_NOBODY)
        theirs = Int32(0)
        present = Int32(0)
        same = Int32(0)
        first_is_same = Boolean(False)
        for i in cutlass.range(table.ranks, unroll=1):
            peer = table.ranks - 1 - i  # so that the lowest is found last
            slot = slot_of(table, table.own, peer, index)
            high = cute.arch.load(global_pointer(Int64, slot), Int64, sem="relaxed", scope="sys")
            low = cute.arch.load(global_pointer(Int64, slot + 8), Int64, sem="relaxed", scope="sys")
            if (high == Int64(0)) | (low == Int64(0)):
                missing = peer
            else:
                present = present + 1
                if (Int32(high) == tag0) & (Int32(low) == tag1):
                    same = same + 1
                    if peer == 0:
                        first_is_same = Boolean(True)
                else:
                    differing = peer
                    theirs = Int32(high)
        step = table.number
        if differing < _NOBODY:
            cute.arch.fence_acq_rel_sys()  # their details were stored before their message
            address = words_at(table.address, protocol.TABLE_SHARED + differing).load()
            param_hash = cute.arch.load(
                words_at(address, protocol.SHARED_DETAILS + index), Int64, sem="relaxed", scope="sys"
            ) ^ cute.arch.load(words_at(table.own, protocol.SHARED_DETAILS + index), Int64, sem="relaxed", scope="sys")
            fields = Int32(0)
            for i in range_constexpr(len(protocol.FIELDS)):
                field = (param_hash >> Int64(protocol.DETAIL_BITS * (3 - i))) & Int64(2**protocol.DETAIL_BITS - 1)
                if field != Int64(0):
                    fields = fields | (8 >> i)
            ahead = ((theirs >> 16) - (tag0 >> 16)) << (32 - protocol.STEP_BITS) >> (32 - protocol.STEP_BITS)
            blame_them = (same * 2 > present) | ((same * 2 == present) & first_is_same)
            if not blame_them:
                step = step + ahead  # the reporter's
                ahead = -ahead
            ahead = cutlass.min(cutlass.max(ahead, Int32(-32)), Int32(31))
            straggler = Int64(select_(blame_them, differing, table.rank))
            reporter = Int64(select_(blame_them, table.rank, differing))
            verdict = Int64(protocol.DIFFERS) | (straggler << Int64(2)) | (reporter << Int64(12))
            verdict = verdict | (Int64(fields) << Int64(22)) | (Int64(ahead & 63) << Int64(26))
        else:
            verdict = Int64(protocol.LATE) | (Int64(missing) << Int64(2)) | (Int64(table.rank) << Int64(12))
        verdict = verdict | (Int64(step & 0x7FFFFFFF) << Int64(32))
        everybodys = words_at(words_at(table.address, protocol.TABLE_SHARED).load(), protocol.SHARED_VERDICT)
        earlier = cute.arch.atomic_cas(everybodys, cmp=Int64(0), val=verdict, sem="relaxed", scope="sys")
        verdict = Int64(select_(earlier == Int64(0), verdict, earlier))
        for i in cutlass.range(table.ranks, unroll=1):
            peer = words_at(table.address, protocol.TABLE_SHARED + i).load()
            cute.arch.store(words_at(peer, protocol.SHARED_FAILURE), verdict, sem="relaxed", scope="sys")
    _tell(table, verdict)


@cute.jit
def conclude(table: Table, row_blocks: Int32, tokens: Int64, count: Int64):
    """The end of a launch, by one thread of each block of rows: counts the step, and if it failed, no row of it has a
    token."""
    finished = Int64(0)
    if row_blocks > 1:
        finished = cute.arch.atomic_add(
            words_at(table.address, protocol.TABLE_FINISHED), Int64(1), sem="acq_rel", scope="gpu"
        )
    if finished == Int64(row_blocks - 1):
        if row_blocks > 1:
            words_at(table.address, protocol.TABLE_FINISHED).store(Int64(0))
            if table.own != Int64(0):
                failure = failure_of(table.own)
                if failure != Int64(0):
                    _tell(table, failure)
                    for index in cutlass.range(count, unroll=1):
                        global_pointer(Int64, tokens + index * 8).store(Int64(-1))
        words_at(table.address, protocol.TABLE_STEPS).store(table.launches + 1)
