"""Where the fused step meets SGLang's model runner: four methods of one runner, its model and its logits processor.

    runner.init_cuda_graphs   compiles, before graphs are captured
    processor.forward         returns hidden states where SGLang's returns logits; in decode a graph has captured that
    model.forward             in the first forward of each kind: does the model return what the processor returned?
    runner.sample             the fused step; or SGLang's own, of logits made then; or both for a part of the rows

A batch is fused if all its requests can be. Of another one all rows go SGLang's way; but if one that could be fused was given a
seed, its token is drawn by the fused step all the same: else it would depend on its batch mates. Nothing here waits for the
device, but the proof in the first forwards.
"""

import contextlib
import functools
import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.common import Layers, to_device
from ..engine.plugin import Refused, StepCounts, describe
from .head import Head, check_speed, head_of
from .request_info import FALLBACK_REASONS, FallbackReason, Needs, RequestInfo, Rules
from .settings import PLUGIN, Release, check_version
from .step import Batch, FusedStep, SampleResult

_KINDS = ("DECODE", "EXTEND", "MIXED")  # forward modes whose last positions are drawn from
_SEEN = 4  # rows of logits that are compared
_MASKS = "grammar_mask"  # in newer releases, with the grammar that it is of

# Of a ``ServerArgs`` in newer releases
_NEWER = (
    "return_hidden_states_mode",
    "enable_return_aux_hidden_states",
    "aux_hidden_state_capture",
    "enable_watermark",
    "enable_encoder_swa_bounded_replay",
    "enable_decoder_swa_bounded_replay",
    "enable_nvidia_megakernel",
    "enable_amd_monokernel",
)
# Of the environment; not every release has all of them
_ABOUT_NAN = {
    "SGLANG_SANITIZE_NAN_LOGITS": "replaces",
    "SGLANG_ENABLE_NAN_LOGITS_CHECK": "looks for",
    "SGLANG_ENABLE_ASYNC_ASSERT": "looks for",
}

Forward = Callable[..., Any]


class Sglang(NamedTuple):
    """What is used of SGLang."""

    output: Callable[..., Any]  # LogitsProcessorOutput
    forward_batch: type
    metadata: Callable[[Any], Any]  # LogitsMetadata.from_forward_batch
    in_dummy_run: Callable[[], bool]


