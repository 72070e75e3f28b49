"""Exchanges packed winners between GPUs from inside the sampling kernel (``flashsampling.exchange_protocol`` has the
protocol).

Between the last CTA's arrival and the store of a token lie one trip over NVLink and one poll. Everything that can be
known earlier is read earlier, while the matmul still runs (``peer_table.look_up``, ``compute_sequence_tags``,
``expect``): the table, the peers' addresses, the rows' tags, their slots, and the fence that orders the last launch's
emptying before this launch's stores.

Lanes: a warp finishes 32 rows and has a lane for each (row, peer). With ``lanes`` the number of ranks, up to a power of
two, a pass covers 32 / lanes rows by ``lanes`` peers, and ``lanes`` passes cover all rows. A lane waits for the
messages of four passes at once. On two GPUs one poll therefore covers all 256 rows of a block, on 72 GPUs (three peers
a lane) three polls cover four rows.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, range_constexpr, select_

from ... import exchange_protocol as protocol
from . import ptx
from .memory import global_pointer
from .peer_table import SLOT, Table, load_failure, publish_verdict, slot_address, word_pointer

_WARP = 32
_ROWS_APART = 128  # between a thread's rows: the threads of the finishing warpgroup
_PASSES = 4  # whose messages a lane waits for at once
_POLLS = 16  # between checks for a failure or a timeout


def _mix(a: Uint32, b: Uint32) -> Uint32:
    """Hashes two words."""
    start, first, second, third = protocol.HASH_FACTORS
    h = (a ^ Uint32(start)) * Uint32(first)
    h = (h ^ (h >> Uint32(15)) ^ b) * Uint32(second)
    h = (h ^ (h >> Uint32(13))) * Uint32(third)
    return h ^ (h >> Uint32(16))


def _mix_long(value: Int64) -> Uint32:
    return _mix(Uint32(value), Uint32(value >> Int64(32)))


@cute.jit
def compute_sequence_tags(table: Table, args, index: Int64) -> tuple[Int32, Int32]:
    """Returns both tags of the row and draw number ``index``, the last row's beyond the batch, and stores its parameter
    hash. A fence must follow before anything is sent."""
    count = Int64(args.batch) * args.num_samples
    row = Int64(cutlass.min(index, count - 1)) // args.num_samples
    temperature = args.temperature_value
    seed = args.seed_value
    offset = args.offset_value
    if args.temperature != 0:
        temperature = global_pointer(Float32, args.temperature + row * 4).load()
    if args.seed != 0:
        seed = global_pointer(Int64, args.seed + row * 8).load()
    if args.offset != 0:
        offset = global_pointer(Int64, args.offset + row * 8).load()
    fields = [
        _mix(Uint32(args.batch), Uint32(args.num_samples)),
        _mix_long(seed),
        _mix_long(offset),
        _mix((temperature + Float32(0.0)).bitcast(Uint32), Uint32(0)),  # -0.0 is 0.0
    ]
    param_hash = Int64(0)
    for i in range_constexpr(len(fields)):
        param_hash = (param_hash << Int64(protocol.DETAIL_BITS)) | Int64(fields[i] >> Uint32(32 - protocol.DETAIL_BITS))
    # not after a failure: the rank that finds the cause may still read the hashes of that step
    if (table.ranks > 0) & (table.failure == Int64(0)) & (index < count):
        word_pointer(table.own, protocol.SHARED_DETAILS + index).store(param_hash)
    number = Uint32(table.number)
    tag1 = _mix(_mix(_mix(fields[0], fields[1]), _mix(fields[2], fields[3])), number)
    tag0 = (Uint32(1) << Uint32(31)) | ((number & Uint32(2**protocol.STEP_BITS - 1)) << Uint32(16))
    tag0 = tag0 | (_mix(fields[0] ^ fields[1], fields[2] ^ fields[3]) >> Uint32(16))
    return Int32(tag0), Int32(tag1 | Uint32(1))


class WarpRows(NamedTuple):
    """Rows and draws that a warp finishes: 32 in positions from 0 on, then 32 from ``_ROWS_APART`` on."""

    first: Int64  # number of the row and draw in position 0
    left: Int32  # positions from here on are empty
    sequence_tags: list  # both tags of each of a lane's own rows, one or two

    def passes(self, table: Table) -> Int32:
        """Returns the number of passes that cover all rows."""
        passes = Int32(0)
        for k in range(len(self.sequence_tags)):
            left = cutlass.min(self.left - k * _ROWS_APART, Int32(_WARP))
            own = (k << table.shift) + ((left + (Int32(_WARP) >> table.shift) - 1) >> (5 - table.shift))
            passes = Int32(select_((left > 0) & (table.ranks > 0), own, passes))
        return passes

    def position(self, table: Table, number, lane: Int32) -> Int32:
        """Returns the position of a lane's row in pass ``number``; modulo the warp, it is the lane that owns the
        row."""
        k, number = number >> table.shift, number & ((Int32(1) << table.shift) - 1)
        return k * _ROWS_APART + number * (Int32(_WARP) >> table.shift) + (lane >> table.shift)

    def shuffle_sequence_tags(self, position: Int32) -> list:
        """Returns the tags of the row in a position; all lanes call it."""
        both = [
            [cute.arch.shuffle_sync(tag, position & (_WARP - 1)) for tag in sequence_tags]
            for sequence_tags in self.sequence_tags
        ]
        return [Int32(select_(position < _ROWS_APART, tag, both[-1][i])) for i, tag in enumerate(both[0])]


@cute.jit
def send(table: Table, rows: WarpRows, winners: list, lane: Int32):
    """Stores this rank's packed winners, for each of a lane's rows, into every rank's slots."""
    lanes = Int32(1) << table.shift
    peer = lane & (lanes - 1)
    first_slot = ptx.scheduling_fence(slot_address(table, table.peer, table.rank, rows.first))
    for k in range_constexpr(len(winners)):
        high = ((winners[k] >> Int64(32)) << Int64(32)) | Int64(Uint32(rows.sequence_tags[k][0]))
        low = (winners[k] << Int64(32)) | Int64(Uint32(rows.sequence_tags[k][1]))
        end = cutlass.min(rows.left, Int32(k * _ROWS_APART + _WARP))
        for first in cutlass.range(k * _ROWS_APART, end, Int32(_WARP) >> table.shift, unroll=1):
            position = first + (lane >> table.shift)
            shuffled_high = cute.arch.shuffle_sync(high, position & (_WARP - 1))
            shuffled_low = cute.arch.shuffle_sync(low, position & (_WARP - 1))
            if position < end:
                if peer < table.ranks:
                    ptx.store_two(first_slot + Int64(position) * SLOT, shuffled_high, shuffled_low)
                for other in cutlass.range(peer + lanes, table.ranks, lanes, unroll=1):
                    shared = word_pointer(table.address, protocol.TABLE_SHARED + other).load()
                    ptx.store_two(
                        slot_address(table, shared, table.rank, rows.first + position), shuffled_high, shuffled_low
                    )
            cute.arch.sync_warp()


