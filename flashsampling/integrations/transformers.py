"""Hugging Face transformers: ``model.generate(..., custom_generate=generate)`` with the LM head fused into the sampler.

    from flashsampling.integrations.transformers import generate

    model.generate(**inputs, custom_generate=generate, do_sample=True, temperature=0.8, top_k=0, seeds=[1, 2, 3])

The decoding loop is transformers' own ``custom_generate`` contract: KV cache, padding and stopping criteria come from there.
What every argument of ``generate`` does here, and which models work, is in docs/transformers.md.

The model stays as it is: its whole ``forward`` runs, with a pair of hooks on the LM head that act on this thread's own calls
alone. The first takes the head's input and hands on none of its positions, so that no logit is computed; the second puts a
``_Placeholder`` where the logits would be. A model that does anything to its logits does it to the placeholder, in every step,
and is refused there and then. (Calling the base model instead would miss what the model does between it and its head, and hooks
on the model; a ``TorchFunctionMode`` needs no hooks, but every torch function of the model would pass through it.)
"""

import inspect
import math
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import GenerationMixin, GenerationMode
from transformers.generation.logits_process import LogitNormalization, TemperatureLogitsWarper
from transformers.generation.streamers import BaseStreamer

from ..module import LMHeadSampler

if "is_first_iteration" not in inspect.signature(GenerationMixin._prefill).parameters:
    raise ImportError(
        f"flashsampling.integrations.transformers needs transformers 5.3 or newer, got {transformers.__version__}"
    )

_T = TypeVar("_T")
_LINEAR_FORWARD = nn.Linear.forward

# What makes transformers add a logits processor, and the value that keeps it from doing so
_SWITCH_OFF = {
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size=0",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty=1.0",
    "EpsilonLogitsWarper": "epsilon_cutoff=0.0",
    "EtaLogitsWarper": "eta_cutoff=0.0",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty=None",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id=None",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id=None",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values=False",
    "MinLengthLogitsProcessor": "min_length=0",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens=None",
    "MinPLogitsWarper": "min_p=None",
    "NoBadWordsLogitsProcessor": "bad_words_ids=None",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size=0",
    "PrefixConstrainedLogitsProcessor": "prefix_allowed_tokens_fn=None",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty=1.0",
    "SequenceBiasLogitsProcessor": "sequence_bias=None",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens=None",
    "SuppressTokensLogitsProcessor": "suppress_tokens=None",
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config=None",
    "TopHLogitsWarper": "top_h=None",
    "TopKLogitsWarper": "top_k=0",
    "TopPLogitsWarper": "top_p=1.0",
    "TypicalLogitsWarper": "typical_p=1.0",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale=None",
    "WatermarkLogitsProcessor": "watermarking_config=None",
}
# What makes ``GenerationConfig.get_generation_mode`` choose another algorithm than sampling and greedy search
_OTHER_MODES = (
    "num_beams", "num_beam_groups", "penalty_alpha", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp",
    "dola_layers", "constraints", "force_words_ids",
)  # fmt: skip


class NoTokenError(RuntimeError):
    """A sequence has no next token: its scores hold a NaN or no finite value. Raised before the step's ids are used.

    Attributes:
        rows: the sequences' places in the batch.
    """

    def __init__(self, rows: list[int], position: int) -> None:
        super().__init__(
            f"no token for rows {rows} of the batch at new token {position}: a NaN in their logits, or none finite"
        )
        self.rows = rows


class _Placeholder(Tensor):
    """Stands where a model expects its LM head's logits, in their shape but without their memory.

    A change of dtype or layout returns it as it is. Whatever else is done to it raises, so a model whose logits are not what
    its LM head returned cannot pass for one whose are.
    """

    hidden_states: Tensor  # (B, T, D), what the LM head would have multiplied
    changed: str  # the error's words up to what was done

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PROPERTIES:
            return super().__torch_function__(func, types, args, kwargs)
        if args and isinstance(args[0], _Placeholder):
            if func in _SAME_LOGITS:
                return args[0]
            if func in _SCALINGS and not kwargs and args[1:] in ((1,), (1.0,)):
                return args[0]  # Granite's and Falcon-H1's default
        name = getattr(func, "__name__", str(func))
        placeholder = next((value for value in args if isinstance(value, _Placeholder)), None)
        changed = "the logits were used" if placeholder is None else placeholder.changed
        raise ValueError(f"{changed} ({name}), which the fused step cannot follow")


