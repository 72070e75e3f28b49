"""Where the fused step meets vLLM's model runner v2.

    add_requests         notes what every new request asks for, by its slot
    sample               the fused step, vLLM's own, or both for a part of the rows each
    _dummy_sampler_run   compiles, while vLLM measures how much memory a step takes

A batch is fused if all its requests can be. Another one goes the way that it goes without the plug-in, all of it; but if a
request that could be fused was given a seed, it is drawn by the fused step all the same, and the others by vLLM: else its
tokens would depend on its batch mates.
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

from ... import ops
from ...inputs import example
from ...outputs import SampleOutput
from ...speculative.acceptance import verify_by_match
from ...tensor_parallel import TensorParallel, TensorParallelError
from ..engine.common import Layers, fast_implementation, to_device
from ..engine.plugin import Refused, StepCounts
from .batches import batch_of, buffers_of, grammar_of, part_of, part_of_grammar, rows_of_requests
from .drafts import most_drafts_of
from .graphs import Graphs
from .head import Head, head_of
from .outputs import checked
from .request_info import (
    DRAFTS,
    FALLBACK_REASONS,
    GRAMMAR,
    GRAMMAR_LOGPROBS,
    GRAMMAR_MIN_TOKENS,
    LOGPROBS_MODE,
    SERVED,
    Needs,
    Rules,
    Slots,
)
from .settings import COUNTING, PLUGIN, RUNNER, TENSOR_PARALLEL, Release, check_version, graphs, tensor_parallel
from .step import FusedStep, Grammar

PROCESSORS = {"LogitBiasState", "PenaltiesState", "BadWordsState"}  # of newer releases' samplers, which ``slots`` knows

Sampled = tuple[Any, Tensor, Tensor]  # vLLM's SamplerOutput, num_sampled, num_rejected
_WARM_UP = re.compile(r"_warmup_\d+_")  # vLLM's own requests; a user's have a random suffix


class Vllm(NamedTuple):
    """What is used of vLLM."""

    sampler_output: Callable[..., Any]
    logprobs: Callable[..., Any]  # LogprobsTensors
    counting: Callable[..., tuple[Tensor, Tensor]]  # get_num_sampled_and_rejected
    output: type  # AsyncModelRunnerOutput


class Fused:
    """What a runner has of the plug-in."""

    def __init__(self, step: FusedStep, vllm: Vllm) -> None:
        self.step, self.vllm, self.checked = step, vllm, checked(vllm.output)
        self.counts = StepCounts(PLUGIN, FALLBACK_REASONS, "fused", "left", "split", "drafts")

    def sample(
        self, theirs: Callable[..., Sampled], runner: Any, hidden_states: Tensor, input_batch: Any, grammar_output: Any
    ) -> Sampled:
        """One step of a batch, in place of ``theirs``, vLLM's own."""
        grammar = grammar_of(input_batch, grammar_output)
        reasons = self.reasons(input_batch, grammar)
        if not reasons.any():
            self.counts.add("fused", drafts=input_batch.num_draft_tokens)
            return self._fused(runner, hidden_states, input_batch, grammar)
        served = reasons == SERVED
        left = map(int, np.unique(reasons[~served]))
        if not (served & self.step.slots.batch_invariant[input_batch.idx_mapping_np]).any():
            self.counts.add("left", left)
            return theirs(hidden_states, input_batch, grammar_output)
        drafts, outputs = 0, []
        for rows, is_mine in ((np.flatnonzero(served), True), (np.flatnonzero(~served), False)):
            part = part_of(input_batch, rows)
            masks = part_of_grammar(grammar_output, grammar, rows, part)
            if is_mine:
                drafts = part.num_draft_tokens
                output, _, _ = self._fused(runner, hidden_states, part, grammar_of(part, masks))
            else:
                output, _, _ = theirs(hidden_states, part, masks)
            outputs.append((rows, output))
        self.counts.add("split", left, drafts=drafts)
        return self._joined(input_batch, outputs)

    def reasons(self, input_batch: Any, grammar: Grammar | None) -> NDArray[np.int8]:
        """(B,) why vLLM has to do a row, as an index of ``FALLBACK_REASONS``; known on the host."""
        slots = self.step.slots
        reasons = slots.reasons[input_batch.idx_mapping_np]
        if input_batch.num_draft_tokens and not self.step.most_drafts:
            reasons[:] = DRAFTS
        if grammar is not None:
            if grammar.masks.shape != (len(grammar.rows), max(grammar.masks.shape[1], self.step.words)):
                reasons[grammar.requests] = GRAMMAR
            wants = slots.wants[input_batch.idx_mapping_np[grammar.requests]]
            if slots.rules.min_tokens_respects_grammar:
                reasons[grammar.requests[(wants & Needs.MIN_TOKENS) != 0]] = GRAMMAR_MIN_TOKENS
            with_logprobs = grammar.requests[
                (wants & Needs.LOGPROBS) != 0
            ]  # vLLM's raw ones are of what the grammar allows
            reasons[with_logprobs] = GRAMMAR_LOGPROBS
        return reasons

    def counters(self) -> dict[str, Any]:
        """See ``load.counters``."""
        return {**self.counts.read(), "undefined_rows": int(self.step.undefined)}

    def log(self) -> None:
        """Logs the counters."""
        PLUGIN.logger.info("flashsampling: %s", self.counters())

    def _fused(self, runner: Any, hidden_states: Tensor, input_batch: Any, grammar: Grammar | None) -> Sampled:
        buffers = None if self.step.graphs is None else buffers_of(runner)
        batch = batch_of(hidden_states, input_batch, grammar, self.step.most_drafts, buffers)
        out, top = self.step.draw(batch)
        bounds = None
        ids, num_sampled = self.step.sanitize_token_ids(out.token_ids)
        if batch.drafts is None:
            token_ids = ids.view(-1, 1)
        else:
            # -1 is no draft: rows without a token accept none, and of a failed step all ranks emit as many
            accepted = verify_by_match(batch.drafts, out.token_ids)
            last = accepted.num_accepted[:, None]
            token_ids = accepted.token_ids.scatter_(1, last, accepted.token_ids.gather(1, last).clamp_(min=0))
            num_sampled = (accepted.num_accepted + 1).int()
            bounds = input_batch.cu_num_logits_np.tolist()
        logprobs = None if top is None else self._logprobs(ids, out, top, bounds)
        num_sampled, num_rejected = self.vllm.counting(
            num_sampled,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            runner.sampler.req_states.prefill_len.gpu,
        )
        return self._output(token_ids, logprobs, num_sampled, num_rejected)

    def _logprobs(self, ids: Tensor, out: SampleOutput, top: int, bounds: list[int] | None) -> Any:
        """As vLLM has them: the token's first, then the most likely ones'. All are copies: it sends them to the host while the
        next step may write to ``out``. ``bounds``: of requests' rows, with drafts."""
        assert out.logprobs is not None
        assert out.ranks is not None
        assert out.top_token_ids is not None
        assert out.top_logprobs is not None
        return self.vllm.logprobs(
            logprob_token_ids=torch.cat((ids[:, None], out.top_token_ids[:, :top]), dim=1),
            logprobs=torch.cat((out.logprobs[:, None], out.top_logprobs[:, :top]), dim=1),
            selected_token_ranks=out.ranks.clone(),
            cu_num_generated_tokens=bounds,
        )

    def _output(self, token_ids: Tensor, logprobs: Any, num_sampled: Tensor, num_rejected: Tensor) -> Sampled:
        output = self.vllm.sampler_output(
            sampled_token_ids=token_ids,
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )
        return output, num_sampled, num_rejected

    def _joined(self, input_batch: Any, outputs: list[tuple[NDArray[np.int64], Any]]) -> Sampled:
        """One output of those of parts, each of these requests."""
        device = input_batch.logits_indices.device
        there = to_device(_places([requests for requests, _ in outputs]), device)
        columns = max(output.sampled_token_ids.shape[1] for _, output in outputs)
        parts = [(_padded(each.sampled_token_ids, columns), each.num_sampled, each.num_rejected) for _, each in outputs]
        token_ids, num_sampled, num_rejected = (torch.cat(same).index_select(0, there) for same in zip(*parts))
        tensors = [output.logprobs_tensors for _, output in outputs]
        logprobs = None
        if any(each is not None for each in tensors):
            rows = [rows_of_requests(input_batch, requests)[0] for requests, _ in outputs]
            there = to_device(_places(rows), device)
            columns = max(each.logprobs.shape[1] for each in tensors if each is not None)
            wide = [_widened(each, len(those), columns, token_ids) for each, those in zip(tensors, rows)]
            ids, values, ranks = (torch.cat(same).index_select(0, there) for same in zip(*wide))
            bounds = input_batch.cu_num_logits_np.tolist() if input_batch.num_draft_tokens else None
            logprobs = self.vllm.logprobs(
                logprob_token_ids=ids, logprobs=values, selected_token_ranks=ranks, cu_num_generated_tokens=bounds
            )
        return self._output(token_ids, logprobs, num_sampled, num_rejected)


