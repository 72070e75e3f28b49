"""The plug-in for SGLang, on a model runner that is made up: who does a step, with whose parameters, and what comes of
it."""

import importlib.metadata
import logging
import sys
from types import SimpleNamespace

import pytest
import torch

import flashsampling
from flashsampling.integrations.engine import head as engine_head
from flashsampling.integrations.engine import step as engine_step
from flashsampling.integrations.engine.request_info import FallbackReason
from flashsampling.integrations.sglang import Refused, counters, load, settings
from flashsampling.integrations.sglang import runner as runner_module
from flashsampling.integrations.sglang.runner import _NEWER, check_runner

from ..engine.refusals import Panic, refused_words
from . import fakes
from .fakes import LEFT, CaptureHiddenMode, ForwardBatch, ForwardMode, Grammar, Req, SamplingParams

V, D = 331, 16
PROMPT = [5, 31, 7, 7]
SANITIZES = SimpleNamespace(get=lambda: False)


@pytest.fixture(autouse=True)
def _sglang(monkeypatch):
    """The modules that ``attach`` imports; and torch's own implementation counts as a fast one, since there is no
    GPU."""
    modules = {
        "layers.logits_processor": {
            "LogitsProcessor": fakes.LogitsProcessor,
            "LogitsProcessorOutput": fakes.LogitsProcessorOutput,
            "LogitsMetadata": fakes.LogitsMetadata,
            "get_in_autotune_dummy_run": lambda: False,
        },
        "layers.vocab_parallel_embedding": {"VocabParallelEmbedding": fakes.Embedding},
        "layers.quantization.unquant": {"UnquantizedEmbeddingMethod": fakes.Unquantized},
        "environ": {"envs": SimpleNamespace(SGLANG_SANITIZE_NAN_LOGITS=SANITIZES)},
        "layers.sampler": {"Sampler": fakes.Sampler, "SGLANG_RETURN_ORIGINAL_LOGPROB": False},
        "model_executor.forward_batch_info": {"ForwardBatch": ForwardBatch},
    }
    for name, names in modules.items():
        monkeypatch.setitem(sys.modules, f"sglang.srt.{name}", SimpleNamespace(**names))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"sglang": "0.5.15.post1"}[name])
    monkeypatch.setattr(engine_head, "FAST", (*engine_head.FAST, "streaming"))
    monkeypatch.setenv(settings.PLUGIN.variable, "auto")


def loaded(model=None, graphs=True, **arguments):
    """A runner as it is behind ``load_model``, and behind the capture of its graphs."""
    torch.manual_seed(0)
    runner = fakes.ModelRunner(fakes.Model(V, D) if model is None else model, fakes.server_args(**arguments))
    runner.load_model()
    load.after_load_model(None, runner)
    runner.init_cuda_graphs(graphs)
    return runner


def runner_of(model=None, graphs=True, **arguments):
    """A loaded runner whose model was seen, as by SGLang's own warm-up request."""
    runner = loaded(model, graphs, **arguments)
    reqs = [Req([1], SamplingParams())]
    step(runner, extend(reqs), states_of(1))
    assert "refused" not in counters(runner)
    assert runner.flashsampling._is_proven
    runner.flashsampling.counts.clear()
    runner.left.clear()
    runner.model.logits_processor.rows = 0
    return runner


def extend(reqs, mode=ForwardMode.EXTEND, **given):
    """SGLang's ``ScheduleBatch``, as far as it is read: all of the prompts."""
    lengths = torch.tensor([len(req.origin_input_ids) for req in reqs])
    return scheduled(reqs, mode, lengths, torch.zeros(int(lengths.sum()), dtype=torch.int64), lengths, **given)


def decode(reqs, drawn=1, **given):
    """One more token each; so many are there beside the prompt."""
    lengths = torch.tensor([len(req.origin_input_ids) for req in reqs]) + drawn
    return scheduled(reqs, ForwardMode.DECODE, lengths, lengths - 1, None, **given)


def scheduled(reqs, mode, lengths, positions, extend_lengths, **given):
    rest = {"capture_hidden_mode": CaptureHiddenMode.NULL, "is_prefill_only": False, "prompt_logprobs": False} | given
    return SimpleNamespace(
        reqs=reqs,
        forward_mode=mode,
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        seq_lens=lengths,
        positions=positions,
        extend_seq_lens=extend_lengths,
        **rest,
    )


def states_of(count, seed=0):
    return torch.randn(count, D, generator=torch.Generator().manual_seed(seed))


def forward_batch_of(runner, batch, **options):
    """The batch as ``ForwardBatch.init_new`` and the hook behind it make it."""
    return load.after_init_new(ForwardBatch.init_new(batch, runner), ForwardBatch, batch, runner, **options)


def step(runner, batch, states):
    """One step as SGLang's worker does it: tokens, and what else the output has."""
    forward_batch = forward_batch_of(runner, batch)
    output = runner.forward(forward_batch, states)
    return runner.sample(output, forward_batch), output


