"""Puts the fused step into vLLM's model runner v2.

    add_requests         reads every new request, by its slot
    sample               the fused step; or vLLM's own; or both, for a part of the rows
    _dummy_sampler_run   compiles, while vLLM measures how much memory a step takes

A batch is fused if all its requests can be. Otherwise vLLM samples the whole batch as it does without the plug-in. One
exception: the token of a request that could be fused and has a seed is still drawn by the fused step, over vLLM's;
otherwise it would depend on its batch mates.

Drafts: every position with a logit is a row of the step, and a draft is accepted while it is what the step draws there.
That is ``flashsampling.verify`` by matching, in its two halves ``sample`` and ``verify_by_match``; between them a row
may have what ``verify`` takes per request only, or not at all: stop tokens allowed along the drafts, log-probabilities.
Drafts must be certain, the drafter's best tokens, as vLLM's are by default. Matching then accepts each with the
probability with which the target draws it, as any exact verifier does. vLLM's sampler accepts more of sampled drafts,
by their probabilities: those are refused.
"""

import contextlib
import importlib.metadata
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...speculative.acceptance import verify_by_match
from ...tensor_parallel import TensorParallel, TensorParallelError
from ..engine.graphs import Graphs
from ..engine.head import Head, Layers, check_speed
from ..engine.plugin import Refused, StepCounts, refuse_if
from ..engine.request_info import VLLM_FALLBACKS, FallbackReason, Needs, RequestState
from ..engine.transfer import to_device
from .batches import convert_batch, find_buffers, find_grammar, rows_of_requests, select_grammar, select_requests
from .head import find_head
from .request_info import VllmRules
from .settings import COUNTING, PLUGIN, RUNNER, TENSOR_PARALLEL, VllmRelease, check_version, graphs, tensor_parallel
from .step import Grammar, VllmStep

PROCESSORS = {"LogitBiasState", "PenaltiesState", "BadWordsState"}  # of newer releases' samplers, which the step knows

Sampled = tuple[Any, Tensor, Tensor]  # vLLM's SamplerOutput, num_sampled, num_rejected
_WARM_UP = re.compile(r"_warmup_\d+_")  # vLLM's own requests; a user's have a random suffix


class Vllm(NamedTuple):
    """The parts of vLLM that are used."""

    sampler_output: Callable[..., Any]
    logprobs: Callable[..., Any]  # LogprobsTensors
    counting: Callable[..., tuple[Tensor, Tensor]]  # get_num_sampled_and_rejected


