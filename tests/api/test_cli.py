"""The command ``flashsampling``, and what is logged of the choice that ``impl=None`` makes."""

import io
import logging
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flashsampling import __main__ as command
from flashsampling import __version__, ops, sample
from flashsampling.backends import BACKENDS
from flashsampling.kernels.hopper import cache


def test_doctor_says_what_serves_and_why_nothing_faster_does(capsys, monkeypatch, tmp_path, no_machine):
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path))
    command.main(["doctor"])
    out = capsys.readouterr().out
    assert f"torch                {torch.__version__}" in out
    assert "cpu: streaming for bf16, fp16, fp32, bf16 with D not divisible by 8\n      not cute: " in out
    assert "cannot be said" not in out
    if BACKENDS["cute"].missing is None:
        assert f"{tmp_path}/cute/" in out
        tmp_path.chmod(0o777)
        command.main(["doctor"])
        assert "not used: " in capsys.readouterr().out


@pytest.mark.parametrize("variable", [None, "~/kernels"])
@pytest.mark.parametrize("home", ["", "relative"])
def test_doctor_says_that_there_is_no_home(capsys, monkeypatch, variable, home):
    monkeypatch.setattr(BACKENDS["cute"], "missing", None)
    monkeypatch.setenv("HOME", home)
    monkeypatch.delenv("FLASHSAMPLING_CACHE_DIR", raising=False)
    if variable:
        monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", variable)
    command.main(["doctor"])
    which = "not set" if variable is None else repr(variable)
    out = capsys.readouterr().out
    assert (
        f"not used: no cache folder: FLASHSAMPLING_CACHE_DIR is {which}, and HOME is {home!r}, which is not an abs"
        in out
    )


def test_doctor_says_what_lies_in_the_cache_and_nobody_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(BACKENDS["cute"], "missing", None)
    monkeypatch.setattr("flashsampling.kernels.hopper.cache._fingerprint", lambda: "0" * 16)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", "~/kernels")
    for name, days in (("0" * 16 + "/tmpabc", 2), ("1" * 16, 91), ("2" * 16, 1)):
        folder = tmp_path / "kernels" / "cute" / name
        folder.mkdir(parents=True)
        (folder / "kernel.o").write_bytes(b"0" * 1_000_000)
        os.utime(folder, (time.time() - days * 86400,) * 2)
    before = sorted(tmp_path.rglob("*"))
    command.main(["doctor"])
    out = capsys.readouterr().out
    assert f"  {tmp_path}/kernels/cute/{'0' * 16} (FLASHSAMPLING_CACHE_DIR is '~/kernels')\n" in out
    assert "temporary folders of processes that ended as they wrote a kernel: 1\n" in out
    assert "folders of other versions beside it, which can be deleted: 2, 2.0 MB\n" in out
    assert "of these folders the next kernel that is written removes 2, older" in out
    assert sorted(tmp_path.rglob("*")) == before


def test_doctor_outlives_a_broken_installation(capsys, monkeypatch):
    def broken(*_):
        raise ImportError("libcuda.so.1")

    for name in ("cute", "triton"):
        monkeypatch.setattr(BACKENDS[name], "unsupported", broken)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command.main(["doctor"])
    assert "not triton: ImportError: libcuda.so.1" in capsys.readouterr().out
    monkeypatch.setattr(torch.cuda, "is_available", broken)
    command.main(["doctor"])
    assert "cannot be said: ImportError: libcuda.so.1" in capsys.readouterr().out


