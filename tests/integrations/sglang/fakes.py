"""Fakes of the classes of SGLang 0.5.15 that the plug-in reads, with the names, shapes and dtypes of the real ones, on
a CPU.

``tests/integrations/sglang/test_real.py`` compares them with the real ones where SGLang's Python files are.
"""

import copy
import dataclasses
import enum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

LEFT = 7  # the token that SGLang's own path draws here
TOP_K_ALL = 1 << 30


class SamplingParams:
    """Parameters after ``__post_init__``: a temperature of 0 is top-k 1."""

    beam_width: int | None  # of 0.5.23; 0.5.15 has no such attribute

    def __init__(self, **given: Any) -> None:
        self.temperature, self.top_p, self.top_k, self.min_p = 1.0, 1.0, TOP_K_ALL, 0.0
        self.frequency_penalty, self.presence_penalty, self.repetition_penalty = 0.0, 0.0, 1.0
        self.min_new_tokens, self.n = 0, 1
        self.stop_token_ids: set[int] | None = None
        self.logit_bias: dict[str, float] | None = None
        self.sampling_seed: int | None = None
        for name, value in given.items():
            assert hasattr(self, name)
            setattr(self, name, value)
        if self.temperature < 1e-6:
            self.temperature, self.top_k = 1.0, 1


class Req:
    return_sampling_mask: bool  # of 0.5.23, likewise
    beam_group: Any
    eos_token_ids: set[int] | None  # read of 0.5.23

    def __init__(self, prompt: list[int], params: SamplingParams, **given: Any) -> None:
        self.origin_input_ids, self.sampling_params = prompt, params
        self.return_logprob = False
        self.logprob = SimpleNamespace(
            top_logprobs_num=given.pop("top", 0), token_ids_logprob=given.pop("token_ids", None)
        )
        self.custom_logit_processor: str | None = None
        self.grammar: Any = None
        self.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)
        for name, value in given.items():
            assert hasattr(self, name)
            setattr(self, name, value)


class Grammar:
    """Allows these tokens; bits as XGrammar's and llguidance's, or a bool per token as Outlines'."""

    def __init__(self, allowed: list[int], bits: bool = True) -> None:
        self.allowed, self.bits = allowed, bits

    def __bool__(self) -> bool:
        return True


class ForwardMode(enum.IntEnum):
    EXTEND = 1
    DECODE = 2
    MIXED = 3
    IDLE = 4

    def is_decode(self) -> bool:
        return self == ForwardMode.DECODE


class CaptureHiddenMode(enum.IntEnum):
    NULL = 0
    LAST = 1
    FULL = 2

    def need_capture(self) -> bool:
        return self != CaptureHiddenMode.NULL


@dataclasses.dataclass
class SamplingBatchInfo:
    vocab_size: int
    grammars: list[Any] | None = None
    vocab_mask: Tensor | None = None
    made: int = 0  # how often the mask was

    def update_regex_vocab_mask(self) -> None:
        assert self.grammars is not None
        self.made += 1
        first = next(grammar for grammar in self.grammars if grammar)
        allowed = torch.ones(len(self.grammars), self.vocab_size, dtype=torch.bool)
        for row, grammar in enumerate(self.grammars):
            if grammar:
                allowed[row] = torch.isin(torch.arange(self.vocab_size), torch.tensor(grammar.allowed))
        self.vocab_mask = packed(allowed) if first.bits else ~allowed


def packed(allowed: Tensor) -> Tensor:
    """(B, ceil(V / 32)) int32 of (B, V) bool."""
    bits = nn.functional.pad(allowed.long(), (0, -allowed.shape[1] % 32)).view(len(allowed), -1, 32)
    return (bits << torch.arange(32)).sum(dim=-1).to(torch.int32)


@dataclasses.dataclass
class ForwardBatch:
    forward_mode: ForwardMode
    batch_size: int
    input_ids: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    positions: Tensor
    sampling_info: SamplingBatchInfo
    return_logprob: bool = False
    top_logprobs_nums: list[int] | None = None
    token_ids_logprobs: list[list[int] | None] | None = None
    extend_seq_lens: Tensor | None = None
    capture_hidden_mode: CaptureHiddenMode = CaptureHiddenMode.NULL
    is_prefill_only: bool = False
    prompt_logprobs: bool = False
    mm_input_embeds: Tensor | None = None

    @classmethod
    def init_new(cls, batch: Any, model_runner: Any) -> "ForwardBatch":
        reqs = batch.reqs
        grammars, logprobs = [req.grammar for req in reqs], [req.logprob for req in reqs]
        info = SamplingBatchInfo(model_runner.vocab_size, grammars if any(grammars) else None)
        lengths = batch.seq_lens, batch.seq_lens.clone()
        given = [each.top_logprobs_num for each in logprobs], [each.token_ids_logprob for each in logprobs]
        kept = (batch.extend_seq_lens, batch.capture_hidden_mode, batch.is_prefill_only, batch.prompt_logprobs)
        wants = any(req.return_logprob for req in reqs)
        return cls(
            batch.forward_mode, len(reqs), batch.input_ids, *lengths, batch.positions, info, wants, *given, *kept
        )


