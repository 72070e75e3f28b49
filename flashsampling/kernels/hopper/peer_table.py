"""Reads the exchange's table, finds the peers' shared memory, and publishes the verdict that stops all ranks.

``flashsampling.exchange_protocol`` has the protocol and the memory layout; ``peer_exchange`` sends and receives.
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
    """The table of ``flashsampling.exchange_protocol`` in registers; no ranks where nothing is exchanged."""

    address: Int64
    rank: Int32
    ranks: Int32
    capacity: Int64
    timeout: Int64
    verdict_address: Int64
    own: Int64  # address of this rank's shared memory; 0 if the group is closed
    failure: Int64  # at the start of the launch
    launches: Int64
    number: Int32  # of the step
    shift: Int32  # lanes of a row = 1 << shift
    peer: Int64  # address of the shared memory of the rank that is this lane's first


def word_pointer(address: Int64, index):
    """Points to the word number ``index`` from an address on."""
    return global_pointer(Int64, address + Int64(index) * 8)


def load_failure(own: Int64) -> Int64:
    """Loads the verdict in a rank's shared memory; 0: none."""
    return cute.arch.load(word_pointer(own, protocol.SHARED_FAILURE), Int64, sem="relaxed", scope="sys")


def _store_verdict(table: Table, verdict: Int64):
    cute.arch.store(global_pointer(Int64, table.verdict_address), verdict, sem="relaxed", scope="sys")


@cute.jit
def with_shared_failure(table: Table, failed: Boolean, thread: Int32) -> Table:
    """Returns the table for all threads of a CTA, of which one has seen that the group has failed: without ranks in
    that case."""
    if failed & (thread == 0) & (table.failure != Int64(0)):
        _store_verdict(table, table.failure)
    return table._replace(ranks=Int32(select_(failed, Int32(0), table.ranks)))


@cute.jit
def look_up(address: Int64, thread: Int32) -> Table:
    """Reads the table. ``address`` may be TOKENS or PACKED: then nothing is read."""
    words = cute.make_rmem_tensor(protocol.TABLE_SHARED, Int64)
    for i in range_constexpr(protocol.TABLE_SHARED):
        words[i] = Int64(0)
    own = Int64(0)
    peer = Int64(0)
    failure = Int64(0)
    shift = Int32(0)
    if (address != Int64(protocol.TOKENS)) & (address != Int64(protocol.PACKED)):
        for i in range_constexpr(protocol.TABLE_SHARED):
            words[i] = word_pointer(address, i).load()
        ranks = Int32(words[protocol.TABLE_RANKS])
        if ranks > 0:
            own = word_pointer(address, protocol.TABLE_SHARED + words[protocol.TABLE_RANK]).load()
            while (shift < 5) & ((Int32(1) << shift) < ranks):
                shift = shift + 1
            first = cutlass.min(thread & ((Int32(1) << shift) - 1), ranks - 1)
            peer = word_pointer(address, protocol.TABLE_SHARED + first).load()
            failure = load_failure(own)
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


def slot_address(table: Table, shared: Int64, rank, index: Int64):
    """Returns the address of the slot that ``rank`` fills, in the shared memory at an address."""
    buffer = (table.launches & 1) * table.ranks + rank
    return shared + protocol.first_slot(table.capacity) * 8 + (buffer * table.capacity + index) * SLOT


