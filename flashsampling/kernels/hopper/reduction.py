"""Reduces scores to one token per row: 64-bit keys, their publication, and the end of the launch.

A key orders by score, then by the lower id: order-preserving bits of the score, then the complement of the id, in a
positive int64. Maximum, ties and order of arrival are then one operation. A NaN is above all keys, 0 below. A key
without an id (NO_TOKEN) is below every token's key with the same score: it states a lower bound.

A row and draw has two slots in the workspace (``workspace_layout``): the best key whose score is not +inf, and the key
of the lowest id whose score is +inf. Threads publish by a relaxed ``red.max`` at GPU scope. Then

    edge                                       order
    a CTA's publishing threads -> its thread   named barrier of the CTA
    its thread -> the last CTA's thread        atomic add on the row block's counter, acquire-release at GPU scope
    the last CTA's thread -> its threads       named barrier of its noise warps

The last CTA of a row block zeroes slots and counter, for the next launch or graph replay, and turns the keys into token
ids. Under tensor parallelism it makes packed winners, which it exchanges with the other ranks (``peer_exchange``) or
stores.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, select_

from ...exchange_protocol import NAN as NAN_KEY
from ...exchange_protocol import NO_FINITE, NO_TOKEN, PACKED, TOKENS
from ...outputs import DEFERRED_DRAW
from . import peer_exchange, peer_table, ptx, store_cutoff, workspace_layout
from .memory import global_pointer

INFINITY = float("inf")
_THREADS = 128  # of the warpgroup that finishes a launch
# the CTA's number by arrival; whether the exchange had failed before; for each warp, whether it failed now
LAST_WORDS = 2 + _THREADS // 32


def pack_key(score: Float32, token: Int32) -> Int64:
    """Packs a score and a token id into a key."""
    bits = (score + Float32(0.0)).bitcast(Int32)  # + 0.0: -0.0 and 0.0 tie
    ordered = Int64(bits ^ ((bits >> Int32(31)) & Int32(0x7FFFFFFF))) + Int64(2**31)
    key = (ordered << Int64(31)) | Int64(token ^ Int32(NO_TOKEN))
    return Int64(select_(score != score, Int64(NAN_KEY), key))


def unpack_score(key: Int64) -> Float32:
    """Returns the score of a key that is neither 0 nor NaN's."""
    ordered = Int32((key >> Int64(31)) - Int64(2**31))
    return (ordered ^ ((ordered >> Int32(31)) & Int32(0x7FFFFFFF))).bitcast(Float32)


def unpack_token(key: Int64) -> Int32:
    """Returns the token id of a key; NO_TOKEN if it has none."""
    return Int32(key & Int64(NO_TOKEN)) ^ Int32(NO_TOKEN)


def max_key(a: Int64, b: Int64) -> Int64:
    """Returns the greater of two keys."""
    return Int64(select_(a > b, a, b))


def column_max(key: Int64) -> Int64:
    """Returns the maximum over the eight threads of a warp that hold the same column of an m64 accumulator."""
    for distance in (4, 8, 16):
        key = max_key(key, cute.arch.shuffle_sync_bfly(key, distance))
    return key


def scatter_max(values: list, lane: Int32) -> tuple[Float32, Int32]:
    """Takes maxima of floats by ``_scatter``, NaN above all."""
    return _scatter(values, lane, Float32, lambda a, b: cute.arch.fmax(a, b, nan=True))


def scatter_max_keys(keys: list, lane: Int32) -> tuple[Int64, Int32]:
    """Takes maxima of keys by ``_scatter``."""
    return _scatter(keys, lane, Int64, max_key)


def scatter_sum(values: list, lane: Int32) -> tuple[Float32, Int32]:
    """Takes sums of floats by ``_scatter``: threads 16 lanes apart, then 8, then 4, for any number of values."""
    return _scatter(values, lane, Float32, lambda a, b: a + b)


def _scatter(values: list, lane: Int32, dtype, combine) -> tuple:
    """Reduces up to eight values (2**n) over the eight threads of a warp that hold the same columns.

    Each of these threads gets one result and the number of its value. Every exchange halves what a thread has: seven
    shuffles for eight values, where one reduction after the other takes 24.
    """
    own = Int32(0)
    for distance in (16, 8, 4):
        if len(values) > 1:
            half = len(values) // 2
            upper = lane & distance != 0
            kept = [dtype(select_(upper, values[half + i], values[i])) for i in range(half)]
            sent = [dtype(select_(upper, values[i], values[half + i])) for i in range(half)]
            own = own + Int32(select_(upper, Int32(half), Int32(0)))
        else:
            kept = sent = values
        values = [
            combine(own_value, cute.arch.shuffle_sync_bfly(sent_value, distance))
            for own_value, sent_value in zip(kept, sent)
        ]
    return values[0], own