def expected(runner, state, req, position, impl=None):
    """The one row by ``flashsampling.sample``, from what the user wrote."""
    params = req.sampling_params
    bias = torch.zeros(V)
    for token, value in (params.logit_bias or {}).items():
        bias[int(token)] = value
    if position + 1 < len(req.origin_input_ids) + params.min_new_tokens:
        bias[[2, *(params.stop_token_ids or ())]] = float("-inf")
    request = {"logit_bias": bias, "return_logprobs": True}
    temperature = 0.0 if params.top_k == 1 else params.temperature
    if temperature:
        of_top_k = runner.flashsampling.rules.flashinfer and params.min_p > 0.0
        request |= {"top_k": params.top_k, "top_p": params.top_p, "min_p": params.min_p, "joint_top_p": not of_top_k}
    if req.grammar:
        request["token_mask"] = fakes.packed(torch.isin(torch.arange(V), torch.tensor(req.grammar.allowed))[None])
    processor = runner.model.logits_processor
    return flashsampling.sample(
        state[None],
        runner.model.lm_head.weight,
        temperature=temperature,
        seed=params.sampling_seed,
        offset=position,
        vocab_size=V,
        logit_scale=processor.logit_scale,
        soft_cap=processor.final_logit_softcapping,
        **request,
    )


SERVED = {
    "plain": SamplingParams(sampling_seed=1),
    "hot": SamplingParams(sampling_seed=2, temperature=3.5),
    "greedy": SamplingParams(sampling_seed=3, temperature=0.0),
    "greedy_as_top_k": SamplingParams(sampling_seed=3, temperature=0.7, top_k=1, top_p=0.5),
    "top_k": SamplingParams(sampling_seed=4, top_k=5, temperature=2.0),
    "top_p": SamplingParams(sampling_seed=5, top_p=0.5, temperature=2.0),
    "top_k_top_p": SamplingParams(sampling_seed=5, top_k=20, top_p=0.4, temperature=2.0),
    "top_k_top_p_min_p": SamplingParams(sampling_seed=5, top_k=9, top_p=0.9, min_p=0.02, temperature=2.0),
    "min_p": SamplingParams(sampling_seed=-6, min_p=0.2, temperature=2.0),
    "top_p_min_p": SamplingParams(sampling_seed=7, top_p=0.9, min_p=0.05, temperature=2.0),
    "large_seed": SamplingParams(sampling_seed=2**63 - 1),
    "bias": SamplingParams(sampling_seed=9, logit_bias={"4": 3.0, "330": 5.0, "31": -100.0}),
    "many_biases": SamplingParams(
        sampling_seed=10, logit_bias={str(token): 0.1 * (token % 50) for token in range(100)}
    ),
    "min_new_tokens": SamplingParams(
        sampling_seed=11, min_new_tokens=2, stop_token_ids={*range(100, 160)}, logit_bias={"120": 40.0, "200": 20.0}
    ),
}
LEFT_TO_SGLANG = {
    "penalties": Req(PROMPT, SamplingParams(repetition_penalty=1.2)),
    "penalties, frequency": Req(PROMPT, SamplingParams(frequency_penalty=0.2)),
    "penalties, presence": Req(PROMPT, SamplingParams(presence_penalty=-0.2)),
    "a custom logit processor": Req(PROMPT, SamplingParams(), custom_logit_processor="{}"),
    "logprobs of more than 20 tokens": Req(PROMPT, SamplingParams(), return_logprob=True, top=21),
    "logprobs of given tokens": Req(PROMPT, SamplingParams(), return_logprob=True, token_ids=[3]),
    "logprobs of a distribution that the step does not have": Req(
        PROMPT, SamplingParams(top_k=5, temperature=0.5), return_logprob=True
    ),
    "logprobs of a distribution that the step does not have, of top tokens": Req(
        PROMPT, SamplingParams(logit_bias={"3": 1.0}), return_logprob=True, top=1
    ),
    "more than 1024 tokens with a bias": Req(
        PROMPT, SamplingParams(logit_bias=dict.fromkeys(map(str, range(1025)), 1.0))
    ),
    "a bias that is not finite": Req(PROMPT, SamplingParams(logit_bias={"3": float("inf")})),
    "several samples with one seed": Req(PROMPT, SamplingParams(n=2, sampling_seed=3)),
    "a grammar without a bit mask": Req(PROMPT, SamplingParams(), grammar=Grammar([3, 4], bits=False)),
}


