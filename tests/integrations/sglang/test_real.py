"""The plug-in against SGLang's own classes, of 0.5.15 or 0.5.23, on the CPU: where its Python files are not, as in CI,
this is skipped.

Packages of SGLang's that need a GPU are made up. A wheel that is unpacked does, with some requirements that are pure
Python or small, beside what the extra ``test`` brings (of 0.5.23 xgrammar is 0.2.7)::

    pip install msgspec orjson pybase64 pyzmq starlette fastapi aiohttp openai dill llguidance xgrammar==0.2.1
    PYTHONPATH=FOLDER python -m pytest tests/integrations/sglang/test_real.py
"""

import dataclasses
import importlib.metadata
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

pytest.importorskip("tests.integrations.sglang.fake_packages", exc_type=ImportError)

from sglang.srt.layers import logits_processor as processors
from sglang.srt.layers import sampler as samplers
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL, SamplingParams
from sglang.srt.server_args import ServerArgs

from flashsampling.integrations.engine import head as engines
from flashsampling.integrations.sglang import counters, load, register, settings
from flashsampling.integrations.sglang.request_info import DETERMINISTIC_SEED
from flashsampling.integrations.sglang.runner import _NEWER

from . import fakes

RELEASE = settings.check_version(importlib.metadata.version("sglang"))
NEWER = RELEASE is settings.KNOWN["0.5.23"]
if NEWER:
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.beam_search.batch_tail import BeamTail, BeamTailEntry
    from sglang.srt.beam_search.coordinator import BeamCoordinator
    from sglang.srt.beam_search.logits_capture import capture_pre_sample_logits
    from sglang.srt.layers.logprob_processor import OutputLogprobProcessor
    from sglang.srt.managers.schedule_batch import ScheduleBatch
V, D = 331, 16
PROMPT = [5, 31, 7, 7]


@pytest.fixture(autouse=True)
def _sglang(monkeypatch):
    arguments = ServerArgs(model_path="dummy")  # which is not looked for
    arguments.sampling_backend, arguments.device, arguments.attention_backend = "pytorch", "cpu", "torch_native"
    arguments.cuda_graph_config = None
    get_context().set_server_args(arguments)
    if not RELEASE.resolves:
        get_context().flags.sampling_backend = "pytorch"
    monkeypatch.setattr(engines, "FAST", (*engines.FAST, "streaming"))
    monkeypatch.setenv(settings.PLUGIN.variable, "auto")
    monkeypatch.setenv("SGLANG_OPT_USE_GUMBEL_SAMPLE", "0")  # by torch.multinomial, which tests watch
    groups = ("tp", "pp", "moe_ep", "moe_dp", "moe_tp", "attn_tp", "attn_cp", "attn_dp")
    one = {f"{group}_{what}": value for group in groups for what, value in (("size", 1), ("rank", 0))}
    with get_parallel().override(**one), torch.inference_mode():
        yield


def test_signatures_and_hooks():
    """SGLang's own registry puts the hooks in."""
    kinds = {name: getattr(importlib.import_module(module), name) for name, module in load._CLASSES.items()}
    settings.check_signatures(kinds, RELEASE)
    originals = ModelRunner.__dict__["load_model"], ForwardBatch.__dict__["init_new"]
    register()
    HookRegistry.apply_hooks()
    try:
        assert ModelRunner.load_model.__wrapped__ is originals[0]
        assert ForwardBatch.init_new.__func__.__wrapped__ is originals[1].__func__
        settings.check_signatures(kinds, RELEASE)
    finally:
        HookRegistry.reset()
        ModelRunner.load_model, ForwardBatch.init_new = originals


