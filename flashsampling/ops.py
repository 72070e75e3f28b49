"""The torch operators: schemas, fakes, dispatch to the backends.

    flashsampling::sample               a whole weight; a pure function
    flashsampling::sample_from_logits   logits in memory; a pure function
    flashsampling::sample_sharded       one step of a ``TensorParallel``, with a side effect: the exchange with other
                                        ranks. It rejects drafts, if there are any, and then returns last tokens and
                                        numbers of accepted drafts
    flashsampling::accept, recover      rejection sampling of drafts (``reference/rejection``); pure functions; without
                                        a weight the states are logits

This module alone flattens ``SampleInputs`` into operator arguments and back. All operators return ids and values,
values empty where there are none, so a new output needs no new operator. Sampling parameters are keyword arguments with
defaults and are passed only where they differ, so a program that was exported before a parameter existed still runs.

``torch.library.Library`` defines them: the wrapper of ``torch.library.custom_op`` adds 12 us of host time to a call,
this 1 us (torch 2.13, one EPYC core). An eager call that no tracer, mode, transform, subclass or profiler sees skips
torch's dispatcher, which saves a third of its host time.

A compiler removes a pure operator whose result is unused, and reorders operators that nothing orders; other ranks would
then wait. ``sample_sharded`` therefore declares that it writes to ``order``: one int64 per device for all groups,
because steps of two groups that trade places on one rank may wait for each other. Nothing is written. AOTAutograd
threads the tensor through the steps, FX and Inductor keep operators that mutate an input, and it costs neither a copy
nor a kernel (torch 2.8 and 2.13). An exported program refuses a constant that is written to, so the overload
``exported`` lacks it; ``torch.fx.has_side_effect`` keeps that one (Inductor from torch 2.10 on). Rejected: effect
tokens (``_register_effectful_op`` of torch.library), which are private and which FX drops before torch 2.10;
``has_side_effect`` alone, which does not order.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.fx
from torch import Tensor
from torch.autograd import profiler
from torch.nn import Parameter

from .backends import BACKENDS, Backend, named
from .exchange_protocol import WHOLE, Shard
from .inputs import DraftChains, SampleInputs
from .noise import Stream
from .outputs import SampleResult, layout
from .reference import rejection
from .sampling_params import DEFAULT_PARAMS, PARAMS, SamplingParams
from .torch_internals import dispatch_modes, function_modes, functorch_is_active, tracing_state

if TYPE_CHECKING:
    from .tensor_parallel import TensorParallel

_logger = logging.getLogger(__name__)

# The open groups by the names that the operator receives. A group without another reference stays until it is closed,
# because a captured graph may replay with its buffers and peers may write to them.
open_groups: dict[str, "TensorParallel"] = {}

# These three are a tensor or, if that is None, a number for all rows. (field of ``SampleInputs``, type of the number)
_ROW_PARAMETERS = (("temperature", "float"), ("seed", "SymInt"), ("offset", "SymInt"))
# The overload ``on_host`` takes each scalar float as a tensor () on the CPU: a number that Dynamo traces as a symbol. A
# CUDA graph would keep the value that it was captured with, so these overloads are not captured.
_ON_HOST = "_on_host"  # suffix of such a tensor's name
_UNSAFE = (torch.Tag.cudagraph_unsafe,) if hasattr(torch.Tag, "cudagraph_unsafe") else ()


def _params_schema() -> str:
    """Returns the sampling parameters as keyword arguments, whose defaults are off. A per-row parameter takes two."""
    arguments = []
    for name, param in PARAMS.items():
        default = getattr(DEFAULT_PARAMS, name)
        if name in _ROW_NUMBERS:
            arguments += [f"Tensor? {name}=None", f"{_ROW_NUMBERS[name]} {name}_value={default}"]
        else:
            arguments.append(f"{param.schema} {name}={default}")
    return ", ".join(arguments)


_ROW_NUMBERS = {name: param.schema[4:] for name, param in PARAMS.items() if param.schema.startswith("row ")}
_PARAMS_SCHEMA = _params_schema()
_ON_HOST_SCHEMA = ", ".join(
    f"Tensor? {name}{_ON_HOST}=None" for name, param in PARAMS.items() if param.schema == "float"
)
_ROWS = ", ".join(f"Tensor? {name}, {kind} {name}_value" for name, kind in _ROW_PARAMETERS)
_STEP = f"{_ROWS}, int stream, SymInt num_samples"
_HEAD = f"Tensor hidden_states, Tensor weight, {_STEP}"
_LOGITS = f"Tensor logits, {_STEP}, SymInt vocab_size, str impl"
_RESULT = "(Tensor ids, Tensor values)"
_DRAFTED = ("draft_token_ids", "draft_rows", "draft_places", "draft_probs")  # the fields of ``DraftChains``
_SHARDED = ", ".join([f"*, {_PARAMS_SCHEMA}", *(f"Tensor? {name}=None" for name in (*_DRAFTED, "draft_hash"))])
_EITHER = f"Tensor states, Tensor? weight, {_STEP}, SymInt vocab_size"
_REJECTION = f"{_EITHER}, Tensor draft_token_ids, Tensor? draft_probs, Tensor draft_rows, *, {_PARAMS_SCHEMA}"


def _flatten_inputs(inputs: SampleInputs) -> list[Any]:
    """Returns the positional arguments of an operator, up to ``num_samples``."""
    arguments: list[Any] = [inputs.hidden_states, inputs.weight] if inputs.logits is None else [inputs.logits]
    for name, kind in _ROW_PARAMETERS:
        value = getattr(inputs, name)
        arguments += (value, 0.0 if kind == "float" else 0) if isinstance(value, Tensor) else (None, value)
    return [*arguments, int(inputs.params.stream), inputs.num_samples]


def _flatten_params(params: SamplingParams) -> dict[str, Any]:
    """Returns the keyword arguments of an operator: the parameters that differ from their defaults, except the
    stream."""
    if params is DEFAULT_PARAMS:
        return {}
    keywords: dict[str, Any] = {} if params.seen is None else {"seen": params.seen}
    for name in params.names():
        value = getattr(params, name)
        if name in _ROW_NUMBERS and not isinstance(value, Tensor):
            keywords[name + "_value"] = value
        elif name != "stream":
            on_host = PARAMS[name].schema == "float" and isinstance(value, Tensor)
            keywords[name + _ON_HOST if on_host else name] = value
    return keywords


def _overload(operator: Any, keywords: dict[str, Any]) -> Any:
    return operator.on_host if any(name.endswith(_ON_HOST) for name in keywords) else operator.default


def _unflatten_inputs(
    arguments: Sequence[Any], keywords: dict[str, Any], vocab_size: int, shard: Shard = WHOLE
) -> SampleInputs:
    """Returns the inputs that ``_flatten_inputs`` and ``_flatten_params`` flattened."""
    *values, stream, num_samples = arguments
    first_row = len(values) - 2 * len(_ROW_PARAMETERS)
    matrices, rows = values[:first_row], values[first_row:]
    temperature, seed, offset = (number if tensor is None else tensor for tensor, number in zip(rows[::2], rows[1::2]))
    params = _unflatten_params(stream, _read_host_tensors(keywords))
    inputs = SampleInputs(matrices[0], matrices[-1], temperature, seed, offset, num_samples, vocab_size, shard, params)
    return inputs if len(matrices) == 2 else inputs._replace(logits=matrices[0])


def _pop_drafts(keywords: dict[str, Any]) -> DraftChains | None:
    """Removes the draft chains from the keyword arguments and returns them."""
    parts = [keywords.pop(name, None) for name in _DRAFTED]
    return None if parts[0] is None else DraftChains(*parts)


def _read_host_tensors(keywords: dict[str, Any]) -> dict[str, Any]:
    """Replaces the tensors of ``on_host`` by their numbers. They lie on the CPU, so nothing waits for a device."""
    return {
        name.removesuffix(_ON_HOST): value.item() if name.endswith(_ON_HOST) else value
        for name, value in keywords.items()
        if not name.endswith(_ON_HOST) or value is not None
    }


def _unflatten_params(stream: int, keywords: dict[str, Any]) -> SamplingParams:
    if not keywords and stream == DEFAULT_PARAMS.stream:
        return DEFAULT_PARAMS
    fields = {name.removesuffix("_value"): value for name, value in keywords.items() if value is not None}
    return SamplingParams(Stream(stream), **fields).normalized()


def choose(inputs: SampleInputs, impl: str = "") -> Backend:
    """Returns the named backend, or the first that runs the step. Raises ValueError if there is no such name, or none
    does."""
    if impl:
        backend = named(impl)
        reason = backend.unsupported(inputs)
        if reason is not None:
            raise ValueError(f"impl={impl!r} cannot do this: {reason}")
        return backend
    reasons, kind = [], "cuda" if inputs.hidden_states.is_cuda else "cpu"
    for backend in BACKENDS.values():
        if kind not in backend.chosen_on:
            continue
        reason = backend.unsupported(inputs)
        if reason is None:
            if _logger.isEnabledFor(logging.DEBUG):
                _log_choice(backend.name, inputs.hidden_states.dtype, inputs.hidden_states.device)
            return backend
        reasons.append(f"{backend.name}: {reason}")
    raise ValueError(f"no implementation can do this on {inputs.hidden_states.device}: {'; '.join(reasons)}")


def _sample(inputs: SampleInputs, impl: str) -> SampleResult:
    if not inputs.hidden_states.numel():
        return _empty_result(inputs)
    return _run_on_device(inputs, choose(inputs, impl).module.run)


def _sample_sharded(inputs: SampleInputs, group: Any) -> SampleResult:
    """Runs one step of a ``TensorParallel``. A call that raises before it joins a step, or has no rows, is a skipped
    call."""
    try:
        group.raise_if_unusable()
        # here, not while tracing: compiled functions and exported programs come with any batch
        batch = inputs.hidden_states.shape[0]
        group.check_call(inputs.weight, batch, inputs.num_samples)
        if batch == 0:
            group.count_skipped_call()
            return _empty_result(inputs)
        # sampling parameters take several steps of the backend and the group, none of which needs ``run`` on a shard
        needs = inputs if inputs.params is DEFAULT_PARAMS else inputs._replace(shard=WHOLE)
        if inputs.drafted is not None:  # rejection needs the same masses as log-probabilities
            needs = inputs._replace(shard=WHOLE, params=inputs.params._replace(logprobs=True))
        return _run_on_device(inputs, functools.partial(_run_and_exchange, choose(needs, group.impl), group))
    except BaseException as error:
        count_skipped_call(group, error)
        raise


def find_group(name: str) -> "TensorParallel":
    """Returns the open group of that name. Raises ValueError if it has been closed."""
    if name not in open_groups:
        raise ValueError(
            "tp must be open, it has been closed: a compiled function or an exported program needs its TensorParallel "
            "open as long as it is called"
        )
    return open_groups[name]


def dry_run(inputs: SampleInputs, group: Any) -> None:
    """Runs the kernels of a ``sample_sharded`` with sampling parameters without other ranks, to compile them."""
    _run_on_device(inputs, functools.partial(group.dry_run, choose(inputs._replace(shard=WHOLE), group.impl)))


def _run_and_exchange(backend: Backend, group: Any, inputs: SampleInputs) -> SampleResult:
    if inputs.drafted is not None or (inputs.params is not DEFAULT_PARAMS and not backend.runs_on_shard(inputs)):
        if backend.exchanges:  # kernels draw whole rows
            reason = inputs._replace(vocab_size=group.vocab_size).too_wide_to_filter()
            if reason is not None:
                raise ValueError(f"impl={backend.name!r} cannot do this: {reason}")
        return group.draw(backend, inputs)
    if inputs.params is not DEFAULT_PARAMS or inputs.draft_hash is not None:
        group.compare(inputs)
    result = backend.run(inputs)
    return result._replace(ids=group.finish(result.ids, inputs))


def _empty_result(inputs: SampleInputs) -> SampleResult:
    return SampleResult(torch.empty(0, dtype=torch.int64, device=inputs.hidden_states.device))


def _run_on_device(inputs: SampleInputs, run: Callable[[SampleInputs], SampleResult]) -> SampleResult:
    """Runs a step with its device as the current one."""
    states = inputs.hidden_states
    if states.is_cuda and states.get_device() != torch.cuda.current_device():
        with torch.cuda.device(states.device):
            return run(inputs)
    return run(inputs)


def count_skipped_call(tp: object, error: BaseException) -> None:
    """Counts a call with a ``TensorParallel`` that raised: this rank joined no step, and the others may have. Counts
    once per error, however many callers pass the error on.

    An error of the exchange itself is counted too: it has failed the group for good, so one more count changes nothing.
    """
    if tp is None:
        return
    from .tensor_parallel import TensorParallel  # imported already if the caller has one

    if isinstance(tp, TensorParallel) and getattr(error, "_left_out_of", None) != tp.name:
        error._left_out_of = tp.name  # type: ignore[attr-defined]
        tp.count_skipped_call()


@functools.cache  # logs each once
def _log_choice(name: str, dtype: torch.dtype, device: torch.device) -> None:
    _logger.debug("impl=None takes %s for %s on %s (python -m flashsampling doctor says why)", name, dtype, device)


@functools.cache
def order_tensor(device: torch.device) -> Tensor:
    """Returns (1,) int64: the tensor that every ``sample_sharded`` on a device declares to write to."""
    with torch.inference_mode(False):  # an inference tensor could not be "written" outside inference mode
        order = torch.zeros(1, dtype=torch.int64, device=device)
    # CUDA graphs need an input that is written to at a static address. torch._dynamo.mark_static_address does the same
    # but imports torch._dynamo, which takes 1 s
    order._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return order


# -- the operators


def _as_tensors(result: SampleResult) -> tuple[Tensor, Tensor]:
    return result.ids, result.ids.new_empty(0, dtype=torch.float32) if result.values is None else result.values


def _operate(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    *flat, vocab_size, impl = arguments
    return _as_tensors(_sample(_unflatten_inputs(flat, keywords, vocab_size), impl))


def _operate_sharded(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
    if isinstance(arguments[-1], Tensor):  # order
        arguments = arguments[:-1]
    group = find_group(arguments[-1])
    drafted, draft_hash = _pop_drafts(keywords), keywords.pop("draft_hash", None)
    inputs = _unflatten_inputs(arguments[:-1], keywords, *group.part)
    return _as_tensors(_sample_sharded(inputs._replace(drafted=drafted, draft_hash=draft_hash), group))


def _make_fake(num_matrices: int) -> Callable[..., tuple[Tensor, Tensor]]:
    """Returns the fake of an operator whose first arguments are so many matrices."""

    def fake(*arguments: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        states = arguments[0]
        stream, num_samples = arguments[num_matrices + 2 * len(_ROW_PARAMETERS) :][:2]
        drafted, _ = _pop_drafts(keywords), keywords.pop("draft_hash", None)
        if drafted is not None:
            values = states.new_empty(0, dtype=torch.float32)
            return states.new_empty(2 * drafted.token_ids.shape[0], dtype=torch.int64), values
        params = {name: value for name, value in keywords.items() if not name.endswith(_ON_HOST)}
        sizes = layout(states.shape[0], num_samples, _unflatten_params(stream, params))
        values = states.new_empty(sizes.num_values, dtype=torch.float32)
        return states.new_empty(sizes.num_ids, dtype=torch.int64), values

    return fake


def _unflatten_rejection(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> SampleInputs:
    """Returns the inputs of ``accept`` or ``recover``, whose last three arguments are about drafts."""
    states, weight, *rows, vocab_size = arguments[:-3]
    matrices = (states,) if weight is None else (states, weight)
    return _unflatten_inputs((*matrices, *rows), keywords, vocab_size)


def _accept(*arguments: Any, **keywords: Any) -> Tensor:
    return rejection.accept(_unflatten_rejection(arguments, keywords), *arguments[-3:])


def _recover(*arguments: Any, **keywords: Any) -> Tensor:
    return rejection.recover(_unflatten_rejection(arguments, keywords), *arguments[-3:])


_library = torch.library.Library("flashsampling", "DEF")
for _schema, _function, _fake in (
    (f"sample({_HEAD}, SymInt vocab_size, str impl, *, {_PARAMS_SCHEMA}) -> {_RESULT}", _operate, _make_fake(2)),
    (f"sample_from_logits({_LOGITS}, *, {_PARAMS_SCHEMA}) -> {_RESULT}", _operate, _make_fake(1)),
    (f"sample_sharded({_HEAD}, str tp, Tensor(a!) order, {_SHARDED}) -> {_RESULT}", _operate_sharded, _make_fake(2)),
    (f"sample_sharded.exported({_HEAD}, str tp, {_SHARDED}) -> {_RESULT}", _operate_sharded, _make_fake(2)),
    (f"accept({_REJECTION}) -> Tensor", _accept, lambda *given, **_: torch.empty_like(given[-3], dtype=torch.bool)),
    (f"recover({_REJECTION}) -> Tensor", _recover, lambda *given, **_: torch.empty_like(given[-3])),
):
    _overloads: dict[str, tuple[torch.Tag, ...]] = {_schema: ()}
    if "exported" not in _schema:
        _on_host = _schema.replace("(", ".on_host(", 1).replace(") ->", f", {_ON_HOST_SCHEMA}) ->")
        _overloads[_on_host] = _UNSAFE
    for _schema, _tags in _overloads.items():
        _name = _schema.partition("(")[0]
        _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag, *_tags))
        _library.impl(_name, _function, "CompositeExplicitAutograd")
        _library.impl(_name, torch.library.fallthrough_kernel, "Autograd")  # the outputs have no gradient
        torch.library.register_fake(f"flashsampling::{_name}", _fake, lib=_library)
_exported = torch.fx.has_side_effect(torch.ops.flashsampling.sample_sharded.exported)


def _is_untraced(inputs: SampleInputs) -> bool:
    """Returns whether torch's dispatcher would change nothing."""
    return (
        type(inputs.hidden_states) is Tensor
        and type(inputs.weight) in (Tensor, Parameter)
        and not torch.compiler.is_compiling()
        and not dispatch_modes()
        and not function_modes()
        and not functorch_is_active()
        and tracing_state() is None
        and not profiler._is_profiler_enabled
    )


