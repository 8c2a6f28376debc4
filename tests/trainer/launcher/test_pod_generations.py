"""Pods on this machine, two, each with its launcher, and an ingest: their ranks start again."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pods import DEADLINE, ITERATIONS, Job

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

Start = Callable[..., Job]


@pytest.fixture(scope="module")
def pod_jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    made: list[Job] = []

    def start(name: str, **args: Any) -> Job:
        made.append(Job(tmp_path_factory.mktemp("pods") / name, **args))
        return made[-1]

    yield start
    for job in made:
        job.close()


@pytest.fixture(scope="module")
def undisturbed_pods(pod_jobs: Start) -> dict[int, float]:
    """Losses of an undisturbed job."""
    job = pod_jobs("undisturbed", pause=0.0)
    assert job.ends() == [0, 0], job
    assert len(job.iterations()) == ITERATIONS, job
    return job.iterations()


@pytest.mark.soak
def test_ranks_that_hang_are_found_and_start_again(
    pod_jobs: Start, undisturbed_pods: dict[int, float]
) -> None:
    """First a rank of pod 1 in the script, then one of pod 0 that is stopped."""
    job = pod_jobs("hangs", env={"PIPEMORPH_HANG_SECONDS": "5"}, hang_at=6)

    job.wait("it recovers", lambda: job.recovered(1))
    os.kill(job.rank(0), signal.SIGSTOP)
    assert job.ends() == [0, 0], job
    assert job.recovered(2), job
    assert job.iterations() == undisturbed_pods
    first, second = job.recoveries().last
    hang = r"no iteration was finished for \d+ s \(spec.failurePolicy.hangSeconds is 5\): "
    one = re.match(
        hang + r"rank 3 \(stage 1, replica 1\) waits for no other rank: in read_labels"
        r" \(train.py:\d+\); ",
        first.cause,
    )
    assert one and (first.pod, first.rank) == (1, 3), f"{first}\n{job}"
    two = hang + r"rank 0 \(stage 0, replica 0\) is stopped, as by SIGSTOP; "
    other = re.match(two, second.cause)
    assert other and (second.pod, second.rank) == (0, 0), f"{second}\n{job}"
    for each in (first, second):
        assert (each.repeated, each.state) == (0, "kept"), each
        assert re.search(r"rank 1 \(stage 0, replica 1\) waited [\d.]+ s for ", each.cause), each
    for rank in range(4):
        # In all stacks there is the main thread's, whichever thread printed them.
        main = rf'\[rank {rank}\]   File ".*/train\.py", line \d+ in <module>'
        said = re.findall(main, job.log(f"pod-{rank // 2}"))
        assert len(said) == 2, f"no stacks of rank {rank}\n{job}"


def test_a_lost_pod_is_replaced_while_the_other_one_waits(
    pod_jobs: Start, undisturbed_pods: dict[int, float]
) -> None:
    """The second time it is that of rank 0, and so of the job's agent."""
    job = pod_jobs("lost", order=["dp_replicate", "pp"])
    job.wait_for_iterations(4)
    job.lose(1)
    job.wait("it recovers", lambda: job.recovered(1))
    done = len(job.iterations())
    job.wait_for_iterations(done + 2)
    job.lose(0)
    assert job.ends() == [0, 0], job
    # The agent went with its pod, and what it had not reported yet is lost.
    assert job.iterations().items() <= undisturbed_pods.items()
    assert max(job.iterations()) == ITERATIONS - 1
    recoveries = job.recoveries()
    assert [each.replaced for each in recoveries.last] == [[1], [0]], f"{recoveries}\n{job}"
    assert [(each.repeated, each.state) for each in recoveries.last] == [(0, "replica")] * 2
    assert (recoveries.generation, recoveries.counted) == (2, 0)
    assert "replaces another one, in generation 1" in job.log("pod-1")
    for recovery in recoveries.last:
        assert recovery.seconds is not None
        print(f"from the loss to the next finished iteration: {recovery.seconds} s")


def test_a_drained_pod_saves_and_the_others_go_on(
    pod_jobs: Start, undisturbed_pods: dict[int, float], tmp_path: Path
) -> None:
    """The node of the pod is drained. The ranks of all pods save; the other pod waits."""
    saves = {"checkpoint": {"directory": str(tmp_path / "saved"), "every": 100}}
    job = pod_jobs("drained", spec=saves)
    job.wait_for_iterations(5)
    job.pods[1].terminate()
    assert job.pods[1].wait(DEADLINE) == 75, job
    job.wait("pod 0 waits", lambda: "the ranks saved and ended with those" in job.log("pod-0"))
    assert job.pods[0].poll() is None, job
    job.pods[1] = job.start_pod(1)
    assert job.ends() == [0, 0], job
    assert job.iterations() == undisturbed_pods
    (recovery,) = job.recoveries().last
    assert recovery.replaced == [1], f"{recovery}\n{job}"
    assert (recovery.repeated, recovery.state) == (0, "checkpoint"), f"{recovery}\n{job}"
    assert (job.recoveries().generation, job.recoveries().counted) == (1, 0)


@pytest.mark.soak
def test_an_ingest_that_is_replaced_meanwhile_counts_on(
    pod_jobs: Start, undisturbed_pods: dict[int, float]
) -> None:
    job = pod_jobs("replaced")
    job.wait_for_iterations(4)
    os.kill(job.rank(0), signal.SIGKILL)
    job.wait("generation 1", lambda: job.recoveries().generation == 1)
    job.wait("it recovers", lambda: job.recoveries().last[0].seconds is not None)
    job.ingest.kill()
    job.ingest.wait(DEADLINE)
    os.kill(job.rank(2), signal.SIGKILL)
    job.wait("pod 1 asks again", lambda: "retrying for" in job.log("pod-1"))
    job.ingest = job.start_ingest()
    assert job.ends() == [0, 0], job
    assert job.iterations() == undisturbed_pods
    recoveries = job.recoveries()
    assert (recoveries.generation, recoveries.count) == (2, 2)
    assert [each.rank for each in recoveries.last] == [0, 2]