def clock() -> Int64:
    """Returns the time in nanoseconds."""
    return Int64(cute.arch.globaltimer())


class Expected(NamedTuple):
    """The messages that a lane will wait for at once, one per pass. They are computed early, because this code is not
    in the instruction cache when a launch ends."""

    positions: cute.Tensor
    sequence_tags: cute.Tensor  # (passes, 2)
    slots: cute.Tensor  # addresses in this rank's memory, of the lane's first peer; 0: none

    @classmethod
    def allocate(cls) -> "Expected":
        """Allocates registers for ``expect`` to fill."""
        shapes = (_PASSES, Int32), ((_PASSES, 2), Int32), (_PASSES, Int64)
        return cls(*(cute.make_rmem_tensor(shape, of) for shape, of in shapes))


@cute.jit
def expect(table: Table, rows: WarpRows, first: Int32, lane: Int32, expected: Expected):
    """Fills in the expected messages of pass ``first`` and the following passes; all lanes call it."""
    lanes = Int32(1) << table.shift
    passes = rows.passes(table)
    first_slot = ptx.scheduling_fence(slot_address(table, table.own, lane & (lanes - 1), rows.first))
    for i in range_constexpr(_PASSES):
        position = rows.position(table, first + i, lane)
        expected.positions[i] = position
        expected.sequence_tags[i, 0], expected.sequence_tags[i, 1] = rows.shuffle_sequence_tags(position)
        here = (first + i < passes) & (position < rows.left)
        expected.slots[i] = ptx.scheduling_fence(Int64(select_(here, first_slot + Int64(position) * SLOT, Int64(0))))


@cute.jit
def receive(table: Table, rows: WarpRows, expected: Expected, tokens: Int64, lane: Int32, start: Int64) -> Boolean:
    """Waits for every rank's messages and stores the rows' token ids: -1 if a message is late or belongs to another
    call.

    Returns whether that happened to this warp. ``expected``: of the first passes. ``start``: ``clock`` before the first
    message was sent.
    """
    failed = Boolean(False)
    for first in cutlass.range(0, rows.passes(table), _PASSES, unroll=1):
        if first != 0:
            expect(table, rows, first, lane, expected)
        if _receive(table, rows, expected, first, tokens, lane, start):
            failed = Boolean(True)
    if table.ranks == 0:
        for k in range_constexpr(len(rows.sequence_tags)):
            if k * _ROWS_APART + lane < rows.left:
                global_pointer(Int64, tokens + (rows.first + k * _ROWS_APART + lane) * 8).store(Int64(-1))
    return failed