def test_the_fakes_have_nothing_that_sglang_has_not():
    read = set(vars(fakes.server_args()))
    if NEWER:
        assert read | set(_NEWER) <= set(namespace_of(ServerArgs))
        assert ModelRunner.sampling_observer.fset is not None
        assert {"beam_group", "return_sampling_mask", "eos_token_ids"} <= set(vars(req_of()))
        assert {"reqs", "beam_tail"} <= {field.name for field in dataclasses.fields(ScheduleBatch)}
    else:
        assert read <= {field.name for field in dataclasses.fields(ServerArgs)}
    params = SamplingParams()
    for name, value in vars(fakes.SamplingParams()).items():
        assert getattr(params, name) == value
    assert fakes.TOP_K_ALL == TOP_K_ALL
    zero, fake_zero = SamplingParams(temperature=0.0), fakes.SamplingParams(temperature=0.0)
    assert (zero.temperature, zero.top_k) == (fake_zero.temperature, fake_zero.top_k)
    assert set(vars(fakes.Req([], fakes.SamplingParams()))) <= set(vars(req_of()))
    own = {"made", "prompt_logprobs", "input_ids", *(["vocab_mask"] if NEWER else [])}
    for fake, real in (
        (fakes.SamplingBatchInfo, SamplingBatchInfo),
        (fakes.ForwardBatch, ForwardBatch),
        (fakes.LogitsMetadata, processors.LogitsMetadata),
        (fakes.LogitsProcessorOutput, processors.LogitsProcessorOutput),
    ):
        assert {field.name for field in dataclasses.fields(fake)} - own <= {
            field.name for field in dataclasses.fields(real)
        }
    for mode in fakes.ForwardMode:
        assert ForwardMode[mode.name].is_decode() == mode.is_decode()
    for capture in fakes.CaptureHiddenMode:
        assert CaptureHiddenMode[capture.name].need_capture() == capture.need_capture()
    tree = inspect.getsource(ModelRunner)
    for name in ("is_generation", "is_draft_worker", "max_running_requests", "model_config", "sampler", "server_args"):
        assert f"self.{name}" in tree
    assert "if r.sampling_params.sampling_seed is not None\n                        else 42" in inspect.getsource(
        SamplingBatchInfo
    )
    assert DETERMINISTIC_SEED == 42


DRAWN_FROM = {  # what ``asks.note`` reads, and with the request's grammar
    "stop_token_ids", "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "min_new_tokens",
    "n", "logit_bias", "sampling_seed", "json_schema", "regex", "ebnf", "structural_tag",
}  # fmt: skip
AROUND_A_DRAW = {  # or for a custom logit processor alone
    "max_new_tokens", "stop", "stop_regex", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "custom_params", "stream_interval", "stop_strs", "stop_regex_strs", "stop_str_max_len",
    "stop_regex_max_len", "is_normalized",
}  # fmt: skip


# left to SGLang, refused with its server's argument, a grammar's
SINCE = {"beam_width", "watermark", "ebnf_full_assistant"}


def test_every_field_of_sampling_params_is_known():
    """Every field is known, and fields that do not concern a draw are read nowhere where logits are."""
    assert set(SamplingParams.__struct_fields__) == DRAWN_FROM | AROUND_A_DRAW | (SINCE if NEWER else set())
    folder = Path(inspect.getfile(SamplingBatchInfo)).parent
    files = [folder / "sampling_batch_info.py", *folder.glob("penaltylib/*.py"), Path(inspect.getfile(Sampler))]
    read = set(re.findall(r"sampling_params\.(\w+)", "".join(path.read_text() for path in files)))
    assert read - {"TOP_K_ALL"} <= DRAWN_FROM | {"custom_params"}


