"""The sampling parameters: one declaration, ``SamplingParams``, from which everything else about them follows.

A field's ``Param`` says what ``sample`` takes for it, its type in the torch operators and whether ranks compare it.
``ops`` builds schemas from the declaration, ``backends`` refuses by its names, ``tensor_parallel`` hashes by it,
``speculative`` expands by it. ``docs/adding.md`` adds a parameter.
"""

import difflib
import inspect
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, get_type_hints

from torch import Tensor

from . import param_parsers as parsers
from .noise import Stream
from .param_parsers import BatchShape, Parser
from .row_params import Integers, Reals, above_0, finite, finite_from_0, share, share_below_1
from .token_counts import Counted, TokenCounts

LogitBias: TypeAlias = Tensor | tuple[Any, Any]


class Param(NamedTuple):
    """The declaration of a field of ``SamplingParams``."""

    schema: Literal["Tensor?", "bool", "float", "SymInt", "row float", "row SymInt"]  # in the operators; "row": or (B,)
    parse: Parser | None = None  # turns the argument into fields; None: the parser of another field sets this one
    argument: str = ""  # name in ``sample``, if the field has another
    per_row: bool = False  # a tensor with a row of values for each row of the batch
    is_rank_local: bool = False  # every rank has its own part, so ranks compare only whether it is given
    is_hint: bool = False  # changes speed, no token and no output
    is_filter: bool = False  # of the tokens of a row; a NaN in one leaves the row without a token


