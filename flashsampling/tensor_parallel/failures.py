"""Failures of a group: one value that all ranks share, and the exceptions that users see."""

from dataclasses import dataclass
from typing import Any, Literal

HOW_TO_GO_ON = (
    "The group cannot be used any more: close it on every rank that lives and make a new one, "
    "see docs/tensor_parallel.md"
)


@dataclass(frozen=True)
class Failure:
    """The reason why a group cannot be used any more. It is decided once and is the same on all ranks.

    Attributes:
        kind: "timeout": the rank did not take part in time, or is gone. "mismatch": the rank took another step, or the
            step with other parameters. "aborted": the rank gave up by itself, because an exception left its ``with`` or
            its device broke.
        rank: the rank at fault, in the group.
        step: number of the step, from 0, as counted by the rank that reported the failure; None outside of a step. A
            step with filters or log-probabilities counts once per message.
        differs: names of the parameters that differ: "step", "batch size or num_samples", "seed", "offset",
            "temperature", other arguments of ``sample`` or ``verify``, or with p2p "request" for all of these;
            "collective" where the rank was in another collective call.
        what: "timeout": the call that the rank missed, "" for a step. "mismatch": the rank it is compared with.
            "aborted": the reason.

    Example:
        >>> from flashsampling.tensor_parallel import Failure
        >>> Failure("timeout", rank=1, step=7).message("rank 1 (global rank 5)", timeout=60.0).partition(". ")[0]
        'rank 1 (global rank 5) did not take part in a step within 60 s, or is gone'
    """

    kind: Literal["timeout", "mismatch", "aborted"]
    rank: int
    step: int | None = None
    differs: tuple[str, ...] = ()
    what: str = ""

    def message(self, who: str, timeout: float) -> str:
        """Returns the failure as a sentence. ``who`` names the rank, ``timeout`` is in seconds."""
        if self.kind == "timeout":
            text = f"{who} did not take part in {self.what or 'a step'} within {timeout:g} s, or is gone"
        elif self.kind == "aborted":
            text = f"{who} left the group" + (f": {self.what}" if self.what else "")
        elif "collective" in self.differs:
            text = f"{who} called {self.what}"
        else:
            others = self.what or "the other ranks"
            fields = [name for name in self.differs if name != "step"]
            named = " and ".join(filter(None, [", ".join(fields[:-1]), *fields[-1:]]))
            at = "a step" if self.step is None else f"step {self.step}"
            if "step" in self.differs:
                text = f"{who} is out of step with {others} in {at}" + (f", and has another {named}" if named else "")
            else:
                text = f"{who} called {at} with another {named or 'parameter'} than {others}"
        return f"{text}. {HOW_TO_GO_ON}"

    def error(self, who: str, timeout: float) -> "TensorParallelError":
        """Returns the exception for this failure."""
        kinds = {"timeout": TensorParallelTimeout, "mismatch": TensorParallelMismatch, "aborted": TensorParallelError}
        return kinds[self.kind](self.message(who, timeout), self)


class TensorParallelError(RuntimeError):
    """The ranks of a group cannot go on together. The group cannot be used any more, all its ranks get this error.

    Attributes:
        failure: the failure, the same on all ranks.
        rank: the rank at fault, in the group.

    Example:
        >>> from flashsampling.tensor_parallel import Failure, TensorParallelError
        >>> try:  # a call with tp=
        ...     raise Failure("aborted", rank=1, what="KeyboardInterrupt: ").error("rank 1", timeout=60.0)
        ... except TensorParallelError as error:
        ...     print(error.rank, error.failure.kind)
        1 aborted
    """

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.failure = failure
        self.rank = failure.rank

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.failure)


class TensorParallelTimeout(TensorParallelError, TimeoutError):
    """A rank did not take part in a step, or in a collective call, in time; or it is gone.

    Example:
        >>> from flashsampling.tensor_parallel import Failure
        >>> try:  # a call with tp=
        ...     raise Failure("timeout", rank=1, step=7).error("rank 1", timeout=60.0)
        ... except TimeoutError as error:
        ...     print(error.rank, error.failure.step)
        1 7
    """


class TensorParallelMismatch(TensorParallelError):
    """A rank was desynchronised: at another step than the others, or at the step with other parameters.

    Example:
        >>> from flashsampling.tensor_parallel import Failure, TensorParallelMismatch
        >>> try:  # a call with tp=
        ...     failure = Failure("mismatch", rank=1, step=7, differs=("seed",), what="rank 0")
        ...     raise failure.error("rank 1", timeout=60.0)
        ... except TensorParallelMismatch as error:
        ...     print(error.rank, error.failure.differs)
        1 ('seed',)
    """


def abort_failure(rank: int, error: BaseException) -> Failure:
    """Returns the failure of a rank that gives up because of an exception."""
    if isinstance(error, TensorParallelError):
        return error.failure
    return Failure("aborted", rank, what=f"{type(error).__name__}: {error}")