@dataclasses.dataclass
class LogitsMetadata:
    forward_mode: ForwardMode
    capture_hidden_mode: CaptureHiddenMode
    extend_return_logprob: bool
    extend_seq_lens: Tensor | None
    is_prefill_only: bool
    mm_input_embeds: Tensor | None = None
    next_token_logits_buffer: Tensor | None = None

    @classmethod
    def from_forward_batch(cls, forward_batch: ForwardBatch) -> "LogitsMetadata":
        names = ("forward_mode", "capture_hidden_mode", "prompt_logprobs", "extend_seq_lens", "is_prefill_only")
        return cls(*(getattr(forward_batch, name) for name in names))


@dataclasses.dataclass
class LogitsProcessorOutput:
    next_token_logits: Tensor | None
    hidden_states: Tensor | None = None
    next_token_logprobs: Tensor | None = None
    next_token_top_logprobs_val: list[Any] | None = None
    next_token_top_logprobs_idx: list[Any] | None = None
    input_token_logprobs: Tensor | None = None
    mm_input_embeds: Tensor | None = None


class Unquantized:
    """SGLang's ``UnquantizedEmbeddingMethod``."""


class Embedding(nn.Module):
    """SGLang's ``ParallelLMHead``: padded to a multiple of 64 rows."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(-(-vocab_size // 64) * 64, dim), requires_grad=False)
        self.quant_method: Any = Unquantized()
        self.num_added_embeddings, self.tp_size = 0, 1


class LogitsProcessor(nn.Module):
    def __init__(self, vocab_size: int, logit_scale: float | None = None, soft_cap: float | None = None) -> None:
        super().__init__()
        self.vocab_size, self.logit_scale, self.final_logit_softcapping = vocab_size, logit_scale, soft_cap
        self.do_tensor_parallel_all_gather = self.return_full_logits = False
        self.rows = 0  # whose logits were made

    def forward(
        self,
        input_ids: Tensor,
        hidden_states: Tensor,
        lm_head: Embedding,
        logits_metadata: Any,
        aux_hidden_states: Tensor | None = None,
        hidden_states_before_norm: Tensor | None = None,
    ) -> LogitsProcessorOutput:
        metadata = logits_metadata
        if isinstance(metadata, ForwardBatch):
            metadata = LogitsMetadata.from_forward_batch(metadata)
        pruned, *_ = self._get_pruned_states(hidden_states, None, None, metadata)
        kept = hidden_states if metadata.capture_hidden_mode.need_capture() else None
        output = LogitsProcessorOutput(self._get_logits(pruned, lm_head, metadata), kept)
        if metadata.extend_return_logprob:
            output.input_token_logprobs = self._get_logits(hidden_states, lm_head, metadata).log_softmax(-1)[:, 0]
        return output

    def _get_pruned_states(
        self, hidden_states: Tensor, hidden_states_before_norm: Any, aux_hidden_states: Any, logits_metadata: Any
    ) -> tuple[Tensor, None, None, None, None, list[int]]:
        if not logits_metadata.forward_mode.is_decode():
            hidden_states = hidden_states[logits_metadata.extend_seq_lens.cumsum(0) - 1]
        return hidden_states, None, None, None, None, []

    def _get_logits(
        self, hidden_states: Tensor, lm_head: Embedding, logits_metadata: Any, embedding_bias: Tensor | None = None
    ) -> Tensor:
        assert logits_metadata.next_token_logits_buffer is None
        self.rows += len(hidden_states)
        logits = (hidden_states.to(lm_head.weight.dtype) @ lm_head.weight.T)[:, : self.vocab_size].float()
        if self.logit_scale is not None:
            logits.mul_(self.logit_scale)
        if self.final_logit_softcapping:
            logits = self.final_logit_softcapping * torch.tanh(logits / self.final_logit_softcapping)
        return logits


class Sampler:
    pass


class Model(nn.Module):
    """A causal LM of SGLang. ``states`` are what its layers make of the tokens."""

    def __init__(self, vocab_size: int, dim: int, **processor: Any) -> None:
        super().__init__()
        self.lm_head, self.logits_processor = Embedding(vocab_size, dim), LogitsProcessor(vocab_size, **processor)
        self.states = torch.empty(0)

    def forward(self, input_ids: Tensor, positions: Tensor, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        return self.logits_processor(input_ids, self.states, self.lm_head, forward_batch)


def server_args(**given: Any) -> SimpleNamespace:
    """Fields of SGLang's ``ServerArgs`` that are read, with their defaults."""
    ones = ("tp_size", "pp_size", "attn_cp_size", "dcp_size")
    none = ("speculative_algorithm", "dllm_algorithm", "enable_lora", "rl_on_policy_target")
    off = "dp_attention dp_lm_head pdmux two_batch_overlap return_hidden_states torch_compile custom_logit_processor"
    made = SimpleNamespace(
        **dict.fromkeys(ones, 1),
        **dict.fromkeys(none),
        **{f"enable_{name}": False for name in (*off.split(), "deterministic_inference")},
        disaggregation_mode="null",
        cuda_graph_config=SimpleNamespace(prefill=SimpleNamespace(backend="breakable")),
        sampling_backend="flashinfer",
    )
    for name, value in given.items():
        assert hasattr(made, name)
        setattr(made, name, value)
    return made


