"""Puts the fused step into SGLang's model runner: four methods of one runner, its model and its logits processor.

    runner.init_cuda_graphs   compiles, before graphs are captured
    processor.forward         returns hidden states where SGLang's returns logits; in decode a graph has captured that
    model.forward             in the first forward: does the model return what the processor returned?
    runner.sample             the fused step; or SGLang's own, of logits made then; or both for a part of the rows

A batch is fused if all its requests can be. Otherwise SGLang samples all rows. One exception: the token of a request
that could be fused and has a seed is still drawn by the fused step; otherwise it would depend on its batch mates. Only
the proof in the first forward waits for the device.
"""

import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..engine.head import PROBE_ROWS, Layers, check_speed
from ..engine.plugin import Refused, StepCounts, refuse_if
from ..engine.request_info import SGLANG_FALLBACKS, FallbackReason, Needs, RequestInfo
from ..engine.step import Batch
from ..engine.transfer import to_device
from .head import find_head, make_logits
from .request_info import SglangRules
from .settings import PLUGIN, check_version
from .step import DrawnTokens, SglangStep

_MODES = ("DECODE", "EXTEND", "MIXED")  # forward modes whose last positions are drawn from
_MASKS = "grammar_mask"  # newer releases keep the mask there, with its grammar

_KERNEL, _REPLAY = "steps of few rows that one kernel does, logits too", "parts of prefixes that are computed again"
_INNER = "hidden states of inner layers to be returned"
_NEWER = {  # fields of a ``ServerArgs`` in newer releases, and why they are refused
    "return_hidden_states_mode": "hidden states to be returned",
    "enable_return_aux_hidden_states": _INNER,
    "aux_hidden_state_capture": _INNER,
    "enable_watermark": "watermarks",
    "enable_encoder_swa_bounded_replay": _REPLAY,
    "enable_decoder_swa_bounded_replay": _REPLAY,
    "enable_nvidia_megakernel": _KERNEL,
    "enable_amd_monokernel": _KERNEL,
}
# Environment variables; not every release has all of them
_ABOUT_NAN = {
    "SGLANG_SANITIZE_NAN_LOGITS": "replaces",
    "SGLANG_ENABLE_NAN_LOGITS_CHECK": "looks for",
    "SGLANG_ENABLE_ASYNC_ASSERT": "looks for",
}

Forward = Callable[..., Any]


class Sglang(NamedTuple):
    """The parts of SGLang that are used."""

    output: Callable[..., Any]  # LogitsProcessorOutput
    forward_batch: type
    metadata: Callable[[Any], Any]  # LogitsMetadata.from_forward_batch
    in_dummy_run: Callable[[], bool]


