"""transformers' continuous batching with the LM head fused into the sampler.

    from flashsampling.integrations.transformers.continuous import FusedBatchingManager, generate_batch

    generate_batch(model, prompts, generation_config, seed=[1, 2, 3])

Scheduler, paged cache, streams and graphs are transformers'. One method of its model runner is replaced: the one that
runs the model, processes logits and draws, which its CUDA graphs hold, too. A step therefore reads its requests from
the tensor by which transformers brings arguments of per-request logits processors to the device. ``_CarriedArgument``
is a processor that puts a seed or a prompt's length there and does nothing else. The device knows each token's position
in its sequence.

There is no public hook for this. The classes are those of one release, and other releases are refused. The manager
raises an error that names unsupported settings, as ``generate`` does; use ``model.generate_batch`` for these.
"""

import inspect
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import GenerationMode
from transformers.generation import logits_process as processors_of

try:
    from transformers.generation.continuous_batching import cb_logits_processors as carried_of
    from transformers.generation.continuous_batching.continuous_api import ContinuousBatchingManager
    from transformers.generation.continuous_batching.model_runner import ModelRunner
except ImportError as error:
    raise ImportError(
        f"transformers {transformers.__version__} has no continuous batching that is known; 5.23 and 5.24 have it "
        f"({error})"
    ) from error

from ...row_params import at_least_0, integer, integers, reals, share
from ...sampling import sample
from ...warmup import warmup
from ..engine.transfer import sanitize_token_ids
from .head import CheckedHead, HeadTap, checked_lm_head

_SIGNATURES = (
    (ModelRunner._forward_process_and_sample, "self, model, batch_data, carry_over_ids, prev_output_ids, output_ids"),
    (ContinuousBatchingManager._create_batch_processor, "self"),
    (ContinuousBatchingManager.__init__, "self, model, generation_config, continuous_batching_config, workload_hints"),
    (carried_of.ContinuousBatchingLogitsProcessor.prepare_tensor_args, "self, requests_with_new_token"),
)
_WORD = 2**32