_SAME_LOGITS = frozenset((Tensor.float, Tensor.to, Tensor.contiguous, Tensor.detach))
_SCALINGS = frozenset((Tensor.mul, Tensor.__mul__, Tensor.div, Tensor.__truediv__))
_PROPERTIES = frozenset(
    (
        Tensor.size,
        Tensor.dim,
        *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
    )
)


class _HeadTap:
    """Takes the LM head's input from calls of the model that go through ``run``, and computes no logits in them.

    The hooks look at the thread and at whether ``run`` is at work, so all other calls of the model, from other threads or from
    this one's callbacks, see the model as it is. Registering and removing hooks is safe beside calls: torch copies them before
    it iterates, without giving up the GIL.
    """

    def __init__(self, model: Any, head: nn.Linear) -> None:
        self.model, self.head, self.weight = model, head, head.weight
        self.record: list[tuple[Tensor, Tensor]] | None = None  # the probe's: (head's input, head's output) of every call
        self._thread = threading.get_ident()
        self._running = False
        self._hidden_states: Tensor | None = None
        self._stack = ExitStack()

    def __enter__(self) -> "_HeadTap":
        with self._stack:
            self._stack.callback(self.head.register_forward_pre_hook(self._before).remove)
            self._stack.callback(self.head.register_forward_hook(self._after).remove)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, call: Callable[..., _T], *args: Any, **kwargs: Any) -> _T:
        """``call``, which calls the model."""
        if _plain_lm_head(self.model) is not self.head or self.head.weight is not self.weight:
            raise ValueError(f"{type(self.model).__name__}'s LM head was replaced while it was generating")
        self._running = True
        try:
            return call(*args, **kwargs)
        finally:
            self._running = False
            self._hidden_states = None

    def last_hidden_states(self, logits: Any, batch: int) -> Tensor:
        """(B, D), what the LM head would have turned into the ``logits`` of each row's last position."""
        name = type(self.model).__name__
        if not isinstance(logits, _Placeholder):
            raise ValueError(
                f"{name} changes the logits after its LM head, or does not call it: it returned others, which the fused step "
                "cannot follow"
            )
        hidden_states = logits.hidden_states
        if hidden_states.dim() != 3 or hidden_states.shape[0] != batch or hidden_states.shape[1] < 1:
            shape = tuple(hidden_states.shape)
            raise ValueError(
                f"{name}'s LM head must be given hidden states of shape ({batch}, positions, dim), got shape {shape}"
            )
        if hidden_states.dtype != self.weight.dtype or torch.is_autocast_enabled(hidden_states.device.type):
            raise ValueError(
                f"{name}'s LM head would convert what it multiplies (autocast?): hidden states are {hidden_states.dtype}, its "
                f"weight {self.weight.dtype}; load the model in the dtype that you want and generate without autocast"
            )
        return hidden_states[:, -1]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor] | None:
        if not self._running or threading.get_ident() != self._thread:
            return None
        if len(args) != 1:
            raise ValueError(
                f"{type(self.model).__name__}'s LM head must be called with one positional argument, got {len(args)}"
            )
        self._hidden_states = args[0]
        return None if self.record is not None else (args[0][..., :0, :],)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor | None:
        hidden_states = self._hidden_states
        if not self._running or threading.get_ident() != self._thread or hidden_states is None:
            return None
        self._hidden_states = None
        if self.record is not None:
            self.record.append((hidden_states.clone(), output.clone()))
            return None
        shape = (*hidden_states.shape[:-1], output.shape[-1])
        placeholder = output.new_empty((1,) * len(shape)).expand(shape).as_subclass(_Placeholder)
        placeholder.hidden_states = hidden_states
        placeholder.changed = f"{type(self.model).__name__} changes the logits after its LM head"
        return placeholder