def publish(slot: Int64, key: Int64) -> None:
    """Raises the slot at an address to a key."""
    cute.arch.red(global_pointer(Int64, slot), key, op="max", dtype="s64", sem="relaxed", scope="gpu")


def load_key(slot: Int64) -> Int64:
    """Loads the key of the slot at an address, as far as other threads have raised it."""
    return cute.arch.load(global_pointer(Int64, slot), Int64, sem="relaxed", scope="gpu")


def winning_token(best_key: Int64, inf_key: Int64) -> Int64:
    """Returns the token id of a row's two slots; -1 if a score was NaN or none was finite."""
    winner = Int64(select_(inf_key != Int64(0), inf_key, best_key))
    token = (winner & Int64(NO_TOKEN)) ^ Int64(NO_TOKEN)
    undefined = (best_key == Int64(NAN_KEY)) | (best_key == Int64(0)) | (token == Int64(NO_TOKEN))
    return Int64(select_(undefined, Int64(-1), token))


def packed_winner(best_key: Int64, inf_key: Int64) -> Int64:
    """Packs a row's two slots into a winner (``flashsampling.exchange_protocol``)."""
    without_finite = Int64(select_(best_key == Int64(0), inf_key | Int64(NO_FINITE), inf_key))
    finite_or_nan = (best_key == Int64(NAN_KEY)) | ((inf_key == Int64(0)) & (best_key != Int64(0)))
    return Int64(select_(finite_or_nan, best_key, without_finite))