def _places(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Where in the parts, one behind the other, each of all is."""
    return np.argsort(np.concatenate(parts))


def _padded(token_ids: Tensor, columns: int) -> Tensor:
    """In so many columns, with -1 behind."""
    return torch.nn.functional.pad(token_ids, (0, columns - token_ids.shape[1]), value=-1)


def _widened(tensors: Any, rows: int, columns: int, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, log-probabilities and ranks in so many columns; what is not there is as vLLM has it, token 0 and -inf."""
    ids = token_ids.new_zeros((rows, columns), dtype=torch.int64)
    values = ids.new_full((rows, columns), float("-inf"), dtype=torch.float32)
    if tensors is None:
        return ids, values, ids.new_zeros(rows)
    width = tensors.logprobs.shape[1]
    ids[:, :width], values[:, :width] = tensors.logprob_token_ids, tensors.logprobs
    return ids, values, tensors.selected_token_ranks.long()


class FusedRunner:
    """In front of vLLM's ``GPUModelRunner`` among the bases of a class."""

    flashsampling: Fused

    def add_requests(self, scheduler_output: Any) -> None:
        """As vLLM's, and notes what new requests ask for."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        for new in scheduler_output.scheduled_new_reqs:
            if new.sampling_params is not None:
                slot = self.req_states.req_id_to_index[new.req_id]  # type: ignore[attr-defined]
                self.flashsampling.step.add(slot, new.sampling_params, int(self.req_states.prompt_len.np[slot]))  # type: ignore[attr-defined]

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Sampled:
        """As vLLM's, fused where it can be. vLLM's warm-up is of its own sampler, and nobody's reason."""
        if _WARM_UP.fullmatch(input_batch.req_ids[0]):
            return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc,no-any-return]
        return self.flashsampling.sample(super().sample, self, hidden_states, input_batch, grammar_output)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's, whose tokens of a step that failed are an error."""
        output, fused = super().sample_tokens(grammar_output), self.flashsampling  # type: ignore[misc]
        if fused.step.tp is None or not isinstance(output, fused.vllm.output):
            return output
        return fused.checked(output, fused.step.tp)

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        super()._dummy_sampler_run(hidden_states)  # type: ignore[misc]
        most_drafts = self.flashsampling.step.most_drafts
        try:
            if most_drafts:
                hidden_states = hidden_states.repeat(most_drafts + 1, 1)[: most_rows(self, most_drafts)]
            names = self.flashsampling.step.warm_up(hidden_states)
        except BaseException as error:  # of several ranks all come here: their group has failed, and is closed
            del self.flashsampling
            self.__class__ = next(kind for kind in type(self).__mro__ if not issubclass(kind, FusedRunner))  # type: ignore[assignment]
            PLUGIN.leave(error, self)
            return
        PLUGIN.logger.info(
            "flashsampling: %d kernels are ready for batches of up to %d", len(set(names)), len(hidden_states)
        )

    def shutdown(self) -> None:
        """As vLLM's, after a line about what was fused."""
        fused = self.flashsampling
        tp = fused.step.tp
        # whoever does not come, the buffers are given up all the same; after a device's error nothing can be read
        for each in (fused.log, *(() if tp is None else (tp.raise_if_failed, tp.close))):
            try:
                each()
            except Exception as error:
                PLUGIN.logger.error("flashsampling: %s", error)
        super().shutdown()  # type: ignore[misc]