class ModelRunner:
    """SGLang's, as far as it samples. Decode goes through graphs: recorded outputs, of which rows are returned anew."""

    def __init__(self, model: Model, arguments: SimpleNamespace | None = None) -> None:
        self.model, self.server_args = model, arguments or server_args()
        self.vocab_size, self.device = model.logits_processor.vocab_size, "cuda"
        self.is_generation, self.is_draft_worker, self.sampler = True, False, Sampler()
        self.model_config = SimpleNamespace(use_ngram_embedding=False)
        self.max_running_requests = 8
        self.left: list[Tensor] = []  # logits that came to SGLang's own path
        self.graphs: dict[int, LogitsProcessorOutput] = {}

    def load_model(self) -> None:
        pass

    def init_cuda_graphs(self, capture_decode_cuda_graph: bool = True) -> None:
        for size in (8, 4) if capture_decode_cuda_graph else ():
            static = torch.zeros(size, self.model.lm_head.weight.shape[1])
            for _ in range(3):  # two to warm up, and what is recorded
                output = self._run(self._dummy(size), static)
            self.graphs[size] = copy.copy(output)
            self.graphs[size].static = static  # type: ignore[attr-defined]

    def _dummy(self, size: int) -> ForwardBatch:
        ones = torch.ones(size, dtype=torch.int64)
        info = SamplingBatchInfo(self.vocab_size)
        return ForwardBatch(ForwardMode.DECODE, size, ones, ones, ones, ones, info)

    def _run(self, forward_batch: ForwardBatch, states: Tensor) -> LogitsProcessorOutput:
        self.model.states = states
        return self.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)

    def forward(self, forward_batch: ForwardBatch, states: Tensor) -> LogitsProcessorOutput:
        size = next((size for size in sorted(self.graphs) if size >= forward_batch.batch_size), None)
        hidden = forward_batch.capture_hidden_mode.need_capture()
        if not forward_batch.forward_mode.is_decode() or size is None or hidden:
            output, rows = self._run(forward_batch, states), None
            rows = len(states)  # as the prefill graphs' runner does
        else:
            output, rows = self.graphs[size], forward_batch.batch_size
            output.static[:rows] = states  # type: ignore[attr-defined]
            if output.next_token_logits is not None and output.next_token_logits.shape[1]:  # what a replay computes
                weight = self.model.lm_head.weight[: self.vocab_size]
                output.next_token_logits = output.static @ weight.T  # type: ignore[attr-defined]
        assert output.next_token_logits is not None
        return LogitsProcessorOutput(
            next_token_logits=output.next_token_logits[:rows],
            hidden_states=None if output.hidden_states is None else output.hidden_states[:rows],
            input_token_logprobs=output.input_token_logprobs,
        )

    def sample(self, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch) -> Tensor:
        logits = logits_output.next_token_logits
        assert logits is not None
        assert logits.shape == (forward_batch.batch_size, self.vocab_size)
        if forward_batch.sampling_info.grammars:
            forward_batch.sampling_info.update_regex_vocab_mask()
            forward_batch.sampling_info.vocab_mask = None
        self.left.append(logits.clone())
        logits.fill_(torch.nan)  # SGLang's writes over them
        if forward_batch.return_logprob:
            counts = forward_batch.top_logprobs_nums or []
            logits_output.next_token_logprobs = torch.full((len(logits),), -2.0)
            if any(counts):
                logits_output.next_token_top_logprobs_val = [torch.full((count,), -3.0) for count in counts]
                logits_output.next_token_top_logprobs_idx = [torch.full((count,), LEFT) for count in counts]
        return torch.full((len(logits),), LEFT, dtype=torch.int32)
