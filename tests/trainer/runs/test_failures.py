"""Failures of a run: every rank ends soon and names the message that it was missing."""

from __future__ import annotations

import os
import re
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import Missing, Ranks, ended, missing_in, run_ranks
from pairwise import parametrize_product
from torch import Tensor, nn
from trainer_jobs import Job, Stage, assert_same, loss_fn, make_batch, make_stage, reference, train
from waiting import until

from pipemorph.spec.sections.faults import Fault
from pipemorph_trainer import Options, Pipeline, TrainerContext

ROUTES = ["direct", pytest.param("delegated", marks=pytest.mark.needs_engine)]


class Breaks(nn.Module):
    """Runs its stage until the ``at``-th forward of the rank, and then hangs or raises."""

    def __init__(self, stage: Stage, at: int, how: str) -> None:
        super().__init__()
        self.stage, self.at, self.how = stage, at, how
        self.runs = 0

    def forward(self, *args: Tensor) -> Any:
        result = self.stage(*args)
        self.runs += 1
        if self.runs == self.at:
            if self.how == "hang":
                threading.Event().wait()  # the test kills it before
            else:
                raise ArithmeticError("the stage broke")
        return result


def entry(context: TrainerContext, job: Job, broken: int, at: int, how: str) -> None:
    module: nn.Module = make_stage(context.rank, job.stages, job.dtype)
    if context.rank == broken:
        module = Breaks(module, at, how)  # type: ignore[arg-type]
    pipe = Pipeline(
        module,
        context=context,
        loss_fn=loss_fn,
        microbatches=job.microbatches,
        policy=job.policy,
        options=Options(route=job.route),  # type: ignore[arg-type]
        deadline_seconds=job.deadline,
    )
    try:
        with pipe:
            for iteration in range(3):
                tokens, target = make_batch(iteration, job.batch * job.microbatches)
                pipe.step(tokens, target=target)
    finally:
        # Caught inside torch when the interpreter ends, a thread aborts the process.
        threads = [t.name for t in threading.enumerate() if t.name.startswith("pipemorph-")]
        print("THREADS", *(name for name in threads if name != "pipemorph-sigterm"), flush=True)


# The self-test before the first F runs the stage some times of its own, so the break is put
# far enough in and the test reads from the message where it was.
LATE = 40
LONG = Job(3, 16, policy="1f1b", deadline=20.0)
LAST = 5
"""The microbatch, of iteration 1, in whose forward the middle stage is killed. It has got the
gradient of the one two before, so the last stage may be at the one before."""


class Stops(nn.Module):
    """Stops its process at the first forward, before the next stage knows any shapes."""

    def forward(self, x: Tensor) -> Tensor:
        os.kill(os.getpid(), signal.SIGSTOP)
        return x


def stopped(context: TrainerContext) -> None:
    module = Stops() if context.rank == 1 else nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    pipe = Pipeline(
        module, context=context, loss_fn=nn.functional.mse_loss, microbatches=4, policy="1f1b",
        options=Options(route="delegated", engine="tcp"), deadline_seconds=300.0,
    )  # fmt: skip
    with pipe:
        pipe.step(torch.ones(8, 4), target=torch.zeros(8, 4))


@pytest.mark.full
@pytest.mark.needs_engine
def test_a_rank_that_is_stopped_is_noticed_whatever_is_waited_for() -> None:
    """Connections of the rank stay, and the line with them; only its engine answers no more."""
    ranks = Ranks(3, stopped)
    try:
        ranks.wait_for_end([0, 2])
    finally:
        ranks.signal(1, signal.SIGKILL)
    zero, _, two = ranks.wait()
    assert re.search(
        r"PeerLostError: rank 2 \(stage 2\) waited [\d.]+ s for shapes from stage 1 for "
        r"iteration 0 on link 1; link 1 \(.*\) is dead: no control connection to rank 1",
        two.error,
    ), two.error
    assert re.search(r"PeerLostError: .*link 0 \(.*\) is dead: no control", zero.error), zero.error


