"""``LMHeadSampler``: a module that replaces a model's ``lm_head`` and sampler."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, SupportsIndex

import torch
from torch import Tensor, nn

from .ops import count_skipped_call
from .outputs import SampleOutput
from .request_pool import PoolBatch, RequestPool, Slots
from .row_params import Integers, Reals, dimensions, finite, finite_from_0, integer, integers, real, reals, row_index
from .sampling import check_impl, check_tensor_parallel, check_vocab_size, check_weight, draw
from .sampling_params import PENALTIES, SamplingOptions, unexpected_argument, with_sampling_options
from .speculative.verification import VerifyOutput, verify

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing's from Python 3.11 on; torch installs this package

    from .integrations.transformers.head import HeadPlace
    from .tensor_parallel import TensorParallel


_SET_ONCE = ("weight", "vocab_size", "impl", "tp")  # set by the constructor, so calls do not take them


class _RowState(NamedTuple):
    """Parameters of some rows: one value for all, or a tensor (rows,)."""

    seeds: Tensor  # (rows,) int64, always
    offset: Tensor | int
    temperature: Tensor | float | None  # None: unchanged


class LMHeadSampler(nn.Module):
    """An LM head that returns token ids instead of logits.

    It keeps a seed and an offset for each row of the batch on the device and advances the offsets, so a step needs
    nothing from the host: a CUDA graph can capture it, and every replay draws new tokens; ``torch.compile`` traces it
    without a graph break. A row's tokens depend on its own seed, offset and hidden states. A request that is reset to
    the same seed draws the same tokens in any row and any batch.

    The weight stays the LM head's. The sampler reads ``lm_head.weight`` at every call, so it follows a replacement of
    that parameter (``load_state_dict(assign=True)``, FSDP). The weight is saved, named and optimised as the LM head's
    alone: checkpoints are the same with and without a sampler. ``sampler.to(...)`` also moves the LM head. A bare
    ``nn.Parameter`` is shared as tied embeddings are, and not saved; replacing it needs a new sampler. A sampler of
    ``from_model`` refuses its next call if the model has another LM head by then.

    Args:
        lm_head: an ``nn.Linear``, or its weight (V, D), on the device, loaded, neither quantised nor a DTensor. It is
            shared, not copied: tied embeddings stay tied. A linear layer's bias is used. The sampler does not see what
            a model does to its logits besides: soft caps (Gemma 2) and scales (Cohere, Granite), which are given here,
            hooks, adapters. ``from_model`` finds the first two and refuses the others.
        max_batch_size: number of rows.
        seed: one integer, from which every row gets its own seed; or max_batch_size integers, the seeds themselves;
            None draws seeds from torch's default generator.
        temperature: default of ``forward``: one number, or max_batch_size of them.
        vocab_size: number of tokens, if the weight is padded.
        logit_scale, soft_cap: as in ``flashsampling.sample``, for every call that passes no others. In a call 1 and 0
            switch them off, None does not.
        impl: as in ``flashsampling.sample``.
        tp: a ``flashsampling.tensor_parallel.TensorParallel``; ``lm_head`` is then this rank's shard, and so is its
            bias. Seeds, offsets and temperatures that are given here and to ``reset`` are the first rank's on all
            ranks, so the constructor and ``reset`` are collective calls with one exchange each. Arguments of
            ``forward`` are not broadcast, which would cost an exchange per token: all ranks pass the same.

    ``seed``, ``offset`` and ``temperature`` take Python and numpy numbers, lists, tuples, numpy arrays and tensors,
    here and in ``reset`` and ``forward``.

    Raises:
        TypeError: an argument has the wrong type or dtype; ``lm_head`` is neither an ``nn.Linear`` nor a tensor, or its
            weight is quantised, sparse or a DTensor.
        ValueError: the weight is on the meta device, or a shape or range does not fit; with ``tp`` also if that happens
            on another rank, which is named, or if ``max_batch_size`` differs.

    Example:
        >>> import torch, flashsampling
        >>> lm_head = torch.nn.Linear(8, 1000, bias=False)
        >>> sampler = flashsampling.LMHeadSampler(lm_head, max_batch_size=4, seed=[0, 1, 2, 3], temperature=0.8)
        >>> hidden_states = torch.zeros(3, 8)  # all of 1000 tokens are equally likely
        >>> sampler(hidden_states).token_ids
        tensor([414, 777, 916])
        >>> sampler(hidden_states).token_ids
        tensor([142, 392, 169])
        >>> sampler.reset(seed=[0], rows=[2])  # a new request in row 2, with the seed of row 0
        >>> sampler(hidden_states).token_ids
        tensor([992, 731, 414])
        >>> sampler.offsets
        tensor([3, 3, 1, 0])
    """

    pool: RequestPool  # of max_batch_size slots; slot b's seed and offset are those of row b
    _place: "HeadPlace | None" = None  # set by ``from_model``

    def __init__(
        self,
        lm_head: nn.Linear | Tensor,
        *,
        max_batch_size: SupportsIndex = 256,
        seed: Integers | None = None,
        temperature: Reals = 1.0,
        vocab_size: int | None = None,
        logit_scale: float = 1.0,
        soft_cap: float = 0.0,
        impl: str | None = None,
        tp: "TensorParallel | None" = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.impl = impl
        self.tp = tp

        def parse() -> _RowState:
            self.max_batch_size = self._adopt(lm_head, max_batch_size)
            self._set_transform(logit_scale, soft_cap)
            device = self.weight.device
            rows = reals("temperature", _to(device, temperature), self.max_batch_size, device)
            if not isinstance(rows, Tensor) and dimensions(temperature):  # a list of one is per row
                rows = torch.full((self.max_batch_size,), rows, device=device, dtype=torch.float32)
            return self._parse_rows(seed, 0, rows, self.max_batch_size, device)

        new = self._broadcast_rows(parse, "max_batch_size")
        device = self.weight.device
        with torch.inference_mode(False):  # an inference tensor could not be written outside
            rows: Any = _to(device, new.temperature)  # not None, because it was given
            self.temperature: Reals = rows.clone() if isinstance(rows, Tensor) else rows
            tokens = (self.vocab_size or len(self.weight)) if self.tp is None else self.tp.vocab_size
            self.pool = RequestPool(self.max_batch_size, tokens, device, needs_seeds=self.tp is not None)
            self.pool.seeds.copy_(new.seeds)

    def _adopt(self, lm_head: nn.Linear | Tensor, max_batch_size: SupportsIndex) -> int:
        """Adopts the LM head if it and the other arguments fit. Returns ``max_batch_size`` as an int."""
        if not isinstance(lm_head, (nn.Linear, Tensor)):
            hint = ""
            if hasattr(lm_head, "get_output_embeddings"):
                hint = "; use LMHeadSampler.from_model(model)"
            elif isinstance(getattr(lm_head, "weight", None), Tensor):
                hint = "; pass its .weight"
            raise TypeError(f"lm_head must be an nn.Linear or its weight, got {type(lm_head).__name__}{hint}")
        weight = lm_head if isinstance(lm_head, Tensor) else lm_head.weight
        check_weight(weight, 1 if self.tp is None else 0)
        if weight.is_meta:
            raise ValueError(
                "lm_head must hold values, got a weight on the meta device; make the sampler once they are loaded"
            )
        if self.tp is None:
            check_vocab_size(self.vocab_size, weight.shape[0])
            check_impl(self.impl)
        else:
            check_tensor_parallel(self.tp, self.vocab_size, self.impl)
            self.tp.check_call(weight, 0, 1)
        max_batch_size = integer("max_batch_size", max_batch_size)
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        # in a tuple, which nn.Module does not register: the LM head is saved and named where it belongs
        self._owner: tuple[nn.Module] = (_BareWeight(lm_head) if isinstance(lm_head, Tensor) else lm_head,)
        self._has_bias = self.bias is not None  # saves 2 us per call: nn.Module raises and catches an AttributeError
        return max_batch_size

    def _set_transform(self, logit_scale: float, soft_cap: float) -> None:
        """Sets what the model does to its LM head's output."""
        self.logit_scale = real("logit_scale", logit_scale, finite)
        self.soft_cap = real("soft_cap", soft_cap, finite_from_0)
        transform = (("logit_scale", self.logit_scale, 1.0), ("soft_cap", self.soft_cap, 0.0))
        self._transform = {name: value for name, value, off in transform if value != off}

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> "LMHeadSampler":
        """Returns a sampler for a Hugging Face transformers causal LM after checking that it draws from the model's own
        logits.

        The constructor sees an LM head alone. This method runs the model over four tokens, takes the scale and the soft
        cap that it finds, and refuses hooks, adapters, quantised or sharded LM heads and everything else with which the
        LM head alone would draw from another distribution.

        The sampler checks the model before every call: another LM head (``resize_token_embeddings``, ``model.lm_head =
        ...``) or an active PEFT adapter on the LM head is an error; an adapter that is merged in place or disabled is
        not. The model is held weakly. A replay of a CUDA graph checks nothing, nor does a copied or pickled sampler.

        Args:
            model: on its device. Not changed. Its hooks run; hooks that depend on the batch's shape must be added
                later.
            options: the constructor's other arguments; not ``tp``, whose weight is a shard.

        Raises:
            TypeError: ``model`` has no ``get_output_embeddings``.
            ValueError: its logits are not its LM head's output with a scale and a soft cap, or ``tp`` is given.
        """
        from .integrations.transformers.head import HeadPlace, checked_lm_head

        if options.get("tp") is not None:
            raise ValueError("tp must go to LMHeadSampler(shard, tp=tp), whose weight is a shard, not to from_model")
        head = checked_lm_head(model)
        sampler = cls(head.linear, logit_scale=head.logit_scale, soft_cap=head.soft_cap, **options)
        sampler._place = HeadPlace(model)
        return sampler

    @property
    def weight(self) -> Tensor:
        """(V, D), the LM head's weight."""
        return self._owner[0].weight  # type: ignore[return-value]

    @property
    def bias(self) -> Tensor | None:
        """(V,), the LM head's bias, or None."""
        return getattr(self._owner[0], "bias", None)

    @property
    def seeds(self) -> Tensor:
        """(max_batch_size,) int64."""
        return self.pool.seeds

    @property
    def offsets(self) -> Tensor:
        """(max_batch_size,) int64: tokens drawn so far."""
        return self.pool.offsets

    def reset(
        self,
        seed: Integers | None = None,
        offset: Integers = 0,
        rows: Tensor | slice | int | list[int] | None = None,
        *,
        temperature: Reals | None = None,
    ) -> None:
        """Starts new requests, in place, so that a captured graph sees them. The arguments are copied, never written
        to.

        Args:
            seed: as in the constructor, for ``rows``: one integer gives each its own seed, a list or tensor holds the
                seeds themselves, one per row.
            offset: number of tokens that the rows have drawn: one integer, or one per row.
            rows: an index into the rows; None is all. With ``tp`` every rank passes its own, equally many.
            temperature: the rows' default of ``forward`` from now on: one number, or one per row; None keeps it. Only
                for a sampler that was made with one temperature per row.

        Raises:
            TypeError, ValueError: an argument does not fit, with ``tp`` on any rank; no row has changed then, on any
                rank.
        """
        index: Tensor | slice = slice(None)

        def parse() -> _RowState:
            nonlocal index
            index = row_index(rows, self.max_batch_size)
            if temperature is not None and not isinstance(self.temperature, Tensor):
                raise ValueError(
                    "temperature can be reset in a sampler that was made with one per row, as a captured graph reads "
                    f"them, got one with temperature={self.temperature} for all; "
                    "LMHeadSampler(..., temperature=[1.0] * max_batch_size)"
                )
            return self._parse_rows(seed, offset, temperature, self.seeds[index].shape[0], self.seeds.device)

        new = self._broadcast_rows(parse, "the number of rows")
        self.seeds[index] = new.seeds.to(self.seeds.device)
        self.offsets[index] = _to(self.seeds.device, new.offset)
        if new.temperature is not None:
            self.temperature[index] = _to(self.seeds.device, new.temperature)  # type: ignore[index] # a tensor, as seen above

    def _parse_rows(
        self, seed: Integers | None, offset: Integers, temperature: Reals | None, count: int, device: torch.device
    ) -> _RowState:
        """Returns the checked parameters of ``count`` rows; writes nothing."""
        offsets = integers("offset", _to(device, offset), count, device)
        temperatures = None if temperature is None else reals("temperature", _to(device, temperature), count, device)
        return _RowState(_parse_seeds(seed, count, device), offsets, temperatures)

    def _broadcast_rows(self, parse: Callable[[], _RowState], count: str) -> _RowState:
        """Returns on every rank what ``parse`` returns on the first; raises on all if it raises on any. ``count``: what
        to call the number of rows."""
        if self.tp is None:
            return parse()
        from .tensor_parallel import TensorParallel  # imported already if the caller has one

        if not isinstance(self.tp, TensorParallel):
            return parse()  # raises
        try:
            rows = _RowState(*(_to(torch.device("cpu"), value) for value in parse()))
        except Exception as error:
            self.tp.broadcast(None, error)  # raises
            raise
        return _RowState(*self.tp.broadcast(rows, must_match={count: rows.seeds.shape[0]}))

    def _with_head_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a call's options with the LM head's bias, scale and soft cap."""
        head: dict[str, Any] = dict(self._transform)
        if self._has_bias:
            if options.get("bias") is not None:
                raise ValueError("bias must be None: the LM head has one of its own")
            head["bias"] = self.bias
        return {**options, **{name: value for name, value in head.items() if options.get(name) is None}}

    @with_sampling_options
    def forward(
        self,
        hidden_states: Tensor,  # (B, D), B <= max_batch_size
        temperature: Reals | None = None,
        num_samples: int = 1,
        *,
        slots: Slots | None = None,  # (B,)
        **params: "Unpack[SamplingOptions]",
    ) -> SampleOutput:
        """Samples rows 0 to B - 1, or the requests in ``slots``, and advances their offsets by one.

        Args:
            hidden_states: (B, D), B up to ``max_batch_size``.
            temperature: one number, or (B,); None is the rows' default. Not with ``slots``.
            slots: (B,) int32 or int64: each row's slot of ``pool``, -1 for padding. Parameters of the call replace
                those of the requests.
            num_samples, bias, logit_scale, ..., return_kept: as in ``flashsampling.sample``; ``bias`` only if the
                LM head has none.

        Returns:
            SampleOutput.

        Raises:
            TypeError, ValueError: as ``flashsampling.sample``; no offset advances then.
        """
        try:
            if self._place is not None:
                self._place.require(self._owner[0])
            if not isinstance(hidden_states, Tensor):
                raise TypeError(f"hidden_states must be a torch.Tensor, got {type(hidden_states).__name__}")
            shape = hidden_states.shape
            batch = shape[0] if len(shape) == 2 else 0  # ``sample`` raises for other dimensions
            if batch > self.max_batch_size:
                raise ValueError(
                    f"hidden_states must have at most max_batch_size = {self.max_batch_size} rows, got {batch}"
                )
            # saves 4 us per call: nn.Module looks attributes up in Python
            state: Any = self._modules["pool"]._buffers  # type: ignore[union-attr]
            seeds, offsets = state["seeds"], state["offsets"][:batch]
            if seeds.device != hidden_states.device:
                raise ValueError(
                    f"hidden_states must be on the sampler's device, {seeds.device}, got {hidden_states.device}"
                )
            options: Any = self._with_head_options(params) if self._transform or self._has_bias else params
            if slots is not None:
                return self._draw_slots(hidden_states, temperature, num_samples, slots, options)
            out = draw(
                hidden_states,
                self._owner[0].weight,  # type: ignore[arg-type]
                self._default_temperature(batch) if temperature is None else temperature,
                seeds[:batch],
                offsets,
                num_samples,
                self.vocab_size,
                self.impl,
                self.tp,
                options,
            )
        except BaseException as error:
            count_skipped_call(self.tp, error)
            self._check_names(error, params, LMHeadSampler.forward)
            raise
        offsets.add_(1)
        return out

    def _draw_slots(
        self, hidden_states: Tensor, temperature: Reals | None, num_samples: int, slots: Slots, options: Any
    ) -> SampleOutput:
        if num_samples != 1 and self.pool.takes(*PENALTIES):
            raise ValueError(f"num_samples must be 1 with penalties, which count one token per row, got {num_samples}")
        batch = self._read_slots(slots, temperature, hidden_states.shape[0], 1, options)
        try:
            out = draw(
                hidden_states, self.weight, batch.temperature, batch.seed, batch.offset, num_samples, self.vocab_size,
                self.impl, self.tp, batch.options,
            )  # fmt: skip
            self.pool.finish(batch, out.token_ids)
        except BaseException:
            self.pool.read(slots, -1)
            raise
        return out

    def _read_slots(
        self, slots: Slots, temperature: Reals | None, batch: int | None, advance: int, options: Mapping[str, Any]
    ) -> PoolBatch:
        """Reads a batch of ``pool``, with the ``options`` of the call. ``batch``: the number of rows, if known."""
        if temperature is not None:
            raise ValueError("temperature must be None with slots: every request has one, from pool.admit")
        given = {name: value for name, value in options.items() if value is not None}
        penalties = [name for name in PENALTIES if name in given]
        if penalties and "token_counts" not in given:
            raise ValueError(f"{penalties[0]} must be given to pool.admit, which counts tokens, or with token_counts")
        count = slots.shape[0] if isinstance(slots, Tensor) and slots.ndim else None  # a symbol in ``torch.export``
        if isinstance(slots, Sequence):
            count = len(slots)
        if None not in (count, batch) and count != batch:
            raise ValueError(f"slots must be one for each of {batch} rows, got {count}")
        read = self.pool.read(slots, advance)
        return read._replace(options={**read.options, **given})

    def _default_temperature(self, batch: int) -> Reals:
        return self.temperature[:batch] if isinstance(self.temperature, Tensor) else self.temperature

    def verify(
        self,
        hidden_states: Tensor,  # (B, n + 1, D), or (N + B, D)
        draft_token_ids: Tensor,  # (B, n), or (N,)
        temperature: Reals | None = None,
        *,
        slots: Slots | None = None,  # (B,)
        **options: Any,
    ) -> VerifyOutput:
        """Verifies drafts of rows 0 to B - 1, or of the requests in ``slots``, and advances their offsets by the number
        of emitted tokens, on the device.

        Args:
            hidden_states, draft_token_ids: as in ``flashsampling.verify``.
            temperature, slots: as in ``forward``, for each request.
            options: other arguments of ``flashsampling.verify``, except those that the sampler keeps.

        Returns:
            VerifyOutput.

        Raises:
            TypeError, ValueError: as ``flashsampling.verify``; no offset advances then.
        """
        try:
            if self._place is not None:
                self._place.require(self._owner[0])
            bounds = options.get("cu_draft_lengths")
            given = draft_token_ids if bounds is None else bounds
            several = hasattr(given, "__len__") and getattr(given, "ndim", 1) > 0  # else ``verify`` raises
            batch = 0
            if several:  # not ``len``, which is a constant in ``torch.export``, where ``shape`` is a symbol
                batch = given.shape[0] if isinstance(given, Tensor) else len(given)
                if bounds is not None:
                    batch -= 1
            if batch > self.max_batch_size:
                raise ValueError(
                    f"drafts must be of at most max_batch_size = {self.max_batch_size} requests, got {batch}"
                )
            options = self._with_head_options(options)
            rows = self.seeds[:batch], self.offsets[:batch]
            if slots is not None:
                read = self._read_slots(slots, temperature, batch if several else None, 0, options)
                temperature, rows, options = read.temperature, (read.seed, read.offset), read.options
            elif temperature is None:
                temperature = self._default_temperature(batch)
            out = verify(
                hidden_states,
                self.weight,
                draft_token_ids,
                temperature=temperature,
                seed=rows[0],
                offset=rows[1],
                vocab_size=self.vocab_size,
                impl=self.impl,
                tp=self.tp,
                **options,
            )
        except BaseException as error:
            count_skipped_call(self.tp, error)
            self._check_names(error, options, verify)
            raise
        if slots is None:
            rows[1].add_(out.num_emitted)
        else:
            self.pool.finish(read, out.token_ids, out.num_emitted)
        return out

    def _check_names(self, error: BaseException, given: Mapping[str, Any], function: Callable[..., Any]) -> None:
        """Raises a TypeError that names an argument which the sampler keeps, or which ``function`` does not have."""
        if not isinstance(error, TypeError):
            return
        for name in given:
            if name in ("seed", "offset"):
                raise TypeError(
                    f"{name} must not be given to a call: the sampler keeps seeds and offsets per row; set them by "
                    "LMHeadSampler(..., seed=...) or sampler.reset(seed=..., offset=..., rows=...)"
                ) from None
            if name in _SET_ONCE:
                raise TypeError(
                    f"{name} must not be given to a call: the sampler has it, from its constructor"
                ) from None
            if name not in inspect.signature(function).parameters:
                raise unexpected_argument(name, function, ("seed", "offset", *_SET_ONCE)) from None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LMHeadSampler":
        super()._apply(fn, recurse)
        if recurse:
            self._owner[0]._apply(fn)
        if isinstance(self.temperature, Tensor):  # no buffer: .half() would round it
            self.temperature = self.temperature.to(self.seeds.device)
        return self

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        is_shared = isinstance(self._owner[0], _BareWeight) and isinstance(self.weight, nn.Parameter)
        if is_shared and local_metadata.get("assign_to_params_buffers"):
            arguments[-1].append(
                "load_state_dict(assign=True) replaces the parameter that an LMHeadSampler was made with, which would "
                "go on with the old one; make it from the nn.Linear, or make it after loading"
            )

    def extra_repr(self) -> str:
        """Returns what ``repr`` shows."""
        vocab, dim = self.weight.shape
        return (
            f"vocab_size={self.vocab_size or vocab}, dim={dim}, max_batch_size={self.max_batch_size}, impl={self.impl}"
        )


class _BareWeight(nn.Module):
    """Holds a weight that came without its module, so that it moves with the sampler."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight)


def _parse_seeds(seed: Integers | None, count: int, device: torch.device) -> Tensor:
    """Returns (count,) int64: the seeds themselves, or seeds drawn from one integer or from torch's generator."""
    if seed is not None and dimensions(seed):
        shape = tuple(getattr(seed, "shape", None) or (len(seed),))  # type: ignore[arg-type]
        if shape != (count,):  # one seed for several rows would give them the same noise
            raise ValueError(f"seed must be one number or have shape ({count},), one per row, got shape {shape}")
        seeds = integers("seed", _to(device, seed), count, device)
        return seeds if isinstance(seeds, Tensor) else torch.tensor([seeds], device="cpu")
    cpu, generator = torch.device("cpu"), None
    if seed is not None:
        generator = torch.Generator(cpu).manual_seed(int(integers("seed", _to(cpu, seed), 1, cpu)))
    return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, generator=generator, device=cpu)


def _to(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
