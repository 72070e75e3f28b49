"""Tokens from logits that are in memory, with everything that a request may ask for, in two launches and without
sorting.

    scan   reads every logit once: per chunk of 32 tokens the highest processed logit and its mass, per block of a row without
           filters the best score (``logits_scan``)
    pick   a program per row: reads again the chunks that can hold a kept token, from the level-2 cache for the most part
           (``logits_pick``, ``logits_chunks``, ``logits_search``); of a row of equal logits, as the zeros of a padded batch,
           less than a block; of another one that is too flat for candidates, the row itself, several times (``logits_draw``)

A kernel that has the logits in its hands anyway can do the scan's work, and draw for the rows without filters: ``pick``
alone follows it, and up to a row per multiprocessor draws from as many that are made up, so that its code is in the
caches (``logits_ahead``).

What a row's chunks are depends on the vocabulary's size alone, and all sums run in a fixed order, so a row's result is
the same bits in any batch. Extra memory per row: 8 bytes per chunk, 16 where raw log-probabilities are asked for, the
candidates, and 36 KB where a row is made up. Chunks of 64 tokens would be 4 bytes less per 32 logits, 3 % of what the
scan reads, and twice as much to read again for a candidate; and a Hopper kernel has 32 of a row in one thread.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ....exchange_protocol import WHOLE
from ....inputs import SampleInputs, row_argument
from ....outputs import SampleResult, layout
from ....sampling_params import SamplingParams
from ...device import capability, multiprocessors
from ..fused.config import next_power_of_2
from .block_stats_kernel import block_stats_kernel
from .cache_warmup import ROOM, TOKENS
from .filtered_sample_kernel import filtered_sample_kernel


@dataclass(frozen=True)
class Config:
    """Shapes of both launches. Those of the second say how its sums are rounded: they must not depend on the batch."""

    columns: int = 512  # Philox groups side by side
    reps: int = 2  # rows of columns in a block
    scan_warps: int = 4
    scan_registers: int = 128  # per thread
    pick_warps: int = 8
    pick_registers: int = 128
    width: int = 1024  # chunks side by side
    few: int = 256  # candidates that are compared with each other: a thread each
    capacity: int = 8192  # candidates per row, not fewer
    tile: int = 1024  # of them at a time
    whole_tile: int = 2048  # of the row's tokens in a draw, twice as many as in a search
    gathered: int = 64  # of chunks
    at_first: int = 512  # chunks that are read for the token that a row has without filters, not more
    pdl: bool = True  # the second launch begins before the first one's end, where the device can (sm_90)

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return 4 * self.columns * self.reps


CONFIG = Config()


class BlockStats(NamedTuple):
    """What a kernel says of a row's chunks (``logits_source.chunk_tokens``), of which there are 4 * ceil(V / 128)."""

    keys: Tensor  # (B, chunks) int32: ``logits_source.key_of`` the highest logit; that of -inf where there is no token
    # (B, chunks) float32: sums of exp2((x - the highest) * ``mass_scale(temperature)``), beside an infinite x the
    # number of infinite ones; None where no row has a top-p without a top-k, and no log-probabilities are asked for.
    # Beside ``floors`` those of rows with a top-k may be anything
    sums: Tensor | None = None
    raw_sums: Tensor | None = (
        None  # likewise at temperature 1; None where nothing is asked for that needs a log-sum-exp
    )
    # (B,) int32: of each row a key in the order of ``keys``. The logits of chunks with a lower one were not stored: their
    # memory holds anything, and is not read. None: all are stored, as log-probabilities and records need. A floor is at most
    #     top-k, 0 < k < V    the key of rank k + k // 4 + 9 among the first 1024; the lowest int32 if there are not so many
    #     min-p, no top-k     the lowest key that min-p keeps, a little less for rounding: ``least`` in ``logits_pick``
    #     top-p alone         the lowest int32
    #     no filter           the highest int32, as of rows whose tokens are known without logits: a temperature below 1e-6 or
    #                         NaN, a highest logit that is NaN or infinite, a top-p or min-p of NaN, a token -1 in ``drawn``;
    #                         but of an infinite one, not where ``drawn`` has ``DEFERRED_DRAW``
    # No bit depends on floors then: ``logits_chunks.kth_highest`` finds a bound that k + k // 4 + 8 columns of chunks reach at
    # most, or the k-th highest. With one above it, up to the k-th highest of all, the same tokens are kept, but what is before
    # them may be summed up in another order, and rounded otherwise
    floors: Tensor | None = None