class SamplingParams(NamedTuple):
    """The parameters that change the logits, filter tokens or add outputs. The defaults do nothing.

    Shapes, dtypes and Python numbers are checked; values inside tensors are not, and no value in them makes a backend
    read out of range. A row with a filter that is NaN gives -1. V is the step's ``vocab_size``; tensors may
    be wider, and their further columns are ignored. A dimension of 1 or V elements is contiguous; rows may have any
    stride, 0 included.

    Under ``torch.compile`` a float that changes between calls is a tensor: (B,), or () on the CPU for ``logit_scale``
    and ``soft_cap``.
    """

    stream: Stream = Stream.TOKEN  # of the noise; no parameter of ``sample``

    # The LM head: raw = soft_cap * tanh(logit_scale * (hidden_states @ weight.T + bias) / soft_cap)
    bias: Annotated[
        Tensor | None,  # (V,) float32
        Param("Tensor?", parsers.parse_head_bias, is_rank_local=True),
    ] = None
    logit_scale: Annotated[float, Param("float", parsers.number(finite))] = 1.0
    soft_cap: Annotated[float, Param("float", parsers.number(finite_from_0))] = 0.0  # 0: none

    # The processed logits, in this order
    dense_bias: Annotated[
        Tensor | None,  # (V,) float32, added in all rows
        Param("Tensor?", parsers.parse_logit_bias, "logit_bias"),
    ] = None
    bias_ids: Annotated[
        Tensor | None,  # (B, n) int32; -1 or out of range: no entry; entries are added in order
        Param("Tensor?", None, "logit_bias", per_row=True),
    ] = None
    bias_values: Annotated[Tensor | None, Param("Tensor?", None, "logit_bias", per_row=True)] = None  # (B, n) float32
    counts: Annotated[
        Tensor | None,  # (B, V) int32; low 31 bits: occurrences in the output; bit 31: occurs in the prompt
        Param(
            "Tensor?", parsers.parse_token_counts, "token_counts",
            per_row=True, is_rank_local=True,
        ),
    ] = None  # fmt: skip
    repetition_penalty: Annotated[Tensor | float, Param("row float", parsers.row_reals(above_0))] = 1.0
    frequency_penalty: Annotated[Tensor | float, Param("row float", parsers.row_reals(finite))] = 0.0
    presence_penalty: Annotated[Tensor | float, Param("row float", parsers.row_reals(finite))] = 0.0
    token_mask: Annotated[
        Tensor | None,  # (B, ceil(V / 32)) int32; bit t & 31 of word t >> 5: token t is allowed
        Param("Tensor?", parsers.parse_token_mask, per_row=True),
    ] = None

    # The filters
    top_k: Annotated[
        Tensor | int,  # int32 or int64; <= 0 or >= V: off
        Param("row SymInt", parsers.parse_top_k, is_filter=True),
    ] = 0
    top_p: Annotated[Tensor | float, Param("row float", parsers.row_reals(share), is_filter=True)] = 1.0  # >= 1: off
    min_p: Annotated[Tensor | float, Param("row float", parsers.row_reals(share), is_filter=True)] = 0.0  # <= 0: off
    joint_top_p: Annotated[
        Tensor | int,  # int32; not 0: top_p takes its share of all tokens, not of those that top_k keeps
        Param("row SymInt", parsers.parse_row_flags, is_filter=True),
    ] = 0
    epsilon_cutoff: Annotated[
        Tensor | float,  # <= 0: off
        Param("row float", parsers.row_reals(share_below_1), is_filter=True),
    ] = 0.0
    top_n_sigma: Annotated[
        Tensor | float,  # <= 0: off
        Param("row float", parsers.row_reals(finite), is_filter=True),
    ] = 0.0

    # The outputs besides token ids: ``outputs.SampleOutput``
    logprobs: Annotated[bool, Param("bool", parsers.parse_flag, "return_logprobs")] = False
    top_logprobs: Annotated[int, Param("SymInt", parsers.parse_top_logprobs)] = 0
    logprob_ids: Annotated[
        Tensor | None,  # (B, m) int64; the log-probability of an id out of range is NaN
        Param("Tensor?", parsers.parse_logprob_ids, per_row=True),
    ] = None
    logsumexp: Annotated[bool, Param("bool", parsers.parse_flag, "return_logsumexp")] = False

    seen: Annotated[
        Tensor
        | None,  # (B, 8 ceil(V / 128)) uint8, contiguous; 0: none of 16 tokens has a count; None: any may have one
        Param("Tensor?", None, "token_counts", per_row=True, is_hint=True),
    ] = None

    counts_rows: Annotated[
        Tensor | None,  # (B,) int64: each row's row of ``counts`` and ``seen``, in range; None: its own
        Param("Tensor?", None, "token_counts", is_rank_local=True),
    ] = None

    scored_ids: Annotated[
        Tensor | None,  # (B, m) int64: with ``logprobs`` the outputs are of these, not of drawn tokens; -1: of none
        Param("Tensor?", None, "return_logprobs", per_row=True),
    ] = None

    ranks: Annotated[bool, Param("bool", None, "return_logprobs")] = True  # with ``logprobs``: the tokens' ranks too

    kept_words: Annotated[int, Param("SymInt", parsers.parse_kept, "return_kept")] = 0  # of the mask; 0: not wanted

    def names(self) -> list[str]:
        """Returns the fields that differ from their defaults, hints apart."""
        return [
            name
            for name, value, default in zip(self._fields, self, DEFAULT_PARAMS)
            if value is not default and (isinstance(value, Tensor) or value != default) and name not in _HINTS
        ]

    def normalized(self) -> "SamplingParams":
        """Returns ``DEFAULT_PARAMS`` itself if these do the same."""
        return self if self.names() else DEFAULT_PARAMS

    def filters(self) -> tuple[bool, ...]:
        """Returns whether a row may have a top-k, a top-p, a min-p, an epsilon cutoff, a top-n-sigma."""
        by_top_k = isinstance(self.top_k, Tensor) or self.top_k > 0
        by_top_p = isinstance(self.top_p, Tensor) or not self.top_p >= 1
        off_at_0 = self.min_p, self.epsilon_cutoff, self.top_n_sigma
        return by_top_k, by_top_p, *(isinstance(value, Tensor) or not value <= 0 for value in off_at_0)

    def may_filter(self) -> bool:
        """Returns whether a row may have a filter."""
        return any(self.filters())

    def filter_values(self) -> dict[str, Any]:
        """Returns the values of all filters by field, in the order of the fields."""
        return {name: getattr(self, name) for name in FILTER_FIELDS}

    def needs_raw_mass(self) -> bool:
        """Returns whether the log-sum-exp of the raw logits is needed."""
        return self.needs_records() or self.top_logprobs > 0 or self.logprob_ids is not None or self.logsumexp

    def needs_records(self) -> bool:
        """Returns whether the limits and masses of what filters keep are needed."""
        return self.logprobs or self.kept_words > 0

    def needs_all_logits(self) -> bool:
        """Returns whether all processed logits of a row are needed, also those of tokens that no filter keeps: for
        log-probabilities, or for a standard deviation."""
        *_, by_sigma = self.filters()
        return by_sigma or self.needs_raw_mass()

    def needs_mass(self, vocab_size: int) -> bool:
        """Returns whether a row may need the sum of all processed probabilities: for log-probabilities, or for a top-p
        or an epsilon cutoff that is not a share of what a top-k keeps."""
        of_top_k = isinstance(self.top_k, int) and 0 < self.top_k < vocab_size and not self.may_be_joint()
        _, by_top_p, _, by_epsilon, _ = self.filters()
        return self.needs_records() or (not of_top_k and (by_top_p or by_epsilon))

    def may_be_joint(self) -> bool:
        """Returns whether a row may have a top-k and a top-p that takes its share of all tokens."""
        if not isinstance(self.joint_top_p, Tensor) and self.joint_top_p == 0:
            return False
        by_top_k, by_top_p, *_ = self.filters()
        return by_top_k and by_top_p

    def rows(self, first: int, last: int) -> "SamplingParams":
        """Returns the parameters of the rows [first, last)."""
        names = (*ROW_FIELDS, *MATRIX_FIELDS, *_HINTS, "counts_rows")
        some: dict[str, Any] = {name: x[first:last] for name in names if isinstance(x := getattr(self, name), Tensor)}
        if self.counts_rows is not None:
            some |= {"counts": self.counts, "seen": self.seen}
        return self._replace(**some)

    def counts_of(self, rows: Tensor) -> Tensor | None:
        """Returns (k, V) int32: a copy of the counts of rows (k,) of the batch; None without counts."""
        if self.counts is None:
            return None
        return self.counts.index_select(0, rows if self.counts_rows is None else self.counts_rows.index_select(0, rows))


