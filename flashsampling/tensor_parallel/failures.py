"""What can go wrong between ranks, as one value that all ranks share, and as the exceptions that users see."""

from dataclasses import dataclass
from typing import Any, Literal

from .serialization import record_from_json, record_to_json

HOW_TO_GO_ON = "The group cannot be used any more: close it on every rank that lives and make a new one, see docs/tensor_parallel.md"


@dataclass(frozen=True)
class Failure:
    """Why a group cannot be used any more. It is decided once, and the same on all ranks.

    Attributes:
        kind: "late", a rank did not take part in time, or is gone; "differs", it took another step, or the step with other
            parameters; "left", it gave up by itself: an exception left its ``with``, or its device broke.
        rank: whose doing it is, in the group.
        step: number of the step, from 0, as the rank that reported it counts; None if it was not in a step. What a request asks
            for takes several steps in this count, one for each message.
        differs: of "step", "batch size or num_samples", "seed", "offset" and "temperature", and names of what else ``sample``
            or ``verify`` was asked for, drafts too, or with p2p "request"; or "collective", where it was not the same
            collective call.
        what: "late": in what it did not take part, "" for a step. "differs": from whom it differs. "left": why.

    Example:
        >>> from flashsampling.tensor_parallel import Failure
        >>> Failure("late", rank=1, step=7).message("rank 1 (global rank 5)", timeout=60.0).partition(". ")[0]
        'rank 1 (global rank 5) did not take part in a step within 60 s, or is gone'
    """

    kind: Literal["late", "differs", "left"]
    rank: int
    step: int | None = None
    differs: tuple[str, ...] = ()
    what: str = ""

    def encoded(self) -> str:
        """As ASCII text, for a store."""
        return record_to_json(self)

    @staticmethod
    def decoded(text: str | bytes) -> "Failure":
        """What ``encoded`` wrote. Raises ``serialization.MalformedError`` for anything else."""
        return record_from_json(Failure, text)

    def message(self, who: str, timeout: float) -> str:
        """In words; ``who`` names the rank, ``timeout`` is in seconds."""
        if self.kind == "late":
            said = f"{who} did not take part in {self.what or 'a step'} within {timeout:g} s, or is gone"
        elif self.kind == "left":
            said = f"{who} left the group" + (f": {self.what}" if self.what else "")
        elif "collective" in self.differs:
            said = f"{who} called {self.what}"
        else:
            others = self.what or "the other ranks"
            fields = [name for name in self.differs if name != "step"]
            named = " and ".join(filter(None, [", ".join(fields[:-1]), *fields[-1:]]))
            at = "a step" if self.step is None else f"step {self.step}"
            if "step" in self.differs:
                said = f"{who} is out of step with {others} in {at}" + (f", and has another {named}" if named else "")
            else:
                said = f"{who} called {at} with another {named or 'parameter'} than {others}"
        return f"{said}. {HOW_TO_GO_ON}"

    def error(self, who: str, timeout: float) -> "TensorParallelError":
        """The exception of this failure."""
        kinds = {"late": TensorParallelTimeout, "differs": TensorParallelMismatch, "left": TensorParallelError}
        return kinds[self.kind](self.message(who, timeout), self)


class TensorParallelError(RuntimeError):
    """The ranks of a group cannot go on together. The group cannot be used any more, all its ranks get this error.

    Attributes:
        failure: what happened, the same on all ranks.
        rank: whose doing it is, in the group.

    Example:
        >>> from flashsampling.tensor_parallel import Failure, TensorParallelError
        >>> try:  # a call with tp=
        ...     raise Failure("left", rank=1, what="KeyboardInterrupt: ").error("rank 1", timeout=60.0)
        ... except TensorParallelError as error:
        ...     print(error.rank, error.failure.kind)
        1 left
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
        ...     raise Failure("late", rank=1, step=7).error("rank 1", timeout=60.0)
        ... except TimeoutError as error:
        ...     print(error.rank, error.failure.step)
        1 7
    """


class TensorParallelMismatch(TensorParallelError):
    """A rank was at another step than the others, or called it with other parameters.

    Example:
        >>> from flashsampling.tensor_parallel import Failure, TensorParallelMismatch
        >>> try:  # a call with tp=
        ...     raise Failure("differs", rank=1, step=7, differs=("seed",), what="rank 0").error("rank 1", timeout=60.0)
        ... except TensorParallelMismatch as error:
        ...     print(error.rank, error.failure.differs)
        1 ('seed',)
    """


def left(rank: int, error: BaseException) -> Failure:
    """The failure of a rank that gives up because of an exception."""
    if isinstance(error, TensorParallelError):
        return error.failure
    return Failure("left", rank, what=f"{type(error).__name__}: {error}")