class Model(torch.nn.Module):
    """A model with SGLang's own head and logits processor."""

    def __init__(self, scale=None):
        super().__init__()
        self.lm_head = ParallelLMHead(V, D, params_dtype=torch.float32)
        self.lm_head.weight.data.copy_(
            0.5 * torch.randn(self.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
        )
        self.logits_processor = processors.LogitsProcessor(SimpleNamespace(vocab_size=V), logit_scale=scale)
        self.states = None

    def forward(self, input_ids, positions, forward_batch):
        return self.logits_processor(input_ids, self.states, self.lm_head, forward_batch)


def sampler_of():
    """SGLang's, of one rank, without a process group."""
    made = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(made)
    made.rl_on_policy_target, made.enable_deterministic = None, False
    made.use_log_softmax_logprob = made.use_ascend_backend = False
    if NEWER:
        made.sampling_mask_max_tokens, made.output_logprob_processor = 0, OutputLogprobProcessor()
    return made


def runner_of(scale=None, fused=True):
    """SGLang's ``ModelRunner`` as it is behind ``load_model``, as far as it samples."""
    made = ModelRunner.__new__(ModelRunner)
    made.model, made.sampler = Model(scale), sampler_of()
    made.server_args, made.device, made.is_generation, made.is_draft_worker = (
        get_context().server_args,
        "cuda",
        True,
        False,
    )
    made.model_config = SimpleNamespace(use_ngram_embedding=False, vocab_size=V)
    made.use_ngram_embedding = made.model_is_mrope = False
    made.max_running_requests = 8
    if NEWER:
        made.model_config.requires_mm_token_modalities = False
        made.model_config.model_is_mrope, made.lora_manager, made._sampling_observer = False, None, None
        made.kv_index_translator, made.ngram_embedding_manager = MagicMock(), MagicMock(enabled=False)
        made.prefill_attention_backend_str = "torch_native"
    if fused:
        load.after_load_model(None, made)
        assert hasattr(made, "flashsampling"), made.flashsampling_refused
        made.device = "cpu"
        made.flashsampling.step.warm_up(8)
        for batch in (scheduled(made, [req_of()], True), scheduled(made, [req_of()], False)):
            step(made, batch, torch.randn(len(batch.input_ids), D))
        assert made.flashsampling._is_proven
        made.flashsampling.counts.clear()
    made.device = "cpu"
    return made


TOKENIZER = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=2)


def req_of(return_logprob=False, top_logprobs_num=0, **params):
    given = SamplingParams(**params)
    given.normalize(TOKENIZER)
    given.verify(V)
    req = Req("r", "", list(PROMPT), given, return_logprob=return_logprob, top_logprobs_num=top_logprobs_num)
    req.tokenizer = TOKENIZER
    return req


def scheduled(made, reqs, prefill, drawn=1):
    """Returns the fields of a ``ScheduleBatch`` that SGLang reads to make a ``ForwardBatch``; others are None."""

    class Batch(SimpleNamespace):
        def __getattr__(self, name):
            return None

    lengths = torch.tensor([len(PROMPT) + (0 if prefill else drawn)] * len(reqs))
    tokens = len(PROMPT) if prefill else 1
    batch = Batch(
        reqs=reqs,
        device="cpu",
        forward_mode=ForwardMode.EXTEND if prefill else ForwardMode.DECODE,
        input_ids=torch.zeros(tokens * len(reqs), dtype=torch.int64),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        extend_lens=[tokens] * len(reqs),
        prefix_lens=[0] * len(reqs),
        extend_num_tokens=tokens * len(reqs),
        extend_logprob_start_lens=[tokens] * len(reqs),
        return_logprob=any(req.return_logprob for req in reqs),
        top_logprobs_nums=[req.logprob.top_logprobs_num for req in reqs],
        token_ids_logprobs=[req.logprob.token_ids_logprob for req in reqs],
        is_prefill_only=False,
        return_hidden_states=False,
        return_hidden_states_mode=CaptureHiddenMode.NULL,
        has_grammar=any(req.grammar for req in reqs),
    )
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, V).copy_for_forward()
    return batch


def step(made, batch, states):
    """A step of SGLang's worker, with its own ``ForwardBatch.init_new`` and ``ModelRunner.sample``."""
    options = {"return_hidden_states_before_norm": False} if NEWER else {}
    made_of_batch = ForwardBatch.init_new(batch, made, **options)
    forward_batch = load.after_init_new(made_of_batch, ForwardBatch, batch, made, **options)
    made.model.states = states
    output = made.model.forward(forward_batch.input_ids, forward_batch.positions, forward_batch)
    if NEWER:
        load.before_logits_are_taken(batch, forward_batch, output)
        capture_pre_sample_logits(batch, forward_batch, output)
    return made.sample(output, forward_batch), output