# -- once a model is loaded


def attach(runner: Any) -> str:
    """Makes a runner, whose model is loaded, a fused one; a line that says what it does. Refused: it cannot."""
    from vllm import envs
    from vllm.distributed import get_tp_group
    from vllm.model_executor.layers.logits_processor import LogitsProcessor
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
    from vllm.v1.outputs import AsyncModelRunnerOutput, LogprobsTensors
    from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.sample.output import SamplerOutput
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    release = check_version(importlib.metadata.version("vllm"))
    check_runner(runner, release, GPUModelRunner, Sampler)
    most_drafts = most_drafts_of(runner, RejectionSampler)
    for name, parameters in RUNNER.items():
        PLUGIN.check_signature(f"GPUModelRunner.{name}", getattr(GPUModelRunner, name, None), parameters)
    PLUGIN.check_signature("get_num_sampled_and_rejected", get_num_sampled_and_rejected, COUNTING)
    PLUGIN.check_signature("LogitsProcessor.forward", LogitsProcessor.forward, release.logits)
    layers = Layers(LogitsProcessor, VocabParallelEmbedding, UnquantizedEmbeddingMethod)
    head = head_of(runner.model, runner.model_config.get_hidden_size(), runner.dtype, runner.device, layers)
    check_head(head, runner.vocab_size)
    raw_logprobs = runner.sampler.logprobs_mode == "raw_logprobs"
    rules = Rules(head.vocab_size, raw_logprobs, release.min_tokens_respects_grammar, bool(envs.VLLM_BATCH_INVARIANT))
    vllm = Vllm(SamplerOutput, LogprobsTensors, get_num_sampled_and_rejected, AsyncModelRunnerOutput)
    with contextlib.ExitStack() as failing:
        tp = None
        if head.ranks > 1:
            tp = group_of(head, get_tp_group().device_group, most_rows(runner, most_drafts))
            failing.push(tp)  # of an error behind it the other ranks hear in their warm-up
        recorded = None
        if graphs():
            dim, dtype = head.weight.shape[1], head.weight.dtype
            recorded = Graphs(runner.max_num_reqs, dim, dtype, runner.device, head.vocab_size, tp)
        step = FusedStep(
            head, runner.sampler, Slots(runner.max_num_reqs, rules), runner.device, tp, most_drafts, recorded
        )
        fused, said = Fused(step, vllm), said_of(head, rules, tp, most_drafts)
        failing.callback(vars(runner).pop, "flashsampling", None)
        runner.flashsampling = fused
        runner.__class__ = type("FusedGPUModelRunner", (FusedRunner, GPUModelRunner), {})
        failing.pop_all()  # the group stays open
    return said


