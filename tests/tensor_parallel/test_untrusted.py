"""Nothing that a store, a socket or a file holds is unpickled or run; what no rank wrote ends in a named error."""

import pickle
import re
import threading
from dataclasses import asdict, fields
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import HashStore

import flashsampling
from flashsampling.tensor_parallel import nccl
from flashsampling.tensor_parallel.capabilities import RankCapabilities
from flashsampling.tensor_parallel.failures import Failure, TensorParallelError
from flashsampling.tensor_parallel.rendezvous import Rendezvous
from flashsampling.tensor_parallel.serialization import MalformedError, from_text, parse_record, to_text
from flashsampling.tensor_parallel.watchdog import Heartbeat, Watchdog, heartbeat_key

PACKAGE = Path(flashsampling.__file__).parent
# modules that run what they read, or read pickles, and functions that do
MODULES = "_?pickle|cPickle|marshal|shelve|dill|cloudpickle|joblib|runpy|rpc|connection|managers|xmlrpc"
FUNCTIONS = r"(?<![.\w])(?:eval|exec|__import__)|read_pickle|SourceFileLoader|spec_from_file_location"
FUNCTIONS += r"|\w+_object(?:_list)?|_tensor_to_object|_object_to_tensor"
RUNS = re.compile(
    rf"^\s*(?:import|from)\b.*\b(?:{MODULES})\b|(?:{FUNCTIONS})\(|torch\.load\((?!.*weights_only=True)|allow_pickle=True",
    re.MULTILINE,
)


def test_no_module_runs_what_it_reads():
    for path in sorted(PACKAGE.rglob("*.py")):
        assert not RUNS.search(path.read_text(encoding="utf-8")), path
    for source in (
        *("import pickle", "from pickle import loads", "import marshal as m", "from multiprocessing import connection"),
        *("dist.broadcast_object_list(values)", "x = eval(text)", "torch.load(path)", "np.load(p, allow_pickle=True)"),
    ):
        assert RUNS.search(source), source
    assert not RUNS.search("torch.load(path, weights_only=True)\nnp.load(path)\njson.loads(text)\nmodel.eval()")


def same(one, other):
    if isinstance(one, torch.Tensor):
        return one.dtype is other.dtype and one.shape == other.shape and one.equal(other)
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
        torch.tensor([0.1, 3e38, float("-inf")]),
        torch.tensor([0.1, float("-inf")], dtype=torch.bfloat16),
        (torch.arange(3), None, torch.ones(3, requires_grad=True)),
    ],
    ids=repr,
)
def test_values_come_back_as_they_are(value):
    assert to_text(value).isascii()
    assert same(value, from_text(to_text(value)))


CYCLE: list = []
CYCLE.append(CYCLE)


@pytest.mark.parametrize(
    ("value", "kind", "message"),
    [
        ({"a": [lambda: 0]}, TypeError, "values must be None, bools, .* got function"),
        (torch.ones(2).to_sparse(), TypeError, "tensors in values must be plain ones on the CPU"),
        (torch.ones(2, device="meta"), TypeError, "got float32 on meta"),
        (torch.ones(2, dtype=torch.complex64), TypeError, "got complex64"),
        (CYCLE, ValueError, "must not contain themselves"),
    ],
)
def test_what_cannot_be_said_is_named(value, kind, message):
    with pytest.raises(kind, match=message):
        to_text(value)


class Hostile:
    """A pickle that ends the process where it is loaded."""

    def __reduce__(self):
        import os

        return os._exit, (77,)


