"""``RequestPool``: the seeds, offsets and parameters of requests in slots on the device, for continuous batching."""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from .backends import runs_small_kernels
from .param_parsers import BatchShape
from .row_params import Array, Integers, Reals, dimensions, integer, integers, reals
from .sampling_params import DEFAULT_PARAMS, PENALTIES, ROW_FIELDS, SamplingParams, parse_sampling_params
from .token_counts import CountedSlots, TokenCounts

Slots: TypeAlias = Tensor | Sequence[int] | Array
_CPU = torch.device("cpu")
_MATRICES = ("logit_bias", "token_mask")
_BITS = {name: 1 << i for i, name in enumerate((*ROW_FIELDS, *_MATRICES))}  # flags of a request's parameters
_FREE = -(2**31)  # the flag of a slot without a request
_BIAS_ENTRIES = 300  # of a request, at most
_OFF_BELOW_0 = ("top_k", "top_n_sigma")  # a value below 0 is as good as 0


class PoolBatch(NamedTuple):
    """The requests of a batch, as ``sample`` takes them."""

    rows: Tensor  # (B,) int64: each row's slot; 0 where it has no request
    seed: Tensor  # (B,) int64; 0 where there is no request, as ranks compare it
    offset: Tensor  # (B,) int64; likewise
    temperature: Tensor  # (B,) float32; NaN where there is no request, so that the row has no token
    options: dict[str, Any]  # sampling parameters by name