def fresh(req):
    """Another request that asks for the same."""
    names = ("return_logprob", "custom_logit_processor", "grammar")
    given = {"top": req.logprob.top_logprobs_num, "token_ids": req.logprob.token_ids_logprob}
    return Req(req.origin_input_ids, req.sampling_params, **given, **{name: getattr(req, name) for name in names})


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_request_of_every_served_kind(graphs):
    """Alone, in a prefill and a step: the tokens of what the user wrote, and no row of logits made. Without graphs the
    head has a scale and a soft cap."""
    model = fakes.Model(V, D, **{} if graphs else {"logit_scale": 3.0, "soft_cap": 4.0})
    runner, states = runner_of(model, graphs), states_of(len(PROMPT) + 1)
    for params in SERVED.values():
        req = Req(PROMPT, params)
        for batch, some in ((extend([req]), states[:-1]), (decode([req]), states[-1:])):
            tokens, output = step(runner, batch, some)
            wanted = expected(runner, some[-1], req, int(batch.seq_lens) - 1)
            assert tokens.tolist() == wanted.token_ids.tolist()
            assert output.hidden_states is None
    assert runner.model.logits_processor.rows == 0
    fused = 2 * len(SERVED)
    assert counters(runner) == {"fused": fused, "left": 0, "split": 0, "reasons": {}, "undefined_rows": 0}


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_a_request_of_every_kind_that_is_left(graphs, caplog):
    """All of its batch goes SGLang's way, with SGLang's logits; the reason is counted, and said once. Beside a seeded
    request the token of that is the one that it has alone; all other rows are SGLang's, log-probabilities too."""
    runner, states = runner_of(graphs=graphs, enable_custom_logit_processor=True), states_of(4)
    logits = (states @ runner.model.lm_head.weight.T)[:, :V]
    seeded = Req(PROMPT, SamplingParams(sampling_seed=5, temperature=1.3), return_logprob=True, top=2)
    greedy, quiet = Req(PROMPT, SamplingParams(temperature=0.0)), Req(PROMPT, SERVED["min_new_tokens"])
    alone = {
        position: [expected(runner, states[row], req, position) for row, req in ((1, seeded), (3, quiet))]
        for position in (len(PROMPT) - 1, len(PROMPT))
    }
    for name, kind in LEFT_TO_SGLANG.items():
        runner.flashsampling.counts.clear()
        runner.left.clear()
        caplog.clear()
        reqs = [Req(PROMPT, SamplingParams()), fresh(kind), greedy]
        with caplog.at_level(logging.INFO, "sglang.flashsampling"):
            for batch in (decode(reqs), decode(reqs, 2)):
                tokens, output = step(runner, batch, states[:3])
                assert tokens.tolist() == [LEFT] * 3
                assert output.hidden_states is None
        reason = name.split(", ")[0]
        torch.testing.assert_close(runner.left[0], logits[:3])
        counted = {"fused": 0, "left": 2, "split": 0, "reasons": {reason: 2}, "undefined_rows": 0}
        assert counters(runner) == counted
        assert caplog.messages == [f"flashsampling: SGLang samples where a request has {reason} (said once)"]
        reqs = [Req(PROMPT, SamplingParams()), seeded, reqs[1], quiet]
        for batch, some in ((decode(reqs), states), (extend(reqs), states.repeat_interleave(4, dim=0))):
            tokens, output = step(runner, batch, some)
            ours, other = alone[int(batch.seq_lens[-1]) - 1]
            assert tokens.tolist() == [LEFT, int(ours.token_ids), LEFT, int(other.token_ids)]
            assert output.next_token_logprobs[[0, 2, 3]].tolist() == [-2.0] * 3
            torch.testing.assert_close(output.next_token_logprobs[1], ours.processed_logprobs[0])
            assert output.next_token_top_logprobs_idx[1].tolist() == [LEFT] * 2
        assert counters(runner)["split"] == 2
    tokens, _ = step(runner, decode([reqs[0], greedy]), states[:2])  # and without it the batch is fused
    assert counters(runner)["fused"] == 1
    assert int(tokens[1]) == int(logits[1].argmax())


def test_a_request_without_a_seed_keeps_the_one_that_it_gets():
    """Its position alone makes its next token another; another request's seed is another."""
    runner = runner_of()
    runner.model.lm_head.weight.zero_()
    reqs = [Req(PROMPT, SamplingParams()) for _ in range(8)]
    first = [step(runner, decode(reqs), states_of(8))[0].tolist() for _ in range(2)]
    assert first[0] == first[1]
    assert len(set(first[0])) > 4
    assert step(runner, decode(reqs, 2), states_of(8))[0].tolist() != first[0]


@pytest.mark.parametrize("backend", ["flashinfer", "pytorch"])
def test_deterministic_inference(backend):
    """All requests without a seed have SGLang's, and no token depends on batch mates: a greedy one neither, although
    SGLang's own logits have 16 bits, and often another best token."""
    runner = runner_of(enable_deterministic_inference=True, sampling_backend=backend)
    for temperature in (1.0, 0.0):
        req = Req(PROMPT, SamplingParams(temperature=temperature))
        as_is = Req(PROMPT, SamplingParams(temperature=temperature, sampling_seed=42))
        (token,) = expected(runner, states_of(1)[0], as_is, len(PROMPT)).token_ids.tolist()
        assert step(runner, decode([req]), states_of(1))[0].tolist() == [token]
        reqs = [req, Req(PROMPT, SamplingParams(repetition_penalty=2.0))]
        assert step(runner, decode(reqs), states_of(1).repeat(2, 1))[0].tolist() == [token, LEFT]