TENSOR = '{"tensor": ["int64", [2], [5, 6]]}'
HOSTILE = {
    "a pickle": pickle.dumps(Hostile()),
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "too deep": b"[" * 100_000,
    "too many digits": b"9" * 10_000,
    "an object": b'{"rank": 0}',
    "an unknown object": b'{"object": ["os.system", "true"]}',
    "two kinds": b'{"tuple": [], "dict": []}',
    "a list as a key": b'{"dict": [[[1], 2]]}',
    "no pairs": b'{"dict": [[1]]}',
    "no elements": b'{"tuple": 5}',
    "a short tensor": TENSOR.replace("[2]", "[3]").encode(),
    "no such dtype": TENSOR.replace("int64", "object").encode(),
    "a dtype of torch that is none": TENSOR.replace("int64", "load").encode(),
    "a size that is none": TENSOR.replace("[2]", '["2"]').encode(),
    "a huge tensor": TENSOR.replace("[2]", "[4611686018427387904, 4]").encode(),
    "an empty huge tensor": b'{"tensor": ["int8", [0, 99999999999999999999999], []]}',
    "no numbers": TENSOR.replace("5", '"5"').encode(),
    "no list of numbers": TENSOR.replace("[5, 6]", '"56"').encode(),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_no_rank_wrote_is_malformed(name):
    with pytest.raises(MalformedError):
        from_text(HOSTILE[name])


@pytest.mark.parametrize("kind", [RankCapabilities, Failure, Heartbeat])
def test_every_field_of_a_record_is_checked(kind):
    backends = {"cute": "no"}
    capabilities = ((4, 8), "torch.float32", "cpu", "", ("A",), "one", None, 7, 1, 1, "gloo", None, 60, "", backends)
    values = {RankCapabilities: capabilities, Failure: ("mismatch", 1, 3, ("seed",), "ü"), Heartbeat: (4, 3)}
    record = kind(*values[kind])
    given = from_text(to_text(record))
    assert parse_record(kind, given) == record
    for field in fields(kind):
        others = [{}, [], object(), (1, "a"), {"a": ("b",)}, b"bytes"]
        for wrong in others[1:] if field.name == "cannot" else others:
            with pytest.raises(MalformedError, match=f"{field.name} of a {kind.__name__} must be"):
                parse_record(kind, given | {field.name: wrong})
    for wrong in (given | {"more": 1}, {}, None, [1, 2]):
        with pytest.raises(MalformedError, match="has the fields"):
            parse_record(kind, wrong)


@pytest.fixture
def ranks():
    """A store and two ranks' exchanges over it."""
    store = HashStore()
    return store, *(Rendezvous(lambda: store, rank, 2, 20.0) for rank in range(2))


BAD = {
    "0/0/error": [to_text((7, "ValueError", "x")), to_text((0, 1, 2)), to_text([0, "a"]), *HOSTILE.values()],
    "0/0/1": ["[0, 1]", to_text((1, 2)), to_text("phase"), *HOSTILE.values()],
    "0/failure": [to_text(Failure("timeout", 2)), to_text(asdict(Heartbeat(1, 1))), *HOSTILE.values()],
}


@pytest.mark.parametrize(("key", "value"), [(key, value) for key in BAD for value in BAD[key]])
def test_a_value_that_no_rank_wrote_ends_an_exchange_for_all(key, value, ranks):
    store, meet, other = ranks
    store.set(key, value)
    if not value and key.endswith("failure"):  # to a store as good as no value, where somebody decides
        return
    with pytest.raises(
        TensorParallelError, match=rf"^rank 0 left .*store holds what no rank wrote \({key[2:]}: "
    ) as error:
        meet.exchange("construction")
    assert error.value.failure.kind == "aborted"
    heard = other.fail(ValueError("x"))
    assert isinstance(heard, TensorParallelError)
    if key != "0/failure":  # the first to find it decides for all
        assert heard.failure == error.value.failure


def test_a_group_s_count_that_is_none():
    store = HashStore()
    store.set("groups/0", HOSTILE["a pickle"])
    with pytest.raises(TensorParallelError, match=r"what no rank wrote \(groups/0: it is no count"):
        Rendezvous(lambda: store, 0, 2, 20.0)


def test_progress_that_nobody_posted(ranks, monkeypatch):
    """The thread of nccl declares it, and does not end; catching up neither raises nor goes on for ever."""
    store, meet, other = ranks
    watch = Watchdog(meet, 2.0)
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
    store.set("0/" + heartbeat_key(1), to_text(Heartbeat(2**62, 0)))
    catching_up = threading.Thread(target=it.drain, daemon=True)
    catching_up.start()
    catching_up.join(20)
    assert not catching_up.is_alive()
    assert sent