def _plain_lm_head(model: Any) -> nn.Linear:
    """The model's LM head, if it is seen to be ``hidden_states @ weight.T`` and nothing else. Cheap: done before every step."""
    head = model.get_output_embeddings()
    if model._compiled_call_impl is not None or hasattr(vars(model).get("forward"), "_torchdynamo_orig_callable"):
        raise ValueError("the model is compiled, its LM head too; compile the decoder alone: model.get_decoder().compile()")
    if type(head) is not nn.Linear:
        raise ValueError(
            f"the model's output embedding must be an nn.Linear, got {type(head).__module__}.{type(head).__name__}: adapters "
            "(LoRA) on it must be merged, quantised heads and subclasses are not supported"
        )
    if head.bias is not None:
        raise ValueError("the model's LM head must be a linear layer without bias, got one with a bias")
    if "forward" in vars(head) or nn.Linear.forward is not _LINEAR_FORWARD or head._compiled_call_impl is not None:
        raise ValueError(
            "the model's LM head has a forward of its own (accelerate puts one there for a device_map over several devices or "
            "with offloading, compile() another), which the fused step cannot follow"
        )
    hooks = (*head._forward_pre_hooks.values(), *head._forward_hooks.values())
    others = [hook for hook in hooks if not isinstance(getattr(hook, "__self__", None), _HeadTap)]
    if others:
        raise ValueError(f"the model's LM head has a forward hook, {others[0]!r}, which the fused step cannot follow")
    weight = head.weight
    plain = type(weight) in (nn.Parameter, Tensor) and weight.dim() == 2 and weight.is_floating_point() and not weight.is_meta
    if not plain:
        raise ValueError(
            f"the model's LM head must have a plain floating-point weight in memory, got {type(weight).__name__}, "
            f"{weight.dtype}, shape {tuple(weight.shape)} on {weight.device}: sharded (DTensor, FSDP, ZeRO-3), quantised and "
            "offloaded heads are not supported"
        )
    return head


# model -> its LM head, the head's weight and what else could change its logits, when ``checked_lm_head`` last compared numbers
_checked_models: "WeakKeyDictionary[nn.Module, tuple[ref[nn.Linear], ref[Tensor], tuple[object, ...]]]" = WeakKeyDictionary()


@torch.no_grad()
def checked_lm_head(model: Any) -> nn.Linear:
    """The LM head of a transformers causal LM, after a check that the model's logits are its output and nothing else.

    Looks at the head's structure every time, and compares numbers over four tokens once: again if the head, its weight or the
    hooks on the model change. Names of configuration fields are not looked at: a list of them would miss the next model family.

    Raises:
        TypeError: ``model`` has no ``get_output_embeddings``.
        ValueError: the model is an encoder-decoder or compiled as a whole, its LM head is not an ``nn.Linear`` without bias,
            hooks or a forward of its own and with a plain weight, or its logits are not what the head returns (Gemma 2's soft
            cap, Cohere's and Granite's scale).
    """
    name = type(model).__name__
    if not hasattr(model, "get_output_embeddings"):
        raise TypeError(f"model must be a transformers causal LM, got {name}")
    if model.config.is_encoder_decoder:
        raise ValueError(f"encoder-decoder models are not supported, got {name}")
    head = _plain_lm_head(model)
    hooks = (
        id(vars(model).get("forward")),
        *(tuple(hooks) for hooks in (model._forward_hooks, model._forward_pre_hooks)),
        *(tuple(hooks) for hooks in (torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks)),
    )
    seen = _checked_models.get(model)
    if seen is not None and seen[0]() is head and seen[1]() is head.weight and seen[2] == hooks:
        return head

    embeddings = model.get_input_embeddings().weight
    tokens = torch.arange(1, 5, device=embeddings.device)[None] % embeddings.shape[0]
    with _HeadTap(model, head) as tap:
        tap.record = []
        logits = tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits
        if len(tap.record) != 1:
            raise ValueError(f"{name} must call its LM head once, it was called {len(tap.record)} times")
        ((hidden_states, output),) = tap.record
        if output.shape != logits.shape or not torch.allclose(output.float(), logits.float(), rtol=0, atol=0, equal_nan=True):
            raise ValueError(f"{name} changes the logits after its LM head, which the fused step cannot follow")
        # the same multiplication may be summed in another order: a few roundings of the largest logit
        expected = hidden_states.to(head.weight.dtype) @ head.weight.T
        bound = 8 * torch.finfo(output.dtype).eps * expected.float().nan_to_num().abs().amax().item()
        if not torch.allclose(output.float(), expected.float(), rtol=0, atol=bound, equal_nan=True):
            raise ValueError(f"{name}'s LM head returns something else than hidden_states @ weight.T")
        tap.record = None  # and as ``generate`` calls it, which sees also what leaves these four tokens' logits alone
        tap.last_hidden_states(tap.run(model, input_ids=tokens, use_cache=False, return_dict=True).logits, 1)
    _checked_models[model] = ref(head), ref(head.weight), hooks
    return head