@cute.jit
def finish(
    args,
    out,
    block_b: cutlass.Constexpr,
    stamps: cutlass.Constexpr,
    row_block,
    row_blocks,
    ctas_of_row_block,
    shared,
    thread,
    published,
    barrier,
):
    """Ends a launch: one warpgroup of every CTA.

    ``published``: the barrier after which all of the CTA's keys are published; ``barrier``: of these threads; ``out``:
    of a kernel with logits; ``stamps``: writes times of the last CTA, for ``benchmarks.exchange``, into the four words
    before the workspace.
    """
    last = shared.last
    total = args.draws()
    counter = global_pointer(Int64, workspace_layout.counter(args.workspace, total, row_block))
    first = Int64(row_block) * block_b * args.num_samples
    count = Int64(cutlass.min(block_b, args.batch - row_block * block_b)) * args.num_samples
    at_once = cutlass.const_expr(2 if block_b > _THREADS else 1)
    exchanges = (args.exchange != Int64(TOKENS)) & (args.exchange != Int64(PACKED))
    table = peer_table.look_up(args.exchange, thread)
    lane = thread % 32
    sequence_tags = cute.make_rmem_tensor((at_once, 2), Int32)
    winners = cute.make_rmem_tensor(at_once, Int64)
    best_keys = cute.make_rmem_tensor(at_once, Int64)
    inf_keys = cute.make_rmem_tensor(at_once, Int64)
    for k in cutlass.range_constexpr(at_once):
        sequence_tags[k, 0] = Int32(0)
        sequence_tags[k, 1] = Int32(0)
        if exchanges:
            index = first + thread + k * _THREADS
            sequence_tags[k, 0], sequence_tags[k, 1] = peer_exchange.compute_sequence_tags(
                table, args, cutlass.min(index, first + count)
            )
    expected = peer_exchange.Expected.allocate()
    if exchanges:
        peer_exchange.expect(
            table, _warp_rows(first, count, Int64(thread), sequence_tags, lane), Int32(0), lane, expected
        )
        cute.arch.fence_acq_rel_sys()
    if thread == 0:
        last[1] = Int32(table.failure != Int64(0))
    if lane == 0:
        last[2 + thread // 32] = Int32(0)
    published.arrive_and_wait()
    if thread == 0:
        last[0] = Int32(cute.arch.atomic_add(counter, Int64(1), sem="acq_rel", scope="gpu"))
    barrier.arrive_and_wait()
    if last[0] == ctas_of_row_block - 1:
        if thread == 0:
            cute.arch.atomic_exch(counter, Int64(0), sem="relaxed", scope="gpu")
        table = peer_table.with_shared_failure(table, last[1] != 0, thread)
        if cutlass.const_expr(stamps):
            _stamp(args, thread, workspace_layout.ARRIVED)
        if cutlass.const_expr(out is not None):
            store_cutoff.finish(args, out, block_b, row_block, thread, _THREADS)
        turns = Int32((count + (at_once * _THREADS - 1)) // (at_once * _THREADS))
        for turn in cutlass.range(turns, unroll=1):
            start = Int64(turn) * (at_once * _THREADS) + thread
            for k in cutlass.range_constexpr(at_once):
                best_keys[k] = Int64(0)
                inf_keys[k] = Int64(0)
                if start + k * _THREADS < count:
                    slot = workspace_layout.best(args.workspace, first + start + k * _THREADS)
                    best_keys[k] = cute.arch.atomic_exch(
                        global_pointer(Int64, slot), Int64(0), sem="relaxed", scope="gpu"
                    )
                    inf_slot = global_pointer(Int64, workspace_layout.infinite(slot, total))
                    inf_keys[k] = cute.arch.atomic_exch(inf_slot, Int64(0), sem="relaxed", scope="gpu")
            for k in cutlass.range_constexpr(at_once):
                winners[k] = packed_winner(best_keys[k], inf_keys[k])
                if (start + k * _THREADS < count) & (not exchanges):
                    result = winners[k]
                    if args.exchange == Int64(TOKENS):
                        result = winning_token(best_keys[k], inf_keys[k])
                        if cutlass.const_expr(out is not None):
                            left = (args.num_samples == 1) & (shared.drawing[0] == 0)
                            result = Int64(select_(left, Int64(DEFERRED_DRAW), result))
                    global_pointer(Int64, args.tokens + (first + start + k * _THREADS) * 8).store(result)
            if exchanges:
                cute.arch.sync_warp()
                rows = _warp_rows(first, count, start, sequence_tags, lane)
                if cutlass.const_expr(stamps):
                    _stamp(args, thread, workspace_layout.WON)
                sent = peer_exchange.clock()
                peer_exchange.send(table, rows, [winners[k] for k in range(at_once)], lane)
                if cutlass.const_expr(stamps):
                    _stamp(args, thread, workspace_layout.SENT)
                if peer_exchange.receive(table, rows, expected, args.tokens, lane, sent) & (lane == 0):
                    last[2 + thread // 32] = Int32(1)
                if turn + 1 < turns:
                    for k in cutlass.range_constexpr(at_once):
                        index = first + start + (at_once + k) * _THREADS
                        sequence_tags[k, 0], sequence_tags[k, 1] = peer_exchange.compute_sequence_tags(
                            table, args, cutlass.min(index, first + count)
                        )
                    next_rows = _warp_rows(first, count, start + at_once * _THREADS, sequence_tags, lane)
                    peer_exchange.expect(table, next_rows, Int32(0), lane, expected)
                    cute.arch.fence_acq_rel_sys()
        if exchanges:
            barrier.arrive_and_wait()
            failed = last[2]
            for warp in cutlass.range_constexpr(1, LAST_WORDS - 2):
                failed = failed | last[2 + warp]
            if failed != 0:
                for index in cutlass.range(Int64(thread), count, _THREADS, unroll=1):
                    global_pointer(Int64, args.tokens + (first + index) * 8).store(Int64(-1))
                barrier.arrive_and_wait()
            if cutlass.const_expr(stamps):
                _stamp(args, thread, workspace_layout.RECEIVED)
            if thread == 0:
                peer_table.finish_step(table, row_blocks, args.tokens, total)


def _warp_rows(
    first: Int64, count: Int64, start: Int64, sequence_tags: cute.Tensor, lane: Int32
) -> peer_exchange.WarpRows:
    """Returns the rows of a warp, of the ``count`` from ``first`` on. ``start``: the lane's first among these;
    ``sequence_tags``: of the lane's own rows."""
    at_once = cute.size(sequence_tags, mode=[0])
    warp_start = start - lane
    left = ptx.scheduling_fence(Int32(cutlass.min(count - warp_start, Int64(at_once * _THREADS))))
    return peer_exchange.WarpRows(
        first + warp_start, left, [[sequence_tags[k, 0], sequence_tags[k, 1]] for k in range(at_once)]
    )


@cute.jit
def _stamp(args, thread, word: cutlass.Constexpr):
    if thread == 0:
        global_pointer(Int64, workspace_layout.before(args.workspace, word)).store(peer_exchange.clock())
