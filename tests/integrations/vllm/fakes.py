"""Fakes of the classes of vLLM 0.26.0 that the plug-in reads, with the names, shapes and dtypes of the real ones, on
the CPU.

``tests/integrations/vllm/test_real.py`` compares them with the real ones where vLLM is installed.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LEFT = 7  # the token that vLLM's own path draws here


@dataclasses.dataclass
class SamplingParams:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    min_tokens: int = 0
    stop_token_ids: list[int] = dataclasses.field(default_factory=list)
    bad_words_token_ids: list[list[int]] | None = None
    thinking_token_budget: int | None = None

    @property
    def all_stop_token_ids(self) -> set[int]:
        return set(self.stop_token_ids)


def _dataclass(name: str, fields: str, **defaults: Any) -> Any:
    return dataclasses.make_dataclass(name, [*fields.split(), *((k, Any, v) for k, v in defaults.items())])


NewRequest = _dataclass("NewRequest", "req_id prompt_token_ids sampling_params")
SamplerOutput = _dataclass(
    "SamplerOutput", "sampled_token_ids logprobs_tensors num_nans num_sampled", num_rejected=None
)
_LOGPROBS = "logprob_token_ids logprobs selected_token_ranks"
LogprobsTensors = _dataclass("LogprobsTensors", _LOGPROBS, cu_num_generated_tokens=None)
GrammarOutput = _dataclass("GrammarOutput", "structured_output_request_ids grammar_bitmask")
InputBatch = _dataclass(
    "InputBatch",
    "req_ids num_reqs num_reqs_after_padding idx_mapping idx_mapping_np expanded_idx_mapping expanded_local_pos "
    "num_scheduled_tokens num_tokens num_draft_tokens num_draft_tokens_per_req seq_lens num_computed_tokens_np "
    "input_ids positions logits_indices cu_num_logits cu_num_logits_np",
)


def get_num_sampled_and_rejected(num_sampled, seq_lens, cu_num_logits, idx_mapping, prefill_len):
    chunk = seq_lens < prefill_len[idx_mapping]
    logits = cu_num_logits[1:] - cu_num_logits[:-1]
    num_sampled = torch.where(chunk, 0, num_sampled)
    return num_sampled, torch.where(chunk, 0, logits - num_sampled)


class Backed:
    """vLLM's ``UvaBackedTensor``: the host's copy, and the device's."""

    def __init__(self, size: int, dtype: torch.dtype, value: float = 0) -> None:
        self.cpu = torch.full((size,), value, dtype=dtype)
        self.np, self.gpu = self.cpu.numpy(), self.cpu


