"""However a run breaks, every rank ends soon and says which message it was missing."""

from __future__ import annotations

import os
import re
import signal
import threading
from typing import Any

import pytest
from jobs import Job, Stage, assert_same, loss_fn, make_batch, make_stage, reference, train
from launch import RankResult, Ranks, run_ranks
from torch import Tensor, nn

from pipemorph.spec import Fault
from pipemorph_trainer import Pipeline, TrainerContext

pytestmark = pytest.mark.multiprocess

PATHS = ["direct", pytest.param("delegated", marks=pytest.mark.needs_engine)]


class Breaks(nn.Module):
    """Runs its stage until the ``at``-th forward of the rank, and then ``how``."""

    def __init__(self, stage: Stage, at: int, how: str) -> None:
        super().__init__()
        self.stage, self.at, self.how = stage, at, how
        self.runs = 0

    def forward(self, *args: Tensor) -> Any:
        result = self.stage(*args)
        self.runs += 1
        if self.runs == self.at:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.how == "hang":
                threading.Event().wait(60)  # the test kills it before
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
        path=job.path,  # type: ignore[arg-type]
        deadline_seconds=job.deadline,
    )
    done = threading.Event()

    def tell() -> None:
        while not done.wait(0.05):
            told = re.search(r"waited ([\d.]+) s for F of microbatch", pipe.current_wait())
            if told is not None and float(told[1]) >= 1:
                print("WAITING", flush=True)

    threading.Thread(target=tell, daemon=True).start()
    try:
        with pipe:
            for iteration in range(3):
                tokens, target = make_batch(iteration, job.batch * job.microbatches)
                pipe.step(tokens, target=target)
    finally:
        done.set()
        # Caught inside torch when the interpreter ends, a thread aborts the process.
        left = [t.name for t in threading.enumerate() if t.name.startswith("pipemorph-")]
        print("THREADS", *(name for name in left if name != "pipemorph-last-word"), flush=True)


# The self-test before the first F runs the stage some times of its own, so the break is put
# far enough in and the test reads from the message where it was.
LATE = 40
LONG = Job(3, 16, policy="1f1b", deadline=20.0)
MISSING = re.compile(
    r"rank (\d) \(stage \d\) waited [\d.]+ s for (F|B) of microbatch (\d+) of iteration (\d) "
    r"from stage (\d) on link (\d) \((direct, gloo|delegated, \w+)\)"
)


def missing(result: RankResult) -> tuple[str, ...]:
    found = MISSING.search(result.error)
    assert found is not None, f"rank {result.rank} named no message:\n{result.error[-2000:]}"
    return found.groups()


@pytest.mark.parametrize("path", PATHS)
def test_a_killed_peer_ends_the_others(path: str) -> None:
    results = Ranks(3, entry, LONG.with_(path=path), 1, LATE, "kill").wait(40)
    assert results[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert results[rank].exitcode == 1, results[rank]
        assert results[rank].seconds < results[1].seconds + 15
    assert missing(results[2])[1:2] == ("F",)
    assert missing(results[2])[4] == "1"
    assert "rank 1 (stage 1) is gone" in results[2].error
    told = results[0].error
    assert "rank 1" in told and ("is gone" in told or "failed" in told), told[-1500:]


@pytest.mark.parametrize("path", PATHS)
def test_a_hanging_peer_runs_into_the_deadline(path: str) -> None:
    ranks = Ranks(3, entry, LONG.with_(path=path, deadline=2.0), 1, LATE, "hang")
    ranks.wait_for_end([0, 2])
    ranks.signal(1, signal.SIGKILL)
    results = ranks.wait(40)
    for rank in (0, 2):
        assert "the deadline is 2 s" in results[rank].error, results[rank].error[-2000:]
        assert "of microbatch" in results[rank].error.splitlines()[-1]
        assert results[rank].output.splitlines()[-1] == "THREADS"
    assert missing(results[2])[1:2] == ("F",)


def test_an_exception_ends_all_ranks() -> None:
    results = Ranks(3, entry, LONG, 1, LATE, "raise").wait(40)
    assert "ArithmeticError: the stage broke" in results[1].error
    assert "rank 1 (stage 1) is gone" in results[2].error
    assert [r.exitcode for r in results] == [1, 1, 1]


def test_sigterm_says_what_was_waited_for() -> None:
    ranks = Ranks(3, entry, LONG, 1, LATE, "hang")
    ranks.wait_for_output(2, "WAITING")
    ranks.signal(2, signal.SIGTERM)
    ranks.wait_for_end([2])
    ranks.signal(1, signal.SIGKILL)
    results = ranks.wait(40)
    assert results[2].exitcode == 128 + signal.SIGTERM
    said = [line for line in results[2].output.splitlines() if line.startswith("terminated:")]
    assert len(said) == 1
    assert MISSING.search(said[0]), said


@pytest.mark.needs_engine
@pytest.mark.parametrize("what", ["data", "control"])
def test_a_severed_engine_connection_changes_nothing(what: str) -> None:
    faults = [Fault(link=link, from_iteration=1, sever=what) for link in (0, 1)]  # type: ignore[arg-type]
    job = Job(3, 6, path="delegated", engine="tcp", faults=faults, iterations=4)
    records = run_ranks(3, train, job)
    assert_same(records, reference(job))


def lopsided(context: TrainerContext) -> None:
    """Rank 0 steps once less than the others."""
    module = make_stage(context.rank, 2, LONG.dtype)
    with Pipeline(module, context=context, loss_fn=loss_fn, microbatches=2, stages=2) as pipe:
        for iteration in range(2 if context.rank == 0 else 3):
            tokens, target = make_batch(iteration, 4)
            pipe.step(tokens, target=target)


def test_a_rank_that_steps_too_often_is_told() -> None:
    results = Ranks(2, lopsided).wait(30)
    assert results[1].exitcode == 1
    assert "stage 0 to begin for iteration 2" in results[1].error