def unsupported(step: SampleInputs) -> str | None:
    """Why it cannot do a step, or None."""
    logits = step.logits
    if logits is None:
        return "it takes logits, not hidden states and a weight"
    if step.shard != WHOLE:
        return "a shard of a vocabulary: it knows whole ones"
    if logits.device.type == "cpu":
        return None if triton.knobs.runtime.interpret else "tensors on the CPU (TRITON_INTERPRET=1 is for tests)"
    if logits.device.type != "cuda" or torch.version.cuda is None:
        return f"tensors on {logits.device.type}, it runs on NVIDIA GPUs"
    if capability(logits.device) < (8, 0):
        return f"compute capability {capability(logits.device)}, it needs (8, 0)"
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"logits of {logits.dtype}"
    return step.too_wide_to_pick()


def contiguous_rows(matrix: Tensor | None) -> Tensor | None:
    """A matrix whose rows may lie any distance apart, but not their elements."""
    return matrix if matrix is None or matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


class Room(NamedTuple):
    """What the second launch keeps its candidates in, and how many programs share it."""

    candidates: Tensor  # int32
    programs: int  # of a row
    ahead: int = 0  # rows that are made up, see ``logits_ahead``: none, or as many as there are


class Records(NamedTuple):
    """What ``rejection`` reads of a row, beside its logits. ``filtered_sample_kernel`` defines it."""

    limits: Tensor  # (B,) int64
    masses: Tensor  # (B, 4) float32


def empty_records(batch: int, device: torch.device) -> Records:
    """To be written to."""
    limits = torch.empty(batch, dtype=torch.int64, device=device)
    return Records(limits, torch.empty((batch, 4), dtype=torch.float32, device=device))


def source_arguments(step: SampleInputs) -> tuple[Any, ...]:
    """What a row's logits are made of, as the kernels' first parameters have it."""
    params, logits = step.params, contiguous_rows(step.logits)
    assert logits is not None
    bias_count = 0 if params.bias_ids is None else params.bias_ids.shape[1]
    counts, token_mask = contiguous_rows(params.counts), contiguous_rows(params.token_mask)
    bias_ids, bias_values = (
        contiguous_rows(part) if bias_count else None for part in (params.bias_ids, params.bias_values)
    )
    return (
        logits,
        logits.stride(0),
        step.vocab_size,
        params.bias,
        params.logit_scale,
        params.soft_cap,
        params.dense_bias,
        bias_ids,
        bias_values,
        bias_count,
        0 if bias_ids is None else bias_ids.stride(0),
        0 if bias_values is None else bias_values.stride(0),
        counts,
        0 if counts is None else counts.stride(0),
        token_mask,
        0 if token_mask is None else token_mask.stride(0),
    )


def sparse_bias_of(params: SamplingParams) -> int:
    """``ENTRIES`` of the kernels."""
    return 1 if params.bias_ids is None else next_power_of_2(max(params.bias_ids.shape[1], 1))


def has_head(params: SamplingParams) -> bool:
    """``HEAD`` of the kernels."""
    return params.logit_scale != 1.0 or params.soft_cap != 0.0


def penalty_arguments(params: SamplingParams) -> tuple[int | float, ...]:
    """Address and number of each penalty, as the kernels have them."""
    values = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    return tuple(part for value in values for part in row_argument(value))


def _flags(params: SamplingParams, pdl: bool, config: Config, records: bool = False) -> dict[str, Any]:
    """What both kernels are compiled for."""
    return {
        "COLUMNS": config.columns,
        "REPS": config.reps,
        "ENTRIES": sparse_bias_of(params),
        "HEAD": has_head(params),
        "FILTERS": params.may_filter(),
        "LOGPROBS": params.logprobs or records,
        "TOP_K_WIDE": not isinstance(params.top_k, Tensor) or params.top_k.dtype == torch.int64,
        "JOINT": params.may_be_joint(),
        "PDL": pdl,
    }


def _pdl(device: torch.device, config: Config) -> bool:
    """Returns whether launches may overlap."""
    return config.pdl and device.type == "cuda" and capability(device) >= (9, 0)


def _arguments(step: SampleInputs, block_stats: tuple[Tensor | None, ...], blocks: int) -> tuple[Any, ...]:
    """Of both kernels. ``block_stats``: keys, sums, raw keys, raw sums, winners, marks."""
    params = step.params
    return (
        *source_arguments(step),
        *step.row_arguments(),
        *row_argument(params.top_k),
        *row_argument(params.top_p),
        *row_argument(params.min_p),
        *penalty_arguments(params),
        *block_stats,
        step.num_samples,
        int(params.stream),
        blocks,
    )


def _list_length(chunks: int, config: Config) -> int:
    """Numbers of a list of chunks, or of a few candidates."""
    return max(chunks, 3 * config.few)