class VllmSampler:
    """The plug-in's part of a runner."""

    def __init__(self, step: VllmStep, vllm: Vllm) -> None:
        self.step, self.vllm = step, vllm
        self.counts = StepCounts(PLUGIN, "fused", "left", "split", "drafts")

    def sample(
        self, own: Callable[..., Sampled], runner: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any
    ) -> Sampled:
        """Samples a batch in place of ``own``, vLLM's method."""
        grammar = find_grammar(input_batch, grammar_output)
        reasons = self.reasons(input_batch, grammar)
        if not reasons.any():
            self.counts.add("fused", drafts=input_batch.num_draft_tokens)
            return self._fused(runner, hidden_states, input_batch, grammar)
        served = reasons == FallbackReason.SERVED
        left = [int(reason) for reason in np.unique(reasons[~served])]
        kept = np.flatnonzero(served & self.step.request_state.batch_invariant[input_batch.idx_mapping_np])
        sampled = own(hidden_states, input_batch, grammar_output)
        if not len(kept):
            self.counts.add("left", left)
            return sampled
        part = select_requests(input_batch, kept)
        self.counts.add("split", left, drafts=part.num_draft_tokens)
        drawn = self._fused(runner, hidden_states, part, select_grammar(input_batch, grammar, kept))
        self._overwrite(sampled, drawn, input_batch, kept)
        return sampled

    def reasons(self, input_batch: Any, grammar: Grammar | None) -> NDArray[np.int8]:
        """Returns (B,) why vLLM has to do a row, as ``FallbackReason``; known on the host."""
        state = self.step.request_state
        reasons = state.reasons[input_batch.idx_mapping_np]
        if grammar is not None:
            if grammar.masks.shape != (len(grammar.rows), max(grammar.masks.shape[1], self.step.words)):
                reasons[grammar.requests] = FallbackReason.GRAMMAR_SHAPE
            needs = state.needs[input_batch.idx_mapping_np[grammar.requests]]
            if state.rules.min_tokens_respects_grammar:
                reasons[grammar.requests[(needs & Needs.MIN_TOKENS) != 0]] = FallbackReason.GRAMMAR_MIN_TOKENS
            # vLLM's raw log-probabilities are of what the grammar allows
            reasons[grammar.requests[(needs & Needs.LOGPROBS) != 0]] = FallbackReason.GRAMMAR_LOGPROBS
        return reasons

    def counters(self) -> dict[str, Any]:
        """Returns the counts that ``load.counters`` documents."""
        return {**self.counts.read(), "undefined_rows": int(self.step.undefined)}

    def log(self) -> None:
        """Logs the counters."""
        PLUGIN.logger.info("flashsampling: %s", self.counters())

    def _fused(self, runner: Any, hidden_states: Tensor, input_batch: Any, grammar: Grammar | None) -> Sampled:
        buffers = None if self.step.graphs is None else find_buffers(runner)
        batch = convert_batch(hidden_states, input_batch, grammar, self.step.most_drafts, buffers)
        out, top = self.step.draw(batch)
        bounds = None
        ids, num_sampled = self.step.sanitize_token_ids(out.token_ids)
        if batch.drafts is None:
            token_ids = ids.view(-1, 1)
        else:
            # -1 is no draft: rows without a token accept none, and in a failed step all ranks emit as many
            accepted = verify_by_match(batch.drafts, out.token_ids)
            last = accepted.num_accepted[:, None]
            token_ids = accepted.token_ids.scatter_(1, last, accepted.token_ids.gather(1, last).clamp_(min=0))
            num_sampled = (accepted.num_accepted + 1).int()
            bounds = input_batch.cu_num_logits_np.tolist()
        logprobs = None if top is None else self._logprobs(ids, out, top, bounds)
        mapping, prefill_len = input_batch.idx_mapping, runner.sampler.req_states.prefill_len.gpu
        counted = self.vllm.counting(num_sampled, input_batch.seq_lens, input_batch.cu_num_logits, mapping, prefill_len)
        num_sampled, num_rejected = counted
        counts = {"num_nans": None, "num_sampled": num_sampled, "num_rejected": num_rejected}
        output = self.vllm.sampler_output(sampled_token_ids=token_ids, logprobs_tensors=logprobs, **counts)
        return output, num_sampled, num_rejected

    def _logprobs(self, ids: Tensor, out: Any, top: int, bounds: list[int] | None) -> Any:
        """Returns vLLM's tensors: the token's first, then the most likely ones'. All are copies: vLLM sends them to the
        host while the next step may overwrite ``out``. ``bounds``: of requests' rows, with drafts."""
        return self.vllm.logprobs(
            logprob_token_ids=torch.cat((ids[:, None], out.top_token_ids[:, :top]), dim=1),
            logprobs=torch.cat((out.logprobs[:, None], out.top_logprobs[:, :top]), dim=1),
            selected_token_ranks=out.ranks.clone(),
            cu_num_generated_tokens=bounds,
        )

    def _overwrite(self, sampled: Sampled, drawn: Sampled, input_batch: Any, requests: NDArray[np.int64]) -> None:
        """Writes what was drawn for these requests over what vLLM sampled for them. Rows of vLLM's have columns for the
        request with the most drafts or log-probabilities."""
        device = input_batch.logits_indices.device
        index = to_device(requests, device)
        rows = to_device(rows_of_requests(input_batch, requests)[0], device)
        (output, *counts), (ours, *our_counts) = sampled, drawn
        pairs: list[tuple[Tensor, Tensor, Tensor]] = [(index, output.sampled_token_ids, ours.sampled_token_ids)]
        pairs += [(index, *pair) for pair in zip(counts, our_counts)]
        if ours.logprobs_tensors is not None:
            for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
                pairs.append((rows, getattr(output.logprobs_tensors, name), getattr(ours.logprobs_tensors, name)))
        for where, theirs, mine in pairs:
            some = theirs if mine.ndim == 1 else theirs[:, : mine.shape[1]]
            some.index_copy_(0, where, mine.to(theirs.dtype))


