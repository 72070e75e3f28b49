"""Packed winners between GPUs, from inside the sampling kernel: ``flashsampling.exchange_protocol`` has the protocol.

Between the last CTA's arrival and the store of a token lie one trip over NVLink and one poll; what can be known before
is read before (``look_up``, ``sequence_tags_of``, ``expect``), while the matmul still runs: the table, the peers'
addresses, the row's tags, its slots, and the fence that orders the last launch's emptying before this launch's stores.

Lanes. A warp finishes 32 rows and has a lane for each (row, peer): with ``lanes`` the ranks up to a power of two, a
pass is 32 / lanes rows by ``lanes`` peers, and ``lanes`` passes are all rows. A lane waits for four passes' messages at
once, so on two GPUs all 256 rows of a block come with one poll, and on 72 (three peers a lane) four rows do with three.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, range_constexpr, select_

from ... import exchange_protocol as protocol
from . import ptx
from .memory import global_pointer
from .peer_table import SLOT, Table, failure_of, judge, slot_of, words_at

_WARP = 32
_ROWS_APART = 128  # between a thread's rows: those of the warpgroup that finishes a launch
_PASSES = 4  # that a lane waits for at once
_LOOKS = 16  # at what is waited for, between looks at whether to go on


def _mix(a: Uint32, b: Uint32) -> Uint32:
    """A hash of two words."""
    start, first, second, third = protocol.HASH_FACTORS
    h = (a ^ Uint32(start)) * Uint32(first)
    h = (h ^ (h >> Uint32(15)) ^ b) * Uint32(second)
    h = (h ^ (h >> Uint32(13))) * Uint32(third)
    return h ^ (h >> Uint32(16))


def _mix_long(value: Int64) -> Uint32:
    return _mix(Uint32(value), Uint32(value >> Int64(32)))


@cute.jit
def sequence_tags_of(table: Table, args, index: Int64) -> tuple[Int32, Int32]:
    """A row's tags, of the row and draw number ``index``; rows beyond the batch have the last one's. Stores the row's
    details. A fence must follow before anything is sent."""
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
    # not once the group has failed: who judges may still want those of that step
    if (table.ranks > 0) & (table.failure == Int64(0)) & (index < count):
        words_at(table.own, protocol.SHARED_DETAILS + index).store(param_hash)
    number = Uint32(table.number)
    tag1 = _mix(_mix(_mix(fields[0], fields[1]), _mix(fields[2], fields[3])), number)
    tag0 = (Uint32(1) << Uint32(31)) | ((number & Uint32(2**protocol.STEP_BITS - 1)) << Uint32(16))
    tag0 = tag0 | (_mix(fields[0] ^ fields[1], fields[2] ^ fields[3]) >> Uint32(16))
    return Int32(tag0), Int32(tag1 | Uint32(1))


class Rows(NamedTuple):
    """Rows and draws that a warp finishes: 32 in positions from 0 on, then 32 from ``_ROWS_APART`` on."""

    first: Int64  # number of the row and draw in position 0
    left: Int32  # none is in positions from here on
    sequence_tags: list  # of a lane's own row, or two: both tags

    def passes(self, table: Table) -> Int32:
        """How many there are until all rows had theirs."""
        passes = Int32(0)
        for k in range(len(self.sequence_tags)):
            left = cutlass.min(self.left - k * _ROWS_APART, Int32(_WARP))
            own = (k << table.shift) + ((left + (Int32(_WARP) >> table.shift) - 1) >> (5 - table.shift))
            passes = Int32(select_((left > 0) & (table.ranks > 0), own, passes))
        return passes

    def position(self, table: Table, number, lane: Int32) -> Int32:
        """Of a lane's row in pass ``number``. Its place in the warp is whose own row it is."""
        k, number = number >> table.shift, number & ((Int32(1) << table.shift) - 1)
        return k * _ROWS_APART + number * (Int32(_WARP) >> table.shift) + (lane >> table.shift)

    def sequence_tags_of(self, position: Int32) -> list:
        """The tags of the row in a position; a call of all lanes."""
        both = [
            [cute.arch.shuffle_sync(tag, position & (_WARP - 1)) for tag in sequence_tags]
            for sequence_tags in self.sequence_tags
        ]
        return [Int32(select_(position < _ROWS_APART, tag, both[-1][i])) for i, tag in enumerate(both[0])]


@cute.jit
def send(table: Table, rows: Rows, winners: list, lane: Int32):
    """Stores this rank's packed winners, of each of a lane's rows, into every rank's slots."""
    lanes = Int32(1) << table.shift
    peer = lane & (lanes - 1)
    first_slot = ptx.settled(slot_of(table, table.peer, table.rank, rows.first))
    for k in range_constexpr(len(winners)):
        high = ((winners[k] >> Int64(32)) << Int64(32)) | Int64(Uint32(rows.sequence_tags[k][0]))
        low = (winners[k] << Int64(32)) | Int64(Uint32(rows.sequence_tags[k][1]))
        end = cutlass.min(rows.left, Int32(k * _ROWS_APART + _WARP))
        for first in cutlass.range(k * _ROWS_APART, end, Int32(_WARP) >> table.shift, unroll=1):
            position = first + (lane >> table.shift)
            source_s_high = cute.arch.shuffle_sync(high, position & (_WARP - 1))
            source_s_low = cute.arch.shuffle_sync(low, position & (_WARP - 1))
            if position < end:
                if peer < table.ranks:
                    ptx.store_two(first_slot + Int64(position) * SLOT, source_s_high, source_s_low)
                for other in cutlass.range(peer + lanes, table.ranks, lanes, unroll=1):
                    shared = words_at(table.address, protocol.TABLE_SHARED + other).load()
                    ptx.store_two(
                        slot_of(table, shared, table.rank, rows.first + position), source_s_high, source_s_low
                    )
            cute.arch.sync_warp()