@pytest.mark.parametrize("backend", ["flashinfer", "pytorch"])
def test_where_top_p_is_of_what_top_k_kept(backend):
    """In SGLang with FlashInfer and min-p; else it is of all tokens. In one batch too."""
    runner, state = runner_of(sampling_backend=backend), torch.zeros(1, D)
    runner.model.lm_head.weight.data[:V, 0] = torch.tensor([0.4, 0.3, 0.2, *[0.1 / (V - 3)] * (V - 3)]).log()
    state[0, 0] = 1.0
    both = {
        min_p: [Req(PROMPT, SamplingParams(sampling_seed=i, top_k=2, top_p=0.56, min_p=min_p)) for i in range(200)]
        for min_p in (0.0, 0.01)
    }
    reqs = both[0.0] + both[0.01]
    tokens, _ = step(runner, decode(reqs), state.repeat(400, 1))
    assert counters(runner)["fused"] == 1
    assert set(tokens[:200].tolist()) == {0, 1}  # 0.4 and 0.3
    assert set(tokens[200:].tolist()) == ({0} if backend == "flashinfer" else {0, 1})  # 0.4 of 0.7 is 0.571


LOGPROBS = {
    "plain": SamplingParams(sampling_seed=1),
    "hot": SamplingParams(sampling_seed=1, temperature=2.5),
    "cold": SamplingParams(sampling_seed=1, temperature=0.3),
    "greedy": SamplingParams(sampling_seed=1, temperature=0.0),
    "filtered": SamplingParams(sampling_seed=1, top_k=3),
    "biased": SamplingParams(sampling_seed=1, temperature=0.7, logit_bias={"3": 2.0}),
}


def test_logprobs_are_those_that_sglang_returns():
    """Log softmax of all tokens' logits over the temperature, behind biases, whatever the filters keep."""
    runner = runner_of()
    reqs = [
        Req(PROMPT, params, return_logprob=True, top=0 if name == "biased" else row)
        for row, (name, params) in enumerate(LOGPROBS.items())
    ]
    reqs.append(Req(PROMPT, SamplingParams(top_k=5, temperature=0.5)))  # asks for none
    states = states_of(len(reqs))
    tokens, output = step(runner, decode(reqs), states)
    assert counters(runner)["fused"] == 1
    for row, (req, (name, params)) in enumerate(zip(reqs, LOGPROBS.items())):
        logits = (states[row] @ runner.model.lm_head.weight.T)[:V]
        if name == "biased":
            logits[3] += 2.0
        wanted = (logits / params.temperature).log_softmax(-1)
        torch.testing.assert_close(output.next_token_logprobs[row], wanted[tokens[row]], rtol=0, atol=2e-5)
        top = wanted.topk(req.logprob.top_logprobs_num)
        assert output.next_token_top_logprobs_idx[row].tolist() == top.indices.tolist()
        torch.testing.assert_close(output.next_token_top_logprobs_val[row], top.values, rtol=0, atol=2e-5)
    assert output.next_token_logprobs.dtype is torch.float32


def test_logprobs_before_the_temperature(monkeypatch):
    """SGLANG_RETURN_ORIGINAL_LOGPROB."""
    monkeypatch.setattr(sys.modules["sglang.srt.layers.sampler"], "SGLANG_RETURN_ORIGINAL_LOGPROB", True)
    runner = runner_of()
    reqs = [Req(PROMPT, LOGPROBS[name], return_logprob=True) for name in ("plain", "hot", "greedy", "filtered")]
    states = states_of(4)
    tokens, output = step(runner, decode(reqs), states)
    wanted = (states @ runner.model.lm_head.weight.T)[:, :V].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(output.next_token_logprobs, wanted, rtol=0, atol=2e-5)
    assert output.next_token_top_logprobs_val is None
    step(runner, decode([Req(PROMPT, LOGPROBS["biased"], return_logprob=True)]), states[:1])
    assert counters(runner)["reasons"] == {FallbackReason.LOGPROBS.text: 1}


def test_a_grammar():
    """Fills SGLang's mask once, and lets go of it; beside one without bits a seeded request is drawn here."""
    runner = runner_of()
    reqs = [Req(PROMPT, SamplingParams(), grammar=Grammar([11, 330])), Req(PROMPT, SamplingParams(sampling_seed=3))]
    batch = decode(reqs)
    forward_batch = forward_batch_of(runner, batch)
    tokens = runner.sample(runner.forward(forward_batch, states_of(2)), forward_batch)
    assert int(tokens[0]) in (11, 330)
    assert int(tokens[1]) == int(expected(runner, states_of(2)[1], reqs[1], len(PROMPT)).token_ids)
    assert forward_batch.sampling_info.made == 1
    assert forward_batch.sampling_info.vocab_mask is None


def test_prompt_logprobs_get_logits_and_the_draw_is_fused():
    runner = runner_of()
    req = Req(PROMPT, SERVED["plain"])
    states = states_of(len(PROMPT))
    tokens, output = step(runner, extend([req], prompt_logprobs=True), states)
    assert int(tokens) == int(expected(runner, states[-1], req, len(PROMPT) - 1).token_ids)
    assert output.input_token_logprobs is not None
    assert output.hidden_states is None
    assert counters(runner)["fused"] == 1
    reqs = [Req(PROMPT, SamplingParams(presence_penalty=1.0))]  # and if it is not, the logits that are there are used
    rows = runner.model.logits_processor.rows
    step(runner, extend(reqs, prompt_logprobs=True), states)
    assert runner.model.logits_processor.rows == rows + 1 + len(PROMPT)