DEFAULT_PARAMS = SamplingParams()  # compared by identity: a call without sampling parameters holds this very object

PARAMS: dict[str, Param] = {  # every field but the stream, which is no parameter of ``sample``
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(SamplingParams, include_extras=True).items()
    if name != "stream"
}
ROW_FIELDS = tuple(name for name, param in PARAMS.items() if param.schema.startswith("row "))
MATRIX_FIELDS = tuple(name for name, param in PARAMS.items() if param.per_row and not param.is_hint)
FILTER_FIELDS = tuple(name for name, param in PARAMS.items() if param.is_filter)
OUTPUT_FIELDS = ("logprobs", "top_logprobs", "logprob_ids", "logsumexp", "kept_words")
HEAD_NUMBERS = tuple(name for name, param in PARAMS.items() if param.schema == "float")
RANK_LOCAL_FIELDS = tuple(name for name, param in PARAMS.items() if param.is_rank_local)
_HINTS = tuple(name for name, param in PARAMS.items() if param.is_hint)
_ARGUMENTS = {name: param.argument or name for name, param in PARAMS.items()}  # by field
_PARSERS = {_ARGUMENTS[name]: param.parse for name, param in PARAMS.items() if param.parse is not None}
PENALTIES = tuple(name for name in PARAMS if name.endswith("_penalty"))
head_numbers: Callable[[SamplingParams], tuple[float, ...]] = operator.attrgetter(*HEAD_NUMBERS)  # their values


