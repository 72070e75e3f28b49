"""How the plug-in gets into SGLang: hooks, of which the first makes one model runner's step a fused one.

    ModelRunner.load_model      then looks at the model, and changes this runner and its logits processor, or leaves both
    ForwardBatch.init_new       then keeps what the batch's requests ask for, which a ``ForwardBatch`` does not
    capture_pre_sample_logits   before it: makes logits for beam search, in releases that have it

SGLang calls plug-ins in all of its processes, logs what one raises, and goes on; hooks whose target is not there it logs too.
So what ``FLASHSAMPLING_SGLANG=require`` demands is said there by ``SystemExit``, which it lets through; an error of a hook ends
the process as any error of ``load_model`` does.
"""

import importlib
import importlib.metadata
import logging
from typing import Any

from .asks import noted_of
from .settings import (
    BEAMS,
    VARIABLE,
    Refused,
    check_signature,
    check_signatures,
    check_version,
    describe,
    mode,
)

_logger = logging.getLogger("sglang.flashsampling")
_RUNNER = "sglang.srt.model_executor.model_runner"
_BATCH = "sglang.srt.model_executor.forward_batch_info"
_WORKER = "sglang.srt.managers.tp_worker"
_TAKES_LOGITS = "capture_pre_sample_logits"
_CLASSES = {
    "ModelRunner": _RUNNER,
    "ForwardBatch": _BATCH,
    "LogitsMetadata": "sglang.srt.layers.logits_processor",
    "LogitsProcessor": "sglang.srt.layers.logits_processor",
    "SamplingBatchInfo": "sglang.srt.sampling.sampling_batch_info",
    "Sampler": "sglang.srt.layers.sampler",
}


def register() -> None:
    """SGLang's entry point: has the model runner of a known release fuse what it can.

    Raises:
        ValueError: ``FLASHSAMPLING_SGLANG`` is none of "off", "auto" and "require". SGLang logs it, and goes on without the
            plug-in.
        SystemExit: it is "require", and this SGLang is not a known one.
    """
    chosen = mode()
    if chosen == "off":
        return
    try:
        release = check_version(importlib.metadata.version("sglang"))
        check_signatures({name: getattr(importlib.import_module(module), name) for name, module in _CLASSES.items()}, release)
        if release.beams:
            check_signature(_TAKES_LOGITS, getattr(importlib.import_module(_WORKER), _TAKES_LOGITS, None), BEAMS)
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        hooks.HookRegistry.register(f"{_RUNNER}.ModelRunner.load_model", after_load_model, hooks.HookType.AFTER)
        hooks.HookRegistry.register(f"{_BATCH}.ForwardBatch.init_new", after_init_new, hooks.HookType.AFTER)
        if release.beams:
            hooks.HookRegistry.register(f"{_WORKER}.{_TAKES_LOGITS}", before_logits_are_taken, hooks.HookType.BEFORE)
    except Exception as error:  # SGLang works without the plug-in, whatever the plug-in did not expect
        if chosen == "require":
            raise SystemExit(f"flashsampling: {describe(error)} ({VARIABLE}=require)") from error
        _say(error)


def _say(error: Exception) -> None:
    _logger.warning("flashsampling: nothing is fused: %s", describe(error), exc_info=not isinstance(error, Refused))


def after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Fuses what this runner can, or says why it does not, whatever the reason."""
    if runner.is_draft_worker or hasattr(runner, "flashsampling"):  # a drafter's target is refused, and says so
        return result
    try:
        said = importlib.import_module(".runner", __package__).attach(runner)
    except Exception as error:
        runner.flashsampling_refused = describe(error)
        if mode() == "require":
            raise Refused(f"{describe(error)} ({VARIABLE}=require)") from error
        _say(error)
    else:
        _logger.info("flashsampling: %s", said)
    return result


def after_init_new(result: Any, kind: type, batch: Any, model_runner: Any, **kwargs: Any) -> Any:
    """Keeps beside a ``ForwardBatch`` what each of its requests asks for, and whose step it is."""
    fused = getattr(model_runner, "flashsampling", None)
    if fused is not None:
        result.flashsampling_step = fused
        try:
            result.flashsampling = tuple([request.flashsampling for request in batch.reqs])
        except AttributeError:  # one is new
            result.flashsampling = tuple([noted_of(request, fused.rules) for request in batch.reqs])
    return result


def before_logits_are_taken(batch: Any, forward_batch: Any, logits_output: Any) -> None:
    """Beam search keeps logits of its rows before the sampler writes over them: of a batch with beams there have to be some."""
    fused = getattr(forward_batch, "flashsampling_step", None)
    if fused is None or batch is None or logits_output is None or logits_output.next_token_logits is None:
        return
    if batch.beam_tail is not None or any(request.beam_group is not None for request in batch.reqs):
        fused.make_logits(logits_output, forward_batch.batch_size)


def counters(runner: Any) -> dict[str, Any]:
    """How many steps a ``ModelRunner`` fused, and how many it left to SGLang, by reason.

    Returns:
        "fused": steps; "left": steps that SGLang did; "split": steps of which some rows were drawn here after SGLang had drawn
        all; "reasons": how many of the last two had a request of each reason; "undefined_rows": rows without a finite score,
        which got token 0. "refused": why nothing is fused, if so. Reading them waits for the device.
    """
    fused = getattr(runner, "flashsampling", None)
    if fused is None:
        return {"refused": getattr(runner, "flashsampling_refused", "the plug-in is off, or was not loaded")}
    return fused.counters()  # type: ignore[no-any-return]
