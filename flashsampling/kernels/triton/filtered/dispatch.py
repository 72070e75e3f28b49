"""Launches the filtered kernels: tokens, log-probabilities and records from logits in memory, without sorting.

    block_stats_kernel      reads every logit once: statistics of blocks of 32 tokens, processed logits where a request
                            or the LM head changes them, draws of rows without filters
    filtered_sample_kernel  a program per row: the candidates of the blocks that can hold a kept token, or the row where
                            they do not fit, the prefix that is kept of them, a token
    logprobs_kernel         where log-probabilities, ranks or likeliest tokens are requested

The Hopper kernel writes block statistics and draws rows without filters itself: ``draw`` launches what follows it.

Every parameter is a value at run time, so five compiled kernels serve all requests of a dtype of logits: three forms of
the first (no statistics, no transforms, both), one of each other. Which blocks a row has depends on the vocabulary's
size alone and masses are integers, so a row's result is the same bits in any batch. Scratch memory per row: 12 bytes
per block, 16 more where raw log-probabilities are requested, 4 bytes per token where logits change, and candidates:
32 to 256 KB, 16 MB a step where 32 KB a row do not take more. Blocks of 64 tokens would save 3 % of what is written,
and twice as much would be read for a candidate; a Hopper kernel has 32 of a row in one thread.

Rejected, with their figures on an H200, V=151936 D=4096: rare rows in a kernel of their own, 4 to 7 us a step; no
comparison of each of a few candidates with each, 4 us at one row and 15 at 64 for a top-k; a dummy row that each
program draws first, to bring instructions to the caches, -1 to +12 us.
"""

import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....exchange_protocol import WHOLE
from ....inputs import SampleInputs, row_argument
from ....outputs import SampleResult, layout
from ....sampling_params import DEFAULT_PARAMS, SamplingParams, head_numbers
from ...device import capability
from ..fused.config import device_unsupported
from ..jit import compiling, only_compiles
from .block_stats_kernel import StatsOutputs, block_stats_kernel
from .draw import Draws
from .filtered_sample_kernel import filtered_sample_kernel
from .kept_kernel import kept_kernel
from .logit_source import StoredLogits
from .logprobs_kernel import LogprobOutputs, logprobs_kernel
from .transforms import Filters, HeadTransform, RequestTransforms, Rows

_TILES = 256  # that the second launch reads: 2**20 tokens, the most that have filters, by 4096
_CANDIDATES = 1 << 21  # of a step, where 4096 a row do not take more


@dataclass(frozen=True)
class Config:
    """Shapes of the launches. No result depends on them."""

    columns: int = 512  # Philox groups side by side in ``block_stats_kernel``
    reps: int = 2  # rows of columns in a tile
    stats_warps: int = 4
    stats_registers: int = 128  # per thread
    width: int = 1024  # blocks side by side
    capacity: int = 32768  # candidates of a row, at most
    gathered: int = 64  # blocks that are read at once
    many: int = 512  # blocks from which on a nucleus' cutoff is guessed
    tile: int = 512  # tokens at a time
    ways: int = 8  # thresholds at a time
    warps: int = 16
    registers: int = 128
    pdl: bool = True  # a launch begins before the previous one's end, where the device can (sm_90)

    @property
    def block(self) -> int:
        """Tokens of a tile."""
        return 4 * self.columns * self.reps


CONFIG = Config()


class BlockStats(NamedTuple):
    """A kernel's statistics of a row's blocks (``order.first_token_of``), of which there are 4 * ceil(V / 128)."""

    keys: Tensor  # (B, blocks) int32: ``order.key_of`` the highest logit; that of -inf where there is no token
    # (B, blocks) float32: sums of exp2((x - the highest) * ``mass_scale(temperature)``), beside an infinite x the
    # number of infinite ones; None where no row has a top-p of all tokens, and no log-probabilities are requested.
    # Beside ``cutoffs`` those of rows with a top-k may be anything, unless a top-p takes its share of all tokens
    sums: Tensor | None = None
    raw_sums: Tensor | None = None  # likewise at temperature 1; None where no log-sum-exp is needed
    # (B,) int32: blocks with a lower key were not stored. None: all are, as log-probabilities and records need. At most
    #     top-k, 0 < k < V    the key of rank k + k // 4 + 9 among the first 1024; the lowest int32 if there are fewer
    #     min-p, no top-k     ``candidates.min_p_cutoff``
    #     top-p alone         the lowest int32
    #     no filter           the highest int32, as of rows whose tokens are known without logits: a temperature below
    #                         1e-6 or NaN, a highest logit that is NaN or infinite, a top-p or min-p of NaN, a token -1
    #                         in ``drawn``; but of an infinite one, not where ``drawn`` has ``DEFERRED_DRAW``
    cutoffs: Tensor | None = None