class Fused:
    """What a runner has of the plug-in."""

    def __init__(self, runner: Any, step: FusedStep, rules: Rules, sglang: Sglang) -> None:
        self.runner, self.step, self.rules, self.sglang = runner, step, rules, sglang
        self.processor, self.model = step.head.processor, runner.model
        self._proven: set[bool] = set()  # decode (True), all else (False)
        self._theirs: set[bool] = set()  # of those, what stays SGLang's
        self._made: Any = None  # the processor's output in this forward
        self._logits: Tensor | None = None  # the first of those in it, as they were
        self._states: Tensor | None = None  # of which they are
        self.counts = StepCounts(PLUGIN, FALLBACK_REASONS, "fused", "left", "split")
        self._is_read = True  # what requests ask for
        self._wrapped: list[tuple[Any, str, Any, Any]] = []  # owners, names, ours, and what the owner itself had
        with contextlib.ExitStack() as failing:
            failing.callback(self.detach)
            for owner, name, mine in self._changed():
                theirs, own = getattr(owner, name), owner.__dict__.get(name)
                wrapped = functools.wraps(theirs)(functools.partial(mine, theirs))
                setattr(owner, name, wrapped)
                self._wrapped.append((owner, name, wrapped, own))
            runner.flashsampling = self
            failing.pop_all()  # all of it stays

    def _changed(self) -> tuple[tuple[Any, str, Forward], ...]:
        return (
            (self.runner, "init_cuda_graphs", self.init_cuda_graphs),
            (self.runner, "sample", self.sample),
            (self.processor, "forward", self.process),
            (self.model, "forward", self.forward),
        )

    def detach(self) -> None:
        """Leaves the runner, its model and its logits processor as they were; what has since been put around ours stays."""
        for owner, name, wrapped, own in self._wrapped:
            if owner.__dict__.get(name) is not wrapped:
                continue
            if own is None:
                del owner.__dict__[name]
            else:
                owner.__dict__[name] = own
        vars(self.runner).pop("flashsampling", None)

    def _give_up(self, why: BaseException, decode: bool = True) -> None:
        """SGLang's way from here on, or an error where this was required. Once one kind of forward is proven a graph may hold
        it, without logits: then the other kind alone is SGLang's."""
        if self._proven:
            self._theirs.add(decode)
            PLUGIN.leave(why, what="decode is not fused" if decode else "prefill is not fused")
        else:
            self.detach()
            PLUGIN.leave(why, self.runner)

    def unread(self, error: Exception) -> None:
        """Says once that SGLang draws for requests whose parameters cannot be read."""
        if self._is_read:
            PLUGIN.logger.warning(
                "flashsampling: a request's parameters cannot be read: %s (said once)", describe(error)
            )
        self._is_read = False

    def init_cuda_graphs(self, theirs: Forward, *args: Any, **kwargs: Any) -> Any:
        """As SGLang's, after compiling what steps need."""
        try:
            batch = int(self.runner.max_running_requests)
            names = self.step.warm_up(batch)
        except BaseException as error:
            self._give_up(error)
        else:
            PLUGIN.logger.info("flashsampling: %d kernels are ready for batches of up to %d", len(set(names)), batch)
        return theirs(*args, **kwargs)

    # -- the forward pass

    def process(
        self,
        theirs: Forward,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: Any,
        logits_metadata: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """As ``LogitsProcessor.forward``; where all that is asked for are logits to draw from, the hidden states that they are
        of stand in their place, and logits of no columns."""
        metadata = logits_metadata
        try:
            if isinstance(metadata, self.sglang.forward_batch):
                metadata = self.sglang.metadata(metadata)
            decode = metadata.forward_mode.is_decode()
            is_mine = decode not in self._theirs and self._drawn_from(metadata)
        except BaseException as error:
            if self._proven:
                raise
            self._give_up(error)
            is_mine = False
        if not is_mine:
            return theirs(input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs)
        if decode not in self._proven:
            output = theirs(input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs)
            try:
                self._note(output, self._last(hidden_states, metadata), lm_head)
            except BaseException as error:
                self._give_up(error, decode)
            return output
        states = self._last(hidden_states, metadata)
        if metadata.extend_return_logprob:  # of the prompt, which needs logits
            output = theirs(input_ids, hidden_states, lm_head, logits_metadata, *args, **kwargs)
            output.hidden_states = states
        else:
            none = states.new_empty((len(states), 0), dtype=torch.float32)
            output = self.sglang.output(
                next_token_logits=none, hidden_states=states, mm_input_embeds=metadata.mm_input_embeds
            )
        self._made = output
        return output

    def _drawn_from(self, metadata: Any) -> bool:
        """Whether the last positions are drawn from, and hidden states are nobody else's."""
        return (
            metadata.forward_mode.name in _KINDS
            and not metadata.capture_hidden_mode.need_capture()
            and not metadata.is_prefill_only
            and not self.sglang.in_dummy_run()
        )

    def _last(self, hidden_states: Tensor, metadata: Any) -> Tensor:
        """Those of the last positions."""
        if metadata.extend_return_logprob:
            return hidden_states[torch.cumsum(metadata.extend_seq_lens, dim=0) - 1]
        states, *_ = self.processor._get_pruned_states(hidden_states, None, None, metadata)
        return states  # type: ignore[no-any-return]

    def _note(self, output: Any, states: Tensor, lm_head: Any) -> None:
        """Keeps what the processor returned, to see what the model makes of it. Refused: it is not of the head."""
        logits = output.next_token_logits
        if logits is None or not len(logits) or (logits.is_cuda and torch.cuda.is_current_stream_capturing()):
            return
        head, why = self.step.head, ""
        if lm_head is not head.layer:
            why = "gives its logits processor another head than its lm_head"
        elif states.dtype is not head.weight.dtype:  # SGLang casts them
            why = f"has {states.dtype} states and a head of {head.weight.dtype}"
        if why:
            raise Refused(f"{type(self.model).__name__} {why}")
        self._made, self._logits, self._states = output, logits[:_SEEN].clone(), states

    def forward(
        self, theirs: Forward, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As the model's."""
        self._made = self._logits = self._states = None
        result = theirs(input_ids, positions, forward_batch, *args, **kwargs)
        made, logits, states = self._made, self._logits, self._states
        self._made = self._logits = self._states = None
        if made is None:
            return result
        name, decode = type(self.model).__name__, forward_batch.forward_mode.is_decode()
        if logits is None:
            if result is not made:
                raise RuntimeError(
                    f"{name} returns something else than its logits processor, in this forward as in no other"
                )
            return result
        try:
            shown = result.next_token_logits if result is made else None
            if shown is None or not torch.allclose(shown[:_SEEN], logits, rtol=0, atol=0, equal_nan=True):
                raise Refused(f"{name} changes its logits after its logits processor")
            result.hidden_states = states  # a seed's tokens are the same from the first one on
        except BaseException as error:
            self._give_up(error, decode)
        else:
            self._proven.add(decode)
        return result

    # -- the draw

    def sample(self, theirs: Forward, logits_output: Any, forward_batch: Any) -> Tensor:
        """One step of a batch, in place of ``theirs``, SGLang's own."""
        states = logits_output.hidden_states
        if states is None or forward_batch.capture_hidden_mode.need_capture():
            self.counts.add("left", (FallbackReason.LOGITS,))
            return theirs(logits_output, forward_batch)  # type: ignore[no-any-return]
        noted: tuple[RequestInfo, ...] | None = getattr(forward_batch, "flashsampling", None)
        info, observer = forward_batch.sampling_info, getattr(self.runner, "sampling_observer", None)
        if noted is None or forward_batch.seq_lens_cpu is None:
            return self._left({FallbackReason.UNSEEN}, theirs, logits_output, forward_batch)
        if observer is not None and observer.is_active(info):
            return self._left({FallbackReason.OBSERVER}, theirs, logits_output, forward_batch)
        states = states[: len(noted)]
        mask = self._grammars(info)
        reasons = self.reasons(noted, mask)
        if not any(reasons):
            # as SGLang does: the batch is kept for a while
            setattr(info, _MASKS if hasattr(info, _MASKS) else "vocab_mask", None)
            logits_output.hidden_states = None
            drawn = self.step.draw(self._batch(states, forward_batch, noted, mask))
            self._hand_over(drawn, logits_output, forward_batch)
            self.counts.add("fused")
            return drawn.token_ids
        mine = [row for row, reason in enumerate(reasons) if not reason and noted[row].batch_invariant]
        token_ids = self._left(set(reasons) - {FallbackReason.SERVED}, theirs, logits_output, forward_batch, bool(mine))
        if mine:
            self._put_in(mine, token_ids, states, logits_output, forward_batch, mask)
        return token_ids

    def _left(
        self,
        reasons: set[FallbackReason],
        theirs: Forward,
        logits_output: Any,
        forward_batch: Any,
        split: bool = False,
    ) -> Tensor:
        """SGLang's own way."""
        self.counts.add("split" if split else "left", sorted(reasons))
        self.make_logits(logits_output, forward_batch.batch_size)
        logits_output.hidden_states = None
        return theirs(logits_output, forward_batch)  # type: ignore[no-any-return]

    def make_logits(self, logits_output: Any, batch: int) -> None:
        """Where there are none yet, of the hidden states in their place."""
        if not logits_output.next_token_logits.shape[1]:
            logits_output.next_token_logits = self.step.head.logits(logits_output.hidden_states[:batch])

    def reasons(self, noted: tuple[RequestInfo, ...], mask: Tensor | None) -> list[FallbackReason]:
        """Why SGLang has to do a row; known on the host."""
        without = FallbackReason.GRAMMAR if mask is None else FallbackReason.SERVED
        return [each.reason or (without if each.grammar else FallbackReason.SERVED) for each in noted]

    def counters(self) -> dict[str, Any]:
        """See ``load.counters``."""
        return {**self.counts.read(), "undefined_rows": int(self.step.undefined)}

    def _grammars(self, info: Any) -> Tensor | None:
        """(B, ceil(V / 32)) int32, the grammars' masks of this step, which SGLang's own way makes anew; None if there are none,
        or if they are no bits, as Outlines' are not."""
        if not info.grammars or not any(info.grammars):
            return None
        info.update_regex_vocab_mask()
        mask: Tensor = getattr(info, _MASKS).vocab_mask if hasattr(info, _MASKS) else info.vocab_mask
        if mask.dtype is not torch.int32 or mask.shape != (len(info.grammars), max(mask.shape[-1], self.step.words)):
            return None
        return mask[:, : self.step.words].contiguous()

    def _batch(self, states: Tensor, forward_batch: Any, noted: tuple[RequestInfo, ...], mask: Tensor | None) -> Batch:
        """Of all rows."""
        positions = forward_batch.positions if forward_batch.forward_mode.is_decode() else forward_batch.seq_lens - 1
        top = max(forward_batch.top_logprobs_nums, default=0) if forward_batch.return_logprob else None
        return Batch(states, positions[: len(noted)].long(), noted, forward_batch.seq_lens_cpu, mask, top)

    def _hand_over(self, drawn: SampleResult, logits_output: Any, forward_batch: Any) -> None:
        """Log-probabilities, where SGLang's sampler leaves them."""
        if not forward_batch.return_logprob:
            return
        logits_output.next_token_logprobs = drawn.logprobs
        counts = forward_batch.top_logprobs_nums
        if any(count > 0 for count in counts):
            for name, values in (("val", drawn.top_logprobs), ("idx", drawn.top_token_ids)):
                assert values is not None
                rows = [row[:count] for row, count in zip(values.unbind(0), counts)]
                setattr(logits_output, f"next_token_top_logprobs_{name}", rows)

    def _put_in(
        self,
        rows: list[int],
        token_ids: Tensor,
        states: Tensor,
        logits_output: Any,
        forward_batch: Any,
        mask: Tensor | None,
    ) -> None:
        """Draws these rows, and writes their tokens, and log-probabilities of them, over SGLang's. The most likely tokens and
        theirs are the same whatever is drawn."""
        noted = forward_batch.flashsampling
        whole = self._batch(states, forward_batch, noted, mask)
        there = to_device(np.array(rows, np.int64), states.device)
        part = Batch(
            whole.hidden_states.index_select(0, there),
            whole.positions.index_select(0, there),
            tuple(noted[row] for row in rows),
            whole.lengths[rows],
            None if whole.mask is None else whole.mask.index_select(0, there),
            None,
        )
        params = [
            place
            for place, row in enumerate(rows)
            if whole.top_logprobs is not None and noted[row].wants & Needs.LOGPROBS
        ]
        drawn = self.step.draw(part._replace(top_logprobs=0) if params else part)
        token_ids.index_copy_(0, there, drawn.token_ids.to(token_ids.dtype))
        if params:
            assert drawn.logprobs is not None
            places: NDArray[np.int64] = np.array(params, np.int64)
            some = to_device(places, states.device)
            logprobs = logits_output.next_token_logprobs
            logprobs.index_copy_(
                0, there.index_select(0, some), drawn.logprobs.index_select(0, some).to(logprobs.dtype)
            )


# -- once a model is loaded


def attach(runner: Any) -> str:
    """Makes a runner, whose model is loaded, a fused one; a line that says what it does. Refused: it cannot."""
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
    head = head_of(runner.model, layers)
    implementation = check_speed(head)
    sglang = Sglang(
        processors.LogitsProcessorOutput,
        batches.ForwardBatch,
        processors.LogitsMetadata.from_forward_batch,
        processors.get_in_autotune_dummy_run,
    )
    rules = rules_of(arguments, release, head, bool(samplers.SGLANG_RETURN_ORIGINAL_LOGPROB))
    said = said_of(head, rules, implementation)
    Fused(runner, FusedStep(head, head.weight.device), rules, sglang)
    return said


class Resolved:
    """A ``ServerArgs`` as it is in force."""

    def __init__(self, leaf: Callable[[str], Any]) -> None:
        self._leaf = leaf

    def __getattr__(self, name: str) -> Any:
        return self._leaf(name)


def rules_of(arguments: Any, release: Release, head: Head, original_logprobs: bool) -> Rules:
    """What SGLang's ``ServerArgs`` mean for all requests."""
    return Rules(
        vocab_size=head.vocab_size,
        flashinfer=arguments.sampling_backend == "flashinfer",
        original_logprobs=original_logprobs,
        deterministic=arguments.enable_deterministic_inference,
        processors=arguments.enable_custom_logit_processor,
        forbids_ends=release.forbids_ends,
        aligns=release.aligns and bool(arguments.enable_deterministic_inference),
    )


def check_runner(runner: Any, arguments: Any, sampler: type) -> None:
    """Refuses a runner of which something else is asked than a token of every request in turn.

    Args:
        arguments: SGLang's ``ServerArgs``, resolved.
        sampler: the class of SGLang's own.
    """
    graphs = arguments.cuda_graph_config
    newer = {name: getattr(arguments, name, None) for name in _NEWER}
    unmet = (
        (not runner.is_generation, "the model does not generate"),
        (runner.device != "cuda", f"the device is {runner.device}, not an NVIDIA GPU"),
        (arguments.tp_size > 1, "tensor parallelism"),
        (arguments.pp_size > 1, "pipeline parallelism"),
        (arguments.attn_cp_size > 1 or arguments.dcp_size > 1, "context parallelism"),
        (arguments.enable_dp_attention or arguments.enable_dp_lm_head, "data-parallel attention"),
        (arguments.speculative_algorithm is not None, "speculative decoding"),
        (arguments.dllm_algorithm is not None, "a diffusion model"),
        (arguments.disaggregation_mode != "null", "prefill and decode in different servers"),
        (arguments.enable_pdmux or arguments.enable_two_batch_overlap, "two batches at once"),
        (bool(arguments.enable_lora), "LoRA"),
        (arguments.enable_return_hidden_states or newer["return_hidden_states_mode"], "hidden states to be returned"),
        (
            newer["enable_return_aux_hidden_states"] or newer["aux_hidden_state_capture"],
            "hidden states of inner layers to be returned",
        ),
        (newer["enable_watermark"], "watermarks"),
        (
            newer["enable_nvidia_megakernel"] or newer["enable_amd_monokernel"],
            "steps of few rows that one kernel does, logits too",
        ),
        (
            newer["enable_encoder_swa_bounded_replay"] or newer["enable_decoder_swa_bounded_replay"],
            "parts of prefixes that are computed again",
        ),
        (arguments.enable_torch_compile, "torch.compile of the whole model"),
        (arguments.rl_on_policy_target is not None, "log-probabilities that are a trainer's (rl_on_policy_target)"),
        (graphs is not None and graphs.prefill.backend == "tc_piecewise", "prefill graphs that torch.compile makes"),
        (runner.model_config.use_ngram_embedding, "a model that reads tokens as they are drawn"),
        (
            arguments.sampling_backend not in ("flashinfer", "pytorch"),
            f"the sampling backend {arguments.sampling_backend!r}",
        ),
        (type(runner.sampler) is not sampler, f"a sampler of another kind, {type(runner.sampler).__name__}"),
    )
    for is_so, why in unmet:
        if is_so:
            raise Refused(why)


def said_of(head: Head, rules: Rules, implementation: str) -> str:
    """What is fused and what is not, in a line."""
    left = set(FallbackReason) - {FallbackReason.SERVED}
    if not rules.processors:
        left.remove(FallbackReason.PROCESSOR)
    if not rules.aligns:
        left.remove(FallbackReason.ALIGNED)
    return (
        f"LM head ({head.vocab_size} tokens) and sampler are one step, {implementation}; left to SGLang: "
        f"{', '.join(FALLBACK_REASONS[reason] for reason in sorted(left))}. "
        "Tokens of a seed are not those of SGLang's own sampler"
    )