@cute.jit
def _receive(
    table: Table, rows: WarpRows, expected: Expected, first: Int32, tokens: Int64, lane: Int32, start: Int64
) -> Boolean:
    """Receives the messages of up to four passes."""
    lanes = Int32(1) << table.shift
    positions, sequence_tags, slots = expected
    best = cute.make_rmem_tensor(_PASSES, Int64)
    defined = cute.make_rmem_tensor(_PASSES, Int32)
    high = cute.make_rmem_tensor(_PASSES, Int64)
    low = cute.make_rmem_tensor(_PASSES, Int64)
    next_peer_offset = Int64(lanes) * table.capacity * SLOT
    for i in range_constexpr(_PASSES):
        best[i] = Int64(0)
        defined[i] = Int32(0)
    failed = Boolean(False)
    for peers in cutlass.range(0, table.ranks, lanes, unroll=1):
        peer = peers + (lane & (lanes - 1))
        if peer < table.ranks:
            waiting = Int32(1)
            while waiting != 0:
                polls = Int32(_POLLS)
                while (waiting != 0) & (polls > 0):
                    waiting = Int32(0)
                    # one acquire per rank orders everything it emptied before it sent: the other loads are relaxed
                    for i in range_constexpr(_PASSES - 1, -1, -1):
                        high[i] = Int64(1)
                        low[i] = Int64(1)
                        if slots[i] != Int64(0):
                            high[i], low[i] = ptx.load_two(slots[i], "relaxed" if i else "acquire")
                    for i in range_constexpr(_PASSES):
                        if (high[i] == Int64(0)) | (low[i] == Int64(0)):
                            waiting = Int32(1)
                    polls = polls - 1
                if waiting != 0:
                    if (load_failure(table.own) != Int64(0)) | (clock() - start >= table.timeout):
                        waiting = Int32(0)
        cute.arch.sync_warp()
        wrong = Int32(_PASSES)  # the lane's first message that is missing or of another call
        for i in range_constexpr(_PASSES - 1, -1, -1):
            if (slots[i] != Int64(0)) & (peer < table.ranks):
                if (Int32(high[i]) != sequence_tags[i, 0]) | (Int32(low[i]) != sequence_tags[i, 1]):
                    wrong = Int32(i)
                winner = ((high[i] >> Int64(32)) << Int64(32)) | ((low[i] >> Int64(32)) & Int64(0xFFFFFFFF))
                if winner > Int64(0):
                    defined[i] = Int32(1)
                below = winner & Int64(protocol.NAN)
                best[i] = Int64(select_(below > best[i], below, best[i]))
                slots[i] = slots[i] + next_peer_offset
        if cute.arch.vote_any_sync(wrong < _PASSES):
            position = rows.position(table, first + wrong, lane)
            tag0, tag1 = rows.shuffle_sequence_tags(position)
            if wrong < _PASSES:
                publish_verdict(table, rows.first + position, tag0, tag1, peer)
            failed = Boolean(True)
        cute.arch.sync_warp()
    if not failed:
        for peers in cutlass.range(0, table.ranks, lanes, unroll=1):
            peer = peers + (lane & (lanes - 1))
            for i in range_constexpr(_PASSES):
                if (slots[i] != Int64(0)) & (peer < table.ranks):
                    slots[i] = slots[i] - next_peer_offset
                    global_pointer(Int64, slots[i]).store(Int64(0))
                    global_pointer(Int64, slots[i] + 8).store(Int64(0))
    distance = lanes >> 1
    while distance > 0:
        for i in range_constexpr(_PASSES):
            below = cute.arch.shuffle_sync_bfly(best[i], distance)
            best[i] = Int64(select_(below > best[i], below, best[i]))
            defined[i] = defined[i] | cute.arch.shuffle_sync_bfly(defined[i], distance)
        distance = distance >> 1
    for i in range_constexpr(_PASSES):
        if (slots[i] != Int64(0)) & (lane & (lanes - 1) == 0):
            token = (best[i] & Int64(protocol.NO_TOKEN)) ^ Int64(protocol.NO_TOKEN)
            defined_here = (defined[i] != 0) & (best[i] != Int64(protocol.NAN)) & (not failed)
            global_pointer(Int64, tokens + (rows.first + positions[i]) * 8).store(
                Int64(select_(defined_here, token, Int64(-1)))
            )
    return failed
