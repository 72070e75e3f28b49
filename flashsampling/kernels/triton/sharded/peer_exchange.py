"""Exchanges packed winners between GPUs from inside the sampling kernel, by ``flashsampling.exchange_protocol``.

Stores to peers are ``atomic_xchg``: the one system-scope store that Triton makes once per element. Inline assembly
would run in every thread that holds a copy of the element, and a copy's late store could fill a slot that the peer has
emptied already.
"""

import triton.language as tl

from .... import exchange_protocol as protocol
from ..jit import jit

_NO_TOKEN = tl.constexpr(protocol.NO_TOKEN)
_NAN = tl.constexpr(protocol.NAN)
_RANK = tl.constexpr(protocol.TABLE_RANK)
_RANKS = tl.constexpr(protocol.TABLE_RANKS)
_CAPACITY = tl.constexpr(protocol.TABLE_CAPACITY)
_TIMEOUT = tl.constexpr(protocol.TABLE_TIMEOUT)
_TOLD = tl.constexpr(protocol.TABLE_TOLD)
_STEPS = tl.constexpr(protocol.TABLE_STEPS)
_LEFT_OUT = tl.constexpr(protocol.TABLE_LEFT_OUT)
_FINISHED = tl.constexpr(protocol.TABLE_FINISHED)
_CLOCK = tl.constexpr(protocol.TABLE_CLOCK)
_SHARED = tl.constexpr(protocol.TABLE_SHARED)
_VERDICT = tl.constexpr(protocol.SHARED_VERDICT)
_FAILURE = tl.constexpr(protocol.SHARED_FAILURE)
_DETAILS = tl.constexpr(protocol.SHARED_DETAILS)
_LATE = tl.constexpr(protocol.LATE)
_DIFFERS = tl.constexpr(protocol.DIFFERS)
_STEP_BITS = tl.constexpr(protocol.STEP_BITS)
_DETAIL_BITS = tl.constexpr(protocol.DETAIL_BITS)
_NOBODY = tl.constexpr(protocol.MAX_RANKS)
_START, _FIRST, _SECOND, _THIRD = (tl.constexpr(factor) for factor in protocol.HASH_FACTORS)
_PEERS = tl.constexpr(4)  # whose messages are waited for at once
_LOW = tl.constexpr(0xFFFFFFFF)


@jit
def _pointer(address):
    return address.to(tl.pointer_type(tl.int64))


@jit
def _word(table, index):
    return tl.load(_pointer(table) + index)


@jit
def shared_address(table, owner, offset):
    """Returns the address ``offset`` bytes behind the beginning of ``owner``'s memory."""
    return _word(table, _SHARED + owner) + offset


@jit
def _slots(table, owner, rank, launches, index):
    """Returns pointers to the slots in ``owner``'s memory that ``rank`` fills."""
    buffer = (launches % 2) * _word(table, _RANKS) + rank
    capacity = _word(table, _CAPACITY)
    first = _DETAILS + capacity + capacity % 2
    return _pointer(_word(table, _SHARED + owner)) + first + (buffer * capacity + index) * 2


@jit
def _clock(table):
    """Returns the nanoseconds of the call before, the same for all threads. Inline assembly alone differs between
    threads: a loop that ends for some of them sooner would end in barriers that do not meet."""
    now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    return tl.atomic_max(_pointer(table) + _CLOCK, now, sem="relaxed")


@jit
def start_clock(table):
    """Sets the time that the next ``_clock`` returns. Precedes the first message."""
    _clock(table)


@jit
def _failure(table):
    """Loads this rank's failure word; 0: none. The group must not be closed."""
    shared = _pointer(_word(table, _SHARED + _word(table, _RANK)))
    return tl.atomic_add(shared + _FAILURE, 0, sem="relaxed", scope="sys")


@jit
def _tell(table, verdict):
    tl.store(_pointer(_word(table, _TOLD)), verdict)


@jit
def active_ranks(table):
    """Returns how many ranks take part: none once the group has failed or is closed."""
    ranks = _word(table, _RANKS)
    if ranks != 0:
        verdict = _failure(table)
        if verdict != 0:
            _tell(table, verdict)
            ranks = ranks * 0
    return ranks


@jit
def is_closed(table):
    """Returns whether the group is closed: memory of other ranks is then touched no more."""
    return _word(table, _RANKS) == 0


@jit
def steps_taken(table):
    """Returns the launches of the group before this one, and the number of this step."""
    launches = _word(table, _STEPS)
    return launches, launches + _word(table, _LEFT_OUT)