@pytest.mark.parametrize("prefill", [True, False], ids=["prefill", "decode"])
@pytest.mark.parametrize("scale", [None, 2.5])
def test_greedy_tokens_and_log_probabilities_are_sglangs(prefill, scale):
    """Tokens are equal with biases, min_new_tokens and temperatures; top tokens are in SGLang's own lists."""
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.0, "logit_bias": {"4": 3.0, "330": 9.0}},
        {"temperature": 0.0, "min_new_tokens": 1, "stop_token_ids": [*range(0, V, 2)]},
        {"temperature": 0.0, "min_new_tokens": 2, "stop_token_ids": [*range(0, V, 2)]},
    ]
    states = torch.randn(len(kinds) * (len(PROMPT) if prefill else 1), D, generator=torch.Generator().manual_seed(2))
    got = []
    for fused in (True, False):
        made = runner_of(scale, fused)
        reqs = [req_of(True, 0 if row else 3, **kind) for row, kind in enumerate(kinds)]
        batch = scheduled(made, reqs, prefill)
        if not prefill:  # a token was drawn, which SGLang's penalties count
            info = SamplingBatchInfo.from_schedule_batch(batch, V)
            info.penalizer_orchestrator.cumulate_output_tokens(torch.zeros(len(reqs), dtype=torch.int64))
            batch.sampling_info = info.copy_for_forward()
        got.append(step(made, batch, states))
        if fused:
            assert counters(made) == {"fused": 1, "left": 0, "split": 0, "reasons": {}, "undefined_rows": 0}
    (tokens, output), (theirs, their_output) = got
    assert tokens.tolist() == theirs.tolist()
    torch.testing.assert_close(output.next_token_logprobs, their_output.next_token_logprobs, rtol=0, atol=1e-4)
    for name in ("next_token_top_logprobs_val", "next_token_top_logprobs_idx"):
        mine, other = getattr(output, name), getattr(their_output, name)
        assert len(mine) == len(other) == len(kinds)
        for row, other_row in zip(mine, other):
            torch.testing.assert_close(row, other_row, rtol=0, atol=1e-4, check_dtype=False)


@pytest.mark.skipif(not NEWER, reason="0.5.15 knows the tokenizer's ends alone")
@pytest.mark.parametrize("ends", [{9}, {9, None}])
def test_ends_that_are_forbidden_are_sglangs(ends):
    """The model's own, too; where the tokenizer has none."""
    got = []
    for fused in (True, False):
        made, req = runner_of(fused=fused), req_of(temperature=0.0, min_new_tokens=2)
        req.eos_token_ids, req.tokenizer = ends, SimpleNamespace(additional_stop_token_ids={11}, eos_token_id=None)
        states = 9 * made.model.lm_head.weight[[9]].clone()
        got.append(step(made, scheduled(made, [req], True), states.repeat(len(PROMPT), 1))[0].tolist())
    assert got[0] == got[1] != [9]


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.0])
def test_log_probabilities_at_a_temperature_are_sglangs(temperature):
    """SGLang's sampler gets the tokens that the step drew."""
    states = torch.randn(4, D, generator=torch.Generator().manual_seed(3))
    made, other = runner_of(), runner_of(fused=False)
    reqs = [req_of(True, row, temperature=temperature) for row in range(4)]
    tokens, output = step(made, scheduled(made, reqs, False), states)
    other.sampler._sample_from_probs = lambda *args: (tokens.clone(), None) if NEWER else tokens.clone()
    _, their_output = step(other, scheduled(other, reqs, False), states)
    torch.testing.assert_close(output.next_token_logprobs, their_output.next_token_logprobs, rtol=0, atol=1e-4)
    for row in range(4):
        mine, theirs = output.next_token_top_logprobs_val[row], their_output.next_token_top_logprobs_val[row]
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
        assert (
            output.next_token_top_logprobs_idx[row].tolist() == their_output.next_token_top_logprobs_idx[row].tolist()
        )


