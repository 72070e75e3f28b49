"""The shared part of the plug-ins of vLLM and SGLang: their variables, refusals and counters.

A plug-in never ends its host. Whatever fails while it attaches leaves the engine as it is, with one line in the log;
with ``require`` the same is an error.
"""

import collections
import contextlib
import inspect
import logging
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from .request_info import FALLBACK_REASONS, FallbackReason

_T = TypeVar("_T")
_MODES = {
    **dict.fromkeys(("", "off", "0", "false"), "off"),
    **dict.fromkeys(("auto", "on", "1", "true"), "auto"),
    "require": "require",
}
_SWITCHES = {
    **dict.fromkeys(("", "auto"), None),
    **dict.fromkeys(("off", "0", "false"), False),
    **dict.fromkeys(("on", "1", "true"), True),
}
_LOG_AFTER = 1024  # steps before the counters are logged, then twice as many, and so on
NOT_LOADED = "the plug-in is off, or was not loaded"


class Refused(RuntimeError):
    """Why nothing is fused here. Raised where the plug-in's variable is "require", logged where it is "auto"."""


class Plugin:
    """The plug-in of an engine, which ``variable`` of the environment turns on. ``logger``: the name of a logger below
    the engine's own, which the engine shows."""

    def __init__(self, engine: str, variable: str, logger: str) -> None:
        self.engine, self.variable, self.logger = engine, variable, logging.getLogger(logger)

    def mode(self) -> str:
        """Returns "off", which is the default, "auto" or "require".

        Raises:
            Refused: the variable has another value.
        """
        value = _read(self.variable)
        if value not in _MODES:
            raise _bad_value(self.variable, "auto, require or off (or 1/0, true/false, on/off)")
        return _MODES[value]

    def required(self) -> bool:
        """Returns whether the plug-in is required; never raises."""
        return _MODES.get(_read(self.variable)) == "require"

    def leave(self, error: BaseException, *owners: Any) -> None:
        """Leaves the engine as it is after an error: logs one line, and notes it on ``owners`` for ``counters``.

        A traceback is logged at DEBUG alone.

        Raises:
            Refused: the plug-in is required.
            BaseException: ``error``, if it asks the process to end.
        """
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise error
        words = describe(error)
        for owner in owners:
            with contextlib.suppress(Exception):
                owner.flashsampling_refused = words
        if self.required():
            why = f" ({self.variable}=require)"  # an error that was left before says so already
            raise Refused(words.removesuffix(why) + why) from error
        unforeseen = not isinstance(error, Refused) and self.logger.isEnabledFor(logging.DEBUG)
        self.logger.warning("flashsampling: nothing is fused: %s", words, exc_info=error if unforeseen else None)

    def check_signature(self, name: str, function: Any, parameters: tuple[str, ...]) -> None:
        """Refuses a function that is None, or takes other parameters than in the known releases."""
        if function is None:
            raise Refused(f"there is no {name} here: this release of {self.engine} is not known")
        got = tuple(inspect.signature(function).parameters)
        if got != parameters:
            differs = f"{name} takes {', '.join(got)} here, not {', '.join(parameters)}"
            raise Refused(f"{differs}: this release of {self.engine} is not known")

    def log_ready(self, names: Iterable[str], batch: int) -> None:
        """Logs how many kernels were compiled before the engine serves."""
        self.logger.info("flashsampling: %d kernels are ready for batches of up to %d", len(set(names)), batch)

    def summary(self, vocab_size: int, how: str, fallbacks: Mapping[FallbackReason, bool], tokens: str) -> str:
        """Returns what is fused and what is not, in a line. ``fallbacks``: reasons, and which of them this runner
        has."""
        left = ", ".join(reason.text for reason, has in fallbacks.items() if has)
        step = f"LM head ({vocab_size} tokens) and sampler are one step, {how}; left to {self.engine}: {left}"
        return f"{step}. {tokens} are not those of {self.engine}'s own sampler"


def switch(variable: str) -> bool | None:
    """Returns whether a variable is on; None: it is "auto", or not set.

    Raises:
        Refused: it has another value.
    """
    value = _read(variable)
    if value not in _SWITCHES:
        raise _bad_value(variable, "1/0, true/false, on/off or auto")
    return _SWITCHES[value]


def _read(variable: str) -> str:
    return os.environ.get(variable, "").strip().lower()


def _bad_value(variable: str, allowed: str) -> Refused:
    return Refused(f"{variable} must be {allowed}, in any case, got {os.environ.get(variable)!r}")


def known_release(version: str, pattern: str, known: Mapping[str, _T], words: str) -> _T:
    """Returns what is known of "ENGINE VERSION". Refuses a version without a known number of that pattern."""
    number = re.match(pattern, version.partition(" ")[2])
    if number is None or number.group() not in known:
        raise Refused(f"{version} is not one of the {words}")
    return known[number.group()]


def refuse_if(conditions: Mapping[str, Any]) -> None:
    """Refuses an engine for the first condition that holds, in the words that are its key."""
    for why, holds in conditions.items():
        if holds:
            raise Refused(why)


def describe(error: BaseException) -> str:
    """Returns an error in one line: its words if it was foreseen, else its type too."""
    try:
        return " ".join((str(error) if isinstance(error, Refused) else repr(error)).split())
    except Exception:  # an engine's error whose words are an error
        return type(error).__name__


def refusal(runner: Any, *owners: Any) -> str | None:
    """Returns why a model runner fuses nothing, as noted on it or its owners; None if it fuses."""
    if getattr(runner, "flashsampling", None) is not None:
        return None
    return next(filter(None, (getattr(each, "flashsampling_refused", None) for each in (*owners, runner))), NOT_LOADED)


def read_counters(runner: Any, *owners: Any) -> dict[str, Any]:
    """Returns the counts of a runner's steps, or why it fuses nothing."""
    refused = refusal(runner, *owners)
    return runner.flashsampling.counters() if refused is None else {"refused": refused}


class StepCounts:
    """How many steps were fused, and how many the engine did, by reason.

    The log has a reason when it comes up for the first time, and all counts after 1024 steps, 2048, and so on.
    ``kinds``: of steps; and of what else is counted with them.
    """

    def __init__(self, plugin: Plugin, *kinds: str) -> None:
        self._plugin, self._kinds = plugin, kinds
        self.clear()

    def clear(self) -> None:
        """Sets all counts to 0."""
        self._counts: collections.Counter[str] = collections.Counter()
        self._reasons: collections.Counter[int] = collections.Counter()
        self._steps = 0

    def add(self, kind: str, reasons: Iterable[int] = (), **more: int) -> None:
        """Counts a step of a kind, the reasons why the engine does rows of it, and what else it has."""
        self._counts[kind] += 1
        for name, count in more.items():
            self._counts[name] += count
        for reason in reasons:
            if reason not in self._reasons:
                text = f"flashsampling: {self._plugin.engine} samples where a request has %s (said once)"
                self._plugin.logger.info(text, FALLBACK_REASONS[reason])
            self._reasons[reason] += 1
        self._steps += 1
        if self._steps >= _LOG_AFTER and not self._steps & (self._steps - 1):
            self._plugin.logger.info("flashsampling: %s", self.read())

    def read(self) -> dict[str, Any]:
        """Returns all counts, by their names."""
        reasons = {FALLBACK_REASONS[reason]: count for reason, count in self._reasons.most_common()}
        return {**{kind: self._counts[kind] for kind in self._kinds}, "reasons": reasons}
