"""The torch operators: schemas, fakes, dispatch to the implementations (``backends``).

    flashsampling::sample               a whole weight; a pure function
    flashsampling::sample_from_logits   logits that are there already; a pure function
    flashsampling::sample_sharded       one step of a ``TensorParallel``; it has a side effect, the exchange with other ranks.
                                        With drafts their rejection: ids are last tokens, then numbers of accepted drafts
    flashsampling::accept, recover      rejection sampling of drafts (``reference/rejection``); pure functions; no
    weight: of logits

Here alone a ``SampleInputs`` is taken apart and put together again. All operators return ids and values, empty where
none were asked
for, so that what a step may be asked for needs no operator of its own. What may be asked for stands behind all other arguments,
by keyword and with a default: where nothing is asked for, nothing is passed, and a program exported before still runs.

``torch.library.Library`` and not ``torch.library.custom_op``, whose wrapper adds 12 us of host time to a call where this adds 1
(torch 2.13 on an EPYC core). Where nobody looks, no tracer, mode, transform, subclass or profiler, they do not go through
torch's dispatcher at all, which saves another third of what a call costs.

A compiler removes a pure operator whose result nobody uses, and moves one that nothing orders; the ranks that kept theirs
would wait. So ``sample_sharded`` says that it writes to ``order``: one int64 per device for all groups, because two groups'
steps that trade places on one rank may wait for each other. Nothing is written in fact. AOTAutograd threads it through the
steps as data, FX's and Inductor's passes keep what changes an input, and it costs neither a copy nor a kernel there (seen with
torch 2.8 and 2.13). An exported program would refuse a constant that is written to, so it has an overload without, which
``torch.fx.has_side_effect`` keeps (Inductor from torch 2.10 on). Rejected: effect tokens (``_register_effectful_op`` of
torch.library), private, and not kept by FX before torch 2.10; ``has_side_effect`` alone, which does not order.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.fx
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter

from . import open_groups
from .backends import BACKENDS, Backend, named, tried_on
from .exchange_protocol import WHOLE, Shard
from .inputs import DEFAULT_PARAMS, DraftChains, SampleInputs, SampleResult, SamplingParams, layout
from .noise import Stream
from .reference import rejection
from .row_params import is_symbolic
from .torch_internals import dispatch_modes, function_modes, functorch_is_active, tracing_state

_logger = logging.getLogger(__name__)

# A row parameter is a tensor or, where that is None, a number for all rows: its field of ``SampleInputs``, and the
# number's type.
_ROW_PARAMETERS = (("temperature", "float"), ("seed", "SymInt"), ("offset", "SymInt"))
# What may be asked for: a field of ``SamplingParams``, and its type in a schema; of a row parameter its number's. The
# stream is passed
# always, as it was before there was anything else.
_ASKED = (
    ("bias", "Tensor?"),
    ("logit_scale", "float"),
    ("soft_cap", "float"),
    ("dense_bias", "Tensor?"),
    ("bias_ids", "Tensor?"),
    ("bias_values", "Tensor?"),
    ("counts", "Tensor?"),
    ("repetition_penalty", "row float"),
    ("frequency_penalty", "row float"),
    ("presence_penalty", "row float"),
    ("token_mask", "Tensor?"),
    ("top_k", "row SymInt"),
    ("top_p", "row float"),
    ("min_p", "row float"),
    ("joint_top_p", "row SymInt"),
    ("logprobs", "bool"),
    ("top_logprobs", "SymInt"),
    ("logprob_ids", "Tensor?"),
    ("logsumexp", "bool"),
    ("seen", "Tensor?"),
)

# Overloads whose scale and soft cap are tensors () on the CPU, for numbers that Dynamo traces as symbols. A CUDA graph would
# keep the values that it was captured with, so these operators stay out of it.
_ON_HOST = "_on_host"  # suffix of such a tensor's name
_OF_HOST = ", ".join(f"Tensor? {name}{_ON_HOST}=None" for name, kind in _ASKED if kind == "float")
_UNSAFE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def _asked_schema() -> str:
    """All of it, with the defaults that say that it is not asked for."""
    arguments = []
    for name, kind in _ASKED:
        row, _, number = kind.rpartition(" ")
        suffix = ""
        if row:
            arguments.append(f"Tensor? {name}=None")
            suffix = "_value"
        arguments.append(f"{number} {name}{suffix}={getattr(DEFAULT_PARAMS, name)}")
    return ", ".join(arguments)


_ROWS = ", ".join(f"Tensor? {name}, {kind} {name}_value" for name, kind in _ROW_PARAMETERS)
_STEP = f"{_ROWS}, int stream, SymInt num_samples"
_HEAD = f"Tensor hidden_states, Tensor weight, {_STEP}"
_DRAWN = "(Tensor ids, Tensor values)"
# a field of ``DraftChains`` each; where there are none, nothing is passed
_DRAFTED = ("draft_token_ids", "draft_rows", "draft_places", "draft_probs")
_OF_DRAFTS = ", ".join(f"Tensor? {name}=None" for name in (*_DRAFTED, "draft_hash"))
_EITHER = f"Tensor states, Tensor? weight, {_STEP}, SymInt vocab_size, Tensor draft_token_ids, Tensor? draft_probs"

_library = torch.library.Library("flashsampling", "DEF")
for _schema in (
    f"sample({_HEAD}, SymInt vocab_size, str impl, *, {_asked_schema()}) -> {_DRAWN}",
    f"sample_from_logits(Tensor logits, {_STEP}, SymInt vocab_size, str impl, *, {_asked_schema()}) -> {_DRAWN}",
    f"sample_sharded({_HEAD}, str tp, Tensor(a!) order, *, {_asked_schema()}, {_OF_DRAFTS}) -> {_DRAWN}",
    f"sample_sharded.exported({_HEAD}, str tp, *, {_asked_schema()}, {_OF_DRAFTS}) -> {_DRAWN}",
    f"accept({_EITHER}, *, {_asked_schema()}) -> Tensor",
    f"recover({_EITHER}, Tensor draft_rows, *, {_asked_schema()}) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    if "exported" not in _schema:
        _schema = _schema.replace("(", ".on_host(", 1).replace(") ->", f", {_OF_HOST}) ->")
        _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, *_UNSAFE))


def _taken_apart(step: SampleInputs) -> list[Any]:
    """A step as the schemas have it, up to ``num_samples``."""
    arguments: list[Any] = [step.hidden_states, step.weight] if step.logits is None else [step.logits]
    for name, kind in _ROW_PARAMETERS:
        value = _row(getattr(step, name), step.hidden_states)
        arguments += (value, 0.0 if kind == "float" else 0) if isinstance(value, Tensor) else (None, value)
    return [*arguments, int(step.params.stream), step.num_samples]


def _asked_apart(step: SampleInputs) -> dict[str, Any]:
    """What is asked for, as the schemas' keywords have it."""
    params = step.params
    if params is DEFAULT_PARAMS:
        return {}
    kinds = dict(_ASKED)
    apart: dict[str, Any] = {} if params.seen is None else {"seen": params.seen}
    for name in params.names():
        value = getattr(params, name)
        if name == "stream":
            continue
        if kinds[name] == "float" and is_symbolic(value):
            apart[name + _ON_HOST] = torch.ones((), dtype=torch.float64, device="cpu") * value
        elif kinds[name].startswith("row ") and not isinstance(value := _row(value, step.hidden_states), Tensor):
            apart[name + "_value"] = value
        else:
            apart[name] = value
    return apart


