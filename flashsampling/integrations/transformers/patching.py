"""``patch``: replaces ``model.generate``, for callers that cannot pass ``custom_generate``."""

from typing import Any
from weakref import ref

from transformers.generation import GenerationMixin

from .arguments import require_transformers_loop
from .decoding import generate
from .head import checked_lm_head


class _PatchedGenerate:
    """The ``generate`` of a patched model. A deep copy or a pickle of the model has its own."""

    def __init__(self, model: Any) -> None:
        self.model = ref(model)

    def __call__(self, *args: Any, custom_generate: Any = None, **kwargs: Any) -> Any:
        model: Any = self.model()
        if custom_generate is not None and custom_generate is not generate:
            raise ValueError(
                f"custom_generate must be None with a patched model, got {custom_generate!r}; unpatch(model) first"
            )
        if kwargs.get("cache_implementation") == "paged":  # transformers would call generate_batch instead
            raise ValueError(
                "cache_implementation must not be 'paged' with a patched model; use "
                "flashsampling.integrations.transformers.continuous.generate_batch"
            )
        if kwargs.get("stop_strings") is not None:  # they need the tokenizer, which custom_generate does not get
            raise ValueError(
                "stop_strings must be None with a patched model; pass "
                "stopping_criteria=[transformers.StopStringCriteria(tokenizer, stop_strings)]"
            )
        return type(model).generate(model, *args, custom_generate=generate, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "_PatchedGenerate":
        return _PatchedGenerate(memo.get(id(self.model()), self.model()))

    def __reduce__(self) -> Any:
        return _PatchedGenerate, (self.model(),)


class _Patch:
    """The context manager of ``patch``: restores the model's ``generate`` at its end."""

    def __init__(self, model: Any, is_first: bool) -> None:
        self._model, self._is_first = model, is_first

    def __enter__(self) -> Any:
        return self._model

    def __exit__(self, *_: object) -> None:
        if self._is_first:
            unpatch(self._model)


def patch(model: Any) -> _Patch:
    """Makes every ``model.generate(...)`` run ``model.generate(..., custom_generate=generate)``.

    For ``pipeline()``, trainers and other code that calls ``generate`` itself. Such a call takes the arguments of
    ``generate`` here (``seed``, ``temperatures``, ...). Unsupported arguments are errors; transformers' own loop never
    runs. Patching twice has no further effect. A deep copy of a patched model is patched, and saved files do not
    change.

    Args:
        model: a model as ``LMHeadSampler.from_model`` takes it. If PEFT wraps it, the inner model is patched.

    Returns:
        A context manager. It gives the model, and at its end undoes the patch, unless the model was patched before.

    Raises:
        TypeError, ValueError: ``checked_lm_head`` refuses the model, or the model has a ``generate`` of its own.

    Example:
        >>> import torch, transformers
        >>> from flashsampling.integrations.transformers import patch
        >>> sizes = {"vocab_size": 1000, "n_embd": 8, "n_layer": 1, "n_head": 1}
        >>> config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)
        >>> model = transformers.GPT2LMHeadModel(config)
        >>> with patch(model):
        ...     model.generate(torch.tensor([[5, 6]]), do_sample=True, max_new_tokens=4, seed=1).shape
        torch.Size([1, 6])
    """
    model = _unwrap(model)
    checked_lm_head(model)
    require_transformers_loop(model)
    is_first = not isinstance(vars(model).get("generate"), _PatchedGenerate)
    if is_first:
        if "generate" in vars(model) or type(model).generate is not GenerationMixin.generate:
            raise ValueError(f"{type(model).__name__} has a generate of its own, which cannot be patched")
        model.generate = _PatchedGenerate(model)
    return _Patch(model, is_first)


def unpatch(model: Any) -> None:
    """Undoes ``patch``, if the model is patched."""
    model = _unwrap(model)
    if isinstance(vars(model).get("generate"), _PatchedGenerate):
        del model.generate


def _unwrap(model: Any) -> Any:
    """Returns the model inside a wrapper, which exposes the inner model's method."""
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model must be a transformers causal LM, got {type(model).__name__}")
    return getattr(model.get_output_embeddings, "__self__", model)