def unsupported(step: SampleInputs) -> str | None:
    """Returns why it cannot do a step, or None."""
    logits = step.logits
    if logits is None:
        return "it takes logits, not hidden states and a weight"
    if step.shard != WHOLE:
        return "a shard of a vocabulary: it knows whole ones"
    reason = device_unsupported(logits.device)
    if reason is None and logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        reason = f"logits of {logits.dtype}"
    return reason or step.too_wide_to_filter()


def contiguous_rows(matrix: Tensor | None) -> Tensor | None:
    """Returns a matrix whose rows may lie any distance apart, but not their elements."""
    return matrix if matrix is None or matrix.shape[1] <= 1 or matrix.stride(1) == 1 else matrix.contiguous()


class Records(NamedTuple):
    """The records of rows, which rejection and log-probabilities read: ``draw.write_record``."""

    limits: Tensor  # (B,) int64
    masses: Tensor  # (B, 4) float32


def empty_records(batch: int, device: torch.device) -> Records:
    """Allocates records to write."""
    limits = torch.empty(batch, dtype=torch.int64, device=device)
    return Records(limits, torch.empty((batch, 4), dtype=torch.float32, device=device))


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def head_transform(params: SamplingParams) -> HeadTransform:
    """Returns the LM head's transform as kernels take it."""
    return HeadTransform(_address(params.bias), *map(float, head_numbers(params)))  # type: ignore[call-arg]


_NO_HEAD_TRANSFORM = head_transform(DEFAULT_PARAMS)


def request_transforms(params: SamplingParams) -> tuple[RequestTransforms, tuple[Tensor | None, ...]]:
    """Returns the request's transforms as kernels take them, and the tensors that must live until the launch."""
    if params.dense_bias is params.bias_ids is params.counts is params.token_mask is None:
        return _NO_REQUEST_TRANSFORMS, ()
    count = 0 if params.bias_ids is None else params.bias_ids.shape[1]
    ids, values = (contiguous_rows(part) if count else None for part in (params.bias_ids, params.bias_values))
    counts, mask = contiguous_rows(params.counts), contiguous_rows(params.token_mask)

    def stride(matrix: Tensor | None) -> int:
        return 0 if matrix is None else matrix.stride(0)

    transforms = RequestTransforms(
        _address(params.dense_bias), _address(ids), _address(values), count, stride(ids), stride(values),
        _address(counts), stride(counts), _address(mask), stride(mask), *row_argument(params.repetition_penalty),
        *row_argument(params.frequency_penalty), *row_argument(params.presence_penalty),
        _address(params.counts_rows),
    )  # fmt: skip
    return transforms, (ids, values, counts, mask)


_NO_REQUEST_TRANSFORMS = RequestTransforms(*[0] * len(RequestTransforms._fields))


def changes_logits(head: HeadTransform, transforms: RequestTransforms) -> tuple[bool, bool]:
    """Returns whether the LM head's transform, and the request's, change logits."""
    return head != _NO_HEAD_TRANSFORM, any(transforms[:10])  # addresses, strides and the count


def rows_argument(step: SampleInputs) -> Rows:
    """Returns temperatures, seeds and offsets as kernels take them."""
    return Rows(*step.row_arguments())


def filters_argument(params: SamplingParams) -> Filters:
    """Returns the filters as kernels take them."""
    wide = not isinstance(params.top_k, Tensor) or params.top_k.dtype == torch.int64
    numbers: list[Any] = [part for value in params.filter_values().values() for part in row_argument(value)]
    return Filters(int(wide), *numbers)


def _pdl(device: torch.device, config: Config) -> bool:
    """Returns whether launches may overlap."""
    return config.pdl and device.type == "cuda" and capability(device) >= (9, 0)


class _Launches(NamedTuple):
    """The inputs that the launches after the block statistics share."""

    step: SampleInputs
    rows: Rows
    filters: Filters
    logits: Tensor  # (B, V) or by block, processed
    stored: StoredLogits
    raw_logits: Tensor
    raw_stored: StoredLogits
    winners: Tensor
    tiles: int
    config: Config