def _row(value: Any, states: Tensor) -> Any:
    """A row parameter, where Dynamo traces a float as a symbol a tensor (B,) of it.

    AOTAutograd makes a constant, and so a graph for each value, of every float that reaches an operator other than torch's own
    arithmetic (``torch.fx.passes._tensorify_python_scalars``); ``torch.full`` is not among them, a product is.
    """
    if isinstance(value, float) and is_symbolic(value):
        return torch.ones(states.shape[0], dtype=torch.float32, device=states.device) * value
    return value


def _overload(operator: Any, params: dict[str, Any]) -> Any:
    return operator.on_host if any(name.endswith(_ON_HOST) for name in params) else operator.default


def _put_together(
    arguments: tuple[Any, ...], params: dict[str, Any], vocab_size: int, shard: Shard = WHOLE, of_logits: bool = False
) -> SampleInputs:
    """The step that was taken apart."""
    if of_logits:
        logits, *arguments_ = arguments
        hidden_states = weight = logits
    else:
        (hidden_states, weight, *arguments_), logits = arguments, None
    *rows, stream, num_samples = arguments_
    given = {
        name: rows[2 * i + 1] if rows[2 * i] is None else rows[2 * i] for i, (name, _) in enumerate(_ROW_PARAMETERS)
    }
    return SampleInputs(
        hidden_states,
        weight,
        **given,
        num_samples=num_samples,
        vocab_size=vocab_size,
        shard=shard,
        params=_asked_together(stream, _from_host(params)),
        logits=logits,
    )


