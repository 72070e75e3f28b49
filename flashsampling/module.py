"""``LMHeadSampler``: what replaces a model's ``lm_head`` and sampler."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .api import SampleOutput, sample

if TYPE_CHECKING:
    from .distributed import TensorParallel


class LMHeadSampler(nn.Module):
    """An LM head that returns token ids instead of logits.

    Keeps a seed and an offset per row of the batch on the device and advances the offsets itself, so a step needs nothing
    from the host: it can be captured in a CUDA graph (every replay draws anew) and traced by ``torch.compile`` without a
    graph break. Row b's tokens are a function of its own seed, offset and hidden states; a request that is reset to the
    same seed replays the same tokens in any row and any batch.

    Args:
        lm_head: an ``nn.Linear`` without bias, or its weight (V, D). The parameter is shared, not copied: tied embeddings
            stay tied. What a model does to its logits beside it is not seen: soft caps (Gemma 2), scales (Cohere, Granite),
            hooks, adapters. ``from_model`` looks for them.
        max_batch_size: rows of state to keep.
        seed: an int, from which every row gets a seed of its own; an integer tensor (max_batch_size,) of seeds; None for
            seeds from torch's default generator.
        temperature: default for ``forward``.
        vocab_size: real size where the weight is padded.
        impl: as in ``flashsampling.sample``.
        tp: a ``flashsampling.distributed.TensorParallel``; ``lm_head`` is then this rank's shard. Seeds are the first rank's
            on all ranks, so making the module and ``reset`` are collective calls.

    Raises:
        TypeError: ``lm_head`` is neither an ``nn.Linear`` nor a tensor.
        ValueError: the linear layer has a bias, or ``seed`` has the wrong shape.
    """

    seeds: Tensor  # (max_batch_size,) int64
    offsets: Tensor  # (max_batch_size,) int64, tokens drawn so far

    def __init__(
        self,
        lm_head: nn.Linear | Tensor,
        *,
        max_batch_size: int = 256,
        seed: int | Tensor | None = None,
        temperature: float = 1.0,
        vocab_size: int | None = None,
        impl: str | None = None,
        tp: "TensorParallel | None" = None,
    ) -> None:
        super().__init__()
        if isinstance(lm_head, nn.Linear):
            if lm_head.bias is not None:
                raise ValueError("lm_head must be a linear layer without bias, got one with a bias")
            lm_head = lm_head.weight
        if not isinstance(lm_head, Tensor):
            raise TypeError(f"lm_head must be an nn.Linear or its weight, got {type(lm_head).__name__}")
        if isinstance(lm_head, nn.Parameter):
            self.weight = lm_head
        else:
            self.register_buffer("weight", lm_head, persistent=False)
        if max_batch_size < 1:
            raise ValueError(f"max_batch_size must be at least 1, got {max_batch_size}")
        self.max_batch_size = max_batch_size
        self.temperature = temperature
        self.vocab_size = vocab_size
        self.impl = impl
        self.tp = tp
        device = lm_head.device
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

    def reset(self, seed: int | Tensor | None = None, offset: int | Tensor = 0, rows: Tensor | slice | None = None) -> None:
        """Starts requests anew, in place (a captured graph sees it).

        Args:
            seed: as in the constructor, for the rows named: an int gives each a seed of its own, a tensor has one per row.
            offset: tokens that the rows have drawn already: an int, or an integer tensor with one per row.
            rows: which rows, as an index into the state; None is all.
        """
        rows = slice(None) if rows is None else rows
        count = self.seeds[rows].shape[0]
        if not isinstance(seed, Tensor):
            generator = None
            if seed is not None:
                generator = torch.Generator().manual_seed(seed)
            seed = torch.randint(-(2**63), 2**63 - 1, (count,), dtype=torch.int64, generator=generator)
        if seed.shape != (count,):
            raise ValueError(f"seed must be an int or have shape ({count},), got shape {tuple(seed.shape)}")
        if self.tp is not None:
            seed = self.tp.broadcast(seed)
        self.seeds[rows] = seed.to(self.seeds)
        self.offsets[rows] = offset.to(self.offsets) if isinstance(offset, Tensor) else offset

    def forward(
        self,
        hidden_states: Tensor,  # (B, D), B <= max_batch_size
        temperature: float | Tensor | None = None,
        num_samples: int = 1,
    ) -> SampleOutput:
        """Samples rows 0 to B - 1 and advances their offsets by one. See ``flashsampling.sample`` for shapes and errors."""
        batch = hidden_states.shape[0]
        if batch > self.max_batch_size:
            raise ValueError(f"hidden_states must have at most max_batch_size = {self.max_batch_size} rows, got {batch}")
        out = sample(
            hidden_states,
            self.weight,
            temperature=self.temperature if temperature is None else temperature,
            seed=self.seeds[:batch],
            offset=self.offsets[:batch],
            num_samples=num_samples,
            vocab_size=self.vocab_size,
            impl=self.impl,
            tp=self.tp,
        )
        self.offsets[:batch].add_(1)
        return out

    def extra_repr(self) -> str:
        """What ``repr`` shows."""
        vocab, dim = self.weight.shape
        return f"vocab_size={self.vocab_size or vocab}, dim={dim}, max_batch_size={self.max_batch_size}, impl={self.impl}"