BATCHES = {  # what makes SGLang sample a batch
    "hidden states to return, or logits that are there already": {"capture_hidden_mode": CaptureHiddenMode.FULL},
    "a batch that was made in another way": {"flashsampling": None},
    "a batch that was made in another way, without lengths": {"seq_lens_cpu": None},
    "an observer of its logits": True,
    "": False,  # an observer of other batches
}


@pytest.mark.parametrize("words", BATCHES)
def test_batches_that_are_left(words):
    runner, reqs = runner_of(), [Req(PROMPT, SamplingParams(sampling_seed=1)) for _ in range(2)]
    batch = decode(reqs)
    forward_batch = forward_batch_of(runner, batch)
    if isinstance(BATCHES[words], dict):
        vars(forward_batch).update(BATCHES[words])
    else:  # of 0.5.23
        runner.sampling_observer = SimpleNamespace(is_active=lambda info: BATCHES[words])
    output = runner.forward(forward_batch, states_of(2))
    assert (runner.sample(output, forward_batch).tolist() == [LEFT] * 2) is bool(words)
    assert counters(runner)["reasons"] == ({words.split(", without")[0]: 1} if words else {})
    assert (output.hidden_states is None) is not words.startswith("hidden states")  # which are the requests'


def test_prefill_without_a_draw_gets_logits():
    runner = runner_of()
    forward_batch = ForwardBatch.init_new(extend([Req(PROMPT, SamplingParams())], is_prefill_only=True), runner)
    output = runner.forward(forward_batch, states_of(4))
    assert output.next_token_logits.shape == (1, V)
    assert output.hidden_states is None


def test_rows_without_a_score_get_token_0():
    runner = runner_of()
    states = states_of(3)
    states[1] = torch.nan
    reqs = [Req(PROMPT, SERVED["plain"]) for _ in range(3)]
    tokens, _ = step(runner, decode(reqs), states)
    assert int(tokens[1]) == 0
    assert int(tokens[0]) == int(expected(runner, states[0], reqs[0], len(PROMPT)).token_ids)
    assert counters(runner)["undefined_rows"] == 1


# -- what is refused


class Fork(fakes.Model):
    """Changes the output of its logits processor."""

    def __init__(self, change):
        super().__init__(V, D)
        self.change = change

    def forward(self, input_ids, positions, forward_batch):
        return self.change(self, super().forward(input_ids, positions, forward_batch), forward_batch)


class OtherHead(Fork):
    """Has a head for show."""

    def forward(self, input_ids, positions, forward_batch):
        return self.logits_processor(input_ids, self.states, fakes.Embedding(V, D), forward_batch)


def suppress(model, output, forward_batch):
    """Overwrites some tokens' logits, as Gemma 4 does."""
    if output.next_token_logits is not None:
        output.next_token_logits.index_fill_(1, torch.tensor([3]), -1e9)
    return output


def replace(model, output, forward_batch):
    return fakes.LogitsProcessorOutput(output.next_token_logits)


def widen(model, output, forward_batch):
    output.next_token_logits = output.next_token_logits.double()
    return output


CHANGES = "Fork changes its logits after its logits processor"
MODELS = {
    "suppress": (lambda: Fork(suppress), CHANGES),
    "replace": (lambda: Fork(replace), CHANGES),
    "head": (lambda: OtherHead(None), "OtherHead gives its logits processor another head than its lm_head"),
}


