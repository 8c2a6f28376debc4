"""Imports of a rank before it trains: it is started anew after every failure, so it is quick."""

import subprocess
import sys

import pytest
import torch
from gate import same_bits
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

import pipemorph_trainer
from pipemorph_trainer.executor.inputs import split_batch

# Each takes as long as torch itself, or brings what does.
SLOW = ("sympy", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.pipelining")


@pytest.mark.full
def test_a_pipeline_is_imported_without_what_few_jobs_need():
    code = (
        "import sys, torch\n"
        "brought = set(sys.modules)\n"
        "import pipemorph_trainer.pipeline\n"
        "from pipemorph_trainer.executor.inputs import split_batch\n"
        "split_batch((torch.zeros(4, 2),), {}, 2)\n"
        f"print([name for name in {SLOW} if name in sys.modules.keys() - brought])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("kwargs", [{}, {"mask": torch.arange(4), "scale": 2.0, "name": None}])
@pytest.mark.parametrize("leaf", [False, True])
def test_plain_inputs_are_cut_as_torch_cuts_them(kwargs: dict[str, object], leaf: bool):
    args = (torch.rand(4, 3).requires_grad_(leaf), nn.Parameter(torch.rand(8, 1)), 7)
    ours = split_batch(args, kwargs, 2)
    theirs = split_args_kwargs_into_chunks(args, kwargs, 2)
    assert [len(part) for part in ours] == [len(part) for part in theirs] == [2, 2]
    for mine, other in zip((*ours[0], *ours[1]), (*theirs[0], *theirs[1]), strict=True):
        assert type(mine) is type(other)
        pairs = [
            (list(mine.values()), list(other.values()))
            if isinstance(mine, dict) and isinstance(other, dict)
            else (list(mine), list(other))
        ]
        for a, b in ((x, y) for left, right in pairs for x, y in zip(left, right, strict=True)):
            if not isinstance(a, Tensor):
                assert a == b
                continue
            same_bits(a, b)
            assert (a.requires_grad, a.retains_grad) == (b.requires_grad, b.retains_grad)


def test_every_name_that_is_offered_is_there() -> None:
    for name in pipemorph_trainer.__all__:
        found = getattr(pipemorph_trainer, name).__name__
        # ``observe`` is a module that can be called, since ``python -m`` runs it.
        assert found.rpartition(".")[2] == name