def check_runner(runner: Any, release: Release, kind: type, sampler: type) -> None:
    """Refuses a runner of which something else is asked than a token of every request in turn."""
    config = runner.vllm_config
    ranks, drafts = config.parallel_config.tensor_parallel_size, config.speculative_config is not None
    several = ranks > 1
    unmet = (
        (type(runner) is not kind, f"the model runner is a {type(runner).__name__}"),
        (runner.is_pooling_model, "the model does not generate"),
        (runner.device.type != "cuda", f"the device is {runner.device}, not an NVIDIA GPU"),
        (runner.use_pp, "pipeline parallelism"),
        (
            several and not tensor_parallel(ranks, drafts),
            f"tensor parallelism, but for two ranks with graphs and no drafts, as it was timed ({TENSOR_PARALLEL}=1 has it)",
        ),
        (
            several and not release.drafts_and_ranks,
            "tensor parallelism with this release of vLLM, which has not been tried",
        ),
        (
            drafts and not release.drafts_and_ranks,
            "speculative decoding with this release of vLLM, which has not been tried",
        ),
        (config.parallel_config.prefill_context_parallel_size > 1, "prefill context parallelism"),
        (bool(runner.model_config.logits_processors), "custom logits processors"),
        (runner.sampler is None, "this rank samples nothing"),
    )
    for is_so, why in unmet:
        if is_so:
            raise Refused(why)
    own = type(runner.sampler)
    if own is not sampler:
        raise Refused(f"the model brings a sampler of its own, {own.__name__}")
    if config.speculative_config is None and runner.decode_query_len != 1:
        raise Refused(f"a step has {runner.decode_query_len} new tokens of a request")
    if runner.sampler.compute_nans:
        raise Refused("VLLM_COMPUTE_NANS_IN_LOGITS counts NaN in logits, which are nowhere in memory here")
    for name in release.sampler:
        if not hasattr(runner.sampler, name):
            raise Refused(f"the sampler has no {name} here: this is not a vLLM that is known")
    package = sampler.__module__.rpartition(".")[0]
    for each in map(type, getattr(runner.sampler, "logits_processors", ())):
        # somebody else's may be called as one of vLLM's is
        if each.__name__ not in PROCESSORS or each.__module__.rpartition(".")[0] != package:
            raise Refused(f"custom logits processors: {each.__module__}.{each.__name__}")
    if getattr(runner.sampler, "return_sampling_mask", False):
        raise Refused("return_sampling_mask, for which logits are needed")
    if getattr(runner.sampler, "trace_replay_state", None) is not None:
        raise Refused("tokens may be replayed from a trace (enable_trace_replay)")