def _drafted_together(params: dict[str, Any]) -> DraftChains | None:
    """The drafts among the keywords, which are taken out."""
    parts = [params.pop(name, None) for name in _DRAFTED]
    return None if parts[0] is None else DraftChains(*parts)


def _from_host(params: dict[str, Any]) -> dict[str, Any]:
    """Numbers in place of the tensors on the CPU. Nothing waits for a device."""
    tensors = {name for name, value in params.items() if name.endswith(_ON_HOST) and value is not None}
    kept = {name: value for name, value in params.items() if not name.endswith(_ON_HOST)}
    return kept | {name.removesuffix(_ON_HOST): params[name].item() for name in tensors}


def _asked_together(stream: int, params: dict[str, Any]) -> SamplingParams:
    if not params and stream == DEFAULT_PARAMS.stream:
        return DEFAULT_PARAMS
    together = SamplingParams(
        Stream(stream), **{name.removesuffix("_value"): value for name, value in params.items() if value is not None}
    )
    return together if together.names() else DEFAULT_PARAMS


def choose(step: SampleInputs, impl: str = "") -> Backend:
    """The backend that is named, or else the first that can do the step. Raises ValueError: no such name, or none can."""
    if impl:
        backend = BACKENDS.get(impl) or named(impl)
        reason = backend.unsupported(step)
        if reason is not None:
            raise ValueError(f"impl={impl!r} cannot do this: {reason}")
        return backend
    reasons = []
    for backend in tried_on("cuda" if step.hidden_states.is_cuda else "cpu"):
        reason = backend.unsupported(step)
        if reason is None:
            if _logger.isEnabledFor(logging.DEBUG):
                _log_choice(backend.name, step.hidden_states.dtype, step.hidden_states.device)
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError(f"no implementation can do this on {step.hidden_states.device}: {'; '.join(reasons)}")


def _sample(step: SampleInputs, impl: str) -> SampleResult:
    if not step.hidden_states.numel():
        return _nothing(step)
    return _there(step, choose(step, impl).module.run)  # .run costs the host a call more


def _sample_sharded(step: SampleInputs, group: Any) -> SampleResult:
    """One step of a ``TensorParallel``. A call that raises before it took part in one, or has no rows, counts as left out."""
    try:
        group.raise_if_unusable()
        # here, not where a tracer looks once: compiled functions and exported programs come with whatever batch
        batch = step.hidden_states.shape[0]
        group.check_call(step.weight, batch, step.num_samples)
        if batch == 0:
            group.count_skipped_call()
            return _nothing(step)
        # what is asked for of a shard, an implementation does in parts, and the group what is between them
        alone = step if step.params is DEFAULT_PARAMS else step._replace(shard=WHOLE)
        if step.drafted is not None:  # which takes what log-probabilities do
            alone = step._replace(shard=WHOLE, params=step.params._replace(logprobs=True))
        return _there(step, functools.partial(_run_and_exchange, choose(alone, group.impl), group))
    except BaseException as error:
        count_skipped_call(group, error)
        raise


def dry_run(step: SampleInputs, group: Any) -> None:
    """What a ``sample_sharded`` that asks for something does without other ranks: for what it compiles."""
    _there(step, functools.partial(group.dry_run, choose(step._replace(shard=WHOLE), group.impl)))


def _run_and_exchange(backend: Backend, group: Any, step: SampleInputs) -> SampleResult:
    if step.drafted is not None or (step.params is not DEFAULT_PARAMS and not backend.runs_on_shard(step)):
        return group.draw(backend, step)
    if step.params is not DEFAULT_PARAMS or step.draft_hash is not None:
        group.compare(step)
    drawn = backend.module.run(step)
    return drawn._replace(ids=group.finish(drawn.ids, step))


def _nothing(step: SampleInputs) -> SampleResult:
    return SampleResult(
        torch.empty(0, dtype=torch.int64, device=step.hidden_states.device)
    )  # no rows: no values either