def _require_what_we_do(config: GenerationConfig, assistant_model: Any, synced_gpus: bool) -> None:
    """Raises ValueError, by name, for arguments of ``generate`` that would silently do nothing here."""
    if config.return_dict_in_generate:
        raise ValueError("return_dict_in_generate is not supported: there are no scores or logits to return")
    mode = config.get_generation_mode(assistant_model)
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        values = {name: getattr(config, name, None) for name in _OTHER_MODES}
        given = [f"{name}={value!r}" for name, value in values.items() if value and not (value == 1 and "beam" in name)]
        given += [] if assistant_model is None else ["assistant_model"]
        raise ValueError(f"the fused step samples or decodes greedily, got {mode.value} ({', '.join(given)})")
    if config.is_assistant:
        raise ValueError("is_assistant is not supported: a model that drafts for another needs scores")
    if synced_gpus:
        raise ValueError("synced_gpus is not supported, nor are FSDP and DeepSpeed ZeRO-3, which set it")
    if config.compile_config is not None:
        raise ValueError("compile_config is not supported: compile the decoder instead, model.get_decoder().compile()")


def _temperature(config: GenerationConfig, processors: LogitsProcessorList) -> float:
    """The batch's temperature; ValueError for any other logits processor, none of which may be dropped silently."""
    harmless = (TemperatureLogitsWarper, LogitNormalization)  # log softmax moves all of a row's scores alike
    others = [type(processor).__name__ for processor in processors if type(processor) not in harmless]
    if others:
        named = [f"{other} ({_SWITCH_OFF[other]})" if other in _SWITCH_OFF else other for other in others]
        raise ValueError(
            f"the fused step samples with a temperature only; switch off {', '.join(named)}, "
            "or keep them and generate without custom_generate"
        )
    if not config.do_sample:
        return 0.0
    return math.prod(float(warper.temperature) for warper in processors if type(warper) is TemperatureLogitsWarper)


def _row_temperatures(temperatures: Any, config: GenerationConfig, batch: int, device: torch.device) -> Tensor:
    if not config.do_sample:
        raise ValueError("temperatures needs do_sample=True, got do_sample=False, which is greedy")
    rows = torch.as_tensor(temperatures, dtype=torch.float32)
    _require_row_each("temperatures", rows, config, batch)
    if rows.device.type == "cpu" and not bool((rows >= 0).all()):
        raise ValueError(f"temperatures must be at least 0, got {rows.tolist()}")
    return rows.to(device)


def _row_seeds(seeds: Any, config: GenerationConfig, batch: int) -> Tensor | int:
    if isinstance(seeds, int):
        return seeds
    if not isinstance(seeds, Tensor):
        values = [int(seed) if hasattr(seed, "__index__") else seed for seed in seeds]
        if not all(isinstance(seed, int) for seed in values):
            raise TypeError(f"seeds must be integers, got {seeds!r}")
        seeds = torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in values], dtype=torch.int64)
    if seeds.is_floating_point() or seeds.is_complex() or seeds.dtype == torch.bool:
        raise TypeError(f"seeds must be integers, got {seeds.dtype}")
    _require_row_each("seeds", seeds, config, batch)
    return seeds.to(torch.int64)