class Sampler:
    """State by slot, and vLLM's own draw: always ``LEFT``, of the rows that it is given."""

    def __init__(self, slots: int, vocab_size: int, logprobs_mode: str = "raw_logprobs") -> None:
        self.logprobs_mode, self.compute_nans = logprobs_mode, False
        self.sampling_states = SimpleNamespace(
            temperature=Backed(slots, torch.float32),
            top_k=Backed(slots, torch.int32, vocab_size),
            top_p=Backed(slots, torch.float32, 1.0),
            min_p=Backed(slots, torch.float32),
            seeds=Backed(slots, torch.int64),
            num_logprobs=np.full(slots, -1, np.int32),
            vocab_size=vocab_size,
        )
        self.penalties_state = SimpleNamespace(
            repetition_penalty=Backed(slots, torch.float32, 1.0),
            frequency_penalty=Backed(slots, torch.float32),
            presence_penalty=Backed(slots, torch.float32),
            prompt_bin_mask=torch.zeros(slots, -(-vocab_size // 32), dtype=torch.int32),
            output_bin_counts=torch.zeros(slots, vocab_size, dtype=torch.int32),
        )
        self.req_states = SimpleNamespace(prefill_len=Backed(slots, torch.int32))

    def add_request(self, slot: int, prompt: list[int], params: SamplingParams) -> None:
        states, penalties, vocab_size = self.sampling_states, self.penalties_state, self.sampling_states.vocab_size
        for name in ("temperature", "top_p", "min_p"):
            getattr(states, name).np[slot] = getattr(params, name)
        states.top_k.np[slot] = params.top_k if 0 < params.top_k <= vocab_size else vocab_size
        states.seeds.np[slot] = np.random.randint(-(2**63), 2**63 - 1) if params.seed is None else params.seed  # noqa: NPY002
        states.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs % (vocab_size + 1)
        for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
            getattr(penalties, name).np[slot] = getattr(params, name)
        if (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0):
            penalties.prompt_bin_mask[slot] = 0  # of other requests vLLM leaves what the slot's last one had
            penalties.output_bin_counts[slot] = 0
            for token in prompt:
                bit = (1 << 31) - (1 << 32) if token & 31 == 31 else 1 << (token & 31)
                penalties.prompt_bin_mask[slot, token >> 5] |= bit
        self.req_states.prefill_len.np[slot] = len(prompt)

    def __call__(self, input_batch: Any, most_drafts: int = 0) -> Any:
        """With drafts it behaves as vLLM's ``RejectionSampler``, and accepts none of them."""
        rows, counts = input_batch.num_reqs, self.sampling_states.num_logprobs[input_batch.idx_mapping_np]
        logprobs = None
        if counts.max() >= 0:
            columns, bounds = 1 + int(counts.max()), input_batch.cu_num_logits_np
            ids, values = torch.full((bounds[-1], columns), LEFT), torch.full((bounds[-1], columns), -2.0)
            bounds = bounds.tolist() if most_drafts else None
            logprobs = LogprobsTensors(ids, values, torch.full((len(ids),), 3), bounds)
        counted = input_batch.seq_lens.new_ones(rows), input_batch.seq_lens, input_batch.cu_num_logits
        prefill_len = self.req_states.prefill_len.gpu
        sampled, rejected = get_num_sampled_and_rejected(*counted, input_batch.idx_mapping, prefill_len)
        ids = torch.full((rows, 1 + most_drafts), 98765)  # not written behind the first
        ids[:, 0] = LEFT
        return SamplerOutput(ids, logprobs, None, sampled, rejected)


@dataclasses.dataclass
class AsyncOutput:
    """Tokens (B, n), of which so many (B,) are a request's."""

    token_ids: Tensor
    counts: Tensor

    def get_output(self) -> list[list[int]]:
        return [ids[:count] for ids, count in zip(self.token_ids.tolist(), self.counts.tolist())]


class Runner:
    """vLLM's ``GPUModelRunner``, as far as it samples. Requests take the slots in ``free``, the last one first."""

    model_config: Any
    vllm_config: Any
    dtype: torch.dtype
    vocab_size: int
    use_pp: bool
    is_pooling_model: bool
    decode_query_len: int

    def __init__(self, model: nn.Module, sampler: Sampler, free: list[int]) -> None:
        self.model: Any = model
        self.sampler, self.free, self.max_num_reqs = sampler, free, len(free)
        self.req_states = SimpleNamespace(req_id_to_index={}, prompt_len=Backed(len(free), torch.int32))
        self.left: list[tuple[list[str], Any]] = []  # what came to vLLM's own path
        self.lengths: dict[str, int] = {}
        self.taken: dict[int, list[str]] = {}  # by slot: its requests, the last one last
        self.device = torch.device("cpu")
        self.num_speculative_steps, self.max_num_tokens = 0, 64
        self.execute_model_state: tuple[Tensor, Any] | None = None

    def add_requests(self, scheduler_output: Any) -> None:
        for new in scheduler_output.scheduled_new_reqs:
            slot = self.free.pop()
            self.req_states.req_id_to_index[new.req_id] = slot
            self.lengths[new.req_id] = 0
            self.taken.setdefault(slot, []).append(new.req_id)
            self.req_states.prompt_len.np[slot] = len(new.prompt_token_ids)
            if new.sampling_params is not None:
                self.sampler.add_request(slot, new.prompt_token_ids, new.sampling_params)

    def sample(self, hidden_states: Tensor, input_batch: Any, grammar_output: Any) -> Any:
        assert hidden_states.shape[0] >= input_batch.num_tokens
        self.left.append((list(input_batch.req_ids), grammar_output))
        output = self.sampler(input_batch, self.num_speculative_steps if input_batch.num_draft_tokens else 0)
        return output, output.num_sampled, output.num_rejected

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Samples the batch and states in ``execute_model_state``; None: nothing was executed."""
        if self.execute_model_state is None:
            return None
        hidden_states, input_batch = self.execute_model_state
        output, num_sampled, _ = self.sample(hidden_states, input_batch, grammar_output)
        return AsyncOutput(output.sampled_token_ids, num_sampled)

    def _dummy_sampler_run(self, hidden_states: Tensor) -> None:
        self.model.compute_logits(hidden_states)

    def shutdown(self) -> None:
        del self.model

    # -- what vLLM's scheduler and other methods do

    def add(self, **requests: tuple[list[int], SamplingParams]) -> None:
        new = [NewRequest(name, prompt, params) for name, (prompt, params) in requests.items()]
        self.add_requests(SimpleNamespace(scheduled_new_reqs=new))

    def finish(self, name: str) -> None:
        self.free.append(self.req_states.req_id_to_index.pop(name))

    def batch(self, tokens: dict[str, int], drafts: dict[str, list[int]] | None = None, too_many: int = 0) -> Any:
        """Returns a batch with so many tokens of each request and their drafts, and counts them all as computed.
        ``too_many``: further tokens of every request that the host takes for computed."""
        drafts = {} if drafts is None else drafts
        names, count = list(tokens), len(tokens)
        numbers = np.array([len(drafts.get(name, ())) for name in names], np.int32)
        tokens = {name: number + len(drafts.get(name, ())) for name, number in tokens.items()}
        slots = np.array([self.req_states.req_id_to_index[name] for name in names], np.int32)
        scheduled = np.array(list(tokens.values()), np.int32)
        computed = np.array([self.lengths[name] for name in names], np.int32)
        positions = np.concatenate([np.arange(c, c + n) for c, n in zip(computed, scheduled)])
        for name, n in tokens.items():
            self.lengths[name] += n
        device_slots, bounds = torch.from_numpy(slots), np.concatenate(([0], (numbers + 1).cumsum())).astype(np.int32)
        local = np.arange(bounds[-1], dtype=np.int32) - np.repeat(bounds[:-1], numbers + 1)
        ends = np.repeat(scheduled.cumsum(), numbers + 1)
        pad = torch.full((3,), 99)  # of a captured graph
        logits_indices = torch.from_numpy(ends - np.repeat(numbers, numbers + 1) - 1 + local)
        input_ids = torch.cat((torch.full((len(positions),), 5), pad)).int()
        for name, end in zip(names, scheduled.cumsum()):
            mine = drafts.get(name, [])
            input_ids[end - len(mine) : end] = torch.tensor(mine, dtype=torch.int32)
        repeated = torch.from_numpy(np.repeat(slots, numbers + 1))
        mappings = device_slots, slots, repeated, torch.from_numpy(local)
        drafted = int(numbers.sum()), numbers if numbers.any() else None
        lengths = torch.from_numpy(computed + scheduled), computed + too_many
        inputs = input_ids, torch.cat((torch.from_numpy(positions).long(), pad)), logits_indices
        totals = scheduled, int(scheduled.sum()), *drafted
        return InputBatch(
            names, count, count + 3, *mappings, *totals, *lengths, *inputs, torch.from_numpy(bounds), bounds
        )

    def rejected(self, batch: Any, num_rejected: Tensor) -> None:
        """They are not computed after all."""
        for name, number in zip(batch.req_ids, num_rejected.tolist()):
            self.lengths[name] -= number


class Unquantized:
    """vLLM's ``UnquantizedEmbeddingMethod``."""


class Embedding(nn.Module):
    """vLLM's ``ParallelLMHead``: padded to a multiple of 64 rows."""

    def __init__(self, vocab_size: int, dim: int, bias: bool = False) -> None:
        super().__init__()
        padded = -(-vocab_size // 64) * 64
        self.weight = nn.Parameter(0.3 * torch.randn(padded, dim), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(padded), requires_grad=False) if bias else None
        self.quant_method: Any = Unquantized()
        self.num_added_embeddings, self.tp_size = 0, 1
        self.shard_indices = SimpleNamespace(padded_org_vocab_start_index=0, org_vocab_end_index=vocab_size)


class Processor(nn.Module):
    """vLLM's ``LogitsProcessor``."""

    def __init__(self, vocab_size: int, scale: float = 1.0, soft_cap: float | None = None) -> None:
        super().__init__()
        self.vocab_size = self.org_vocab_size = vocab_size
        self.scale, self.soft_cap, self.logits_as_input = scale, soft_cap, False
        self.head_dtype: torch.dtype | None = torch.float32

    def forward(self, lm_head: Embedding, hidden_states: Tensor, embedding_bias: Tensor | None = None) -> Tensor:
        logits = self.logits_gemm(lm_head, hidden_states, embedding_bias)[:, : self.org_vocab_size]
        if self.soft_cap is not None:
            logits = torch.tanh(logits / self.soft_cap) * self.soft_cap
        return logits * self.scale

    def logits_gemm(self, lm_head: Embedding, hidden_states: Tensor, bias: Tensor | None) -> Tensor:
        """Returns logits of the padded vocabulary."""
        return nn.functional.linear(hidden_states, lm_head.weight, bias)


class Model(nn.Module):
    """A causal LM of vLLM."""

    def __init__(self, vocab_size: int, dim: int, bias: bool = False, **processor: Any) -> None:
        super().__init__()
        self.lm_head, self.logits_processor = Embedding(vocab_size, dim, bias), Processor(vocab_size, **processor)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        if self.lm_head.bias is None:
            return self.logits_processor(self.lm_head, hidden_states)
        return self.logits_processor(self.lm_head, hidden_states, self.lm_head.bias)