def sample(inputs: SampleInputs, impl: str) -> SampleResult:
    """Runs a step of a whole weight, or of logits. ``impl`` may be "": the first backend that can."""
    if _is_untraced(inputs):
        return _sample(inputs, impl)
    operators, keywords = torch.ops.flashsampling, _flatten_params(inputs.params)
    operator = _overload(operators.sample if inputs.logits is None else operators.sample_from_logits, keywords)
    return SampleResult(*operator(*_flatten_inputs(inputs), inputs.vocab_size, impl, **keywords))


def sample_sharded(inputs: SampleInputs, tp: Any) -> SampleResult:
    """Runs a step of the open ``TensorParallel`` ``tp``; the inputs hold its ``part``."""
    if _is_untraced(inputs):
        return _sample_sharded(inputs, find_group(tp.name))
    arguments, keywords = _flatten_inputs(inputs), _flatten_params(inputs.params)
    if inputs.drafted is not None:
        keywords |= {name: part for name, part in zip(_DRAFTED, inputs.drafted) if part is not None}
    if inputs.draft_hash is not None:
        keywords["draft_hash"] = inputs.draft_hash
    if torch.compiler._is_exporting_flag:  # is_exporting() is also true in every torch.compile of torch 2.8
        return SampleResult(*_exported(*arguments, tp.name, **keywords))
    operator = _overload(torch.ops.flashsampling.sample_sharded, keywords)
    return SampleResult(*operator(*arguments, tp.name, tp.order, **keywords))


def reject(name: str, inputs: SampleInputs, *drafts: Tensor | None) -> Tensor:
    """Runs ``rejection.accept`` or ``rejection.recover``, by name, as one operator."""
    states, *rest = _flatten_inputs(inputs)
    matrices, keywords = [states, *([None] if inputs.logits is not None else [])], _flatten_params(inputs.params)
    operator = _overload(getattr(torch.ops.flashsampling, name), keywords)
    return operator(*matrices, *rest, inputs.vocab_size, *drafts, **keywords)  # type: ignore[no-any-return]