def _require_row_each(name: str, rows: Tensor, config: GenerationConfig, batch: int) -> None:
    if rows.shape != (batch,):
        returned = config.num_return_sequences or 1
        sequences = f"{batch} sequences" + (
            f", {batch // returned} prompts x {returned} returned sequences" if returned > 1 else ""
        )
        raise ValueError(f"{name} must have one entry for each of the {sequences}, got shape {tuple(rows.shape)}")


def _require_sampler_of(head: nn.Linear, sampler: LMHeadSampler, batch: int) -> None:
    if not isinstance(sampler, LMHeadSampler):
        raise TypeError(f"sampler must be an LMHeadSampler, got {type(sampler).__name__}")
    if batch > sampler.max_batch_size:
        raise ValueError(
            f"input_ids must have at most max_batch_size = {sampler.max_batch_size} rows with this sampler, got {batch}"
        )
    ours: Tensor = sampler.weight
    models: Tensor = head.weight
    if ours is models:
        return
    if sampler.tp is not None:
        models = models[sampler.tp.first_token : sampler.tp.last_token]
        ours = ours[: models.shape[0]]
        same = ours.shape == models.shape and ours.dtype == models.dtype and ours.device == models.device
        same = same and torch.equal(ours, models)
    else:
        same = (ours.data_ptr(), ours.shape, ours.stride(), ours.dtype) == (
            models.data_ptr(), models.shape, models.stride(), models.dtype
        )  # fmt: skip
    if not same:
        raise ValueError(
            f"sampler must be over this model's LM head (LMHeadSampler.from_model), got one over another weight, shape "
            f"{tuple(sampler.weight.shape)}"
        )


def _arguments_of_model_generate(model: Any) -> dict[str, Any]:
    """``streamer``, ``assistant_model`` and ``synced_gpus`` as given to the ``model.generate`` that called us.

    transformers (5.3 to 5.23) hands none of them to a ``custom_generate`` callable, so they are read from its frame: without, a
    streamer would be waited on for ever and an assistant ignored in silence.
    """
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code and frame.f_locals.get("self") is model:
            return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model", "synced_gpus")}
        frame = frame.f_back  # type: ignore[assignment]
    return {}