@jit
def mix(a, b):
    """Hashes two words."""
    h = (a ^ _START) * tl.full((), _FIRST, tl.uint32)
    h = (h ^ (h >> 15) ^ b) * tl.full((), _SECOND, tl.uint32)
    h = (h ^ (h >> 13)) * tl.full((), _THIRD, tl.uint32)
    return h ^ (h >> 16)


@jit
def details_and_tags(number, batch, num_samples, temperature, seed_lo, seed_hi, offset_lo, offset_hi):
    """Returns details and both tags of rows in step ``number``, int64, (N,) each."""
    shape = mix(tl.full(temperature.shape, batch, tl.uint32), tl.full(temperature.shape, num_samples, tl.uint32))
    seed = mix(seed_lo, seed_hi)
    offset = mix(offset_lo, offset_hi)
    bits = (temperature + 0.0).to(tl.uint32, bitcast=True)  # -0.0 is 0.0
    heat = mix(bits, tl.zeros(temperature.shape, tl.uint32))
    step = tl.full(temperature.shape, number & _LOW, tl.uint32)
    param_hash = (shape >> 16).to(tl.int64) << 48 | (seed >> 16).to(tl.int64) << 32
    param_hash |= (offset >> 16).to(tl.int64) << 16 | (heat >> 16).to(tl.int64)
    some = mix(shape ^ seed, offset ^ heat) >> 16
    tag0 = some.to(tl.int64) | (step & ((1 << _STEP_BITS) - 1)).to(tl.int64) << 16 | 1 << 31
    tag1 = mix(mix(mix(shape, seed), mix(offset, heat)), step) | 1
    return param_hash, tag0, tag1.to(tl.int64)


@jit
def _details(table, owner, index):
    """Returns pointers to the details of rows in ``owner``'s memory."""
    return _pointer(_word(table, _SHARED + owner)) + _DETAILS + index


@jit
def send(table, ranks, launches, index, live, winner, param_hash, tag0, tag1):
    """Stores this rank's packed winners, (N,), into every rank's slots; its own last, the others' travel longer."""
    rank = _word(table, _RANK)
    if ranks != 0:
        tl.store(_details(table, rank, index), param_hash, mask=live)
        tl.debug_barrier()  # the thread that stores a row's details need not be the one that sends its message
    for step in range(1, ranks + 1):
        slots = _slots(table, (rank + step) % ranks, rank, launches, index)
        tl.atomic_xchg(slots, (winner >> 32) << 32 | tag0, mask=live, sem="release", scope="sys")
        tl.atomic_xchg(slots + 1, winner << 32 | tag1, mask=live, sem="relaxed", scope="sys")


@jit
def _poll(slots, awaited):
    high = tl.atomic_add(slots, 0, mask=awaited, sem="acquire", scope="sys")
    low = tl.atomic_add(slots + 1, 0, mask=awaited, sem="acquire", scope="sys")
    missing = awaited & ((high == 0) | (low == 0))
    return high, low, tl.max(tl.max(missing.to(tl.int32), axis=1), axis=0)


@jit
def _wait(table, slots, awaited, start):
    """Waits for messages. Returns both words of each, 0 where one is missing after the time-out or once the group has
    failed, and since when it has waited."""
    high, low, missing = _poll(slots, awaited)
    if missing != 0:
        timeout = _word(table, _TIMEOUT)
        now = _clock(table)
        start = tl.where(start == 0, now, start)
        waiting = 1
        while waiting != 0:
            high, low, missing = _poll(slots, awaited)
            over = (_clock(table) - start >= timeout) | (_failure(table) != 0)
            waiting = ((missing != 0) & (over == 0)).to(tl.int32)
    return high, low, start


@jit
def _decide(table, ranks, verdict):
    """Makes the group fail on all ranks. Returns the verdict that counts: the first."""
    everybodys = _pointer(_word(table, _SHARED)) + _VERDICT
    earlier = tl.atomic_cas(everybodys, tl.zeros((), tl.int64), verdict, sem="relaxed", scope="sys")
    verdict = tl.where(earlier == 0, verdict, earlier)
    for peer in range(ranks):
        tl.atomic_xchg(_pointer(_word(table, _SHARED + peer)) + _FAILURE, verdict, sem="relaxed", scope="sys")
    return verdict