@pytest.mark.parametrize(
    "kind",
    [
        *(
            {},
            {"top_k": 7},
            {"top_p": 0.7},
            {"min_p": 0.1},
            {"logit_bias": {"4": 2.0}},
            {"temperature": 1.6, "top_p": 0.8},
        ),
        *({"top_k": 40, "top_p": 0.5}, {"top_k": 12, "top_p": 0.9}, {"top_k": 40, "top_p": 0.5, "min_p": 0.02}),
    ],
)
def test_the_distribution_is_sglangs(kind):
    """Chi-square of 4096 seeds' tokens against what SGLang's own sampler draws from."""
    from scipy import stats

    draws = 4096
    made, other = runner_of(), runner_of(fused=False)
    state = 0.7 * torch.randn(1, D, generator=torch.Generator().manual_seed(4))
    reqs = [req_of(sampling_seed=seed, **kind) for seed in range(draws)]
    tokens, _ = step(made, scheduled(made, reqs, False), state.repeat(draws, 1))
    assert counters(made)["fused"] == 1
    seen = []
    original = samplers.torch.multinomial

    def watched(probs, num_samples):
        seen.append(probs.clone())
        return original(probs, num_samples)

    samplers.torch.multinomial = watched
    try:
        step(other, scheduled(other, reqs[:1], False), state)
    finally:
        samplers.torch.multinomial = original
    (probs,) = seen
    if kind.keys() & {"top_k", "top_p", "min_p"}:  # sorted, there
        logits = (state @ other.model.lm_head.weight.T)[:, :V]
        order = (logits / reqs[0].sampling_params.temperature).softmax(-1).sort(dim=-1, descending=True).indices
        probs = torch.zeros_like(logits).scatter_(1, order[:, : probs.shape[1]], probs)
    wanted = draws * probs[0].double() / probs[0].double().sum()
    counts = torch.bincount(tokens, minlength=V).double()
    assert not counts[wanted == 0].any()
    common = wanted >= 5
    got = torch.cat((counts[common], counts[~common].sum()[None]))
    expected = torch.cat((wanted[common], wanted[~common].sum()[None]))
    keep = expected > 0
    assert int(keep.sum()) > 3
    assert stats.chisquare(got[keep].numpy(), expected[keep].numpy()).pvalue > 1e-4


def leader_of(width=3):
    """A request of beam search as the scheduler's coordinator makes one: its parameters are others then, without the
    width."""
    req = req_of(beam_width=width)
    coordinator = BeamCoordinator(
        model_config=SimpleNamespace(is_encoder_decoder=False, vocab_size=V),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        dllm_enabled=False,
        max_req_len=1000,
        req_to_token_pool=SimpleNamespace(size=100, device="cpu"),
        token_to_kv_pool_allocator=None,
        tree_cache=SimpleNamespace(supports_swa=lambda: False, supports_mamba=lambda: False),
        future_map=None,
    )
    nothing = (
        "session_params",
        "return_logprob",
        "return_hidden_states",
        "return_sampling_mask",
        "return_routed_experts",
    )
    with get_context().config_bag("schedule").override(page_size=1):
        assert coordinator.validate_and_init(req, SimpleNamespace(**dict.fromkeys(nothing))) is None
    assert req.sampling_params.beam_width is None
    return req


@pytest.mark.skipif(not NEWER, reason="0.5.15 has no beam search")
def test_beams_and_their_members_in_a_decode():
    """Rows behind the requests' are the members': what is taken is of all, tokens are the requests' alone."""
    made = runner_of()
    reqs = [req_of(sampling_seed=1), leader_of(), req_of(sampling_seed=2, min_new_tokens=3, logit_bias={"3": 2.0})]
    states = torch.randn(5, D, generator=torch.Generator().manual_seed(6))
    batch = scheduled(made, reqs, False)
    batch.seq_lens = batch.seq_lens_cpu = torch.cat([batch.seq_lens, batch.seq_lens[:2]])
    batch.input_ids = torch.zeros(5, dtype=torch.int64)
    batch.beam_tail = BeamTail(num_base_rows=3, entries=[BeamTailEntry(reqs[1].beam_group, 1, 0, 2)])
    tokens, output = step(made, batch, states.clone())
    wanted = (states @ made.model.lm_head.weight.T)[:, :V]
    torch.testing.assert_close(output.beam.leader_logits, wanted[[1]], rtol=0, atol=1e-4)
    torch.testing.assert_close(output.beam.tail_logits, wanted[3:], rtol=0, atol=1e-4)
    assert len(tokens) == 3
    for row in (0, 2):
        alone, _ = step(made, scheduled(made, [reqs[row]], False), states[[row]])
        assert int(tokens[row]) == int(alone[0])
