"""SIGTERM and forks: the process that speaks for a rank, and others."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

import pytest
import torch
from launch import Ranks, run_ranks
from torch import nn

from pipemorph_trainer import Options, Pipeline, TrainerContext
from pipemorph_trainer.signals import SigtermHandler


def ended_by(child: int) -> int:
    """Exit code of a child, or minus its signal."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        threading.Event().wait(0.01)
    os.kill(child, signal.SIGKILL)
    raise AssertionError("the child had not ended after 20 s")


def forking(context: TrainerContext) -> list[float]:
    losses = []
    module = nn.Linear(4, 4)
    torch.nn.init.eye_(module.weight)
    with Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=2,
        options=Options(route="direct"), deadline_seconds=30.0,
    ) as pipe:  # fmt: skip
        for _ in range(3):
            losses.append(float(pipe.step(torch.ones(4, 4), target=torch.zeros(4, 4))))
            child = os.fork()
            if child == 0:  # as a worker of a pool, which is ended by SIGTERM
                threading.Event().wait(30)
                os._exit(7)
            os.kill(child, signal.SIGTERM)
            assert ended_by(child) == -signal.SIGTERM, "a child has the default handler"
            child = os.fork()
            if child == 0:  # as one that calls sys.exit(), in the block and at its end
                pipe.__exit__(SystemExit, SystemExit(0), None)
                pipe.close()
                pipe._parts.world.destroy_groups(clean=False)
                os._exit(7)
            assert ended_by(child) == 7
    return losses


def test_a_rank_whose_children_end_trains_on() -> None:
    zero, one = run_ranks(2, forking)
    assert zero == one and len(zero) == 3


def forked_at_once(context: TrainerContext) -> None:
    """SIGTERM that comes to a child before any line of it has run."""
    del context
    # Registered first, so it runs in the child before what the trainer has registered.
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    SigtermHandler(lambda: "rank 0 (stage 0) was waiting for nothing", lambda: None).install()
    child = os.fork()
    if child == 0:
        os._exit(7)
    assert ended_by(child) == -signal.SIGTERM
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), "blocked for good"


def test_a_child_that_is_ended_at_once_does_not_end_its_parent() -> None:
    run_ranks(1, forked_at_once)


def own_handler(context: TrainerContext, how: str) -> list[str]:
    """Sets a handler, and gets SIGTERM; ``how``: whether it calls the one that it replaced."""
    del context
    said: list[str] = []
    word = SigtermHandler(lambda: "rank 0 (stage 0) was waiting for nothing", lambda: None)
    word.install()
    before = signal.getsignal(signal.SIGTERM)

    def save(number: int, frame: FrameType | None) -> None:
        said.append("saved")
        print("SAVED", flush=True)
        if how == "chained":
            assert callable(before)
            before(number, frame)

    signal.signal(signal.SIGTERM, save)
    os.kill(os.getpid(), signal.SIGTERM)
    # Long enough for the thread that would end the process.
    threading.Event().wait(20 if how == "chained" else 0.5)
    word.uninstall()
    assert signal.getsignal(signal.SIGTERM) is save, "it is the script's"
    return said


@pytest.mark.full
def test_a_handler_of_the_script_runs_instead() -> None:
    assert run_ranks(1, own_handler, "alone") == [["saved"]]
    (result,) = Ranks(1, own_handler, "chained").wait()
    assert result.exitcode == 128 + signal.SIGTERM, result
    assert result.output.startswith("SAVED\nterminated: rank 0 (stage 0) was waiting for nothing")
