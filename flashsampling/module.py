"""``LMHeadSampler``: what replaces a model's ``lm_head`` and sampler."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from .api import SampleOutput, check_impl, check_tensor_parallel, check_vocab_size, check_weight, sample
from .parameters import Integers, Reals, dimensions, integer, integers, reals

if TYPE_CHECKING:
    from .distributed import TensorParallel


class LMHeadSampler(nn.Module):
    """An LM head that returns token ids instead of logits.

    Keeps a seed and an offset per row of the batch on the device and advances the offsets itself, so a step needs nothing
    from the host: it can be captured in a CUDA graph (every replay draws anew) and traced by ``torch.compile`` without a
    graph break. Row b's tokens are a function of its own seed, offset and hidden states; a request that is reset to the
    same seed replays the same tokens in any row and any batch.

    The weight stays the LM head's: the sampler reads ``lm_head.weight`` at every call, so it follows whoever replaces that
    parameter (``load_state_dict(assign=True)``, FSDP), and it is saved, named and optimised as the head's alone: checkpoints
    are the same with and without a sampler. ``sampler.to(...)`` moves the head too. A bare ``nn.Parameter`` is shared as tied
    embeddings are, and not saved either; who replaces it makes a new sampler.

    Args:
        lm_head: an ``nn.Linear`` without bias, or its weight (V, D), on the device, loaded, neither quantised nor a DTensor.
            It is shared, not copied: tied embeddings stay tied. What a model does to its logits beside it is not seen: soft
            caps (Gemma 2), scales (Cohere, Granite), hooks, adapters. ``from_model`` looks for them.
        max_batch_size: rows of state to keep.
        seed: one integer, from which every row gets a seed of its own; or max_batch_size integers, the seeds themselves; None
            for seeds from torch's default generator.
        temperature: default for ``forward``: one number, or max_batch_size of them.
        vocab_size: real size where the weight is padded.
        impl: as in ``flashsampling.sample``.
        tp: a ``flashsampling.distributed.TensorParallel``; ``lm_head`` is then this rank's shard. Seeds are the first rank's
            on all ranks, so making the module and ``reset`` are collective calls.

    ``seed``, ``offset`` and ``temperature`` take Python and numpy numbers, lists, tuples, numpy arrays and tensors, here and in
    ``reset`` and ``forward``.

    Raises:
        TypeError: an argument is of the wrong type or dtype; ``lm_head`` is neither an ``nn.Linear`` nor a tensor, or its
            weight is quantised, sparse or a DTensor.
        ValueError: the linear layer has a bias or lies on the meta device, or a shape or range does not fit.
    """

    seeds: Tensor  # (max_batch_size,) int64
    offsets: Tensor  # (max_batch_size,) int64, tokens drawn so far

    def __init__(
        self,
        lm_head: nn.Linear | Tensor,
        *,
        max_batch_size: SupportsIndex = 256,
        seed: Integers | None = None,
        temperature: Reals = 1.0,
        vocab_size: int | None = None,
        impl: str | None = None,
        tp: "TensorParallel | None" = None,
    ) -> None:
        super().__init__()
        if isinstance(lm_head, nn.Linear):
            if lm_head.bias is not None:
                raise ValueError("lm_head must be a linear layer without bias, got one with a bias")
        elif not isinstance(lm_head, Tensor):
            raise TypeError(f"lm_head must be an nn.Linear or its weight, got {type(lm_head).__name__}")
        weight = lm_head if isinstance(lm_head, Tensor) else lm_head.weight
        check_weight(weight, 1 if tp is None else 0)
        if weight.is_meta:
            raise ValueError("lm_head must hold values, got a weight on the meta device; make the sampler once they are loaded")
        if tp is None:
            check_vocab_size(vocab_size, weight.shape[0])
            check_impl(impl)
        else:
            check_tensor_parallel(tp, weight, 0, 1, vocab_size, impl)
        max_batch_size = integer("max_batch_size", max_batch_size)
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        if isinstance(lm_head, Tensor):
            self.bare = _BareWeight(lm_head)
        # in a tuple, which nn.Module does not register: the head is saved, and named, where it belongs
        self._owner: tuple[nn.Module] = (self.bare if isinstance(lm_head, Tensor) else lm_head,)
        device = weight.device
        rows, number = reals("temperature", _to(device, temperature), max_batch_size, device)
        self.temperature: Reals = number if rows is None else rows.clone()
        self.max_batch_size = max_batch_size
        self.vocab_size = vocab_size
        self.impl = impl
        self.tp = tp
        self.register_buffer("seeds", torch.empty(max_batch_size, dtype=torch.int64, device=device), persistent=False)
        self.register_buffer("offsets", torch.zeros(max_batch_size, dtype=torch.int64, device=device), persistent=False)
        self.reset(seed)

    @classmethod
    def from_model(cls, model: nn.Module, **options: Any) -> "LMHeadSampler":
        """A sampler for a Hugging Face transformers causal LM, once it is shown that its logits are its LM head's output.

        The constructor sees a weight alone; this runs the model over four tokens and refuses soft caps, scales, biases, hooks,
        adapters and quantised or sharded heads, from all of which the weight alone would draw another distribution.

        Args:
            model: on its device. Not changed.
            options: the constructor's other arguments; not ``tp``, whose weight is a shard.

        Raises:
            TypeError: ``model`` has no ``get_output_embeddings``.
            ValueError: its logits are not ``hidden_states @ weight.T``, or ``tp`` is given.
        """
        from .integrations.transformers import checked_lm_head

        if options.get("tp") is not None:
            raise ValueError("tp must go to LMHeadSampler(shard, tp=tp), whose weight is a shard, not to from_model")
        return cls(checked_lm_head(model), **options)

    @property
    def weight(self) -> Tensor:
        """(V, D), the LM head's own."""
        return self._owner[0].weight  # type: ignore[return-value]

    def reset(
        self,
        seed: Integers | None = None,
        offset: Integers = 0,
        rows: Tensor | slice | int | list[int] | None = None,
    ) -> None:
        """Starts requests anew, in place (a captured graph sees it). The arguments are copied, never written to.

        Args:
            seed: as in the constructor, for the rows named: one integer gives each a seed of its own, a list or tensor has the
                seeds themselves, one per row.
            offset: tokens that the rows have drawn already: one integer, or one per row.
            rows: which rows, as an index into the state; None is all.

        Raises:
            TypeError, ValueError: an argument does not fit; no row has changed then.
        """
        rows = self._index(rows)
        count, device = self.seeds[rows].shape[0], self.seeds.device
        offset_rows, number = integers("offset", _to(device, offset), count, device)
        seeds = self._draw_seeds(seed, count) if seed is None or not dimensions(seed) else self._take_seeds(seed, count)
        if self.tp is not None:
            seeds = self.tp.broadcast(seeds.clone())  # which writes into what it is given
        self.seeds[rows] = seeds.to(device)
        self.offsets[rows] = number if offset_rows is None else offset_rows

    def _index(self, rows: Tensor | slice | int | list[int] | None) -> Tensor | slice:
        """Rows of the state; those that the host knows are in range, since a GPU would end the process over one that is not."""
        if rows is None:
            return slice(None)
        if isinstance(rows, slice):
            return rows
        index = rows if isinstance(rows, Tensor) else torch.as_tensor(rows, device="cpu")
        index = index.reshape(-1) if index.numel() else index.reshape(-1).long()  # torch takes [] for floats
        if index.is_floating_point():
            raise TypeError(f"rows must be integers or a mask, got {index.dtype}")
        size = self.max_batch_size
        if index.device.type == "cpu" and index.dtype != torch.bool and bool(((index < -size) | (index >= size)).any()):
            raise ValueError(f"rows must be from 0 to max_batch_size - 1 = {size - 1}, got {index.tolist()}")
        return index

    def _draw_seeds(self, seed: Integers | None, count: int) -> Tensor:
        generator = None
        if seed is not None:
            cpu = torch.device("cpu")
            one, number = integers("seed", _to(cpu, seed), 1, cpu)
            generator = torch.Generator(cpu).manual_seed(number if one is None else int(one))
        return torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, generator=generator, device="cpu")

    def _take_seeds(self, seed: Integers, count: int) -> Tensor:
        shape = tuple(getattr(seed, "shape", None) or (len(seed),))  # type: ignore[arg-type]
        if shape != (count,):  # one for several rows would be the same noise for all of them
            raise ValueError(f"seed must be one number or have shape ({count},), one per row, got shape {shape}")
        rows, number = integers("seed", _to(self.seeds.device, seed), count, self.seeds.device)
        return torch.tensor([number]) if rows is None else rows

    def forward(
        self,
        hidden_states: Tensor,  # (B, D), B <= max_batch_size
        temperature: Reals | None = None,
        num_samples: int = 1,
    ) -> SampleOutput:
        """Samples rows 0 to B - 1 and advances their offsets by one. See ``flashsampling.sample`` for shapes and errors."""
        if not isinstance(hidden_states, Tensor):
            raise TypeError(f"hidden_states must be a torch.Tensor, got {type(hidden_states).__name__}")
        shape = hidden_states.shape
        batch = shape[0] if shape else 0
        if batch > self.max_batch_size:
            raise ValueError(f"hidden_states must have at most max_batch_size = {self.max_batch_size} rows, got {batch}")
        seeds, offsets = self.seeds, self.offsets
        if seeds.device != hidden_states.device:
            raise ValueError(f"hidden_states must be on the device of the sampler, {seeds.device}, got {hidden_states.device}")
        if temperature is None:
            temperature = self.temperature
            if isinstance(temperature, Tensor):
                temperature = temperature[:batch]
        offsets = offsets[:batch]
        out = sample(
            hidden_states,
            self.weight,
            temperature=temperature,
            seed=seeds[:batch],
            offset=offsets,
            num_samples=num_samples,
            vocab_size=self.vocab_size,
            impl=self.impl,
            tp=self.tp,
        )
        offsets.add_(1)
        return out

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "LMHeadSampler":
        super()._apply(fn, recurse)
        if recurse and self._owner[0] is not self._modules.get("bare"):
            self._owner[0]._apply(fn)
        if isinstance(self.temperature, Tensor):  # no buffer, which .half() would round
            self.temperature = self.temperature.to(self.seeds.device)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = (
            prefix + "weight"
        )  # a state dict of 0.1.0 has the weight under the sampler's name, be it the head's as well or not
        if key in state_dict:
            self._owner[0]._load_from_state_dict({key: state_dict[key]}, prefix, local_metadata, False, [], [], error_msgs)
            state_dict = {name: value for name, value in state_dict.items() if name != key}
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        vocab, dim = self.weight.shape
        return f"vocab_size={self.vocab_size or vocab}, dim={dim}, max_batch_size={self.max_batch_size}, impl={self.impl}"


class _BareWeight(nn.Module):
    """A weight that came without its module: it moves with the sampler, and whoever owns it saves it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        if isinstance(weight, nn.Parameter):
            self.weight = weight
        else:
            self.register_buffer("weight", weight, persistent=False)

    def _save_to_state_dict(self, *arguments: Any) -> None:
        pass

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, local_metadata: Mapping[str, Any], *arguments: Any
    ) -> None:
        if prefix + "weight" in state_dict:
            super()._load_from_state_dict(state_dict, prefix, local_metadata, *arguments)
        elif local_metadata.get("assign_to_params_buffers") and self._parameters:
            arguments[-1].append(
                "load_state_dict(assign=True) replaces the parameter that an LMHeadSampler was made with, which would go on "
                "with the old one; make it from the nn.Linear, or make it after loading"
            )


def _to(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value