def _programs(params: SamplingParams, batch: int, device: torch.device, records: Records | None) -> int:
    """Of a row: two where likeliest or given tokens are asked for beside what is drawn, and multiprocessors are left
    for it."""
    both = params.logprobs and (params.top_logprobs > 0 or params.logprob_ids is not None) and records is None
    return 2 if both and batch <= multiprocessors(device) else 1


def _candidates(params: SamplingParams, batch: int, programs: int, chunks: int, config: Config, ahead: int = 0) -> int:
    """Numbers that the second kernel keeps its candidates in."""
    if not (params.may_filter() or params.needs_raw_mass()):
        return 0
    rows = programs * batch * (3 * config.capacity + _list_length(chunks, config))
    return rows + ahead * (ROOM.value + 3 * config.few)


def run(step: SampleInputs, config: Config = CONFIG, records: Records | None = None) -> SampleResult:
    """Runs a step with logits in two launches. Writes ``records``."""
    params, num_samples, vocab_size = step.params, step.num_samples, step.vocab_size
    assert step.logits is not None
    batch, device = step.logits.shape[0], step.logits.device
    blocks = -(-vocab_size // config.block)
    chunks = 4 * -(-vocab_size // 128)
    wants_raw, programs = params.needs_raw_mass(), _programs(params, batch, device, records)
    # one allocation: what the second kernel is told by the first, and its candidates
    block_stats = params.may_filter() or params.logprobs or records is not None
    sizes = [
        2 * batch * num_samples * blocks,
        batch * blocks,
        batch * chunks if block_stats else 0,
        batch * chunks if block_stats else 0,
        batch * chunks if wants_raw else 0,
        batch * chunks if wants_raw else 0,
        _candidates(params, batch, programs, chunks, config),
    ]
    sizes = [-(-size // 4) * 4 for size in sizes]  # all of them at 16 bytes, in any batch: Triton compiles for it
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    winners, marks, keys, sums, raw_keys, raw_sums, candidates = parts
    raw = (raw_keys, raw_sums.view(torch.float32)) if wants_raw else (None, None)
    told = (keys, sums.view(torch.float32), *raw, winners.view(torch.int64), marks)
    common = _arguments(step, told, blocks)
    flags = _flags(params, _pdl(device, config), config, records is not None)
    block_stats_kernel[(batch * blocks,)](
        *common, 0, **flags, num_warps=config.scan_warps, maxnreg=config.scan_registers
    )
    return _launch_pick(step, common, Room(candidates, programs), flags, False, blocks, config, records)


def _ahead(step: SampleInputs, config: Config) -> int:
    """Rows that ``pick`` makes up while the kernel before it runs: one for each, up to a row per multiprocessor, which
    has room for both with ``CONFIG``."""
    params, batch, device = step.params, len(step.hidden_states), step.hidden_states.device
    has_room = step.vocab_size >= TOKENS.value  # ids of the made-up row must fit where the vocabulary's do
    of_one_draw = step.num_samples == 1 and not (params.logprobs or params.needs_raw_mass())
    if not (params.may_filter() and has_room and of_one_draw and _pdl(device, config)):
        return 0
    return batch if batch <= multiprocessors(device) else 0


def _room(step: SampleInputs, config: Config, records: Records | None, ahead: int) -> Room:
    """Of ``pick`` behind a kernel that has drawn."""
    params, batch, device = step.params, len(step.hidden_states), step.hidden_states.device
    programs, chunks = _programs(params, batch, device, records), 4 * -(-step.vocab_size // 128)
    size = _candidates(params, batch, programs, chunks, config, ahead)
    return Room(torch.empty(size, dtype=torch.int32, device=device), programs, ahead)


def room_of(step: SampleInputs, config: Config = CONFIG) -> Room:
    """For ``pick``, to be made before the kernel that it follows is launched: of made-up rows it draws in here, while
    that kernel runs (``logits_ahead``)."""
    return _room(step, config, None, _ahead(step, config))


def pick(
    step: SampleInputs,
    block_stats: BlockStats,
    drawn: Tensor,
    config: Config = CONFIG,
    records: Records | None = None,
    room: Room | None = None,
) -> SampleResult:
    """The second launch alone, behind a kernel that wrote ``SampleInputs.logits``, (B, V) float32 with rows a multiple
    of 16 bytes apart, to which nothing is left to do but filters: no head, mask, bias or penalty. Beside floors a
    row lies by chunks: its token t at ``logits_source.place_in_memory``, in 128 * ceil(V / 128) floats. ``drawn`` (B
    * num_samples,) int64: the tokens that all rows have without filters, -1 of undefined ones, or ``DEFERRED_DRAW``
    of a row that has a top-k, is not greedy, and whose temperature does not make a finite number of an infinity.
    ``records`` is written to, and needs ``block_stats.sums``. ``room``: ``room_of`` the step, not beside
    ``records``; None: of its own, and nothing is drawn ahead."""
    params, logits = step.params, step.logits
    assert logits is not None
    wants_raw = params.needs_raw_mass()
    assert block_stats.sums is not None or not (records is not None or params.needs_mass(step.vocab_size))
    assert block_stats.raw_sums is not None or not wants_raw
    assert block_stats.floors is None or not (wants_raw or records is not None)
    assert block_stats.keys.shape[1] == 4 * -(-step.vocab_size // 128)
    assert room is None or (records is None and room.ahead in (0, len(logits)))
    raw_keys = block_stats.keys if wants_raw else None
    told = (block_stats.keys, block_stats.sums, raw_keys, block_stats.raw_sums if wants_raw else None, drawn, None)
    common = _arguments(step, told, 1)
    flags = _flags(params, _pdl(logits.device, config), config, records is not None)
    room = room or _room(step, config, records, 0)
    return _launch_pick(step, common, room, flags, True, 1, config, records, block_stats.floors)


def _launch_pick(
    step: SampleInputs,
    common: tuple[Any, ...],
    room: Room,
    flags: dict[str, Any],
    drawn: bool,
    blocks: int,
    config: Config,
    records: Records | None = None,
    floors: Tensor | None = None,
) -> SampleResult:
    params, batch, device = step.params, common[0].shape[0], room.candidates.device
    if params.needs_raw_mass():
        ids, values, beside = _beside(step, batch, device)
    else:  # what costs the host least: one allocation
        ids, values, beside = (
            torch.empty(batch * step.num_samples, dtype=torch.int64, device=device),
            None,
            _NOTHING_BESIDE,
        )
    by_top_k, by_top_p, by_min_p = params.filters()
    filtered_sample_kernel[(batch + room.ahead, room.programs)](
        *common,
        floors,
        params.joint_top_p if isinstance(params.joint_top_p, Tensor) and flags["JOINT"] else None,
        room.candidates,
        ids,
        *beside,
        room.ahead,
        None if records is None else records.limits,
        None if records is None else records.masses,
        **flags,
        TOP_K=by_top_k,
        TOP_P=by_top_p,
        MIN_P=by_min_p,
        DRAWN=drawn,
        **_shapes(step.vocab_size, blocks, config),
        launch_pdl=flags["PDL"],
    )
    return SampleResult(ids, values)


_NOTHING_BESIDE = (None, None, None, None, None, 0, None, 0, None, 0, None)  # as ``_beside``'s


def _beside(step: SampleInputs, batch: int, device: torch.device) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Room for ids and for values, and what the kernel is told of what is asked for beside tokens."""
    params = step.params
    places = layout(batch, step.num_samples, params)
    ids = torch.empty(places.num_ids, dtype=torch.int64, device=device)
    # of some that may be none, as logprob_ids (B, 0), the kernel has the address
    values = torch.empty(places.num_values, dtype=torch.float32, device=device)
    given = contiguous_rows(params.logprob_ids)

    def part(tensor: Tensor, name: str) -> Tensor | None:
        where = (places.ids if tensor is ids else places.values).get(name)
        return None if where is None else tensor[where.first :]

    return (
        ids,
        values,
        (
            part(values, "logprobs"),
            part(values, "processed_logprobs"),
            part(ids, "ranks"),
            part(ids, "top_token_ids"),
            part(values, "top_logprobs"),
            params.top_logprobs,
            given,
            0 if given is None else given.stride(0),
            part(values, "given_logprobs"),
            0 if given is None else given.shape[1],
            part(values, "logsumexp"),
        ),
    )


@functools.cache  # which most calls share: to make it costs the host 3 us
def _shapes(vocab_size: int, blocks: int, config: Config) -> dict[str, int]:
    """What ``filtered_sample_kernel`` is compiled for, of a vocabulary."""
    chunks = 4 * -(-vocab_size // 128)
    width = min(config.width, next_power_of_2(chunks))
    return {
        "BLOCKS": next_power_of_2(blocks),
        "WIDTH": width,
        "PARTS": -(-chunks // width),
        "LIST": _list_length(chunks, config),
        "ID_BITS": vocab_size.bit_length(),
        "FEW": config.few,
        "CAPACITY": config.capacity,
        "TILE": config.tile,
        "WHOLE_TILE": config.whole_tile,
        "GATHERED": config.gathered,
        "AT_FIRST": config.at_first,
        "num_warps": config.pick_warps,
        "maxnreg": config.pick_registers,
    }
