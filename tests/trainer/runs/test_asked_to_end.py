"""Ranks that get a request to end save first: nothing is lost and nothing runs twice."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import prepared_processes
import pytest
import torch
from gate import same_bits
from launch import Ranks
from local_runs import command, manifest, rank_of, read_until, run
from torch import nn

from pipemorph.exits import ABORT_SIGNAL
from pipemorph.spec.sections.trainer import Checkpoint
from pipemorph_trainer import Pipeline, TrainerContext
from pipemorph_trainer.signals import SigtermHandler

ITERATIONS, ACCUMULATED = 30, 3
SCRIPT = """
import contextlib, os
from pathlib import Path
import torch
from torch import nn
from pipemorph_trainer import Pipeline, TrainerContext

class Loader:
    seed = 1
    def __iter__(self):
        while True:
            self.seed = self.seed * 5 % 1009
            yield torch.randn(4, 8, generator=torch.Generator().manual_seed(self.seed))
    def state_dict(self):
        return {"seed": self.seed}
    def load_state_dict(self, state):
        self.seed = state["seed"]

context = TrainerContext.from_env()
torch.manual_seed(context.rank)
stage = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
optimizer = torch.optim.Adam(stage.parameters(), 1e-2)
loader = Loader()
every = context.args["accumulate"]
restarts = context.job.spec.failure_policy.max_restarts
assert bool(context.memory_dir) is bool(restarts), "copies in memory without a reader"
path = Path(context.args["losses"])
with Pipeline(stage, context=context, optimizer=optimizer, loss_fn=nn.functional.mse_loss,
              state={"data": loader}) as pipe:
    batches = iter(loader)
    while pipe.iteration < context.job.spec.trainer.iterations:
        last = (pipe.iteration + 1) % every == 0
        with contextlib.nullcontext() if last else pipe.no_sync():
            batch = next(batches)
            loss = pipe.step(batch, target=batch.flip(1))
        if last:
            optimizer.step()
            optimizer.zero_grad()
        if context.rank == 0:
            with path.open("a") as file:
                print(pipe.iteration - 1, float(loss).hex(), file=file)
"""


def job(folder: Path, *, checkpoints: Path, restarts: int = 0) -> Any:
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    return manifest(
        parallelism={"stages": 2},
        schedule={"microbatches": 4},
        trainer={
            "command": ["python", str(folder / "train.py")],
            "iterations": ITERATIONS,
            "args": {"accumulate": ACCUMULATED, "losses": str(folder / "losses")},
        },
        checkpoint={"directory": str(checkpoints), "every": 10_000},
        failurePolicy={"maxRestarts": restarts},
        emulation=None,
        # Long enough for a signal to arrive between the first iterations and the last.
        faults=[{"link": 0, "fromIteration": 2, "toIteration": ITERATIONS, "delayMs": 20}],
        adaptation={"enabled": False},
    )


def losses(folder: Path) -> list[str]:
    return (folder / "losses").read_text().splitlines()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The losses of a run without a request to end."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    made = job(folder, checkpoints=folder / "none")
    whole = run(folder, made)
    assert whole.status == 0 and len(losses(folder)) == ITERATIONS, whole
    return losses(folder)


@pytest.mark.full
@pytest.mark.parametrize(("requested", "restarts"), [("all", 0), ("one rank", 2)])
def test_a_run_with_a_request_to_end_loses_no_iteration(
    requested: str, restarts: int, tmp_path: Path, undisturbed: list[str]
) -> None:
    first, second, saved = tmp_path / "first", tmp_path / "second", tmp_path / "saved"
    host = prepared_processes.PreparedProcess(
        command(first, job(first, checkpoints=saved, restarts=restarts)),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    said = read_until(host, 5)
    if requested == "all":
        host.send_signal(signal.SIGTERM)
    else:
        os.kill(rank_of(host.pid, 1), signal.SIGTERM)
    said += host.communicate(timeout=60)[0]
    assert host.returncode == 130, said
    assert "the ranks saved a checkpoint" in said
    done = losses(first)
    assert 5 <= len(done) < ITERATIONS, "the request came in between"
    assert [path.name for path in saved.iterdir()] == [f"iteration-{len(done):08d}"]
    assert len(done) % ACCUMULATED == 0, "gradients that are not averaged cannot be saved"
    same_bits(done, undisturbed[: len(done)], said)
    if requested == "one rank":
        return  # The saved state is the same, and so is its continuation.

    again = run(second, job(second, checkpoints=saved, restarts=restarts))
    assert again.status == 0, again
    same_bits(done + losses(second), undisturbed, str(again))


def waits_for_ever(context: TrainerContext, folder: str, grace: float) -> None:
    """Rank 1 does not take part in the second iteration."""
    context = replace(context, grace_seconds=grace)
    with Pipeline(
        nn.Linear(4, 4), context=context, stages=2, microbatches=2, loss_fn=nn.functional.mse_loss,
        checkpoint=Checkpoint(directory=folder, every=10),
    ) as pipe:  # fmt: skip
        batch = torch.ones(4, 4)
        pipe.step(batch, target=batch)
        if context.rank == 1:
            print("HANGS", flush=True)
            signal.pause()
        pipe.step(batch, target=batch)


@pytest.mark.parametrize(
    ("number", "grace", "why"),
    [
        pytest.param(
            signal.SIGTERM, 0.5, "not saved within 0.5 s; ", marks=pytest.mark.full, id="grace"
        ),
        pytest.param(ABORT_SIGNAL, 600.0, "", id="now"),
    ],
)
def test_a_rank_that_cannot_save_says_what_it_waited_for(
    number: signal.Signals, grace: float, why: str, tmp_path: Path
) -> None:
    ranks = Ranks(2, waits_for_ever, str(tmp_path), grace)
    ranks.wait_for_output(1, "HANGS")
    ranks.signal(0, number)
    ranks.wait_for_end([0])
    ranks.signal(1, signal.SIGKILL)
    result = ranks.wait()[0]
    assert result.exitcode == 128 + signal.SIGTERM
    (said,) = re.findall(r"^terminated: (.*)$", result.output, re.MULTILINE)
    assert said.startswith(f"{why}rank 0 (stage 0) wa"), said
    assert not list(tmp_path.iterdir()), "no checkpoint, not even a part of one"


def request_once(context: TrainerContext) -> None:
    word = SigtermHandler(
        lambda: "rank 0 (stage 0) was waiting for nothing", lambda: None, grace=60
    )
    word.install()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGTERM)
    while not word.save_requested:
        pass
    word.uninstall()
    assert signal.getsignal(signal.SIGTERM) == signal.getsignal(ABORT_SIGNAL) == signal.SIG_DFL


def test_a_second_sigterm_changes_nothing() -> None:
    (result,) = Ranks(1, request_once).wait()
    assert result.exitcode == 0, result
    assert result.output.count("SIGTERM: saving within 60 s, then ending") == 1