class FusedRunner:
    """In front of vLLM's ``GPUModelRunner`` among the bases of a class."""

    flashsampling: VllmSampler

    def add_requests(self, scheduler_output: Any) -> None:
        """Calls vLLM's method, and reads new requests."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is not None:
                slot = self.req_states.req_id_to_index[new.req_id]  # type: ignore[attr-defined]
                self.flashsampling.step.add(slot, new.sampling_params, int(self.req_states.prompt_len.np[slot]))  # type: ignore[attr-defined]

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Sampled:
        """Samples a batch. vLLM's warm-up runs its own sampler, and is not counted."""
        if _WARM_UP.fullmatch(input_batch.req_ids[0]):
            return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc,no-any-return]
        return self.flashsampling.sample(super().sample, self, hidden_states, input_batch, grammar_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Calls vLLM's method. Rows of a failed step have tokens all the same, and vLLM would hear of the failure at
        the next step, which need not come: ``get_output``, which has waited for the step, raises it."""
        output, tp = super().sample_tokens(grammar_output), self.flashsampling.step.tp  # type: ignore[misc]
        get_output = getattr(output, "get_output", None)
        if tp is None or get_output is None:
            return output

        def checked() -> Any:
            found = get_output()
            tp.raise_if_failed()
            return found

        output.get_output = checked
        return output

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        super()._dummy_sampler_run(hidden_states)  # type: ignore[misc]
        most_drafts = self.flashsampling.step.most_drafts
        try:
            if most_drafts:
                hidden_states = hidden_states.repeat(most_drafts + 1, 1)[: max_rows(self, most_drafts)]
            names = self.flashsampling.step.warm_up(len(hidden_states), hidden_states)
        except BaseException as error:  # all ranks come here: their group has failed, and is closed
            del self.flashsampling
            self.__class__ = next(kind for kind in type(self).__mro__ if not issubclass(kind, FusedRunner))  # type: ignore[assignment]
            PLUGIN.leave(error, self)
        else:
            PLUGIN.log_ready(names, len(hidden_states))

    def shutdown(self) -> None:
        """Logs what was fused, and calls vLLM's method."""
        fused = self.flashsampling
        tp = fused.step.tp
        # buffers are released even if a rank is missing; after a device's error nothing can be read
        for each in (fused.log, *(() if tp is None else (tp.raise_if_failed, tp.close))):
            try:
                each()
            except Exception as error:
                PLUGIN.logger.error("flashsampling: %s", error)
        super().shutdown()  # type: ignore[misc]


# -- once a model is loaded


def attach(runner: Any) -> str:
    """Makes a runner, whose model is loaded, a fused one. Returns a line that says what it does. Refuses other
    runners."""
    from vllm import envs
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    release = check_version(importlib.metadata.version("vllm"))
    check_runner(runner, release, GPUModelRunner, Sampler)
    most_drafts = count_drafts(runner, RejectionSampler)
    for name, parameters in RUNNER.items():
        PLUGIN.check_signature(f"GPUModelRunner.{name}", getattr(GPUModelRunner, name, None), parameters)
    PLUGIN.check_signature("get_num_sampled_and_rejected", get_num_sampled_and_rejected, COUNTING)
    PLUGIN.check_signature("LogitsProcessor.forward", LogitsProcessor.forward, release.logits)
    layers = Layers(LogitsProcessor, VocabParallelEmbedding, UnquantizedEmbeddingMethod)
    head = find_head(runner.model, runner.model_config.get_hidden_size(), runner.dtype, runner.device, layers)
    if head.vocab_size > runner.vocab_size:  # of which vLLM keeps counts
        raise Refused(f"the LM head has {head.vocab_size} tokens, the model's configuration {runner.vocab_size}")
    backend = check_speed(head, "vLLM")
    raw_logprobs, invariant = runner.sampler.logprobs_mode == "raw_logprobs", bool(envs.VLLM_BATCH_INVARIANT)
    rules = VllmRules(head.vocab_size, raw_logprobs, release.min_tokens_respects_grammar, invariant)
    vllm = Vllm(SamplerOutput, LogprobsTensors, get_num_sampled_and_rejected)
    with contextlib.ExitStack() as failing:
        tp, recorded = None, None
        if head.ranks > 1:
            tp = open_group(head, get_tp_group().device_group, max_rows(runner, most_drafts))
            failing.push(tp)  # the other ranks hear of a later error in their warm-up
            backend = f"{tp.impl} over {tp.transport} on {tp.world_size} ranks"
        if graphs():
            dim, dtype = head.weight.shape[1], head.weight.dtype
            recorded = Graphs(runner.max_num_reqs, dim, dtype, runner.device, head.vocab_size, tp)
        state = RequestState(runner.max_num_reqs, rules)
        step = VllmStep(head, runner.sampler, state, runner.device, tp, most_drafts, recorded)
        failing.callback(vars(runner).pop, "flashsampling", None)
        runner.flashsampling = VllmSampler(step, vllm)
        runner.__class__ = type("FusedGPUModelRunner", (FusedRunner, GPUModelRunner), {})
        failing.pop_all()  # the group stays open
    if most_drafts:
        backend += f"; drafts, up to {most_drafts} of a request, are accepted by matching"
    has = {FallbackReason.LOGPROBS_MODE: not raw_logprobs}
    has[FallbackReason.GRAMMAR_MIN_TOKENS] = release.min_tokens_respects_grammar
    return PLUGIN.summary(head.vocab_size, backend, dict.fromkeys(VLLM_FALLBACKS, True) | has, "Seeded tokens")


def check_runner(runner: Any, release: VllmRelease, kind: type, sampler: type) -> None:
    """Refuses a runner that has to do something else than draw a token of every request in turn."""
    config, own, tokens = runner.vllm_config, runner.sampler, runner.decode_query_len
    ranks, drafts = config.parallel_config.tensor_parallel_size, config.speculative_config is not None
    several, untried = ranks > 1, "with this release of vLLM, which has not been tried"
    as_timed = f"but for two ranks with graphs and no drafts, as it was timed ({TENSOR_PARALLEL}=1 has it)"
    nan = "VLLM_COMPUTE_NANS_IN_LOGITS counts NaN in logits, which are nowhere in memory here"
    refuse_if(
        {
            f"the model runner is a {type(runner).__name__}": type(runner) is not kind,
            "the model does not generate": runner.is_pooling_model,
            f"the device is {runner.device}, not an NVIDIA GPU": runner.device.type != "cuda",
            "pipeline parallelism": runner.use_pp,
            f"tensor parallelism, {as_timed}": several and not tensor_parallel(ranks, drafts),
            f"tensor parallelism {untried}": several and not release.drafts_and_ranks,
            f"speculative decoding {untried}": drafts and not release.drafts_and_ranks,
            "prefill context parallelism": config.parallel_config.prefill_context_parallel_size > 1,
            "custom logits processors": runner.model_config.logits_processors,
            "this rank samples nothing": own is None,
            f"the model brings a sampler of its own, {type(own).__name__}": type(own) is not sampler,
            f"a step has {tokens} new tokens of a request": not drafts and tokens != 1,
            nan: own is not None and own.compute_nans,
        }
    )
    package = sampler.__module__.rpartition(".")[0]
    for each in map(type, getattr(own, "logits_processors", ())):
        # another package's processor may have the name of one of vLLM's
        if each.__name__ not in PROCESSORS or each.__module__.rpartition(".")[0] != package:
            raise Refused(f"custom logits processors: {each.__module__}.{each.__name__}")
    traced = "tokens may be replayed from a trace (enable_trace_replay)"
    masks = "return_sampling_mask, for which logits are needed"
    replay = getattr(own, "trace_replay_state", None)
    refuse_if({masks: getattr(own, "return_sampling_mask", False), traced: replay is not None})


def count_drafts(runner: Any, rejection_sampler: type) -> int:
    """Returns how many drafts a request may have in a step; 0 without speculative decoding. Refuses an acceptance that
    is something else than matching certain drafts."""
    if runner.vllm_config.speculative_config is None:
        return 0
    most, kind, tokens = int(runner.num_speculative_steps), type(runner.rejection_sampler), runner.decode_query_len
    decoding = "speculative decoding with"
    probabilistic = "draft_sample_method=probabilistic, where vLLM accepts more drafts than matching would"
    synthetic = "rejection_sample_method=synthetic, which accepts drafts whatever they are"
    if runner.speculator is None or kind is not rejection_sampler:
        raise Refused(f"speculative decoding whose drafts go to a {kind.__name__}")
    refuse_if(
        {
            f"{decoding} {probabilistic}": runner.speculator.draft_logits is not None,
            f"{decoding} {synthetic}": runner.rejection_sampler.synthetic_conditional_rates is not None,
            f"a step has {tokens} new tokens, and {most} drafts": tokens != most + 1,
        }
    )
    return most


def max_rows(runner: Any, most_drafts: int) -> int:
    """Returns the rows of a step at most: one for every draft, as far as a step has tokens, and one for every
    request."""
    return max(min(runner.max_num_reqs * (most_drafts + 1), runner.max_num_tokens), runner.max_num_reqs)  # type: ignore[no-any-return]


def open_group(head: Head, group: Any, max_batch_size: int) -> TensorParallel:
    """Returns vLLM's tensor-parallel ranks as a group; all ranks make this call. Refuses ranks that cannot be one."""
    sizes: Any = {"vocab_size": head.vocab_size, "max_batch_size": max_batch_size}
    try:
        return TensorParallel(group, head.weight, first_token=head.first_token, **sizes)
    except (ValueError, TensorParallelError) as error:
        raise Refused(f"tensor parallelism: {error}") from error