@torch.no_grad()
def generate(
    model: Any,
    input_ids: Tensor,  # (B, T), left-padded
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: StoppingCriteriaList | None = None,
    generation_config: GenerationConfig | None = None,
    synced_gpus: bool | None = None,
    streamer: BaseStreamer | None = None,
    *,
    sampler: LMHeadSampler | None = None,
    seeds: int | Sequence[int] | Tensor | None = None,
    temperatures: Sequence[float] | Tensor | None = None,
    token_streamer: BaseStreamer | None = None,
    **model_kwargs: Any,
) -> Tensor:
    """Decoding loop for ``model.generate(..., custom_generate=generate)``. docs/transformers.md has every argument and model.

    Several threads may generate with one model, each with a sampler of its own, beside plain calls of it.

    Args:
        model, input_ids, logits_processor, stopping_criteria, generation_config, synced_gpus, streamer, model_kwargs: from
            transformers. The streamer gets the prompt and every step's (B,) ids, and its end also when this raises.
        sampler: an ``LMHeadSampler.from_model(model)``, to keep its state (or to name an ``impl``); None makes one.
        seeds: one per returned sequence; each sequence's tokens then depend on its own seed, prompt and temperature alone. An
            int gives each a seed of its own. None leaves the sampler's seeds, or draws fresh ones from torch's default
            generator.
        temperatures: one per returned sequence, 0 for greedy; None uses ``generation_config`` for all.
        token_streamer: a second streamer, alike: it too gets the prompt first.

    Returns:
        (B, T + new tokens) int64 token ids, sequences that ended early padded with the pad token.

    Raises:
        ValueError: the generation asks for something that the fused step does not do: logits processors other than the
            temperature, beams, drafts, scores or logits in the output; a model that changes its logits after the LM head
            (``checked_lm_head``); seeds, temperatures or a sampler that do not fit. Before the first token.
        NoTokenError: a sequence's logits hold a NaN, or no finite value.
        flashsampling.distributed.TensorParallelError: as in ``flashsampling.sample``.

    Example:
        >>> import torch, transformers
        >>> from flashsampling.integrations.transformers import generate
        >>> config = transformers.GPT2Config(vocab_size=1000, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=None)
        >>> model = transformers.GPT2LMHeadModel(config)  # its weights are random
        >>> prompts = torch.tensor([[5, 6], [7, 8]])
        >>> options = {"do_sample": True, "top_k": 0, "max_new_tokens": 4, "seeds": [1, 2]}
        >>> model.generate(prompts, custom_generate=generate, **options).shape
        torch.Size([2, 6])
    """
    given = _arguments_of_model_generate(model)
    streamer = given.get("streamer") if streamer is None else streamer
    synced_gpus = given.get("synced_gpus") if synced_gpus is None else synced_gpus
    streamers = [one for one in (streamer, token_streamer) if one is not None]
    try:
        if generation_config is None or stopping_criteria is None or logits_processor is None:
            raise ValueError("generate is called by model.generate(..., custom_generate=generate), not by itself")
        _require_what_we_do(generation_config, given.get("assistant_model"), bool(synced_gpus))
        batch, device = input_ids.shape[0], input_ids.device
        temperature: float | Tensor = _temperature(generation_config, logits_processor)
        head = checked_lm_head(model)
        if temperatures is not None:
            temperature = _row_temperatures(temperatures, generation_config, batch, head.weight.device)
        if seeds is not None:
            seeds = _row_seeds(seeds, generation_config, batch)
        if sampler is None:
            sampler = LMHeadSampler.from_model(model, max_batch_size=max(batch, 1))
        else:
            _require_sampler_of(head, sampler, batch)
        if seeds is not None:
            sampler.reset(seeds, rows=slice(0, batch))
        pad_token = generation_config._pad_token_tensor
        ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
        if ends and pad_token is None:
            raise ValueError("pad_token_id must be given where sequences end at different lengths, got None")
        if ends:
            pad_token = pad_token.to(device)
        generation_config.disable_compile = True  # transformers' copy; a graph compiled earlier knows nothing of our hooks

        if token_streamer is not None:  # streamer has had it from transformers
            token_streamer.put(input_ids.cpu())
        prompt_length = input_ids.shape[1]
        unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        with _HeadTap(model, head) as tap, ExitStack() as decoding:
            outputs = tap.run(model._prefill, input_ids, generation_config, model_kwargs, is_first_iteration=True)
            decoding.enter_context(model._optimize_model_for_decode())
            while True:
                hidden_states = tap.last_hidden_states(outputs.logits, batch)
                model_kwargs = model._update_model_kwargs_for_generation(outputs, model_kwargs, is_encoder_decoder=False)
                del outputs
                next_tokens = sampler(hidden_states, temperature=temperature).token_ids.to(device)
                lost = next_tokens < 0
                if ends:
                    lost &= unfinished
                    next_tokens = torch.where(unfinished, next_tokens, pad_token)
                next_tokens = next_tokens.clamp(min=0)  # -1 is no id: criteria look ids up, and the step fails below
                input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
                unfinished &= ~stopping_criteria(input_ids, None)
                going_on, failed = torch.stack([unfinished.any(), lost.any()]).tolist()  # the step's one synchronisation
                if failed:
                    if sampler.tp is not None:
                        sampler.tp.check()
                    raise NoTokenError(lost.nonzero()[:, 0].tolist(), input_ids.shape[1] - prompt_length)
                for one in streamers:
                    one.put(next_tokens.cpu())
                if not going_on:
                    return input_ids
                inputs = model.prepare_inputs_for_generation(
                    input_ids, next_sequence_length=1 if model_kwargs["use_cache"] else None, **model_kwargs
                )
                outputs = tap.run(model, **inputs, return_dict=True)
    finally:
        for one in streamers:  # after an error, too: whoever reads from them would wait for ever
            one.end()
