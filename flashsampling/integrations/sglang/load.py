"""Attaches the plug-in to SGLang by hooks. The first makes one model runner's step a fused one.

    ModelRunner.load_model      after it: inspects the model, and changes this runner and its logits processor, or
                                leaves both
    ForwardBatch.init_new       after it: keeps what the batch's requests need, which a ``ForwardBatch`` does not have
    capture_pre_sample_logits   before it: makes logits for beam search, in releases that have it

and where the plug-in is required

    Engine._launch_subprocesses   before it: raises with Ray, whose schedulers load no plug-ins

SGLang calls plug-ins in all of its processes, logs their errors, and goes on; it also logs hooks without a target. With
``FLASHSAMPLING_SGLANG=require`` ``register`` therefore raises ``SystemExit``, which SGLang lets through. An error of a
hook ends the process as any error of ``load_model`` does.
"""

import importlib
import importlib.metadata
from typing import Any

from ..engine.plugin import Refused, read_counters
from .request_info import read_request
from .settings import BEAMS, PLUGIN, check_signatures, check_version

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
    """Is SGLang's entry point: where ``FLASHSAMPLING_SGLANG`` says so, makes a known release's model runner fuse what
    it can.

    Raises:
        SystemExit: ``FLASHSAMPLING_SGLANG`` is "require", and this SGLang is not a known one.
    """
    try:
        mode = PLUGIN.mode()
        if mode == "off":
            return
        release = check_version(importlib.metadata.version("sglang"))
        classes = {name: getattr(importlib.import_module(module), name) for name, module in _CLASSES.items()}
        check_signatures(classes, release)
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        before, after = hooks.HookType.BEFORE, hooks.HookType.AFTER
        wanted = [
            (f"{_RUNNER}.ModelRunner.load_model", after_load_model, after),
            (f"{_BATCH}.ForwardBatch.init_new", after_init_new, after),
        ]
        if release.beams:
            taken = getattr(importlib.import_module(_WORKER), _TAKES_LOGITS, None)
            PLUGIN.check_signature(_TAKES_LOGITS, taken, BEAMS)
            wanted.append((f"{_WORKER}.{_TAKES_LOGITS}", before_logits_are_taken, before))
        if mode == "require":
            wanted.append(("sglang.srt.entrypoints.engine.Engine._launch_subprocesses", before_launch, before))
        for each in wanted:
            hooks.HookRegistry.register(*each)
    except BaseException as error:
        try:
            PLUGIN.leave(error)
        except Refused as why:
            raise SystemExit(f"flashsampling: {why}") from error


def after_load_model(result: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    """Fuses what this runner can, or logs why it does not, whatever the reason."""
    try:
        if runner.is_draft_worker or hasattr(runner, "flashsampling"):  # a drafter's target is refused, and logs it
            return result
        summary = importlib.import_module(".runner", __package__).attach(runner)
    except BaseException as error:
        PLUGIN.leave(error, runner)
    else:
        PLUGIN.logger.info("flashsampling: %s", summary)
    return result


def before_launch(kind: type, *args: Any, **kwargs: Any) -> None:
    """Raises Refused where an engine's schedulers load no plug-ins."""
    if kind.__module__.startswith("sglang.srt.ray"):
        PLUGIN.leave(Refused("with Ray SGLang's schedulers load no plug-ins"))


def after_init_new(result: Any, kind: type, batch: Any, model_runner: Any, **kwargs: Any) -> Any:
    """Keeps on a ``ForwardBatch`` what each of its requests needs, and whose step it is."""
    fused, reqs = getattr(model_runner, "flashsampling", None), getattr(batch, "reqs", None)
    if fused is not None and reqs is not None:
        result.flashsampling_step = fused
        # a call for each of 256 requests would take 40 us
        infos = [getattr(request, "flashsampling", None) or read_request(request, fused.rules) for request in reqs]
        result.flashsampling = tuple(infos)
    return result


def before_logits_are_taken(batch: Any, forward_batch: Any, logits_output: Any) -> None:
    """Makes the logits of a batch with beams: beam search keeps those of its rows before the sampler overwrites
    them."""
    fused = getattr(forward_batch, "flashsampling_step", None)
    if fused is None or batch is None or logits_output is None or logits_output.next_token_logits is None:
        return
    if batch.beam_tail is not None or any(request.beam_group is not None for request in batch.reqs):
        fused.make_logits(logits_output, forward_batch.batch_size)


def counters(runner: Any) -> dict[str, Any]:
    """Counts the steps that a ``ModelRunner`` fused, and those that it left to SGLang, by reason.

    Returns:
        "fused": steps; "left": steps that SGLang did; "split": steps of which some rows were drawn here after SGLang
        had drawn all; "reasons": how many of the last two had a request of each reason; "undefined_rows": rows without
        a finite score, which got token 0. "refused": why nothing is fused, if so. Reading them waits for the device.
    """
    return read_counters(runner)
