"""Every public name has an example in its docstring, and it runs on a CPU and gives what it says."""

import doctest

import pytest
import torch.distributed as dist

import flashsampling
from flashsampling import tensor_parallel

PUBLIC = [
    (package, name) for package in (flashsampling, tensor_parallel) for name in package.__all__ if name != "__version__"
]


@pytest.fixture(autouse=True)
def _no_process_group_left():
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def run_examples(thing, capsys):
    """Of what stands in the thing itself; it need not show those of methods."""
    (test,) = doctest.DocTestFinder(recurse=False, exclude_empty=False).find(thing, thing.__name__, globs={})
    assert test.examples
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert not capsys.readouterr().out  # what differed, in doctest's words


@pytest.mark.parametrize(("package", "name"), PUBLIC, ids=[f"{package.__name__}.{name}" for package, name in PUBLIC])
def test_examples(package, name, capsys):
    run_examples(getattr(package, name), capsys)


@pytest.mark.parametrize("name", ["generate", "patch"])
def test_the_examples_of_transformers(name, capsys):
    pytest.importorskip("transformers")
    from flashsampling.integrations import transformers

    run_examples(getattr(transformers, name), capsys)