def clock() -> Int64:
    """Nanoseconds."""
    return Int64(cute.arch.globaltimer())


class Expected(NamedTuple):
    """What a lane will wait for at once, one message of each pass. Its code is not in the instruction cache when a
    launch ends, so what can be known earlier is made earlier."""

    positions: cute.Tensor
    sequence_tags: cute.Tensor  # both of each
    slots: cute.Tensor  # in this rank's memory, of the lane's first peer; 0: none

    @classmethod
    def room(cls) -> "Expected":
        """To be filled by ``expect``."""
        shapes = (_PASSES, Int32), ((_PASSES, 2), Int32), (_PASSES, Int64)
        return cls(*(cute.make_rmem_tensor(shape, of) for shape, of in shapes))


@cute.jit
def expect(table: Table, rows: Rows, first: Int32, lane: Int32, expected: Expected):
    """Fills in what is waited for in pass ``first`` and the following; a call of all lanes."""
    lanes = Int32(1) << table.shift
    passes = rows.passes(table)
    first_slot = ptx.settled(slot_of(table, table.own, lane & (lanes - 1), rows.first))
    for i in range_constexpr(_PASSES):
        position = rows.position(table, first + i, lane)
        expected.positions[i] = position
        expected.sequence_tags[i, 0], expected.sequence_tags[i, 1] = rows.sequence_tags_of(position)
        here = (first + i < passes) & (position < rows.left)
        expected.slots[i] = ptx.settled(Int64(select_(here, first_slot + Int64(position) * SLOT, Int64(0))))


@cute.jit
def receive(table: Table, rows: Rows, expected: Expected, tokens: Int64, lane: Int32, start: Int64) -> Boolean:
    """Waits for every rank's messages and stores the rows' token ids: -1 if a message did not come in time, or is of
    another call. Whether that happened to this warp. ``expected``: in the first passes. ``start``: ``clock`` before
    anything was sent."""
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
    table: Table, rows: Rows, expected: Expected, first: Int32, tokens: Int64, lane: Int32, start: Int64
) -> Boolean:
    """``receive`` of up to four passes."""
    lanes = Int32(1) << table.shift
    positions, sequence_tags, slots = expected
    best = cute.make_rmem_tensor(_PASSES, Int64)
    defined = cute.make_rmem_tensor(_PASSES, Int32)
    high = cute.make_rmem_tensor(_PASSES, Int64)
    low = cute.make_rmem_tensor(_PASSES, Int64)
    next_peer_s = Int64(lanes) * table.capacity * SLOT
    for i in range_constexpr(_PASSES):
        best[i] = Int64(0)
        defined[i] = Int32(0)
    failed = Boolean(False)
    for peers in cutlass.range(0, table.ranks, lanes, unroll=1):
        peer = peers + (lane & (lanes - 1))
        if peer < table.ranks:
            waiting = Int32(1)
            while waiting != 0:
                looks = Int32(_LOOKS)
                while (waiting != 0) & (looks > 0):
                    waiting = Int32(0)
                    # of all that a rank emptied before it sent, one of its messages tells: the others need not acquire
                    for i in range_constexpr(_PASSES - 1, -1, -1):
                        high[i] = Int64(1)
                        low[i] = Int64(1)
                        if slots[i] != Int64(0):
                            high[i], low[i] = ptx.load_two(slots[i], "relaxed" if i else "acquire")
                    for i in range_constexpr(_PASSES):
                        if (high[i] == Int64(0)) | (low[i] == Int64(0)):
                            waiting = Int32(1)
                    looks = looks - 1
                if waiting != 0:
                    if (failure_of(table.own) != Int64(0)) | (clock() - start >= table.timeout):
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
                slots[i] = slots[i] + next_peer_s
        if cute.arch.vote_any_sync(wrong < _PASSES):
            position = rows.position(table, first + wrong, lane)
            tag0, tag1 = rows.sequence_tags_of(position)
            if wrong < _PASSES:
                judge(table, rows.first + position, tag0, tag1, peer)
            failed = Boolean(True)
        cute.arch.sync_warp()
    if not failed:
        for peers in cutlass.range(0, table.ranks, lanes, unroll=1):
            peer = peers + (lane & (lanes - 1))
            for i in range_constexpr(_PASSES):
                if (slots[i] != Int64(0)) & (peer < table.ranks):
                    slots[i] = slots[i] - next_peer_s
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