def _there(step: SampleInputs, run: Callable[[SampleInputs], SampleResult]) -> SampleResult:
    """Runs a step with its device the current one."""
    states = step.hidden_states
    # torch.cuda.current_device() less its asking whether there is CUDA
    if states.is_cuda and states.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(states.device):
            return run(step)
    return run(step)


def count_skipped_call(group: Any, error: BaseException) -> None:
    """Counts a call that raised, once, however many of its callers come here: so ranks that are out of step are found out.

    An error in the exchange itself comes here too: it has failed the group for good, where one more does no harm.
    """
    if getattr(error, "_left_out_of", None) != group.name:
        error._left_out_of = group.name  # type: ignore[attr-defined]
        group.count_skipped_call()


@functools.cache  # once for each
def _log_choice(name: str, dtype: torch.dtype, device: torch.device) -> None:
    _logger.debug("impl=None takes %s for %s on %s (python -m flashsampling doctor says why)", name, dtype, device)


@functools.cache
def order_of(device: torch.device) -> Tensor:
    """(1,) int64: what every ``sample_sharded`` on a device is said to write."""
    with torch.inference_mode(False):  # what is made inside could not be "written" outside
        order = torch.zeros(1, dtype=torch.int64, device=device)
    # torch._dynamo.mark_static_address, less importing torch._dynamo (1 s): CUDA graphs are not made of functions that change
    # an input, unless it stays where it is
    order._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return order


# -- the operators


def _tensors(drawn: SampleResult) -> tuple[Tensor, Tensor]:
    """What an operator returns: one that gives no values gives an empty tensor of them."""
    return drawn.ids, drawn.ids.new_empty(0, dtype=torch.float32) if drawn.values is None else drawn.values


def _operate(*arguments: Any, **params: Any) -> tuple[Tensor, Tensor]:
    *taken_apart, vocab_size, impl = arguments
    return _tensors(_sample(_put_together(tuple(taken_apart), params, vocab_size), impl))


def _operate_on_logits(*arguments: Any, **params: Any) -> tuple[Tensor, Tensor]:
    *taken_apart, vocab_size, impl = arguments
    return _tensors(_sample(_put_together(tuple(taken_apart), params, vocab_size, of_logits=True), impl))


def _operate_sharded(*arguments: Any, **params: Any) -> tuple[Tensor, Tensor]:
    if isinstance(arguments[-1], Tensor):  # order, which nobody reads
        arguments = arguments[:-1]
    group, of_ranks = (
        open_groups.find(arguments[-1]),
        {"drafted": _drafted_together(params), "draft_hash": params.pop("draft_hash", None)},
    )
    return _tensors(_sample_sharded(_put_together(arguments[:-1], params, *group.part)._replace(**of_ranks), group))


