"""``TokenCounts``: which tokens a request has seen, and how often, on the device."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .backends import BACKENDS
from .kernels.device import capability
from .row_params import index_of, integer
from .torch_internals import dispatch_modes, tracing_state

IN_PROMPT = -(2**31)  # bit 31; the other bits count the output
_GROUP = 16  # tokens of which ``Counted.seen`` says together whether they have come


class Counted(NamedTuple):
    """What a step reads of counts; ``sample`` takes it too, and counts nothing."""

    counts: Tensor  # (B, V) int32
    seen: Tensor | None  # (B, 8 ceil(V / 128)) uint8: ``step.SamplingParams.seen``


def groups_of(vocab_size: int) -> int:
    """How many ``Counted.seen`` has of a row."""
    return 8 * -(-vocab_size // (8 * _GROUP))


def _seen_in(counts: Tensor) -> Tensor:
    """``Counted.seen`` of counts (rows, V)."""
    groups = groups_of(counts.shape[1])
    some = torch.nn.functional.pad(counts != 0, (0, groups * _GROUP - counts.shape[1]))
    return some.view(-1, groups, _GROUP).any(2).to(torch.uint8)


def _writes(counts: Tensor) -> int:
    """How often torch has written to a tensor; of those made in inference mode it does not count."""
    return 0 if counts.is_inference() else counts._version


class TokenCounts:
    """What the penalties of ``flashsampling.sample`` need to know of every row: how often each token came in its output, and
    which tokens its prompt holds.

    ``sample(token_counts=state)`` reads rows 0 to B - 1 and counts the tokens that it draws. Nothing waits for the device, and
    nothing is allocated per step: a step with it can be captured in a CUDA graph, whose every replay counts on.

    Few tokens of a vocabulary come in a text, so it also keeps which groups of 16 hold one that has, and the Hopper kernel
    reads the counts of these alone. Who takes ``counts`` to write to it need not care where ``sample`` is called: it looks at
    all of them once after ``counts`` was taken, and after each write that torch counts. What is compiled, or replayed in a CUDA
    graph, does not; and nobody sees what comes later through a tensor that was taken before without torch's counting it
    (``numpy``, DLPack, a collective, a kernel of one's own). Call ``recount`` then.

    Args:
        max_batch_size: rows.
        vocab_size: tokens. 4 bytes for each of them and row, and one for 16.
        device: where; None is torch's default.

    Attributes:
        counts: (max_batch_size, vocab_size) int32. The low 31 bits: how often in the output; bit 31: it is in the prompt.

    Raises:
        ValueError: a size is below 1.

    Example:
        >>> import torch, flashsampling
        >>> state = flashsampling.TokenCounts(max_batch_size=2, vocab_size=1000)
        >>> state.reset(rows=[0, 1], prompt_token_ids=[[5, 7, 7], [9]])
        >>> hidden_states, weight = torch.ones(2, 8), torch.zeros(1000, 8)
        >>> weight[5], weight[6] = 0.5, 0.4  # rows: logits 4.0 and 3.2, all others 0
        >>> flashsampling.sample(
        ...     hidden_states, weight, temperature=0.0, repetition_penalty=1.5, token_counts=state
        ... ).token_ids  # 5 is in the prompt of row 0: 4.0 / 1.5 is below 3.2
        tensor([6, 5])
        >>> state.counts[:, 5:8] & 0x7FFFFFFF
        tensor([[0, 1, 0],
                [1, 0, 0]], dtype=torch.int32)
    """

    def __init__(self, max_batch_size: int, vocab_size: int, device: torch.device | str | None = None) -> None:
        sizes = []
        for name, given in (("max_batch_size", max_batch_size), ("vocab_size", vocab_size)):
            sizes.append(size := integer(name, given))
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        with torch.inference_mode(False):  # what is made inside could not be written outside
            self._counts = torch.zeros(sizes, dtype=torch.int32, device=device)
            self._seen = torch.zeros((sizes[0], groups_of(sizes[1])), dtype=torch.uint8, device=device)
        self._known: tuple[Tensor, int] | None = (
            None  # the counts that ``_seen`` is of, and torch's count of writes to them
        )
        self._wrote()

    @property
    def counts(self) -> Tensor:
        """(max_batch_size, vocab_size) int32: see above."""
        self._known = None  # who has it may write to it
        return self._counts

    @counts.setter
    def counts(self, counts: Tensor) -> None:
        self._known, self._counts = None, counts

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy torch counts anew."""
        return self.__dict__ | {"_known": None}

    @property
    def max_batch_size(self) -> int:
        """Rows."""
        return self._counts.shape[0]

    @property
    def vocab_size(self) -> int:
        """Tokens."""
        return self._counts.shape[1]

    def reset(self, rows: Tensor | slice | int | list[int] | None = None, prompt_token_ids: Any = None) -> None:
        """Starts requests anew, in place.

        Args:
            rows: which, as an index; None is all.
            prompt_token_ids: of one row its ids; of several one list per row, or a tensor (rows, n) with -1 where a prompt has
                ended. Ids out of range are passed over. None: no prompt, or one that the repetition penalty is to leave alone.

        Raises:
            TypeError, ValueError: an argument does not fit; no row has changed then.
        """
        index = index_of(rows, self.max_batch_size)
        self._look()
        fresh = torch.zeros_like(self._counts[index])
        if prompt_token_ids is not None:
            ids = self._matrix("prompt_token_ids", prompt_token_ids, len(fresh))
            there = (ids >= 0) & (ids < self.vocab_size)
            bits = torch.where(there, IN_PROMPT, 0).to(torch.int32)
            fresh.scatter_reduce_(1, torch.where(there, ids, 0), bits, "amin")
        self._counts[index] = fresh
        self._seen[index] = _seen_in(self._counts[index])  # of what is there: of a row that is named twice it is either
        self._wrote()

    def add(self, token_ids: Tensor, rows: Tensor | slice | int | list[int] | None = None) -> None:
        """Counts tokens of the output; -1 and other ids out of range count for nothing.

        Args:
            token_ids: integers, one per row, or (rows, n).
            rows: whose; None is as many as there are, from row 0 on.

        Raises:
            TypeError, ValueError: an argument does not fit.
        """
        if not isinstance(token_ids, Tensor) or token_ids.is_floating_point() or token_ids.dtype is torch.bool:
            got = token_ids.dtype if isinstance(token_ids, Tensor) else type(token_ids).__name__
            raise TypeError(f"token_ids must be a tensor of integers, got {got}")
        ids = token_ids[:, None] if token_ids.ndim == 1 else token_ids
        if ids.ndim != 2 or len(ids) > self.max_batch_size:
            raise ValueError(
                f"token_ids must have shape (B,) or (B, n), B up to max_batch_size = {self.max_batch_size}, "
                f"got shape {tuple(token_ids.shape)}"
            )
        chosen = None
        if rows is not None:
            chosen = torch.arange(self.max_batch_size, device=self._counts.device)[index_of(rows, self.max_batch_size)]
            if len(chosen) != len(ids):
                raise ValueError(
                    f"token_ids must have a row for each of {len(chosen)} rows, got shape {tuple(token_ids.shape)}"
                )
        self._look()
        if self._counts_by_kernel(ids):
            from .kernels.triton import token_counts

            with torch.cuda.device_of(self._counts):
                token_counts.count(self._counts, self._seen, ids, chosen, _GROUP)
            return
        ids = ids.long()
        there = (ids >= 0) & (ids < self.vocab_size)
        ids, ones = torch.where(there, ids, 0), there.to(torch.int32)
        if chosen is None:
            self._counts[: len(ids)].scatter_add_(1, ids, ones)
            self._seen[: len(ids)].scatter_(1, ids // _GROUP, 1)  # the first group's too, where an id is out of range
        else:
            chosen = chosen[:, None].expand_as(ids)
            self._counts.index_put_((chosen, ids), ones, accumulate=True)
            self._seen[chosen, ids // _GROUP] = 1
        self._wrote()

    def read(self, batch_size: int) -> Counted:
        """What a step of rows 0 to ``batch_size`` - 1 reads. ``sample`` takes it as ``token_counts`` too, and then counts
        nothing."""
        self._look()
        return Counted(self._counts[:batch_size], self._seen[:batch_size])

    def recount(self) -> None:
        """Looks at all counts, after they were written to by something else than ``reset`` and ``add``: reads as many bytes."""
        seen = _seen_in(self._counts)
        if self._seen.shape == seen.shape and self._seen.device == seen.device:
            self._seen.copy_(seen)  # a graph reads it there
        else:
            self._seen = seen
        self._wrote()

    def _counts_by_kernel(self, ids: Tensor) -> bool:
        """Whether one launch counts: on a GPU, where no compiler looks."""
        return (
            self._counts.is_cuda
            and self._counts.stride(1) == 1  # what takes the place of counts may lie otherwise
            and type(ids) is Tensor
            and ids.device == self._counts.device
            and BACKENDS["triton"].missing is None
            and capability(self._counts.device) >= (8, 0)
            and not torch.compiler.is_compiling()
            and tracing_state() is None
            and not dispatch_modes()
        )

    def _look(self) -> None:
        """Sees whether something else has written to the counts."""
        if torch.compiler.is_compiling():
            return
        if self._known is None or self._known[0] is not self._counts or self._known[1] != _writes(self._counts):
            self.recount()

    def _wrote(self) -> None:
        if not torch.compiler.is_compiling():
            self._known = self._counts, _writes(self._counts)

    def _matrix(self, name: str, given: Any, count: int) -> Tensor:
        """(count, n) int64 on the device, -1 where a row has ended."""
        if not isinstance(given, Tensor):
            if hasattr(given, "tolist"):
                given = given.tolist()
            if not isinstance(given, Sequence):
                raise TypeError(f"{name} must be token ids, or a list of them per row, got {type(given).__name__}")
            lists = [row.tolist() if hasattr(row, "tolist") else row for row in given]
            if not all(isinstance(row, (list, tuple)) for row in lists) or (not lists and count):
                lists = [lists]
            longest = max(map(len, lists), default=0)
            try:
                given = torch.tensor([[*row, *[-1] * (longest - len(row))] for row in lists], device="cpu")
                given = given.view(len(lists), longest)  # of no rows too
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"{name} must be token ids, or a list of them per row: {error}") from None
            given = given if given.numel() else given.long()  # torch takes [] for floats
        if given.is_floating_point() or given.dtype is torch.bool:
            raise TypeError(f"{name} must be integers, got {given.dtype}")
        given = given[None] if given.ndim == 1 else given
        if given.ndim != 2 or len(given) != count:
            raise ValueError(f"{name} must have one row for each of {count} rows, got shape {tuple(given.shape)}")
        return given.to(self._counts.device, torch.int64)