def _blocks(vocab_size: int) -> int:
    return 4 * -(-vocab_size // 128)


def run(step: SampleInputs, config: Config = CONFIG, records: Records | None = None) -> SampleResult:
    """Runs a step with logits. Writes ``records``."""
    return run_with_processed(step, config, records)[0]


_WORDS = 64  # of a kept set, at a time
_compiled: set[tuple[Any, ...]] = set()  # kinds of steps whose kernels exist


def run_with_processed(
    step: SampleInputs, config: Config = CONFIG, records: Records | None = None
) -> tuple[SampleResult, Tensor]:
    """Runs a step with logits. Returns its processed logits too, (B, V): the step's own where nothing changes them. The
    first step of a kind compiles its kernels in threads."""
    assert step.logits is not None
    kind = step.logits.device, step.logits.dtype, step.params.may_filter(), step.params.needs_raw_mass()
    if step.logits.is_cuda and kind not in _compiled and not only_compiles():
        with compiling(os.cpu_count() or 1):
            _run(step, config, records)
        _compiled.add(kind)
    return _run(step, config, records)


def _run(step: SampleInputs, config: Config, records: Records | None) -> tuple[SampleResult, Tensor]:
    params, vocab_size = step.params, step.vocab_size
    logits = contiguous_rows(step.logits)
    assert logits is not None
    batch, device = logits.shape[0], logits.device
    tiles, blocks = -(-vocab_size // config.block), _blocks(vocab_size)
    head = head_transform(params)
    transforms, _held = request_transforms(params)
    has_head, changes = changes_logits(head, transforms)
    wants_raw, wants_record = params.needs_raw_mass(), params.needs_records() or records is not None
    stride = -(-vocab_size // 4) * 4
    sizes = [
        2 * batch * step.num_samples * tiles,
        batch * blocks if params.may_filter() or wants_record else 0,
        batch * blocks if params.needs_mass(vocab_size) or wants_record else 0,
        batch * blocks if wants_raw else 0,
        batch * blocks if wants_raw else 0,
        batch * stride if has_head or changes else 0,
        batch * stride if has_head and changes and wants_raw else 0,
    ]
    sizes = [-(-size // 4) * 4 for size in sizes]  # all of them at 16 bytes
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    winners, keys, sums, raw_keys, raw_sums, processed, raw = (
        part if size else None for part, size in zip(parts, sizes)
    )
    outputs = StatsOutputs(
        _address(raw), _address(processed), stride, _address(keys), _address(sums), _address(raw_keys),
        _address(raw_sums), _address(winners),
    )  # fmt: skip
    rows, filters = rows_argument(step), filters_argument(params)
    block_stats(step, logits, rows, filters, head, transforms, outputs, config)
    best = parts[0]
    if tiles > _TILES:  # of a vocabulary that is too wide to filter
        best = best[: 2 * batch * step.num_samples * tiles].view(torch.int64).view(-1, tiles).amax(dim=1)
        tiles = 1

    def rows_of(store: Tensor) -> Tensor:
        return store.view(torch.float32).view(batch, stride)[:, :vocab_size]

    after = logits if processed is None else rows_of(processed)
    before = rows_of(raw) if raw is not None else logits if changes else after
    launches = _Launches(
        step, rows, filters, after, StoredLogits(after.stride(0), vocab_size, 0, _address(keys), _address(sums), 0),
        before, StoredLogits(before.stride(0), vocab_size, 0, _address(raw_keys), _address(raw_sums), 0),
        best, tiles, config,
    )  # fmt: skip
    return _launch_rows(launches, records), after


def block_stats(
    step: SampleInputs,
    logits: Tensor,
    rows: Rows,
    filters: Filters,
    head: HeadTransform,
    transforms: RequestTransforms,
    outputs: StatsOutputs,
    config: Config = CONFIG,
) -> None:
    """Launches ``block_stats_kernel``; it draws where ``outputs`` has winners, and transforms logits where it has
    logits."""
    tiles = -(-step.vocab_size // config.block)
    changes = (outputs.raw_at | outputs.processed_at) != 0
    stats = changes or outputs.keys_at != 0 or outputs.raw_keys_at != 0
    aligned = (logits.data_ptr() | logits.stride(0) | step.vocab_size) % 16 == 0
    block_stats_kernel[(logits.shape[0] * tiles,)](
        logits, logits.stride(0), step.vocab_size, head, transforms, rows, filters, outputs,
        step.num_samples if outputs.winners_at else 0, int(step.params.stream), tiles, 0,
        ALIGNED=aligned, STATS=stats, TRANSFORMS=changes, COLUMNS=config.columns, REPS=config.reps,
        PDL=_pdl(logits.device, config), num_warps=config.stats_warps, num_stages=1, maxnreg=config.stats_registers,
    )  # fmt: skip


def draw(
    step: SampleInputs,
    block_stats: BlockStats,
    drawn: Tensor,
    config: Config = CONFIG,
    records: Records | None = None,
) -> SampleResult:
    """Runs the launches behind a kernel that wrote ``SampleInputs.logits``, (B, V) float32 with rows a multiple of 16
    bytes apart, to which nothing is left to do but filters: no head, mask, bias or penalty. Beside cutoffs a row lies
    by blocks, in 128 * ceil(V / 128) floats (``logit_source``). ``drawn`` (B * num_samples,) int64: the tokens that all
    rows have without filters, -1 of undefined ones, or ``DEFERRED_DRAW`` of a row that has a top-k, is not greedy, and
    whose temperature does not make a finite number of an infinity. ``records`` is written to, and needs
    ``block_stats.sums``."""
    params, logits = step.params, step.logits
    assert logits is not None
    wants_raw = params.needs_raw_mass()
    assert block_stats.sums is not None or not (records is not None or params.needs_mass(step.vocab_size))
    assert block_stats.raw_sums is not None or not wants_raw
    assert block_stats.cutoffs is None or not (wants_raw or records is not None)
    assert block_stats.keys.shape[1] == _blocks(step.vocab_size)
    keys, sums, raw_sums, cutoffs = map(_address, block_stats)
    stored = StoredLogits(logits.stride(0), step.vocab_size, int(cutoffs != 0), keys, sums, cutoffs)
    raw_stored = StoredLogits(logits.stride(0), step.vocab_size, 0, keys, raw_sums, 0)
    launches = _Launches(
        step, rows_argument(step), filters_argument(params), logits, stored, logits, raw_stored, drawn, 0, config
    )
    return _launch_rows(launches, records)


def _launch_rows(launches: _Launches, records: Records | None) -> SampleResult:
    """Launches the kernels that have a program per row."""
    step, rows, filters, logits, stored, raw_logits, raw_stored, winners, tiles, config = launches
    params, batch, device, num_samples = step.params, logits.shape[0], logits.device, step.num_samples
    wants_raw = params.needs_raw_mass()
    places = layout(batch, num_samples, params) if wants_raw else None
    ids = torch.empty(batch * num_samples if places is None else places.num_ids, dtype=torch.int64, device=device)
    if records is None and params.needs_records():
        records = empty_records(batch, device)
    limits_at, masses_at = (0, 0) if records is None else (_address(records.limits), _address(records.masses))
    pdl = _pdl(device, config)
    draws = Draws(_address(winners), tiles, num_samples, int(params.stream), limits_at, masses_at)
    blocks = _blocks(step.vocab_size)
    capacity = min(config.capacity, max(_CANDIDATES // batch, 4096))
    candidates = torch.empty((batch, capacity), dtype=torch.int64, device=device)
    lists = torch.empty((2 if wants_raw else 1, batch, blocks), dtype=torch.int32, device=device)
    options = {"PDL": pdl, "num_warps": config.warps, "num_stages": 1, "maxnreg": config.registers, "launch_pdl": pdl}
    filtered_sample_kernel[(batch,)](
        logits, stored, rows, filters, draws, candidates, capacity, lists, ids,
        TILES=_TILES, WIDTH=config.width, GATHERED=config.gathered, MANY=config.many,
        TILE=config.tile, WAYS=config.ways, **options,
    )  # fmt: skip
    if places is None:
        return SampleResult(ids)
    values = torch.empty(places.num_values, dtype=torch.float32, device=device)
    scored = None if params.scored_ids is None else params.scored_ids.contiguous()
    given = contiguous_rows(params.logprob_ids)

    def address(tensor: Tensor, name: str) -> int:
        where = (places.ids if tensor is ids else places.values).get(name)
        return 0 if where is None else tensor.data_ptr() + where.first * tensor.element_size()

    outputs = LogprobOutputs(
        address(values, "logprobs"), address(values, "processed_logprobs"), address(ids, "ranks"),
        address(ids, "top_token_ids"), address(values, "top_logprobs"), params.top_logprobs, _address(given),
        0 if given is None else given.stride(0), address(values, "given_logprobs"),
        0 if given is None else given.shape[1], address(values, "logsumexp"),
        num_samples if scored is None else scored.shape[1], limits_at, masses_at,
    )  # fmt: skip
    logprobs_kernel[(batch, 2)](
        raw_logits, raw_stored, logits, stored, rows, outputs, candidates, capacity, lists,
        ids if scored is None else scored,
        WIDTH=config.width, GATHERED=config.gathered, TILE=config.tile, **options,
    )  # fmt: skip
    if params.kept_words:
        assert records is not None
        counts, words = (ids[places.ids[name].first :] for name in ("kept_counts", "kept_mask"))
        kept_kernel[(batch,)](
            logits, stored, rows, *records, counts, words, params.kept_words,
            WORDS=_WORDS, PDL=pdl, num_warps=4, launch_pdl=pdl,
        )  # fmt: skip
    return SampleResult(ids, values)
