"""The command ``flashsampling``, and what is logged of the choice that ``impl=None`` makes."""

import logging

import pytest
import torch

from flashsampling import __main__ as command
from flashsampling import ops, sample
from flashsampling.backends import BACKENDS


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
    monkeypatch.setattr("flashsampling.impl.cute.cache._fingerprint", lambda: "0" * 16)
    with pytest.raises(SystemExit, match=r"the kernels cannot be kept: .*can be written by others"):
        command.main(["precompile"])


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