class SamplingOptions(TypedDict, total=False):
    """The sampling parameters as ``sample`` takes them, for functions that pass them on. None and False are off."""

    bias: Tensor | None  # (V,)
    logit_scale: float | None
    soft_cap: float | None
    logit_bias: LogitBias | None  # (V,), or ids (B, n) and values (B, n)
    token_counts: TokenCounts | Counted | Tensor | None  # (B, V)
    repetition_penalty: Reals | None  # or (B,)
    frequency_penalty: Reals | None  # or (B,)
    presence_penalty: Reals | None  # or (B,)
    token_mask: Tensor | None  # (B, ceil(V / 32))
    top_k: Integers | None  # or (B,)
    top_p: Reals | None  # or (B,)
    min_p: Reals | None  # or (B,)
    joint_top_p: bool | Sequence[bool] | Tensor | None  # or (B,)
    epsilon_cutoff: Reals | None  # or (B,)
    top_n_sigma: Reals | None  # or (B,)
    return_logprobs: bool
    top_logprobs: int | None
    logprob_ids: Any  # (B, m)
    return_logsumexp: bool
    return_kept: bool


_Function = TypeVar("_Function", bound=Callable[..., Any])


def with_sampling_options(function: _Function) -> _Function:
    """Completes the signature of a function that ends in ``**params: Unpack[SamplingOptions]``, for ``help`` and
    editors."""
    signature = inspect.signature(function)
    own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if name.startswith("return_") else None,
            annotation=annotation,
        )
        for name, annotation in SamplingOptions.__annotations__.items()
    ]
    function.__signature__ = signature.replace(parameters=own + options)  # type: ignore[attr-defined]
    return function


def argument_names(fields: Sequence[str]) -> str:
    """Returns the arguments of ``sample`` that set these fields of ``SamplingParams``, for messages."""
    return ", ".join(dict.fromkeys(_ARGUMENTS.get(name, name) for name in fields))


def unexpected_argument(
    name: str, function: Callable[..., Any] | None = None, without: Sequence[str] = ()
) -> TypeError:
    """Returns the error for an argument that ``function`` does not take, with the closest name and the whole list.
    ``without``: parameters of the function that its caller sets itself."""
    own = [] if function is None else inspect.signature(function).parameters
    hidden = ("self", "params", "unknown", "options", *without)
    names = [known for known in dict.fromkeys([*own, *SamplingOptions.__annotations__]) if known not in hidden]
    similar = [other for other in names if other.startswith(name)] or difflib.get_close_matches(name, names, 1)
    hint = f"; did you mean {similar[0]}?" if similar else "."
    taker = "A request" if function is None else function.__name__
    return TypeError(f"unexpected argument {name!r}{hint} {taker} takes {', '.join(names)}")


def parse_sampling_params(
    options: Mapping[str, Any], shape: BatchShape, function: Callable[..., Any] | None = None
) -> SamplingParams:
    """Returns the parameters as backends take them: ``DEFAULT_PARAMS`` itself if all are off.

    Args:
        options: arguments of ``sample`` by name; None and False are off.
        shape: what the arguments must fit.
        function: whose arguments these are, for the error about an unknown name.

    Raises:
        TypeError, ValueError: as ``sample`` documents.
    """
    fields: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _PARSERS:
            raise unexpected_argument(name, function)
        if value is not None and value is not False:
            fields |= _PARSERS[name](name, value, shape)
    fields = {name: value for name, value in fields.items() if _is_on(name, value)}
    penalties = [name for name in PENALTIES if name in fields]
    if penalties and "counts" not in fields:
        # of the options, because a float that Dynamo traces is a tensor among the fields
        penalties = [name for name in penalties if _is_on(name, options[name])]
        if penalties:
            raise ValueError(f"token_counts must be given with {penalties[0]}")
    if not penalties:  # counts alone change no logit
        fields = {name: value for name, value in fields.items() if name not in ("counts", "seen", "counts_rows")}
    if not fields:
        return DEFAULT_PARAMS
    # not SamplingParams(**fields): Dynamo takes that one's defaults for symbols with dynamic=True
    params = DEFAULT_PARAMS._replace(**fields)
    if "joint_top_p" in fields and not params.may_be_joint():  # without both filters both orders are the same
        params = params._replace(joint_top_p=DEFAULT_PARAMS.joint_top_p).normalized()
    return params


def _is_on(name: str, value: Any) -> bool:
    """Returns whether the value of a field is not its default; a tensor's elements are not read."""
    return not isinstance(value, (int, float)) or value != getattr(DEFAULT_PARAMS, name)