@cute.jit
def publish_verdict(table: Table, index: Int64, tag0: Int32, tag1: Int32, seen: Int32):
    """Publishes to all ranks why the message of a row is missing or wrong, unless one of them has done so.

    Of the ranks that differ the smaller group is the straggler; of two halves, the one without the first rank.
    ``seen``: a rank whose message was missing or wrong, though it may have arrived meanwhile.
    """
    verdict = load_failure(table.own)
    if verdict == Int64(0):
        missing = seen
        differing = Int32(_NOBODY)
        peer_tag = Int32(0)
        present = Int32(0)
        same = Int32(0)
        first_is_same = Boolean(False)
        for i in cutlass.range(table.ranks, unroll=1):
            peer = table.ranks - 1 - i  # the lowest is found last
            slot = slot_address(table, table.own, peer, index)
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
                    peer_tag = Int32(high)
        step = table.number
        if differing < _NOBODY:
            cute.arch.fence_acq_rel_sys()  # a rank stores its parameter hash before its message
            address = word_pointer(table.address, protocol.TABLE_SHARED + differing).load()
            param_hash = cute.arch.load(
                word_pointer(address, protocol.SHARED_DETAILS + index), Int64, sem="relaxed", scope="sys"
            ) ^ cute.arch.load(
                word_pointer(table.own, protocol.SHARED_DETAILS + index), Int64, sem="relaxed", scope="sys"
            )
            fields = Int32(0)
            for i in range_constexpr(len(protocol.FIELDS)):
                field = (param_hash >> Int64(protocol.DETAIL_BITS * (3 - i))) & Int64(2**protocol.DETAIL_BITS - 1)
                if field != Int64(0):
                    fields = fields | (8 >> i)
            ahead = ((peer_tag >> 16) - (tag0 >> 16)) << (32 - protocol.STEP_BITS) >> (32 - protocol.STEP_BITS)
            peer_is_straggler = (same * 2 > present) | ((same * 2 == present) & first_is_same)
            if not peer_is_straggler:
                step = step + ahead  # the reporter's step
                ahead = -ahead
            ahead = cutlass.min(cutlass.max(ahead, Int32(-32)), Int32(31))
            straggler = Int64(select_(peer_is_straggler, differing, table.rank))
            reporter = Int64(select_(peer_is_straggler, table.rank, differing))
            verdict = Int64(protocol.DIFFERS) | (straggler << Int64(2)) | (reporter << Int64(12))
            verdict = verdict | (Int64(fields) << Int64(22)) | (Int64(ahead & 63) << Int64(26))
        else:
            verdict = Int64(protocol.LATE) | (Int64(missing) << Int64(2)) | (Int64(table.rank) << Int64(12))
        verdict = verdict | (Int64(step & 0x7FFFFFFF) << Int64(32))
        shared_verdict = word_pointer(
            word_pointer(table.address, protocol.TABLE_SHARED).load(), protocol.SHARED_VERDICT
        )
        earlier = cute.arch.atomic_cas(shared_verdict, cmp=Int64(0), val=verdict, sem="relaxed", scope="sys")
        verdict = Int64(select_(earlier == Int64(0), verdict, earlier))
        for i in cutlass.range(table.ranks, unroll=1):
            peer = word_pointer(table.address, protocol.TABLE_SHARED + i).load()
            cute.arch.store(word_pointer(peer, protocol.SHARED_FAILURE), verdict, sem="relaxed", scope="sys")
    _store_verdict(table, verdict)


@cute.jit
def finish_step(table: Table, row_blocks: Int32, tokens: Int64, count: Int64):
    """Ends a launch: one thread of each row block. Counts the step; if it failed, no row has a token."""
    finished = Int64(0)
    if row_blocks > 1:
        finished = cute.arch.atomic_add(
            word_pointer(table.address, protocol.TABLE_FINISHED), Int64(1), sem="acq_rel", scope="gpu"
        )
    if finished == Int64(row_blocks - 1):
        if row_blocks > 1:
            word_pointer(table.address, protocol.TABLE_FINISHED).store(Int64(0))
            if table.own != Int64(0):
                failure = load_failure(table.own)
                if failure != Int64(0):
                    _store_verdict(table, failure)
                    for index in cutlass.range(count, unroll=1):
                        global_pointer(Int64, tokens + index * 8).store(Int64(-1))
        word_pointer(table.address, protocol.TABLE_STEPS).store(table.launches + 1)
