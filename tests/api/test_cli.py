"""The command ``flashsampling``, and what is logged of the choice that ``impl=None`` makes."""

import logging
import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from flashsampling import __main__ as command
from flashsampling import __version__, ops, sample
from flashsampling.backends import BACKENDS
from flashsampling.kernels.hopper import cache
from tests.conftest import run_python


@pytest.fixture
def root(monkeypatch, tmp_path):
    """The root of the compile cache, where the compiler is said to be installed."""
    monkeypatch.setattr(BACKENDS["cute"], "missing", None)
    monkeypatch.setattr(cache, "_fingerprint", lambda: "0" * 16)
    monkeypatch.setenv("FLASHSAMPLING_CACHE_DIR", str(tmp_path))
    return tmp_path


def test_doctor_says_what_serves_and_why_nothing_faster_does(capsys, monkeypatch, no_machine):
    monkeypatch.setattr(BACKENDS["cute"], "missing", "nvidia-cutlass-dsl is not installed")
    command.main(["doctor"])
    out = capsys.readouterr().out
    assert f"torch                {torch.__version__}" in out
    assert (
        "cpu: streaming for bf16, fp16, fp32, bf16 with D not divisible by 8\n      not cute: nvidia-cutlass-dsl" in out
    )
    assert "not needed: nvidia-cutlass-dsl is not installed" in out
    assert "cannot be said" not in out


def test_doctor_says_what_lies_in_the_cache(capsys, root):
    command.main(["doctor"])
    out = capsys.readouterr().out
    assert f"  {root}/cute/{'0' * 16} (FLASHSAMPLING_CACHE_DIR is {root})\n" in out
    assert "none of the Hopper kernels is there yet" in out
    path = cache.trusted_folder() / "kernel.o"
    path.write_bytes(b"cut off")
    command.main(["doctor"])
    out = capsys.readouterr().out
    assert "0 of the 96 Hopper kernels, 0.0 MB\n" in out
    assert f"not used: {path} is damaged" in out
    path.parent.chmod(0o777)
    command.main(["doctor"])
    assert f"cannot be said: PermissionError: {path.parent} can be written by others" in capsys.readouterr().out


def test_doctor_needs_torch_alone():
    absent = "triton", "cutlass", "nvidia_cutlass_dsl", "tvm_ffi", "transformers", "rich", "typer"
    code = f"import sys; sys.modules.update(dict.fromkeys({absent})); from flashsampling.__main__ import main; "
    out = run_python(code + "main(['doctor'])")
    assert "not cute: nvidia-cutlass-dsl is not installed" in out
    assert "not triton: triton is not installed" in out


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


def test_precompile_says_why_it_cannot(monkeypatch, root):
    cache.trusted_folder().chmod(0o777)
    with pytest.raises(SystemExit, match=r"the kernels cannot be kept: .*can be written by others"):
        command.main(["precompile"])
    monkeypatch.setattr(BACKENDS["cute"], "missing", "nvidia-cutlass-dsl is not installed")
    with pytest.raises(SystemExit, match="nvidia-cutlass-dsl is not installed"):
        command.main(["precompile"])


def test_precompile_counts_and_an_interrupt_ends_it_in_a_line(monkeypatch, root, capsys):
    def precompile(workers, kernels):
        assert (workers, len(kernels)) == (2, 3)
        yield Path("plain.o"), True
        yield Path("logits.o"), False
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "precompile", precompile)
    with pytest.raises(SystemExit, match=r"^interrupted; what is compiled is kept"):
        command.main(["precompile", "--workers", "2", "--dtype", "bfloat16", "--max-batch-size", "8"])
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"3 kernels into {root}")
    assert lines == ["1 of 3 kernels, 0 s: plain compiled", "2 of 3 kernels, 0 s: logits was there"]


def test_who_stops_precompiling_does_not_wait_for_the_rest(monkeypatch, root):
    monkeypatch.setattr(cache, "prepare", time.sleep)
    done = cache.precompile(1, [0, *[2] * 100])  # type: ignore[list-item]
    next(done)
    started = time.perf_counter()
    done.close()  # type: ignore[attr-defined]
    assert time.perf_counter() - started < 60
    assert not multiprocessing.active_children()


def test_without_a_command_it_prints_help_and_it_knows_its_version(capsys):
    command.main([])
    assert capsys.readouterr().out.startswith("usage: flashsampling [-h] [--version] command ...")
    with pytest.raises(SystemExit, match=r"^0$"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"flashsampling {__version__}\n"
    with pytest.raises(SystemExit, match=r"^2$"):
        command.main(["precompile", "--workers=0"])
    assert "--workers and --max-batch-size must be at least 1" in capsys.readouterr().err


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