class RequestPool(nn.Module):
    """Slots for requests: the seed, the offset and the sampling parameters of each, on the device.

    A serving engine admits a request to a free slot when it begins and releases the slot when it ends. In between the
    host writes nothing: a step takes the slots of its batch, ``sampler(hidden_states, slots=slots)``, reads parameters
    and advances offsets and token counts on the device. A slot's tokens are those of its request run alone.

    Slots may come in any order. -1 is padding: the row's token is -1 and nothing advances. So is that of a slot that is
    out of range, free, or in an earlier row of the batch; where the host sees the slots these are errors instead.

    A step takes the parameters that any request of the pool has. A captured CUDA graph takes those of its capture: a
    row whose request has others gets -1. ``params_in_use`` says which graph a batch needs. ``reserve`` names parameters
    ahead of the requests that have them; without it ``torch.compile`` makes a graph for each set.

    Row b of a call without ``slots`` has the seed and the offset of slot b, and no other parameter of its request.

    Args:
        max_requests: number of slots, at most 2**31 - 1.
        vocab_size: number of tokens.
        device: None is torch's default.
        needs_seeds: whether ``admit`` must be given seeds, as ranks must: each would draw others.

    Attributes:
        seeds: (max_requests,) int64.
        offsets: (max_requests,) int64: tokens drawn so far.

    Raises:
        ValueError: a size is out of range.

    Example:
        >>> import torch, flashsampling
        >>> lm_head = torch.nn.Linear(8, 1000, bias=False)
        >>> sampler = flashsampling.LMHeadSampler(lm_head, max_batch_size=4)
        >>> sampler.pool.admit([2, 0], seed=[7, 8], temperature=[0.8, 0.0], top_p=[0.9, 1.0])
        >>> sampler(torch.zeros(3, 8), slots=[0, -1, 2]).token_ids
        tensor([  0,  -1, 155])
        >>> sampler.pool.release(0)
        >>> sampler.pool.live
        [2]
    """

    seeds: Tensor
    offsets: Tensor
    words: Tensor  # (W, S) int32: flags, bits of the temperature, then ``ROW_FIELDS`` or their bits
    matrices: Tensor | None  # (S, 2 n + M) int32: n ids and bits of n values of the bias, token mask; None: not needed

    def __init__(
        self,
        max_requests: int,
        vocab_size: int,
        device: torch.device | str | None = None,
        *,
        needs_seeds: bool = False,
    ) -> None:
        super().__init__()
        self.max_requests = _size("max_requests", max_requests, 2**31 - 1)
        self.vocab_size = _size("vocab_size", vocab_size, 2**31 - 1)
        self.needs_seeds = needs_seeds
        with torch.inference_mode(False):  # an inference tensor could not be written outside
            words = torch.zeros((2 + len(ROW_FIELDS), self.max_requests), dtype=torch.int32, device=device)
            words[0] = _FREE
            seeds, offsets = (torch.zeros(self.max_requests, dtype=torch.int64, device=device) for _ in range(2))
        self.register_buffer("seeds", seeds, persistent=False)
        self.register_buffer("offsets", offsets, persistent=False)
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("matrices", None, persistent=False)
        self.counts: TokenCounts | None = None
        self._live: dict[int, int] = {}  # flags by slot
        self._reserved = self._flags = 0
        self._is_compiled = False

    @property
    def live(self) -> list[int]:
        """The slots that hold a request, in the order of their admission."""
        return list(self._live)

    @property
    def params_in_use(self) -> frozenset[str]:
        """The parameters that steps take: those that a request has or that are reserved."""
        return frozenset(name for name in _BITS if self.takes(name))

    def takes(self, *names: str) -> bool:
        """Returns whether steps take one of these parameters."""
        return any(self._flags & _BITS[name] for name in names)

    def reserve(self, *names: str) -> None:
        """Makes steps take parameters from now on, whether or not a request has them.

        Raises:
            ValueError: the pool has no such parameter.
        """
        unknown = [name for name in names if name not in _BITS]
        if unknown:
            raise ValueError(f"names must be of {', '.join(_BITS)}, got {unknown[0]!r}")
        self._reserved |= sum({_BITS[name] for name in names})
        self._make_tables(names)
        self._update({})

    def admit(
        self,
        slots: Slots | int,
        *,
        seed: Integers | None = None,
        offset: Integers = 0,
        temperature: Reals = 1.0,
        prompt_token_ids: Any = None,
        logit_bias: tuple[Any, Any] | None = None,
        token_mask: Tensor | None = None,
        repetition_penalty: Reals | None = None,
        frequency_penalty: Reals | None = None,
        presence_penalty: Reals | None = None,
        top_k: Integers | None = None,
        top_p: Reals | None = None,
        min_p: Reals | None = None,
        joint_top_p: bool | Sequence[bool] | Tensor | None = None,
        epsilon_cutoff: Reals | None = None,
        top_n_sigma: Reals | None = None,
    ) -> None:
        """Begins requests in free slots.

        Args:
            slots: one slot or k of them, known to the host.
            seed: one per slot; None draws them from torch's default generator.
            offset: number of tokens that the requests have drawn: one number, or k.
            temperature, repetition_penalty, ..., top_n_sigma: as in ``flashsampling.sample``: one number, or k, on the
                CPU.
            prompt_token_ids: as in ``TokenCounts.reset``: the tokens that the repetition penalty counts as prompt. Only
                read if a request of the pool has a penalty.
            logit_bias: ids and values, (k, n) each on the CPU, or (n,) for all, n up to 300; -1 is no entry.
            token_mask: (k, ceil(V / 32)) int32 on the CPU, or one row for all.

        Raises:
            TypeError, ValueError: an argument does not fit, or a slot is not free; no slot has changed then.
        """
        options: dict[str, Any] = {
            "logit_bias": logit_bias, "token_mask": token_mask, "repetition_penalty": repetition_penalty,
            "frequency_penalty": frequency_penalty, "presence_penalty": presence_penalty, "top_k": top_k,
            "top_p": top_p, "min_p": min_p, "joint_top_p": joint_top_p, "epsilon_cutoff": epsilon_cutoff,
            "top_n_sigma": top_n_sigma,
        }  # fmt: skip
        places = self._parse_slots(slots)
        for slot in places:
            if slot in self._live:
                raise ValueError(f"slot {slot} holds a request; release it first")
        if isinstance(logit_bias, Tensor):
            raise TypeError("logit_bias must be a pair of ids and values, got a tensor")
        count = len(places)
        seeds = self._parse_seeds(seed, count)
        offsets = _column(integers("offset", offset, count, _CPU), count, torch.int64)
        temperatures = _column(reals("temperature", temperature, count, _CPU), count, torch.float32)
        no_counts = torch.empty((1, self.vocab_size), dtype=torch.int32, device=_CPU).expand(count, -1)
        shape = BatchShape(count, self.vocab_size, self.vocab_size, _CPU, 1)
        params = parse_sampling_params({**options, "token_counts": no_counts}, shape)
        words, matrices = self._pack(params, temperatures)
        flags = words[0].tolist()
        self._make_tables([name for name, bit in _BITS.items() if any(bit & flag for flag in flags)])
        index, longs, columns = self._upload(
            torch.tensor(places, dtype=torch.int64, device=_CPU), torch.stack([seeds, offsets]), words
        )
        with torch.inference_mode(False):
            if self.counts is not None:
                self.counts.reset(index, prompt_token_ids)
            if self.matrices is not None:
                (self.matrices[index],) = self._upload(matrices)
            self.seeds[index], self.offsets[index] = longs
            self.words[:, index] = columns
        self._update(dict(zip(places, flags)))

    def release(self, slots: Slots | int) -> None:
        """Ends the requests of some slots.

        Raises:
            TypeError, ValueError: an argument does not fit, or a slot is free; no slot has changed then.
        """
        places = self._parse_slots(slots)
        self._require_live(places)
        (index,) = self._upload(torch.tensor(places, dtype=torch.int64, device=_CPU))
        self.words[0, index] = _FREE
        for slot in places:
            del self._live[slot]
        self._update({})

    def read(self, slots: Slots, advance: int) -> PoolBatch:
        """Returns the requests of a batch and advances their offsets, in one small launch on a GPU.

        Args:
            slots: (B,) int32 or int64, B up to ``max_requests``.
            advance: tokens that each request draws.

        Raises:
            TypeError, ValueError: ``slots`` does not fit, or the host sees one that holds no request, or twice.
        """
        slots = self._check_slots(slots)
        counts = self.counts.read(self.max_requests) if self.counts is not None and self.takes(*PENALTIES) else None
        width = 0  # of ``matrices``
        if self.matrices is not None and self.takes(*_MATRICES):
            width = self.matrices.shape[1] if self.takes("token_mask") else 2 * _BIAS_ENTRIES
        if slots.shape[0] > 0 and runs_small_kernels(slots):
            from .kernels.triton.request_pool import read_slots

            tables = self.seeds, self.offsets, self.words, self.matrices
            rows, seeds, offsets, words, matrices = read_slots(slots, *tables, width, ~self._flags, advance)
        else:
            slots = slots.long()
            again = (slots[:, None] == slots[None, :]).tril(-1).any(1)  # in an earlier row
            there = (slots >= 0) & (slots < self.max_requests) & ~again
            rows = torch.where(there, slots, 0)
            words = self.words.index_select(1, rows)
            there = there & (words[0] & ~self._flags == 0)
            words[1] = torch.where(there, words[1].view(torch.float32), torch.nan).view(torch.int32)
            seeds, offsets = (torch.where(there, x.index_select(0, rows), 0) for x in (self.seeds, self.offsets))
            matrices = None if self.matrices is None else self.matrices[:, :width].index_select(0, rows)
            self.offsets.index_add_(0, rows, there.long() * advance)
        options = self._options(words, matrices)
        if counts is not None:
            options["token_counts"] = CountedSlots(*counts, rows)
        return PoolBatch(rows, seeds, offsets, words[1].view(torch.float32), options)

    def finish(self, batch: PoolBatch, token_ids: Tensor, advance: Tensor | None = None) -> None:
        """Counts the tokens (B,) or (B, n) of a batch where a request has a penalty; -1 is none. Advances its offsets
        by ``advance`` (B,)."""
        if advance is not None:
            self.offsets.index_add_(0, batch.rows, advance)
        if self.counts is not None and self.takes(*PENALTIES):
            self.counts.add_to_rows(token_ids if token_ids.ndim == 2 else token_ids[:, None], batch.rows)

    # -- what the host knows

    def _update(self, admitted: Mapping[int, int]) -> None:
        self._live.update(admitted)
        self._flags = functools.reduce(operator.or_, self._live.values(), self._reserved)

    def _parse_slots(self, slots: Slots | int) -> list[int]:
        """Returns slots that the host knows, each once and in range."""
        if isinstance(slots, Tensor) and slots.device.type != "cpu":
            raise TypeError(f"slots must be known to the host here, got a tensor on {slots.device}")
        places = _listed(slots) if dimensions(slots) else [integer("slots", slots)]  # type: ignore[arg-type]
        for slot in places:
            if not 0 <= slot < self.max_requests:
                raise ValueError(f"slots must be from 0 to max_requests - 1 = {self.max_requests - 1}, got {slot}")
        if len(set(places)) < len(places):
            raise ValueError(f"slots must differ, got {places}")
        return places

    def _require_live(self, places: Sequence[int]) -> None:
        for slot in places:
            if slot not in self._live:
                raise ValueError(f"slot {slot} holds no request")

    def _check_slots(self, slots: Slots) -> Tensor:
        """Returns (B,) int32 or int64 on the device. Slots that the host sees are checked."""
        device = self.words.device
        if isinstance(slots, Tensor) and slots.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"slots must be int32 or int64, got {slots.dtype}")
        if not isinstance(slots, Tensor) or (slots.device.type == "cpu" and not torch.compiler.is_compiling()):
            slots = torch.tensor(_listed(slots), dtype=torch.int64, device=_CPU)
            self._require_live(self._parse_slots([slot for slot in slots.tolist() if slot != -1]))
            (slots,) = self._upload(slots)
        if slots.ndim != 1 or slots.shape[0] > self.max_requests:
            wanted = f"(B,), B up to max_requests = {self.max_requests}"
            raise ValueError(f"slots must have shape {wanted}, got shape {tuple(slots.shape)}")
        if slots.device != device:
            raise ValueError(f"slots must be on the device of the pool, {device}, got {slots.device}")
        return slots.contiguous()

    def _parse_seeds(self, seed: Integers | None, count: int) -> Tensor:
        if seed is None:
            if self.needs_seeds:
                raise ValueError("seed must be given with tp: all ranks need the same")
            return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, device=_CPU)
        given = len(seed) if dimensions(seed) else 1  # type: ignore[arg-type]
        if given != count:  # one seed for several requests would give them the same noise
            raise ValueError(f"seed must be one per slot, {count} of them, got {given}")
        return _column(integers("seed", seed, count, _CPU), count, torch.int64)

    def _upload(self, *tensors: Tensor) -> list[Tensor]:
        """Returns tensors of the CPU on the device. The host does not wait for the device's work."""
        device = self.words.device
        return [(x.pin_memory() if device.type == "cuda" else x).to(device, non_blocking=True) for x in tensors]

    # -- tables

    def _pack(self, params: SamplingParams, temperatures: Tensor) -> tuple[Tensor, Tensor]:
        """Returns columns of ``words`` and rows of ``matrices``, on the CPU."""
        count = len(temperatures)
        flags = torch.zeros(count, dtype=torch.int32, device=_CPU)
        words = [flags, temperatures.view(torch.int32)]
        for name in ROW_FIELDS:
            default = getattr(DEFAULT_PARAMS, name)
            of_reals = isinstance(default, float)
            column = _column(getattr(params, name), count, torch.float32 if of_reals else torch.int64)
            if name in _OFF_BELOW_0:
                column = column.clamp(min=0)  # a NaN stays
            if name == "top_k":
                column = torch.where(column < self.vocab_size, column, 0)
            flags += torch.where(column != default, _BITS[name], 0).to(torch.int32)
            words.append(column.view(torch.int32) if of_reals else column.to(torch.int32))
        entries = _BIAS_ENTRIES
        matrices = torch.full((count, self._width), -1, dtype=torch.int32, device=_CPU)
        if params.bias_ids is not None and params.bias_values is not None:
            most = params.bias_ids.shape[1]
            if most > entries:
                raise ValueError(f"logit_bias must have at most {entries} entries per request, got {most}")
            flags += _BITS["logit_bias"]
            matrices[:, :most] = params.bias_ids
            matrices[:, entries : entries + most] = params.bias_values.view(torch.int32)
        if params.token_mask is not None:
            flags += _BITS["token_mask"]
            matrices[:, 2 * entries :] = params.token_mask[:, : matrices.shape[1] - 2 * entries]
        return torch.stack(words), matrices

    @property
    def _width(self) -> int:
        return 2 * _BIAS_ENTRIES + -(-self.vocab_size // 32)

    def _make_tables(self, names: Sequence[str]) -> None:
        """Makes the tables of some parameters, and compiles the kernel that reads slots, if that was not done."""
        device = self.words.device
        with torch.inference_mode(False):
            if self.counts is None and set(PENALTIES) & set(names):
                self.counts = TokenCounts(self.max_requests, self.vocab_size, device)
            if self.matrices is None and set(_MATRICES) & set(names):
                shape = self.max_requests, self._width
                self.matrices = torch.full(shape, -1, dtype=torch.int32, device=device)
        if not self._is_compiled:
            self._is_compiled = True
            for dtype in (torch.int32, torch.int64):
                self.read(torch.full((1,), -1, dtype=dtype, device=device), 0)

    def _options(self, words: Tensor, matrices: Tensor | None) -> dict[str, Any]:
        """Returns the parameters that the step takes, of columns of ``words`` and rows of ``matrices``."""
        options: dict[str, Any] = {}
        for number, name in enumerate(ROW_FIELDS if self._flags else (), 2):
            if self.takes(name):
                of_reals = isinstance(getattr(DEFAULT_PARAMS, name), float)
                options[name] = words[number].view(torch.float32) if of_reals else words[number]
        entries = _BIAS_ENTRIES
        if matrices is not None and self.takes("logit_bias"):
            options["logit_bias"] = matrices[:, :entries], matrices[:, entries : 2 * entries].view(torch.float32)
        if matrices is not None and self.takes("token_mask"):
            options["token_mask"] = matrices[:, 2 * entries :]
        return options

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RequestPool":
        super()._apply(fn, recurse)
        if self.counts is not None:
            self.counts.apply(fn)
        return self


def _listed(slots: Any) -> list[int]:
    """Returns the integers of a tensor, an array or a sequence."""
    listed = slots.tolist() if hasattr(slots, "tolist") else slots
    if not isinstance(listed, Sequence) or isinstance(listed, (str, bytes)):
        raise TypeError(f"slots must be integers, one per row, got {type(slots).__name__}")
    return [integer("slots", slot) for slot in listed]


def _size(name: str, value: int, most: int) -> int:
    size = integer(name, value)
    if not 1 <= size <= most:
        raise ValueError(f"{name} must be from 1 to {most}, got {size}")
    return size


def _column(value: Tensor | float, count: int, dtype: torch.dtype) -> Tensor:
    """Returns (k,) on the CPU of a number or a tensor."""
    return value.to(dtype) if isinstance(value, Tensor) else torch.full((count,), value, dtype=dtype, device=_CPU)