def test_precompile_says_why_it_cannot(monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setattr(BACKENDS["cute"], "missing", "nvidia-cutlass-dsl is not installed")
        with pytest.raises(SystemExit, match="nvidia-cutlass-dsl is not installed"):
            command.main(["precompile"])
    monkeypatch.setattr(BACKENDS["cute"], "missing", None)
    tmp_path.chmod(0o777)
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("flashsampling.kernels.hopper.cache._fingerprint", lambda: "0" * 16)
    with pytest.raises(SystemExit, match=r"the kernels cannot be kept: .*can be written by others"):
        command.main(["precompile"])


def test_without_a_command_it_prints_help_and_it_knows_its_version(capsys):
    command.main([])
    assert capsys.readouterr().out.startswith("usage: flashsampling [-h] [--version] command ...")
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"flashsampling {__version__}\n"


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def _precompiled(monkeypatch, out, last=(Path("logits-5.o"), True)):
    """What ``precompile`` prints of three kernels, the second of which is on disk already."""

    def compiled(workers, kernels):
        yield Path("plain-1.o"), True
        yield Path("processed-3.o"), False
        if isinstance(last, BaseException):
            raise last
        yield last

    monkeypatch.setattr(BACKENDS["cute"], "missing", None)
    monkeypatch.setattr(cache, "folder", lambda: "FOLDER")
    monkeypatch.setattr(cache, "select_kernels", lambda dtype, size: [1, 2, 3])
    monkeypatch.setattr(cache, "precompile", compiled)
    monkeypatch.setattr("sys.stdout", out)
    ticks = iter(range(0, 1000, 10))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    command.main(["precompile", "--workers", "1"])
    return out.getvalue()


def test_precompile_counts_with_times(monkeypatch):
    first, *lines, last = _precompiled(monkeypatch, io.StringIO()).splitlines()
    assert first == "3 kernels into FOLDER, 1 at a time, each some 15 s of a core"
    assert lines == [
        "1 of 3 kernels, 10 s, about 20 s left: plain compiled",
        "2 of 3 kernels, 20 s, about 20 s left: processed was there",
        "3 of 3 kernels, 30 s: logits compiled",
    ]
    assert last == "3 kernels in FOLDER, 40 s"


def test_precompile_rewrites_one_line_on_a_terminal(monkeypatch):
    _, live, last, end = _precompiled(monkeypatch, _Terminal()).split("\n")
    assert [text.rstrip() for text in live.split("\r")] == [
        "",
        "0 of 3 kernels",
        "1 of 3 kernels, 10 s, about 20 s left",
        "2 of 3 kernels, 20 s, about 20 s left",
        "3 of 3 kernels, 30 s",
    ]
    assert live.endswith("30 s" + " " * len(", about 20 s left"))  # nothing of a longer text stays
    assert (last, end) == ("3 kernels in FOLDER, 40 s", "")


@pytest.mark.parametrize(
    ("error", "message"),
    [(KeyboardInterrupt(), "^interrupted; what is compiled is kept"), (OSError("full"), "be kept: full$")],
)
def test_precompile_ends_in_a_line(monkeypatch, error, message):
    terminal = _Terminal()
    with pytest.raises(SystemExit, match=message):
        _precompiled(monkeypatch, terminal, error)
    assert terminal.getvalue().endswith("left\n")  # the message begins a line of its own


def test_who_stops_precompiling_does_not_wait_for_the_rest(monkeypatch, tmp_path):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache, "_fingerprint", lambda: "0" * 16)
    monkeypatch.setattr(cache, "prepare", time.sleep)
    others = set(multiprocessing.active_children())
    seconds: list[Any] = [(300,), (0,), (300,), (300,)]
    done = cache.precompile(2, seconds)
    next(done)  # the second, which is done first
    assert set(multiprocessing.active_children()) - others
    started = time.perf_counter()
    done.close()
    assert time.perf_counter() - started < 100
    assert not set(multiprocessing.active_children()) - others


@pytest.mark.parametrize("workers", ["0", "-1", "two", "1.5", ""])
def test_workers_must_be_a_number_of_processes(workers, capsys):
    with pytest.raises(SystemExit):
        command.main(["precompile", f"--workers={workers}"])
    assert "--workers: must be a whole number, 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main(["precompile", f"--max-batch-size={workers}"])
    assert "--max-batch-size: must be a whole number, 1 or more" in capsys.readouterr().err


def test_the_choice_is_logged_once_and_only_where_one_is_made(caplog):
    ops._log_choice.cache_clear()
    hidden_states, weight = torch.randn(2, 8), torch.randn(16, 8)
    with caplog.at_level(logging.DEBUG, logger="flashsampling"):
        sample(hidden_states, weight, impl="streaming")
        assert not caplog.records
        for _ in range(3):
            sample(hidden_states, weight)
        sample(hidden_states.bfloat16(), weight.bfloat16())
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split(" (")[0] for message in messages] == [
        "impl=None takes streaming for torch.float32 on cpu",
        "impl=None takes streaming for torch.bfloat16 on cpu",
    ]