def _fake_of(matrices: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Of an operator whose first arguments are so many matrices: how much comes back is known from shapes and what is asked."""

    def fake(*arguments: Any, **params: Any) -> tuple[Tensor, Tensor]:
        states = arguments[0]
        stream, num_samples = arguments[matrices + 2 * len(_ROW_PARAMETERS) :][:2]
        drafted, _ = _drafted_together(params), params.pop("draft_hash", None)
        if drafted is not None:
            empty = states.new_empty(0, dtype=torch.float32)
            return states.new_empty(2 * drafted.token_ids.shape[0], dtype=torch.int64), empty
        beside = {name: value for name, value in params.items() if not name.endswith(_ON_HOST)}
        there = layout(states.shape[0], num_samples, _asked_together(stream, beside))
        values = states.new_empty(there.num_values, dtype=torch.float32)
        return states.new_empty(there.num_ids, dtype=torch.int64), values

    return fake


def _drafted(arguments: tuple[Any, ...], params: dict[str, Any], behind: int) -> SampleInputs:
    """The step of ``accept`` or ``recover``, of whose arguments so many are behind it."""
    states, weight, *parameters, vocab_size = arguments[:-behind]
    if weight is None:
        return _put_together((states, *parameters), params, vocab_size, of_logits=True)
    return _put_together((states, weight, *parameters), params, vocab_size)


def _accept(*arguments: Any, **params: Any) -> Tensor:
    return rejection.accept(_drafted(arguments, params, 2), *arguments[-2:])


def _recover(*arguments: Any, **params: Any) -> Tensor:
    return rejection.recover(_drafted(arguments, params, 3), *arguments[-3:])


def _fake_accept(*arguments: Any, **params: Any) -> Tensor:
    return arguments[-2].new_empty(arguments[-2].shape, dtype=torch.bool)


def _fake_recover(*arguments: Any, **params: Any) -> Tensor:
    return torch.empty_like(arguments[-3])


for _name, _function, _fake in (
    ("sample", _operate, _fake_of(2)),
    ("sample_from_logits", _operate_on_logits, _fake_of(1)),
    ("sample_sharded", _operate_sharded, _fake_of(2)),
    ("sample_sharded.exported", _operate_sharded, _fake_of(2)),
    ("accept", _accept, _fake_accept),
    ("recover", _recover, _fake_recover),
    ("sample.on_host", _operate, _fake_of(2)),
    ("sample_from_logits.on_host", _operate_on_logits, _fake_of(1)),
    ("sample_sharded.on_host", _operate_sharded, _fake_of(2)),
    ("accept.on_host", _accept, _fake_accept),
    ("recover.on_host", _recover, _fake_recover),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    _library.impl(
        _name, torch.library.fallthrough_kernel, "Autograd"
    )  # values have no gradient, whoever's weight has one
    torch.library.register_fake(f"flashsampling::{_name}", _fake, lib=_library)
_exported = torch.fx.has_side_effect(torch.ops.flashsampling.sample_sharded.exported)


def _nobody_looks(step: SampleInputs) -> bool:
    """Whether torch's dispatcher would change nothing. It does nothing where a gradient is wanted: see above."""
    return (
        type(step.hidden_states) is Tensor
        and type(step.weight) in (Tensor, Parameter)
        # is_compiling() less two calls; of the call that is left Dynamo knows the answer, so it does not guard on the flag
        and not torch.compiler.is_dynamo_compiling()
        and not torch.compiler._is_compiling_flag
        and not dispatch_modes()
        and not function_modes()
        and not functorch_is_active()
        and tracing_state() is None
        and not profiler._is_profiler_enabled
    )


def sample(step: SampleInputs, impl: str) -> SampleResult:
    """A step of a whole weight, or of logits; ``impl`` may be "": chosen here."""
    if _nobody_looks(step):
        return _sample(step, impl)
    operators, params = torch.ops.flashsampling, _asked_apart(step)
    operator = _overload(operators.sample if step.logits is None else operators.sample_from_logits, params)
    return SampleResult(*operator(*_taken_apart(step), step.vocab_size, impl, **params))


def sample_sharded(step: SampleInputs, tp: Any) -> SampleResult:
    """A step of the open ``TensorParallel`` ``tp``, whose ``part`` it is of."""
    if _nobody_looks(step):
        return _sample_sharded(step, open_groups.find(tp.name))
    arguments, params = _taken_apart(step), _asked_apart(step)
    if step.drafted is not None:
        params |= {name: part for name, part in zip(_DRAFTED, step.drafted) if part is not None}
    if step.draft_hash is not None:
        params["draft_hash"] = step.draft_hash
    if torch.compiler._is_exporting_flag:  # is_exporting() says so in every torch.compile of torch 2.8
        return SampleResult(*_exported(*arguments, tp.name, **params))
    return SampleResult(
        *_overload(torch.ops.flashsampling.sample_sharded, params)(*arguments, tp.name, tp.order, **params)
    )


def _either(step: SampleInputs) -> list[Any]:
    """A step as ``accept`` and ``recover`` have it."""
    states, *others = _taken_apart(step)
    return [states, *([None] if step.logits is not None else []), *others, step.vocab_size]


def accept(step: SampleInputs, draft_token_ids: Tensor, draft_probs: Tensor | None) -> Tensor:
    """``reference/rejection``'s, for compilers one node."""
    params = _asked_apart(step)
    operator = _overload(torch.ops.flashsampling.accept, params)
    return operator(*_either(step), draft_token_ids, draft_probs, **params)


def recover(step: SampleInputs, draft_token_ids: Tensor, draft_probs: Tensor | None, draft_rows: Tensor) -> Tensor:
    """``reference/rejection``'s, for compilers one node."""
    params = _asked_apart(step)
    operator = _overload(torch.ops.flashsampling.recover, params)
    return operator(*_either(step), draft_token_ids, draft_probs, draft_rows, **params)