class _CarriedArgument(carried_of.ContinuousBatchingLogitsProcessor):  # type: ignore[misc]
    """Brings one int32 of every request to the device and does not change scores."""

    ignored_kwargs: tuple[str, ...] = ()
    supports_continuous_batching = True

    def __init__(self, name: str, shift: int = 0) -> None:
        self.name, self.shift = name, shift
        self.supported_kwargs = {name: int}

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        """Fills padding rows."""
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        """Returns bits ``shift`` to ``shift + 31`` of each request's argument, (n,) int32 on the host."""
        given = [request.state.logit_processor_kwargs.get(self.name, 0) for request in requests_with_new_token]
        words = [value >> self.shift & _WORD - 1 for value in given]
        return torch.tensor([word - _WORD if word >= _WORD // 2 else word for word in words], dtype=torch.int32)

    def __call__(self, scores: Tensor, tensor_arg: Tensor) -> Tensor:
        """Returns the scores unchanged. The fused step never calls it."""
        return scores


class _CarriedRow(NamedTuple):
    """A parameter of which every request has its own: its place among the tensors of processors' arguments."""

    place: int
    dtype: torch.dtype


# parameters that every request may have its own of
_CARRIED = {
    carried_of.ContinuousBatchingTemperatureLogitsWarper: ("temperature", torch.float32),
    carried_of.ContinuousBatchingTopKLogitsWarper: ("top_k", torch.int32),
    carried_of.ContinuousBatchingTopPLogitsWarper: ("top_p", torch.float32),
}
_OF_ALL = {
    processors_of.TemperatureLogitsWarper: "temperature",
    processors_of.TopKLogitsWarper: "top_k",
    processors_of.TopPLogitsWarper: "top_p",
    processors_of.MinPLogitsWarper: "min_p",
}


def _read_processors(processors: Any, do_sample: bool) -> dict[str, Any]:
    """Returns the parameters of a manager's processors, which a configuration made, in its order: a number for all
    requests, or a ``_CarriedRow``. Raises ValueError for an unsupported processor."""
    params: dict[str, Any] = {"temperature": 1.0 if do_sample else 0.0}
    rows = 0
    for processor in processors:
        kind = type(processor)
        if kind in _CARRIED:
            name, dtype = _CARRIED[kind]
            params[name], rows = _CarriedRow(rows, dtype), rows + 1
        elif kind in _OF_ALL:
            params[_OF_ALL[kind]] = getattr(processor, _OF_ALL[kind])
        else:
            raise ValueError(
                f"{kind.__name__} in continuous batching is not what the fused step does: temperature, top_k, top_p "
                "and min_p are; use model.generate_batch"
            )
    return params


# settings that transformers' continuous batching ignores or does not support -> the values that switch them off
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "min_length": (None, 0),
    "min_new_tokens": (None, 0),
    "max_time": (None,),
    "stop_strings": (None,),
    "bad_words_ids": (None,),
    "begin_suppress_tokens": (None,),
    "exponential_decay_length_penalty": (None,),
    "encoder_repetition_penalty": (None, 1.0),
    "encoder_no_repeat_ngram_size": (None, 0),
    "token_healing": (None, False),
    "is_assistant": (None, False),
    "compile_config": (None,),
}
_OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def _require_fields(config: GenerationConfig) -> None:
    """Raises a ValueError that names settings that neither transformers nor the fused step would follow."""
    mode = config.get_generation_mode()
    if mode not in (GenerationMode.SAMPLE, GenerationMode.GREEDY_SEARCH):
        raise ValueError(f"continuous batching samples or decodes greedily, got a configuration of {mode.value}")
    params = [name for name, off in _UNSUPPORTED.items() if getattr(config, name, None) not in off]
    if config.return_dict_in_generate:
        params += [name for name in _OUTPUTS if getattr(config, name, None)]
    if params:
        raise ValueError(
            f"{', '.join(params)} is not done in continuous batching, by transformers either: switch it off"
        )


class FusedModelRunner(ModelRunner):  # type: ignore[misc]
    """transformers' ``ModelRunner`` with the fused step."""

    head: CheckedHead
    params: dict[str, Any]
    undefined: Tensor  # (1,) int64

    def _forward_process_and_sample(
        self,
        model: Any,
        batch_data: dict[str, Any],
        carry_over_ids: Tensor,
        prev_output_ids: Tensor,
        output_ids: Tensor,
    ) -> None:
        """Runs and samples a step without logits in memory. CUDA graphs hold it, so it never synchronises."""
        self.inputs_and_outputs.carry_over_tokens(batch_data["input_ids"], carry_over_ids, prev_output_ids)
        with HeadTap(model, self.head.linear) as tap:
            logits = tap.run(model, **batch_data).logits
            # (1, T, D), or (1, n, D) if the model got the positions to keep
            given = tap.read(logits, 1, positions=logits.shape[1])
        indices = batch_data["logits_indices"]  # (n,)
        states = given.hidden_states[0]
        if "logits_to_keep" not in batch_data:
            states = states[indices]
        params = self._parameters(batch_data, indices) | given.transform._asdict()
        out = sample(states, self.head.linear.weight, **params)
        token_ids, _ = sanitize_token_ids(out.token_ids, self.undefined)
        count = len(token_ids)
        output_ids[0, :count].copy_(token_ids)
        if self.return_logprobs:
            assert out.processed_logprobs is not None
            output_ids[1, :count].copy_(out.processed_logprobs.view(torch.int32))  # float32 bits, as in transformers

    def _parameters(self, batch_data: dict[str, Any], indices: Tensor) -> dict[str, Any]:
        """Returns the step's parameters of every row, from device memory."""
        carried = batch_data["logits_processor_args"][:, : len(indices)]  # int32, a row for each processor that has one
        low, high, prompt = carried[-3].long(), carried[-2].long(), carried[-1].long()
        # the copy is aligned to 16 bytes, on which kernels are specialised
        params = self._all_params(lambda row: carried[row.place].clone().view(row.dtype))
        # tokens that the request has drawn: the position of its last one, without the prompt
        drawn = batch_data["position_ids"][0].index_select(0, indices).long() + 1 - prompt
        return params | {"seed": high << 32 | low & _WORD - 1, "offset": drawn}

    def _all_params(self, value: Callable[[_CarriedRow], Tensor]) -> dict[str, Any]:
        """Returns the parameters of all requests; ``value`` returns those that every request has its own of."""
        params = {name: value(of) if isinstance(of, _CarriedRow) else of for name, of in self.params.items()}
        return params | {"bias": self.head.linear.bias, "return_logprobs": self.return_logprobs}

    def warm_up(self, max_batch_size: int) -> None:
        """Compiles the kernels of steps with up to ``max_batch_size`` requests."""
        weight = self.head.linear.weight
        params = self._all_params(lambda row: torch.ones(max_batch_size, dtype=row.dtype, device=weight.device))
        del params["temperature"]  # changes no kernel
        params |= {"logit_scale": self.head.logit_scale, "soft_cap": self.head.soft_cap}
        warmup(weight.detach(), max_batch_size=max_batch_size, **params)


class FusedBatchingManager(ContinuousBatchingManager):  # type: ignore[misc]
    """transformers' ``ContinuousBatchingManager`` with a seed per request and fused steps.

    A request's tokens depend on its seed, its prompt and the number of tokens drawn, and on no other request. They are
    those of ``model.generate(custom_generate=generate, seed=...)``, apart from roundings of paged attention.

    Args:
        model: a causal LM, as ``flashsampling.integrations.transformers.generate`` takes it.
        generation_config: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``; with the manager's
            ``per_request_processors`` also temperature, top-k and top-p per request, if the configuration has one.
        continuous_batching_config: None: transformers' defaults.
        workload_hints: as in transformers.

    Raises:
        ValueError: the configuration has unsupported settings, several sequences per prompt, ``torch.compile`` of the
            step, or tensor parallelism; ``checked_lm_head`` refuses the model's head; or transformers is an unknown
            release.
        TypeError: ``model`` has no LM head.
    """

    _original_attn_impl: str | None  # transformers' attribute: the attention that it replaced

    def __init__(
        self,
        model: Any,
        generation_config: GenerationConfig,
        continuous_batching_config: Any = None,
        workload_hints: Any = None,
    ) -> None:
        _check_release()
        if getattr(model, "_device_mesh", None) is not None:
            raise ValueError("continuous batching over several devices is not done by the fused step")
        if (generation_config.num_return_sequences or 1) > 1:
            raise ValueError(
                "num_return_sequences must be 1: copies of a request would share its seed; add the prompt several times"
            )
        _require_fields(generation_config)
        self._head = checked_lm_head(model)  # must run before the model's attention needs a paged cache
        do_sample = getattr(generation_config, "do_sample", True)
        # transformers drops unknown processors later, so check them first
        _read_processors(model._get_logits_processor(generation_config), do_sample)
        config = continuous_batching_config or getattr(generation_config, "continuous_batching_config", None)
        if config is None:
            config = transformers.ContinuousBatchingConfig()
        seed = getattr(config, "seed", None)  # requests added in the same order then have the same seeds
        self._seeds = random.SystemRandom() if seed is None else random.Random(seed)
        super().__init__(model, generation_config, config, workload_hints)
        try:
            self._add_carried_arguments(do_sample)
        except BaseException:
            self.destroy()
            raise

    def _add_carried_arguments(self, do_sample: bool) -> None:
        """Reads the processors' parameters and appends processors that carry seeds and prompt lengths."""
        config = self.continuous_batching_config
        if config.varlen_compile_config is not None or config.decode_compile_config is not None:
            raise ValueError("torch.compile of continuous batching's step is not done with the fused one")
        processors = self.logit_processor
        self._params = _read_processors(processors.logits_processor, do_sample)
        carried = (_CarriedArgument("seed"), _CarriedArgument("seed", 32), _CarriedArgument("prompt_length"))
        processors.logits_processor.extend(carried)
        processors.tensors_required += len(carried)
        processors._retrieve_processors_kwargs()
        processors.do_processing = True

    def destroy(self) -> None:
        """Destroys the manager and restores the model's attention, which ``stop`` does only if the manager was
        started."""
        super().destroy()
        if self._original_attn_impl is not None:
            self.model.set_attn_implementation(self._original_attn_impl)
            self._original_attn_impl = None

    def add_request(self, input_ids: list[int], *args: Any, seed: int | None = None, **kwargs: Any) -> str | None:
        """Adds a request with a ``seed`` (an int64 or uint64); None draws one.

        Raises ValueError or TypeError for another seed, or a ``temperature``, ``top_p`` or ``top_k`` out of range."""
        cpu = torch.device("cpu")
        given = integers("seed", self._seeds.getrandbits(64) if seed is None else seed, 1, cpu)
        for name, check in (("temperature", at_least_0), ("top_p", share)):  # transformers checks only their types
            if name in kwargs:
                reals(name, kwargs[name], 1, cpu, check)
        # transformers takes 0 for one token, and from 2**31 on its thread ends
        if not 1 <= integer("top_k", kwargs.get("top_k", 1)) < 2**31:
            raise ValueError(f"top_k must be from 1 to 2**31 - 1, got {kwargs['top_k']}")
        if len(input_ids) == 0:  # transformers' thread would end
            raise ValueError("input_ids must be one or more tokens, got none")
        config, most = self.generation_config, kwargs.get("max_new_tokens", args[1] if len(args) > 1 else None)
        if most is None and config.max_new_tokens is None and getattr(config, "max_length", None) is not None:
            raise ValueError(
                f"max_new_tokens must be given: continuous batching ignores max_length={config.max_length}, and would "
                "go on until the end of a sequence"
            )
        return super().add_request(input_ids, *args, seed=int(given), prompt_length=len(input_ids), **kwargs)  # type: ignore[no-any-return]

    def add_requests(self, inputs: list[list[int]], *args: Any, **kwargs: Any) -> list[str]:
        """Adds several requests. Raises ValueError if they share one seed."""
        if kwargs.get("seed") is not None and len(inputs) > 1:
            raise ValueError(
                f"seed must be None for {len(inputs)} requests, which would share noise: add each by add_request"
            )
        return super().add_requests(inputs, *args, **kwargs)  # type: ignore[no-any-return]

    @property
    def undefined_rows(self) -> int:
        """Number of tokens that had no finite score; these tokens are 0. Synchronises."""
        return 0 if self.batch_processor is None else int(self.batch_processor.model_runner.undefined)

    def _create_batch_processor(self) -> Any:
        processor = super()._create_batch_processor()
        runner = processor.model_runner
        if not isinstance(runner, FusedModelRunner):
            runner.__class__ = FusedModelRunner
            runner.head, runner.params = self._head, self._params
            runner.undefined = torch.zeros(1, dtype=torch.int64, device=self._head.linear.weight.device)
            runner.warm_up(self.continuous_batching_config.max_requests_per_batch)
        return processor


def generate_batch(
    model: Any,
    inputs: list[list[int]],
    generation_config: GenerationConfig | None = None,
    *,
    seed: Sequence[int] | Tensor | None = None,
    continuous_batching_config: Any = None,
    max_new_tokens: int | None = None,
) -> list[Any]:
    """Runs ``model.generate_batch`` with the fused step and a seed per prompt.

    Args:
        model: a model as ``FusedBatchingManager`` takes it.
        inputs: token ids of each prompt.
        generation_config: None: the model's.
        seed: one per prompt; None draws them.
        continuous_batching_config: a configuration as ``FusedBatchingManager`` takes it.
        max_new_tokens: None: the configuration's.

    Returns:
        transformers' ``GenerationOutput`` of each prompt, in order.

    Raises:
        TypeError, ValueError: those of ``FusedBatchingManager`` and ``add_request``, or there is not one seed per
            prompt.
        RuntimeError: a request failed, or a token had no finite score.
    """
    seeds: Any = [None] * len(inputs) if seed is None else seed.tolist() if isinstance(seed, Tensor) else seed
    if not isinstance(seeds, Sequence) or len(seeds) != len(inputs):
        raise ValueError(f"seed must be one per prompt, {len(inputs)}, got {seed}")
    if not inputs:
        return []
    config = model.generation_config if generation_config is None else generation_config
    manager = FusedBatchingManager(model, config, continuous_batching_config)
    eos = config.eos_token_id
    if eos is None:  # as transformers' add_requests does, but not its add_request
        eos = getattr(model.config, "eos_token_id", None)
    done: dict[str, Any] = {}
    try:
        manager.warmup()
        manager.start()
        names = [f"prompt {place}" for place in range(len(inputs))]
        for name, ids, seed_of_prompt in zip(names, inputs, seeds):
            manager.add_request(ids, name, max_new_tokens, eos_token_id=eos, seed=seed_of_prompt)
        while len(done) < len(names):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                done[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError(f"continuous batching ended after {len(done)} of {len(names)} requests")
        failed = [f"{name}: {done[name].error}" for name in names if done[name].error is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} of {len(names)} requests failed: {failed[0]}")
        if manager.undefined_rows:
            raise RuntimeError(f"{manager.undefined_rows} tokens had no finite score")
    finally:
        manager.stop(block=True, timeout=5, hard_stop=True)
        manager.destroy()
    return [done[name] for name in names]


def _check_release() -> None:
    for function, parameters in _SIGNATURES:
        got = ", ".join(inspect.signature(function).parameters)
        if got != parameters:
            raise ValueError(
                f"{function.__qualname__} of transformers {transformers.__version__} takes {got}, not {parameters} as "
                "that of 5.23 and 5.24, which are the releases that are known"
            )