@jit
def _judge(table, ranks, launches, number, row, tag0, tag1, seen):
    """Tells all ranks why the message of a row is missing or wrong, unless one of them was earlier. Blames the fewer of
    the ranks that differ; of two halves, the one without the first rank. ``seen``: a rank whose message was missing or
    wrong, though it may have come since."""
    rank = _word(table, _RANK)
    verdict = _failure(table)
    if verdict == 0:
        missing = ranks * 0 + seen
        differing = ranks * 0 + _NOBODY
        theirs = tag0
        present = ranks * 0
        same = ranks * 0
        first_is_same = ranks * 0
        for i in range(ranks):
            peer = ranks - 1 - i  # so that the lowest is found last
            slot = _slots(table, rank, peer, launches, row)
            high = tl.atomic_add(slot, 0, sem="acquire", scope="sys")
            low = tl.atomic_add(slot + 1, 0, sem="acquire", scope="sys")
            there = (high != 0) & (low != 0)
            agrees = there & ((high & _LOW) == tag0) & ((low & _LOW) == tag1)
            missing = tl.where(there, missing, peer)
            present += there.to(tl.int64)
            same += agrees.to(tl.int64)
            first_is_same = tl.where(agrees & (peer == 0), 1, first_is_same)
            theirs = tl.where(there & (agrees == 0), high & _LOW, theirs)
            differing = tl.where(there & (agrees == 0), peer, differing)
        if differing < _NOBODY:
            blame_them = (same * 2 > present) | ((same * 2 == present) & (first_is_same != 0))
            # their details were stored before their message, which was acquired
            param_hash = tl.atomic_add(_details(table, differing, row), 0, sem="acquire", scope="sys")
            param_hash ^= tl.atomic_add(_details(table, rank, row), 0, sem="relaxed", scope="sys")
            fields = param_hash * 0
            for field in tl.static_range(4):
                other = (param_hash >> (_DETAIL_BITS * (3 - field))) & ((1 << _DETAIL_BITS) - 1)
                fields |= tl.where(other != 0, 8 >> field, 0)
            half = 1 << (_STEP_BITS - 1)
            ahead = ((((theirs >> 16) - (tag0 >> 16)) & (2 * half - 1)) ^ half) - half
            number += tl.where(blame_them, 0, ahead)  # the reporter's
            ahead = tl.minimum(tl.maximum(tl.where(blame_them, ahead, -ahead), -32), 31)
            straggler = tl.where(blame_them, differing, rank)
            reporter = tl.where(blame_them, rank, differing)
            verdict = _DIFFERS | straggler << 2 | reporter << 12 | fields << 22 | (ahead & 63) << 26
        else:
            verdict = _LATE | missing << 2 | rank << 12
        verdict |= (number & 0x7FFFFFFF) << 32
        verdict = _decide(table, ranks, verdict)
    _tell(table, verdict)


@jit
def receive(table, ranks, launches, number, index, live, tag0, tag1, start):
    """Receives every rank's messages. Returns token ids, (N,), -1 where a message did not come in time or is of another
    call; the number of such messages; and since when it has waited, 0 if it has not."""
    rank = _word(table, _RANK)
    best = tl.zeros(index.shape, tl.int64)
    defined = tl.zeros(index.shape, tl.int32)
    wrong = ranks * 0
    for first in range(0, ranks, _PEERS):
        peers = first + tl.arange(0, _PEERS)[None, :]
        awaited = live[:, None] & (peers < ranks)
        slots = _slots(table, rank, tl.minimum(peers, ranks - 1), launches, index[:, None])
        high, low, start = _wait(table, slots, awaited, start)
        winner = ((high >> 32) << 32) | ((low >> 32) & _LOW)
        differs = awaited & (((high & _LOW) != tag0[:, None]) | ((low & _LOW) != tag1[:, None]))
        wrong_here = tl.sum(tl.sum(differs.to(tl.int32), axis=1), axis=0)
        if wrong_here != 0:
            row = tl.min(tl.min(tl.where(differs, index[:, None], _NAN), axis=1), axis=0)
            seen = tl.min(tl.min(tl.where(differs & (index[:, None] == row), peers, _NOBODY), axis=1), axis=0)
            sequence_tags = tl.where(index == row, tag0, 0), tl.where(index == row, tag1, 0)
            _judge(
                table,
                ranks,
                launches,
                number,
                row,
                tl.sum(sequence_tags[0], axis=0),
                tl.sum(sequence_tags[1], axis=0),
                seen,
            )
        wrong += wrong_here
        defined = defined | tl.max((awaited & (winner > 0)).to(tl.int32), axis=1)
        best = tl.maximum(best, tl.max(tl.where(awaited, winner & _NAN, 0), axis=1))
    if wrong == 0:
        for first in range(0, ranks, _PEERS):
            peers = first + tl.arange(0, _PEERS)[None, :]
            awaited = live[:, None] & (peers < ranks)
            slots = _slots(table, rank, tl.minimum(peers, ranks - 1), launches, index[:, None])
            tl.store(slots, tl.zeros(slots.shape, tl.int64), mask=awaited)
            tl.store(slots + 1, tl.zeros(slots.shape, tl.int64), mask=awaited)
    token = (best & _NO_TOKEN) ^ _NO_TOKEN
    return tl.where((defined != 0) & (best != _NAN) & (wrong == 0), token, -1), wrong, start