def killed(context: TrainerContext, job: Job, neighbour: str, folder: Path) -> None:
    """Rank 1 is killed in a forward: while rank 2 ``waits`` for it, or while it ``computes``."""
    module = make_stage(context.rank, job.stages, job.dtype)
    victim, ready = folder / "victim", folder / "ready"
    forwards = 0

    def hook(*_: object) -> None:
        nonlocal forwards
        if context.rank == 1 and forwards == LAST:
            (folder / "pid").write_text(str(os.getpid()))
            (folder / "pid").rename(victim)
            until(ready.exists, f"rank 2 {neighbour}")
            os.kill(os.getpid(), signal.SIGKILL)
        if context.rank == 2 and forwards == LAST - 1 and neighbour == "computes":
            until(victim.exists, "rank 1 is at its last forward")
            ready.touch()
            pid = int(victim.read_text())
            until(lambda: ended(pid), "rank 1 is dead")
        forwards += 1

    with Pipeline(
        module,
        context=context,
        loss_fn=loss_fn,
        microbatches=job.microbatches,
        policy=job.policy,
        options=Options(route=job.route),  # type: ignore[arg-type]
        deadline_seconds=job.deadline,
    ) as pipe:

        def tell() -> None:
            wanted = f"F of microbatch {LAST} of iteration 1"
            until(lambda: wanted in pipe.current_wait(), f"rank 2 waits for {wanted}")
            ready.touch()

        if context.rank == 2 and neighbour == "waits":
            threading.Thread(target=tell, daemon=True).start()
        for iteration in range(2):
            if iteration == 1:
                # The self-test of iteration 0 has run the stage as well.
                module.register_forward_hook(hook)
            tokens, target = make_batch(iteration, job.batch * job.microbatches)
            pipe.step(tokens, target=target)


@pytest.mark.needs_engine
@pytest.mark.parametrize(
    ("route", "neighbour"),
    parametrize_product(["delegated", "direct"], ["computes", "waits"], test=1, full=3),
)
def test_a_killed_peer_ends_the_others(route: str, neighbour: str, tmp_path: Path) -> None:
    """The peer may have had a message first: where that is refused, the error names it."""
    results = Ranks(3, killed, LONG.with_(route=route), neighbour, tmp_path).wait()
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].exitcode == 1, results[rank]
        assert results[rank].seconds < results[1].seconds + 15
    to_come = Missing("F", LAST, 1, 1, 1, taken=False)
    to_take = Missing("B", LAST - 1, 1, 1, 1, taken=True)
    allowed = [to_come] if neighbour == "waits" else [to_come, to_take]
    assert missing_in(results[2].error) in allowed, results[2].error[-2000:]
    assert "rank 1 (stage 1) is gone" in results[2].error
    assert "rank 1 (stage 1) is gone" in results[0].error, results[0].error[-1500:]


@pytest.mark.full
@pytest.mark.parametrize("route", ROUTES)
def test_a_hanging_peer_runs_into_the_deadline(route: str) -> None:
    ranks = Ranks(3, entry, LONG.with_(route=route, deadline=4.0), 1, LATE, "hang")
    ranks.wait_for_end([0, 2])
    ranks.signal(1, signal.SIGKILL)
    results = ranks.wait()
    for rank in (0, 2):
        assert "the deadline is 4 s" in results[rank].error, results[rank].error[-2000:]
        assert "of microbatch" in results[rank].error.splitlines()[-1]
        assert results[rank].output.splitlines()[-1] == "THREADS"
    assert missing_in(results[2].error).kind == "F"


def test_an_exception_ends_all_ranks() -> None:
    results = Ranks(3, entry, LONG, 1, LATE, "raise").wait()
    assert "ArithmeticError: the stage broke" in results[1].error
    assert "rank 1 (stage 1) is gone" in results[2].error
    assert [r.exitcode for r in results] == [1, 1, 1]


def bereaved(context: TrainerContext) -> None:
    """Kill rank 1 where rank 0 waits for a collective, whose connections name no rank."""
    module = make_stage(context.rank, 2, LONG.dtype)
    with Pipeline(module, context=context, loss_fn=loss_fn, microbatches=2) as pipe:
        tokens, target = make_batch(0, 4)
        pipe.step(tokens, target=target)
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        pipe.clip_grad_norm_(1.0)


def test_a_peer_that_is_killed_before_a_collective_is_named() -> None:
    error = Ranks(2, bereaved).wait()[0].error
    expected = "for the gradient norm of iteration 0 of all stages; rank 1 (stage 1) is gone"
    assert expected in error, error[-2000:]


@pytest.mark.needs_engine
@pytest.mark.parametrize("what", ["data", pytest.param("control", marks=pytest.mark.full)])
def test_a_severed_engine_connection_changes_nothing(what: str) -> None:
    faults = [Fault(link=link, from_iteration=1, sever=what) for link in (0, 1)]  # type: ignore[arg-type]
    job = Job(3, 6, route="delegated", engine="tcp", faults=faults, iterations=4)
    records = run_ranks(3, train, job)
    assert_same(records, reference(job))


def lopsided(context: TrainerContext) -> None:
    """Rank 0 steps once less than the others."""
    module = make_stage(context.rank, 2, LONG.dtype)
    with Pipeline(module, context=context, loss_fn=loss_fn, microbatches=2, stages=2) as pipe:
        for iteration in range(2 if context.rank == 0 else 3):
            tokens, target = make_batch(iteration, 4)
            pipe.step(tokens, target=target)


def test_a_rank_that_steps_too_often_gets_an_error() -> None:
    results = Ranks(2, lopsided).wait()
    assert results[1].exitcode == 1
    assert "stage 0 to begin for iteration 2" in results[1].error