def most_rows(runner: Any, most_drafts: int) -> int:
    """Of a step: every draft has one, as far as there are tokens of a step, and so has every request."""
    return max(min(runner.max_num_reqs * (most_drafts + 1), runner.max_num_tokens), runner.max_num_reqs)  # type: ignore[no-any-return]


def group_of(head: Head, group: Any, max_batch_size: int) -> TensorParallel:
    """vLLM's tensor-parallel ranks as a group; all of them make this call. Refused: they cannot be one."""
    try:
        return TensorParallel(
            group, head.weight, first_token=head.first_token, vocab_size=head.vocab_size, max_batch_size=max_batch_size
        )
    except (ValueError, TensorParallelError) as error:
        raise Refused(f"tensor parallelism: {error}") from error


def check_head(head: Head, vocab_size: int) -> None:
    """Refuses a head of more tokens than vLLM keeps counts of, or that only a slow implementation takes."""
    if head.vocab_size > vocab_size:
        raise Refused(f"the LM head has {head.vocab_size} tokens, the model's configuration {vocab_size}")
    try:
        fast_implementation(head.weight, "vLLM")
    except ValueError as error:
        raise Refused(str(error)) from None


def said_of(head: Head, rules: Rules, tp: TensorParallel | None, most_drafts: int = 0) -> str:
    """What is fused and what is not, in a line."""
    left = [FALLBACK_REASONS[reason] for reason in range(1, DRAFTS)]
    off = {
        FALLBACK_REASONS[LOGPROBS_MODE]: rules.raw_logprobs,
        FALLBACK_REASONS[GRAMMAR_MIN_TOKENS]: not rules.min_tokens_respects_grammar,
    }
    left = [text for text in left if not off.get(text)]
    who = (
        ops.choose(example(head.weight), "").name
        if tp is None
        else f"{tp.impl} over {tp.transport} on {tp.world_size} ranks"
    )
    drafts = f"drafts, up to {most_drafts} of a request, are accepted by matching; " if most_drafts else ""
    return (
        f"LM head ({head.vocab_size} tokens) and sampler are one step, {who}; {drafts}"
        f"left to vLLM: {', '.join(left)}. Seeded tokens are not those of vLLM's own sampler"
    )