@pytest.mark.parametrize(("make", "words"), MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_models_that_do_more_are_left_as_they_were(make, words, graphs, monkeypatch, caplog):
    with caplog.at_level(logging.INFO, "sglang.flashsampling"):
        runner = loaded(make(), graphs)
        tokens, output = step(runner, decode([Req(PROMPT, SamplingParams())]), states_of(1))
    assert int(tokens) == LEFT
    assert output.next_token_logits.shape == (1, V)
    assert counters(runner) == {"refused": words}
    assert f"flashsampling: nothing is fused: {words}" in [record.getMessage() for record in caplog.records]
    monkeypatch.setenv(settings.PLUGIN.variable, "require")
    with pytest.raises(Refused, match=words):
        step(loaded(make(), graphs), decode([Req(PROMPT, SamplingParams())]), states_of(1))


def fails(*args, **kwargs):
    raise Panic("no")


@pytest.mark.parametrize("broken", ["_last_states", "_metadata", "result"])
def test_first_forwards_that_fail(broken, monkeypatch, caplog):
    """SGLang serves as without the plug-in, with one line."""
    runners = [loaded(Fork(widen) if broken == "result" else None, graphs=False) for _ in range(2)]
    failing = iter(runners)

    def serve():
        setattr((runner := next(failing)).flashsampling, broken, fails)
        tokens, _ = step(runner, decode([Req(PROMPT, SamplingParams())]), states_of(1))
        assert tokens.tolist() == [LEFT]

    words = refused_words(settings.PLUGIN, serve, monkeypatch, caplog)
    assert counters(runners[0]) == {"refused": words}


class Unwritable(fakes.Model):
    """Takes no other ``forward``."""

    def __setattr__(self, name, value):
        if name == "forward":
            raise Panic("no")
        super().__setattr__(name, value)


def test_a_runner_is_fused_or_as_it_was(caplog):
    runner = fakes.ModelRunner(Unwritable(V, D), fakes.server_args())
    load.after_load_model(None, runner)
    runner.init_cuda_graphs()
    tokens, _ = step(runner, decode([Req(PROMPT, SamplingParams())]), states_of(1))
    assert tokens.tolist() == [LEFT]
    assert counters(runner) == {"refused": "Panic('no')"}
    assert [record.getMessage() for record in caplog.records] == ["flashsampling: nothing is fused: Panic('no')"]


def test_requests_that_cannot_be_read():
    """Those of another SGLang than is known are SGLang's to draw."""
    runner = runner_of()
    reqs = [Req(PROMPT, SamplingParams())]
    del reqs[0].sampling_params.top_k
    for _ in range(2):
        tokens, _ = step(runner, decode(reqs), states_of(1))
        assert tokens.tolist() == [LEFT]
    assert counters(runner)["reasons"] == {FallbackReason.UNREADABLE.text: 2}


def test_a_model_that_changes_its_ways_later():
    runner = runner_of(Fork(lambda model, output, forward_batch: output))
    runner.model.change = replace
    with pytest.raises(RuntimeError, match="Fork returns something else than its logits processor"):
        step(runner, extend([Req(PROMPT, SamplingParams())]), states_of(4))


class Own(fakes.LogitsProcessor):
    pass


def off_by_a_factor(model):
    model.logits_processor._get_logits = lambda states, lm_head, metadata: 1.1 * (states @ lm_head.weight.T)[:, :V]


HEADS = {
    "own, and has LogitsProcessor, LogitsProcessor": lambda model: setattr(model, "second", fakes.LogitsProcessor(V)),
    "one logits processor, SGLang's own, and has Own": lambda model: setattr(model, "logits_processor", Own(V)),
    "has no lm_head of its own": lambda model: delattr(model, "lm_head"),
    "LM head is a Linear": lambda model: setattr(model, "lm_head", torch.nn.Linear(D, V)),
    "LM head is quantised": lambda model: setattr(model.lm_head, "quant_method", object()),
    "has an added vocabulary": lambda model: setattr(model.lm_head, "num_added_embeddings", 3),
    "is a part of one": lambda model: setattr(model.lm_head, "tp_size", 2),
    "or is a part of one": lambda model: setattr(model.logits_processor, "do_tensor_parallel_all_gather", True),
    "returns logits of all positions": lambda model: setattr(model.logits_processor, "return_full_logits", True),
    "weight must be bfloat16": lambda model: model.lm_head.double(),
    "a vocabulary of 999 tokens": lambda model: setattr(model.logits_processor, "vocab_size", 999),
    "scales its logits by inf": lambda model: setattr(model.logits_processor, "logit_scale", float("inf")),
    "caps them at -3": lambda model: setattr(model.logits_processor, "final_logit_softcapping", -3),
    "something else than its head": off_by_a_factor,
}


@pytest.mark.parametrize("words", HEADS)
def test_heads_that_are_refused(words):
    model = fakes.Model(V, D)
    HEADS[words](model)
    runner = loaded(model, graphs=False)
    assert words in counters(runner)["refused"]


def test_slow_implementations_are_refused(monkeypatch):
    monkeypatch.setattr(engine_head, "FAST", ("cute", "triton"))
    assert "there is only the implementation 'streaming'" in counters(loaded())["refused"]


ARGUMENTS = {
    "tp_size": 2, "pp_size": 2, "attn_cp_size": 2, "dcp_size": 2, "enable_dp_attention": True,
    "enable_dp_lm_head": True, "speculative_algorithm": "EAGLE", "dllm_algorithm": "LowConfidence",
    "disaggregation_mode": "decode", "enable_pdmux": True, "enable_two_batch_overlap": True, "enable_lora": True,
    "enable_return_hidden_states": True, "enable_torch_compile": True, "rl_on_policy_target": "fsdp",
    "sampling_backend": "mine",
    "cuda_graph_config": SimpleNamespace(prefill=SimpleNamespace(backend="tc_piecewise")),
}  # fmt: skip
STATE = {
    "is_generation": False, "device": "cpu", "sampler": object(),
    "model_config": SimpleNamespace(use_ngram_embedding=True),
}  # fmt: skip


@pytest.mark.parametrize("name", [*ARGUMENTS, *STATE])
def test_runners_that_are_refused(name):
    runner = fakes.ModelRunner(fakes.Model(V, D), fakes.server_args(cuda_graph_config=None))
    check_runner(runner, runner.server_args, fakes.Sampler)
    setattr(runner.server_args if name in ARGUMENTS else runner, name, (ARGUMENTS | STATE)[name])
    with pytest.raises(Refused):
        check_runner(runner, runner.server_args, fakes.Sampler)


@pytest.mark.parametrize("name", runner_module._ABOUT_NAN)
def test_logits_in_which_nan_is_looked_for(name, monkeypatch):
    envs = SimpleNamespace(**{"SGLANG_SANITIZE_NAN_LOGITS": SANITIZES, name: SimpleNamespace(get=lambda: True)})
    monkeypatch.setitem(sys.modules, "sglang.srt.environ", SimpleNamespace(envs=envs))
    assert name in counters(loaded())["refused"]


# -- what is new in 0.5.23


@pytest.fixture
def newer(monkeypatch):
    """SGLang 0.5.23, and its arguments that are in force."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: {"sglang": "0.5.23"}[name])

    in_force = vars(fakes.server_args()) | dict.fromkeys(_NEWER)
    context = SimpleNamespace(config_leaf=in_force.__getitem__)
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", SimpleNamespace(get_context=lambda: context))
    return in_force


@pytest.mark.parametrize("name", _NEWER)
def test_newer_arguments_that_are_refused(newer, name):
    newer[name] = "something"
    assert counters(loaded()) == {"refused": _NEWER[name]}


def test_arguments_are_those_in_force(newer):
    """The given arguments have no sampling backend, which would be refused."""
    newer["enable_deterministic_inference"] = True
    runner = runner_of(sampling_backend=None)
    assert runner.flashsampling.rules.deterministic
    assert runner.flashsampling.rules.flashinfer
    params = SamplingParams(sampling_seed=3, top_k=20, top_p=0.9, min_p=0.01)
    step(runner, decode([Req(PROMPT, params)]), states_of(1))
    assert counters(runner)["fused"] == 1


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_logprobs_that_are_a_prefills(newer, version, deterministic, monkeypatch):
    """0.5.23 promises that of deterministic inference, to the bit. Of a mate without them the token is drawn here."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    newer["enable_deterministic_inference"] = deterministic
    runner = runner_of(enable_deterministic_inference=deterministic)
    reqs = [
        Req(PROMPT, SamplingParams(sampling_seed=1), return_logprob=True),
        Req(PROMPT, SamplingParams(sampling_seed=2)),
    ]
    step(runner, decode(reqs), states_of(2))
    left = deterministic and version == "0.5.23"
    assert counters(runner)["reasons"] == ({"logprobs that are a prefill's to the bit": 1} if left else {})
    assert (counters(runner)["split"] == 1) is left


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_states_of_another_dtype_than_the_heads(graphs):
    """Falcon-H1 and Ling-linear have a float32 head and bfloat16 states, which SGLang casts."""
    model = fakes.Model(V, D)
    theirs = model.forward

    def forward(input_ids, positions, forward_batch):
        model.states = model.states.bfloat16()
        return theirs(input_ids, positions, forward_batch)

    model.forward = forward  # type: ignore[method-assign]
    runner = loaded(model, graphs)
    reqs = [Req(PROMPT, SamplingParams())]
    for batch in (extend(reqs), decode(reqs)):
        step(runner, batch, states_of(len(batch.positions)))
    assert "a head of torch.float32" in counters(runner)["refused"]


def test_a_mask_that_is_held_with_its_grammar(newer):
    runner = runner_of()
    req = Req(PROMPT, SamplingParams(sampling_seed=20), grammar=Grammar([*range(0, V, 7)]))
    forward_batch = forward_batch_of(runner, decode([req]), return_hidden_states_before_norm=False)
    forward_batch.sampling_info = NewerInfo(forward_batch.sampling_info)
    state = states_of(1)
    tokens = runner.sample(runner.forward(forward_batch, state), forward_batch)
    assert tokens.tolist() == expected(runner, state[0], req, len(PROMPT)).token_ids.tolist()
    assert forward_batch.sampling_info.grammar_mask is None
    assert counters(runner)["fused"] == 1


class NewerInfo:
    """``SamplingBatchInfo`` of 0.5.23."""

    def __init__(self, info):
        self.info, self.grammars, self.grammar_mask = info, info.grammars, None

    def update_regex_vocab_mask(self):
        self.info.update_regex_vocab_mask()
        self.grammar_mask = SimpleNamespace(grammar=self.grammars[0], vocab_mask=self.info.vocab_mask)


def test_requests_of_newer_kinds_are_left(newer):
    runner = runner_of()
    beams, support = Req(PROMPT, SamplingParams(sampling_seed=1)), Req(PROMPT, SamplingParams(sampling_seed=1))
    beams.beam_group, support.return_sampling_mask = object(), True  # SGLang takes the width from its parameters
    for req, words in ((beams, "beam search"), (support, "the tokens that its filters leave to be returned")):
        tokens, _ = step(runner, decode([req]), states_of(1))
        assert tokens.tolist() == [LEFT]
        assert counters(runner)["reasons"][words] == 1
    one = Req(PROMPT, SamplingParams(sampling_seed=1))
    one.beam_group = None
    step(runner, decode([one]), states_of(1))
    assert counters(runner)["fused"] == 1


def test_beams_find_their_logits(newer):
    """SGLang takes logits before the draw. A batch without beams still has none."""
    runner, states = runner_of(), states_of(2)
    for grouped, tail in ((True, None), (False, object()), (False, None)):
        reqs = [Req(PROMPT, SamplingParams()), Req(PROMPT, SamplingParams())]
        for req in reqs:
            req.beam_group = object() if grouped else None
        batch = decode(reqs)
        batch.beam_tail = tail
        forward_batch = forward_batch_of(runner, batch)
        output = runner.forward(forward_batch, states)
        load.before_logits_are_taken(batch, forward_batch, output)
        if grouped or tail is not None:
            torch.testing.assert_close(output.next_token_logits, (states @ runner.model.lm_head.weight.T)[:, :V])
        else:
            assert output.next_token_logits.shape == (2, 0)
        load.before_logits_are_taken(None, forward_batch, output)
        load.before_logits_are_taken(batch, forward_batch, None)
        load.before_logits_are_taken(batch, SimpleNamespace(), output)


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_ends_of_the_model_and_min_new_tokens(version, newer, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    runner = runner_of()
    req = Req(PROMPT, SamplingParams(sampling_seed=1, min_new_tokens=3, logit_bias={"40": 50.0}))
    req.eos_token_ids = {40}
    tokens, _ = step(runner, decode(reqs := [req]), states_of(1))
    assert (tokens.tolist() == [40]) is (version == "0.5.15")
    tokens, _ = step(runner, decode(reqs, 3), states_of(1))
    assert tokens.tolist() == [40]


def test_a_draft_worker_is_passed_over():
    runner = fakes.ModelRunner(fakes.Model(V, D))
    runner.is_draft_worker = True
    load.after_load_model(None, runner)
    assert not hasattr(runner, "flashsampling")


def test_a_model_that_is_loaded_again():
    runner = runner_of()
    before = dict(vars(runner))
    load.after_load_model(None, runner)
    assert vars(runner) == before


def test_a_forward_of_no_rows_proves_nothing():
    runner = loaded(graphs=False)
    reqs: list[Req] = []
    step(runner, decode(reqs), states_of(0))
    assert not runner.flashsampling._is_proven


@pytest.mark.parametrize("prompt_logprobs", [False, True])
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_forwards_that_prove_the_model_are_drawn_too(graphs, prompt_logprobs):
    """A server without a warm-up request, as ``Engine`` is: its first request's tokens are those that it gets later."""
    runner = loaded(graphs=graphs)
    reqs, states = [Req(PROMPT, SERVED["plain"])], states_of(len(PROMPT))
    for _ in range(2):
        for batch in (extend(reqs, prompt_logprobs=prompt_logprobs), decode(reqs)):
            some = states if batch.extend_seq_lens is not None else states[:1]
            tokens, output = step(runner, batch, some)
            position = int(batch.seq_lens) - 1
            assert int(tokens) == int(expected(runner, some[-1], reqs[0], position).token_ids)
            assert output.hidden_states is None
    assert counters(runner)["fused"] == 4


def test_a_split_batch_whose_log_probabilities_nobody_wants_any_more():
    """An abort takes the wish for log-probabilities back."""
    runner = runner_of()
    reqs = [Req(PROMPT, SERVED["plain"], return_logprob=True), Req(PROMPT, SamplingParams(presence_penalty=1.0))]
    batch = decode(reqs)
    step(runner, batch, states_of(2))
    reqs[0].return_logprob = False
    tokens, output = step(runner, batch, states_of(2))
    assert int(tokens[0]) == int(expected(runner, states_of(2)[0], reqs[0], len(PROMPT)).token_ids)
    assert output.next_token_logprobs is None


def test_kernels_that_cannot_be_made_ready(monkeypatch, caplog):
    runners = []

    def broken(*args, **kwargs):
        raise OSError("no compiler")

    monkeypatch.setattr(engine_step, "warmup_mixes", broken)
    words = refused_words(settings.PLUGIN, lambda: runners.append(loaded()), monkeypatch, caplog)
    assert counters(runners[0]) == {"refused": words} == {"refused": "OSError('no compiler')"}
    assert step(runners[0], decode([Req(PROMPT, SamplingParams())]), states_of(1))[0].tolist() == [LEFT]


def test_what_is_said(caplog):
    with caplog.at_level(logging.INFO, "sglang.flashsampling"):
        loaded()
        loaded(enable_custom_logit_processor=True)
    lines = caplog.messages
    assert lines[0].startswith(
        "flashsampling: LM head (331 tokens) and sampler are one step, streaming; left to SGLang: logprobs of more "
    )
    assert "a custom logit processor" not in lines[0]
    assert "a custom logit processor" in lines[2]
    assert lines[1] == lines[3] == "flashsampling: 0 kernels are ready for batches of up to 8"