@jit
def receive_words(table, ranks, launches, number, index, live, tag0, tag1, start, out, out_stride):
    """Receives like ``receive``, but writes the peer values of every rank, (N,), to ``out`` + rank * ``out_stride`` +
    index, 0 where a value did not arrive or is of another call. Returns the number of such values."""
    rank = _word(table, _RANK)
    wrong = ranks * 0
    for first in range(0, ranks, _PEERS):
        peers = first + tl.arange(0, _PEERS)[None, :]
        awaited = live[:, None] & (peers < ranks)
        slots = _slots(table, rank, tl.minimum(peers, ranks - 1), launches, index[:, None])
        high, low, start = _wait(table, slots, awaited, start)
        word = ((high >> 32) << 32) | ((low >> 32) & _LOW)
        differs = awaited & (((high & _LOW) != tag0[:, None]) | ((low & _LOW) != tag1[:, None]))
        tl.store(out + peers.to(tl.int64) * out_stride + index[:, None], tl.where(differs, 0, word), mask=awaited)
        wrong_here = tl.sum(tl.sum(differs.to(tl.int32), axis=1), axis=0)
        if wrong_here != 0:
            row = tl.min(tl.min(tl.where(differs, index[:, None], _NAN), axis=1), axis=0)
            seen = tl.min(tl.min(tl.where(differs & (index[:, None] == row), peers, _NOBODY), axis=1), axis=0)
            sequence_tags = tl.where(index == row, tag0, 0), tl.where(index == row, tag1, 0)
            _judge(
                table,
                ranks,
                launches,
                number,
                row,
                tl.sum(sequence_tags[0], axis=0),
                tl.sum(sequence_tags[1], axis=0),
                seen,
            )
        wrong += wrong_here
    if wrong == 0:
        for first in range(0, ranks, _PEERS):
            peers = first + tl.arange(0, _PEERS)[None, :]
            awaited = live[:, None] & (peers < ranks)
            slots = _slots(table, rank, tl.minimum(peers, ranks - 1), launches, index[:, None])
            tl.store(slots, tl.zeros(slots.shape, tl.int64), mask=awaited)
            tl.store(slots + 1, tl.zeros(slots.shape, tl.int64), mask=awaited)
    return wrong


@jit
def of_request(tag0, tag1, request):
    """Returns the tags of a step with sampling parameters; ``request``: their hash, int64. Such tags differ from those
    of a step without, but for a collision, and the details do not: no field of these is then blamed."""
    some = (request >> 32).to(tl.uint32)
    tag1 = mix(tag1.to(tl.uint32), tl.zeros(tag1.shape, tl.uint32) + mix(request.to(tl.uint32), some)) | 1
    return tag0 ^ ((some >> 16) | 1).to(tl.int64), tag1.to(tl.int64)


@jit
def conclude(table, launches, row_blocks, tokens, count):
    """Ends a launch, in one program of each block of rows: counts the step; if it failed, no row of it has a token."""
    tl.debug_barrier()  # the block's tokens are stored
    finished = tl.atomic_add(_pointer(table) + _FINISHED, 1, sem="acq_rel")
    if finished == row_blocks - 1:
        tl.store(_pointer(table) + _FINISHED, tl.zeros((), tl.int64))
        if row_blocks > 1 and _word(table, _RANKS) != 0:
            verdict = _failure(table)
            if verdict != 0:
                _tell(table, verdict)
                for index in range(count):
                    tl.store(tokens + index, tl.full((), -1, tl.int64))
        tl.store(_pointer(table) + _STEPS, launches + 1)


@jit
def declare(table: tl.int64, verdict: tl.int64):
    """Ends a group for a reason that its host knows. Grid: (1,), one warp."""
    ranks = _word(table, _RANKS)
    if ranks != 0:
        _tell(table, _decide(table, ranks, verdict))
