"""Nothing that a store, a socket or a file holds is unpickled or run; what no rank wrote ends in a named error."""

import ast
import json
import pickle
import threading
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import flashsampling
from flashsampling.tensor_parallel import nccl
from flashsampling.tensor_parallel.capabilities import RankCapabilities
from flashsampling.tensor_parallel.failures import Failure, TensorParallelError
from flashsampling.tensor_parallel.fd_passing import _parse_name
from flashsampling.tensor_parallel.rendezvous import Rendezvous
from flashsampling.tensor_parallel.serialization import (
    MalformedError,
    from_bytes,
    record_from_json,
    record_to_json,
    to_bytes,
)
from flashsampling.tensor_parallel.watchdog import Heartbeat, Watchdog, heartbeat_key

PACKAGE = Path(flashsampling.__file__).parent
# modules that run what they read, or read pickles
MODULES = {"pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "runpy"}
MODULES |= {"torch.distributed.rpc", "multiprocessing.connection", "multiprocessing.managers", "xmlrpc"}
NAMES = {"eval", "exec", "__import__", "read_pickle", "SourceFileLoader", "spec_from_file_location"}
NAMES |= {"broadcast_object_list", "all_gather_object", "gather_object", "scatter_object_list"}
NAMES |= {"send_object_list", "recv_object_list", "_tensor_to_object", "_object_to_tensor"}


def runs_what_it_reads(source: str) -> list[str]:
    """Returns the calls of a module's source that may run what they read."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            base = getattr(node, "module", None) or ""
            names = [alias.name for alias in node.names]
            names = [*names, base, *(f"{base}.{name}" for name in names)]
            found += [name for name in names if {name, name.split(".")[0]} & MODULES or name in NAMES]
        elif isinstance(node, ast.Attribute) and node.attr in NAMES - {"eval"}:  # a module has an eval()
            found.append(node.attr)
        elif isinstance(node, ast.Name) and node.id in NAMES:
            found.append(node.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
            keywords = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
            owner = ast.unparse(node.func.value)
            if owner == "torch" and keywords.get("weights_only") is not True:
                found.append("torch.load")
            if owner in ("np", "numpy") and keywords.get("allow_pickle", False) is not False:
                found.append("numpy.load")
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_module_runs_what_it_reads(path):
    assert runs_what_it_reads(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "source",
    [
        *("import pickle", "from pickle import loads", "import marshal as m", "from multiprocessing import connection"),
        *("dist.broadcast_object_list(values)", "from torch.distributed import all_gather_object", "eval(text)"),
        *("torch.load(path)", "torch.load(path, weights_only=False)", "np.load(path, allow_pickle=True)"),
    ],
)
def test_the_scan_finds_it(source):
    assert runs_what_it_reads(source)
    assert not runs_what_it_reads("torch.load(path, weights_only=True)\nnp.load(path)\njson.loads(text)\nmodel.eval()")


def same(one, other):
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.dtype is other.dtype
            and one.shape == other.shape
            and one.equal(other)
        )
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 0, -(2**63), 2**70, 0.1, float("inf"), "", "\ud800 ü\n", [], (), {}, [[], ()], (1, (2,))),
        *({"tensor": ["int64", [1], ""]}, {1: {"dict": []}, (2, "x"): None, None: 1.5}, [{"tuple": 1}]),
        torch.tensor([1, 0], dtype=torch.bool),
        torch.zeros(3, 0, 2),
        torch.arange(12).view(3, 4).T,
        torch.tensor(-(2**63)),
        torch.tensor([0.1, float("-inf")], dtype=torch.bfloat16),
        (torch.arange(3), None, torch.ones(3, requires_grad=True)),
    ],
    ids=repr,
)
def test_values_come_back_as_they_are(value):
    assert same(value, from_bytes(to_bytes(value)))


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        (object(), TypeError, "values must be None, bools, .* got object"),
        ({"a": [lambda: 0]}, TypeError, "got function"),
        (torch.ones(2).to_sparse(), TypeError, "tensors in values must be plain ones on the CPU"),
        (torch.ones(2, device="meta"), TypeError, "got float32 on meta"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "got complex64"),
        (CYCLE, ValueError, "must not contain themselves"),
    ],
)
def test_what_cannot_be_said_is_named(value, kind, message):
    with pytest.raises(kind, match=message):
        to_bytes(value)


class Hostile:
    """A pickle that ends the process where it is loaded."""

    def __reduce__(self):
        import os

        return os._exit, (77,)


TENSOR = '{"tensor": ["int64", [2], "AAAAAAAAAAA="]}'
HOSTILE = {
    "a pickle": pickle.dumps(Hostile()),
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "too deep": b"[" * 100_000,
    "too many digits": b"9" * 10_000,
    "a list": b"[1, 2]",
    "an object": b'{"rank": 0}',
    "an unknown object": b'{"object": ["os.system", "true"]}',
    "two kinds": b'{"tuple": [], "dict": []}',
    "a list as a key": b'{"dict": [[[1], 2]]}',
    "no pairs": b'{"dict": [[1]]}',
    "a short tensor": TENSOR.encode(),
    "no such dtype": TENSOR.replace("int64", "object").encode(),
    "a dtype of torch that is none": TENSOR.replace("int64", "load").encode(),
    "a negative size": TENSOR.replace("[2]", "[-1]").encode(),
    "a size that is true": TENSOR.replace("[2]", "[true]").encode(),
    "a huge tensor": TENSOR.replace("[2]", "[4611686018427387904, 4]").encode(),
    "an empty huge tensor": b'{"tensor": ["int8", [0, 99999999999999999999999], ""]}',
    "no base64": TENSOR.replace("AAAA", "A!AA").encode(),
}
DECODERS = {
    "a failure": Failure.decoded,
    "a member": lambda data: record_from_json(RankCapabilities, data),
    "progress": lambda data: record_from_json(Heartbeat, data),
    "a socket's name": _parse_name,
    "values": from_bytes,
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_rank_wrote_is_malformed(decoder, name):
    if decoder == "values" and name == "a list":
        assert from_bytes(HOSTILE[name]) == [1, 2]
        return
    with pytest.raises(MalformedError):
        DECODERS[decoder](HOSTILE[name])


MEMBER = RankCapabilities(
    (4, 8), "torch.float32", "cpu", "", ("A",), "one", None, 7, 1, 1, "gloo", None, 60.0, "gloo", {"cute": "no"}
)


@pytest.mark.parametrize(
    "record", [MEMBER, Failure("mismatch", 1, 3, ("seed",), '"ü"'), Failure("timeout", 0), Heartbeat(4, 3)], ids=repr
)
def test_every_field_of_a_record_is_checked(record):
    kind, text = type(record), record_to_json(record)
    assert record_from_json(kind, text) == record
    assert text.isascii()
    fields = asdict(record)
    for name in fields:
        for wrong in (object, [1, [2]], {"a": [1]}, [None]):
            other = {key: value for key, value in fields.items() if key != name}
            other |= {} if wrong is object else {name: wrong}
            if wrong == [1, [2]] or wrong is object or not isinstance(fields[name], tuple):
                with pytest.raises(MalformedError):
                    record_from_json(kind, json.dumps(other))
    with pytest.raises(MalformedError, match="has the fields"):
        record_from_json(kind, json.dumps(fields | {"more": 1}))


@pytest.fixture
def ranks():
    """A store and two ranks' exchanges over it."""
    store = HashStore()
    return store, *(Rendezvous(lambda: store, rank, 2, 20.0) for rank in range(2))


VERDICTS = {
    "ranks of no group": '{"present": [0, 1, 2]}',
    "not all ranks": '{"present": [0]}',
    "a rank twice": '{"present": [0, 0]}',
    "an error of no rank": '{"error": [7, "ValueError", "x"]}',
    "an error of three": '{"error": [0, 1, 2]}',
    "a failure of no rank": json.dumps({"failure": Failure("timeout", 2).encoded()}),
    "a failure that is none": '{"failure": "{}"}',
    "two in one": '{"present": [0, 1], "error": [0, "a", "b"]}',
}


@pytest.mark.parametrize("verdict", [*VERDICTS.values(), *(value.decode("latin-1") for value in HOSTILE.values())])
def test_a_verdict_that_no_rank_gave(verdict, ranks):
    store, meet, other = ranks
    store.set("0/0/verdict", verdict.encode("latin-1"))
    for one in (meet, other):
        with pytest.raises(TensorParallelError, match="store holds what no rank wrote") as error:
            one.exchange("construction", b"x")
        assert error.value.failure.rank == one.rank  # the reader gives up: it cannot know the writer
    assert isinstance(meet.fail("construction", ValueError()), TensorParallelError | RuntimeError)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_payload_that_no_rank_sent(name, ranks):
    store, meet, _ = ranks
    store.set("0/0/1", HOSTILE[name])
    with pytest.raises(TensorParallelError, match=r"store holds what no rank wrote \(0/1: it is no phase"):
        meet.exchange("construction", b"x")


@pytest.mark.parametrize("error", [*VERDICTS.values(), '{"present": [0, 1]}', "", "[0, 1]"])
def test_an_error_that_no_rank_raised(error, ranks):
    store, meet, other = ranks
    store.set("0/0/1", f"construction\n1\n{error}".encode())
    with pytest.raises(TensorParallelError, match=r"^rank 0 left .*store holds what no rank wrote \(0/1: ") as found:
        meet.exchange("construction", b"x")
    heard = other.fail("construction", ValueError("x"))  # the first to find it decides for all
    assert heard.failure == found.value.failure


@pytest.mark.parametrize("name", HOSTILE)
def test_a_failure_that_nobody_declared_is_one(name, ranks):
    store, meet, _ = ranks
    store.set("0/failure", HOSTILE[name])
    if name == "nothing":  # to a store as good as no value, where somebody decides
        return
    for failure in (meet.declared(), meet.try_declared(), meet.declare(Failure("timeout", 1))):
        assert failure.kind == "aborted"
        assert "store holds what no rank wrote (failure: " in failure.what


def test_a_group_s_count_that_is_none():
    store = HashStore()
    store.set("groups/0", HOSTILE["a pickle"])
    with pytest.raises(TensorParallelError, match=r"what no rank wrote \(groups/0: it is no count"):
        Rendezvous(lambda: store, 0, 2, 20.0)


def test_progress_that_nobody_posted(ranks, monkeypatch):
    """The thread of nccl declares it, and does not end; catching up neither raises nor goes on for ever."""
    store, meet, other = ranks
    watch = Watchdog(meet, 2.0, 0)
    store.set("0/" + heartbeat_key(1), HOSTILE["a pickle"])
    heard, now = None, 100.0
    while heard is None and now < 120:
        heard, now = watch.look(Heartbeat(4, 3), 3, now), now + watch.period
    assert "progress/1: it is no JSON" in heard.what
    assert other.declared() == heard

    it = nccl.Nccl(None, meet, torch.device("cpu"), 4, 4, 8, 1.0)
    sent: list = []
    monkeypatch.setattr(nccl, "gather_flat", lambda *_: sent.append(1))
    monkeypatch.setattr(nccl, "DRAIN_AT_MOST", 0.3)
    it._set_failure(heard)
    it.drain()
    assert not sent
    store.set("0/" + heartbeat_key(1), record_to_json(Heartbeat(2**62, 0)))
    catching_up = threading.Thread(target=it.drain, daemon=True)
    catching_up.start()
    catching_up.join(20)
    assert not catching_up.is_alive()
    assert sent