class SglangSampler:
    """The plug-in's part of a runner. ``own``: SGLang's method of the same name."""

    def __init__(self, runner: Any, step: SglangStep, processor: Any, rules: SglangRules, sglang: Sglang) -> None:
        self.runner, self.step, self.rules, self.sglang = runner, step, rules, sglang
        self.processor, self.model = processor, runner.model
        self._is_proven = False  # the model returns what its processor returns
        self._made: Any = None  # the processor's output in this forward
        # before the proof: a copy of the output's first logits, and the processor's arguments
        self._seen: tuple[Any, Any, Any, Any] | None = None
        self.counts = StepCounts(PLUGIN, "fused", "left", "split")
        for owner, name, method in (
            (runner, "init_cuda_graphs", self.init_cuda_graphs),
            (runner, "sample", self.sample),
            (processor, "forward", self.process),
            (self.model, "forward", self.forward),
        ):
            setattr(owner, name, self._wrap(getattr(owner, name), method))
        runner.flashsampling = self

    def _wrap(self, own: Forward, method: Callable[..., Any]) -> Forward:
        """Returns a method that does what SGLang's own does unless this is the plug-in's part of the runner. Others may
        wrap it again."""

        @functools.wraps(own)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            is_on = getattr(self.runner, "flashsampling", None) is self
            return method(own, *args, **kwargs) if is_on else own(*args, **kwargs)

        return wrapped

    def _give_up(self, why: BaseException) -> None:
        """Leaves everything to SGLang from now on, or raises where the plug-in is required."""
        del self.runner.flashsampling
        PLUGIN.leave(why, self.runner)

    def init_cuda_graphs(self, own: Forward, *args: Any, **kwargs: Any) -> Any:
        """Compiles what steps need before SGLang captures its graphs."""
        try:
            batch = int(self.runner.max_running_requests)
            names = self.step.warm_up(batch)
        except BaseException as error:
            self._give_up(error)
        else:
            PLUGIN.log_ready(names, batch)
        return own(*args, **kwargs)

    # -- the forward pass

    def process(
        self, own: Forward, input_ids: Tensor, hidden_states: Tensor, lm_head: Any, logits_metadata: Any, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        """Returns hidden states, and logits of no columns, where ``LogitsProcessor.forward`` would return logits only
        to draw from."""
        given = input_ids, hidden_states, lm_head, logits_metadata, *args
        if not self._is_proven:
            self._made = output = own(*given, **kwargs)
            logits = output.next_token_logits
            if logits is not None and not (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
                self._seen = logits[:PROBE_ROWS].clone(), hidden_states, lm_head, logits_metadata
            return output
        metadata = self._metadata(logits_metadata)
        if not self._is_drawn_from(metadata):
            return own(*given, **kwargs)
        states = self._last_states(hidden_states, metadata)
        if metadata.extend_return_logprob:  # the prompt's log-probabilities need logits
            output = own(*given, **kwargs)
            output.hidden_states = states
        else:
            none, embeds = states.new_empty((len(states), 0), dtype=torch.float32), metadata.mm_input_embeds
            output = self.sglang.output(next_token_logits=none, hidden_states=states, mm_input_embeds=embeds)
        self._made = output
        return output

    def _metadata(self, given: Any) -> Any:
        return self.sglang.metadata(given) if isinstance(given, self.sglang.forward_batch) else given

    def _is_drawn_from(self, metadata: Any) -> bool:
        """Returns whether the last positions are drawn from, and nothing else reads hidden states."""
        return (
            metadata.forward_mode.name in _MODES
            and not metadata.capture_hidden_mode.need_capture()
            and not metadata.is_prefill_only
            and not self.sglang.in_dummy_run()
        )

    def _last_states(self, hidden_states: Tensor, metadata: Any) -> Tensor:
        """Returns hidden states of the last positions."""
        if metadata.extend_return_logprob:
            return hidden_states[torch.cumsum(metadata.extend_seq_lens, dim=0) - 1]
        states, *_ = self.processor._get_pruned_states(hidden_states, None, None, metadata)
        return states  # type: ignore[no-any-return]

    def forward(
        self, own: Forward, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Runs the model, and sees whether it returns what its logits processor returned."""
        self._made = self._seen = None
        result = own(input_ids, positions, forward_batch, *args, **kwargs)
        made, seen = self._made, self._seen
        self._made = self._seen = None
        if not self._is_proven:
            try:
                self._is_proven = seen is not None and self._prove(result, made, *seen)
            except BaseException as error:
                self._give_up(error)
        elif made is not None and result is not made:
            what = "something else than its logits processor, in this forward as in no other"
            raise RuntimeError(f"{type(self.model).__name__} returns {what}")
        return result

    def _prove(
        self, result: Any, made: Any, logits: Tensor, hidden_states: Tensor, lm_head: Any, logits_metadata: Any
    ) -> bool:
        """Returns whether the model's result shows that the processor's logits are the model's; False: nothing is drawn
        from them. Refuses other logits."""
        metadata, head, name = self._metadata(logits_metadata), self.step.head, type(self.model).__name__
        if not len(logits) or not self._is_drawn_from(metadata):
            return False
        states = self._last_states(hidden_states, metadata)
        if lm_head is not head.layer:
            raise Refused(f"{name} gives its logits processor another head than its lm_head")
        if states.dtype is not head.weight.dtype:  # SGLang casts them
            raise Refused(f"{name} has {states.dtype} states and a head of {head.weight.dtype}")
        shown = result.next_token_logits if result is made else None
        if shown is None or not torch.allclose(shown[:PROBE_ROWS], logits, rtol=0, atol=0, equal_nan=True):
            raise Refused(f"{name} changes its logits after its logits processor")
        result.hidden_states = states  # a seed's tokens are the same from the first one on
        return True

    # -- the draw

    def sample(self, own: Forward, logits_output: Any, forward_batch: Any) -> Tensor:
        """Samples a batch in place of ``own``."""
        states = logits_output.hidden_states
        if states is None or forward_batch.capture_hidden_mode.need_capture():
            self.counts.add("left", (FallbackReason.LOGITS,))
            return own(logits_output, forward_batch)  # type: ignore[no-any-return]
        requests: tuple[RequestInfo, ...] | None = getattr(forward_batch, "flashsampling", None)
        info, observer = forward_batch.sampling_info, getattr(self.runner, "sampling_observer", None)
        if requests is None or forward_batch.seq_lens_cpu is None:
            return self._leave({FallbackReason.UNSEEN}, own, logits_output, forward_batch)
        if observer is not None and observer.is_active(info):
            return self._leave({FallbackReason.OBSERVER}, own, logits_output, forward_batch)
        states = states[: len(requests)]
        mask = self._grammar_masks(info)
        without_mask = FallbackReason.GRAMMAR if mask is None else FallbackReason.SERVED
        reasons = [each.reason or (without_mask if each.has_grammar else FallbackReason.SERVED) for each in requests]
        if not any(reasons):
            # as SGLang does: the batch is kept for a while
            setattr(info, _MASKS if hasattr(info, _MASKS) else "vocab_mask", None)
            logits_output.hidden_states = None
            drawn = self.step.draw_tokens(self._convert_batch(states, forward_batch, requests, mask))
            self._hand_over(drawn, logits_output, forward_batch)
            self.counts.add("fused")
            return drawn.token_ids
        kept = [row for row, reason in enumerate(reasons) if not reason and requests[row].batch_invariant]
        left = {reason for reason in reasons if reason}
        token_ids = self._leave(left, own, logits_output, forward_batch, bool(kept))
        if kept:
            batch = self._convert_batch(states, forward_batch, requests, mask)
            self._overwrite(kept, token_ids, batch, logits_output)
        return token_ids

    def _leave(
        self, reasons: set[int], own: Forward, logits_output: Any, forward_batch: Any, split: bool = False
    ) -> Tensor:
        """Lets SGLang sample."""
        self.counts.add("split" if split else "left", sorted(reasons))
        self.make_logits(logits_output, forward_batch.batch_size)
        logits_output.hidden_states = None
        return own(logits_output, forward_batch)  # type: ignore[no-any-return]

    def make_logits(self, logits_output: Any, batch: int) -> None:
        """Makes logits of the hidden states in their place, where there are none yet."""
        if not logits_output.next_token_logits.shape[1]:
            states = logits_output.hidden_states[:batch]
            logits_output.next_token_logits = make_logits(self.processor, self.step.head.layer, states)

    def counters(self) -> dict[str, Any]:
        """Returns the counts that ``load.counters`` documents."""
        return {**self.counts.read(), "undefined_rows": int(self.step.undefined)}

    def _grammar_masks(self, info: Any) -> Tensor | None:
        """Returns the grammars' masks of this step (B, ceil(V / 32)) int32, which SGLang would make anew; None without
        any, or if they are no bits, as Outlines' are not."""
        if not info.grammars or not any(info.grammars):
            return None
        info.update_regex_vocab_mask()
        mask: Tensor = getattr(info, _MASKS).vocab_mask if hasattr(info, _MASKS) else info.vocab_mask
        if mask.dtype is not torch.int32 or mask.shape != (len(info.grammars), max(mask.shape[-1], self.step.words)):
            return None
        return mask[:, : self.step.words].contiguous()

    def _convert_batch(
        self, states: Tensor, forward_batch: Any, requests: tuple[RequestInfo, ...], mask: Tensor | None
    ) -> Batch:
        positions = forward_batch.positions if forward_batch.forward_mode.is_decode() else forward_batch.seq_lens - 1
        top = max(forward_batch.top_logprobs_nums, default=0) if forward_batch.return_logprob else None
        return Batch(states, positions[: len(requests)].long(), requests, forward_batch.seq_lens_cpu, mask, top)

    def _hand_over(self, drawn: DrawnTokens, logits_output: Any, forward_batch: Any) -> None:
        """Puts log-probabilities where SGLang's sampler leaves them."""
        if not forward_batch.return_logprob:
            return
        logits_output.next_token_logprobs = drawn.logprobs
        counts = forward_batch.top_logprobs_nums
        if any(count > 0 for count in counts):
            for name, values in (("val", drawn.top_logprobs), ("idx", drawn.top_token_ids)):
                assert values is not None
                rows = [row[:count] for row, count in zip(values.unbind(0), counts)]
                setattr(logits_output, f"next_token_top_logprobs_{name}", rows)

    def _overwrite(self, rows: list[int], token_ids: Tensor, whole: Batch, logits_output: Any) -> None:
        """Draws these rows, and writes their tokens and log-probabilities over SGLang's. The most likely tokens are the
        same whatever is drawn."""
        device = whole.hidden_states.device
        index = to_device(np.array(rows, np.int64), device)
        requests = tuple(whole.requests[row] for row in rows)
        has_logprobs = [] if whole.top_logprobs is None else [bool(each.needs & Needs.LOGPROBS) for each in requests]
        part = Batch(
            whole.hidden_states.index_select(0, index),
            whole.positions.index_select(0, index),
            requests,
            whole.lengths[rows],
            None if whole.grammar is None else whole.grammar.index_select(0, index),
            0 if any(has_logprobs) else None,
        )
        drawn = self.step.draw_tokens(part)
        token_ids.index_copy_(0, index, drawn.token_ids.to(token_ids.dtype))
        if any(has_logprobs):
            assert drawn.logprobs is not None
            places = to_device(np.flatnonzero(has_logprobs), device)
            logprobs, own = drawn.logprobs.index_select(0, places), logits_output.next_token_logprobs
            own.index_copy_(0, index.index_select(0, places), logprobs.to(own.dtype))


# -- once a model is loaded


def attach(runner: Any) -> str:
    """Makes a runner, whose model is loaded, a fused one. Returns a line that says what it does. Refuses other
    runners."""
    processors = importlib.import_module("sglang.srt.layers.logits_processor")
    embeddings = importlib.import_module("sglang.srt.layers.vocab_parallel_embedding")
    unquantized = importlib.import_module("sglang.srt.layers.quantization.unquant").UnquantizedEmbeddingMethod
    batches = importlib.import_module("sglang.srt.model_executor.forward_batch_info")
    samplers = importlib.import_module("sglang.srt.layers.sampler")
    environment = importlib.import_module("sglang.srt.environ").envs
    release, arguments = check_version(importlib.metadata.version("sglang")), runner.server_args
    if release.resolves:
        arguments = Resolved(importlib.import_module("sglang.srt.runtime_context").get_context().config_leaf)
    check_runner(runner, arguments, samplers.Sampler)
    for name, does in _ABOUT_NAN.items():
        if hasattr(environment, name) and getattr(environment, name).get():
            raise Refused(f"{name}, which {does} NaN in logits that are nowhere in memory here")
    layers = Layers(processors.LogitsProcessor, embeddings.VocabParallelEmbedding, unquantized)
    head, processor = find_head(runner.model, layers)
    backend = check_speed(head, "SGLang")
    sglang = Sglang(
        processors.LogitsProcessorOutput,
        batches.ForwardBatch,
        processors.LogitsMetadata.from_forward_batch,
        processors.get_in_autotune_dummy_run,
    )
    deterministic = arguments.enable_deterministic_inference
    rules = SglangRules(
        vocab_size=head.vocab_size,
        flashinfer=arguments.sampling_backend == "flashinfer",
        original_logprobs=bool(samplers.SGLANG_RETURN_ORIGINAL_LOGPROB),
        deterministic=deterministic,
        processors=arguments.enable_custom_logit_processor,
        forbids_ends=release.forbids_ends,
        aligns=release.aligns and bool(deterministic),
    )
    off = {FallbackReason.PROCESSOR: rules.processors, FallbackReason.ALIGNED: rules.aligns}
    fallbacks = dict.fromkeys(SGLANG_FALLBACKS, True) | off
    SglangSampler(runner, SglangStep(head, head.weight.device), processor, rules, sglang)
    return PLUGIN.summary(head.vocab_size, backend, fallbacks, "Tokens of a seed")


class Resolved:
    """The ``ServerArgs`` in force."""

    def __init__(self, leaf: Callable[[str], Any]) -> None:
        self._leaf = leaf

    def __getattr__(self, name: str) -> Any:
        return self._leaf(name)


def check_runner(runner: Any, arguments: Any, sampler: type) -> None:
    """Refuses a runner that has to do something else than draw a token of every request in turn. ``arguments``:
    SGLang's ``ServerArgs``, resolved; ``sampler``: its own class."""
    graphs, backend, own = arguments.cuda_graph_config, arguments.sampling_backend, type(runner.sampler)
    refuse_if(
        {
            "the model does not generate": not runner.is_generation,
            f"the device is {runner.device}, not an NVIDIA GPU": runner.device != "cuda",
            "tensor parallelism": arguments.tp_size > 1,
            "pipeline parallelism": arguments.pp_size > 1,
            "context parallelism": arguments.attn_cp_size > 1 or arguments.dcp_size > 1,
            "data-parallel attention": arguments.enable_dp_attention or arguments.enable_dp_lm_head,
            "speculative decoding": arguments.speculative_algorithm is not None,
            "a diffusion model": arguments.dllm_algorithm is not None,
            "prefill and decode in different servers": arguments.disaggregation_mode != "null",
            "two batches at once": arguments.enable_pdmux or arguments.enable_two_batch_overlap,
            "LoRA": arguments.enable_lora,
            "hidden states to be returned": arguments.enable_return_hidden_states,
            "torch.compile of the whole model": arguments.enable_torch_compile,
            "log-probabilities that are a trainer's (rl_on_policy_target)": arguments.rl_on_policy_target is not None,
            "prefill graphs that torch.compile makes": graphs and graphs.prefill.backend == "tc_piecewise",
            "a model that reads tokens as they are drawn": runner.model_config.use_ngram_embedding,
            f"the sampling backend {backend!r}": backend not in ("flashinfer", "pytorch"),
            f"a sampler of another kind, {own.__name__}": own is not sampler,
        }
    )
    refuse_if({why: True for name, why in _NEWER.items() if getattr(arguments, name, None)})
