"""A spare takes the place of a lost pod: real launchers, ranks and ingest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from pods import SCRIPT, Job

from pipemorph.api.spec import PipeMorphJob
from pipemorph.exits import EXIT_SIGTERM
from pipemorph.local.generations import Life
from pipemorph.local.processes.interrupts import Interrupts
from pipemorph.local.processes.supervise import Ending
from pipemorph.wire import GenerationState
from pipemorph_trainer import TrainerContext
from pipemorph_trainer.launcher.meeting import Meeting
from pipemorph_trainer.launcher.pod import Pod
from pipemorph_trainer.launcher.site import PodSite, describe, exit_code

pytestmark = pytest.mark.timeout(300)

ITERATIONS, INTERVAL = 60, 4
SLOWLY = SCRIPT.replace(
    'time.sleep(args["pause"])',
    # Slower and slower, so that there are iterations left however long a pod takes.
    'time.sleep(0 if (here / "hurry").exists() else 0.2 if pipe.iteration < 25 else 4.0)',
)
CUT = {"stages": 2, "replicas": 2, "ranksPerPod": 2, "order": ["pp", "dp_replicate"]}


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def start(name: str, **args: Any) -> Job:
        made.append(Job(tmp_path / name, iterations=ITERATIONS, **args))
        return made[-1]

    yield start
    for job in made:
        job.close()


@pytest.mark.full
def test_a_spare_takes_the_place_of_a_lost_pod_and_the_new_pod_is_a_spare(started: Any) -> None:
    """Pods have one stage each, so the state comes from a neighbour. Then the pod of rank 0 is
    lost, whose place the others meet at, and the pod that came for the first one takes it."""
    alone = started("undisturbed", pause=0.0)
    assert alone.ends() == [0, 0], alone
    spec = {
        "parallelism": {**CUT, "spares": 1},
        "recovery": {"neighbour": True, "snapshotIterations": INTERVAL},
    }
    job = started("spares", spec=spec, script=SLOWLY)
    job.wait("pod 2 stands by", lambda: job.recoveries().spares_ready == 1)
    job.wait_for_iterations(6)
    job.kill(1, told=True)
    job.wait("pod 2 trains in the place of pod 1", lambda: job.recovered(1))
    first = job.recoveries()
    assert first.moved == ((1, 2),), f"{first}\n{job}"
    assert [(each.pod, each.instead_of) for each in first.last[0].spares] == [(2, 1)]
    assert (first.last[0].state, first.last[0].replaced) == ("neighbour", []), f"{first}\n{job}"
    print(f"from the kill to the next finished iteration: {first.last[0].seconds} s")
    assert "takes the place of another one, in generation 1: rank 2 to 3" in job.log("pod-2")

    job.pods[1] = job.start_pod(1)
    job.wait("the new pod stands by", lambda: job.recoveries().spares_ready == 1)
    assert job.recoveries().generation == 1, job
    # Of each rank pod 2, which had nothing in memory, has a copy by then.
    job.wait_for_iterations(len(job.iterations()) + 2)
    job.kill(0, told=True)
    job.wait("pod 1 trains in the place of pod 0", lambda: job.recovered(2))
    second = job.recoveries()
    assert second.moved == ((0, 1), (1, 2)), f"{second}\n{job}"
    print(f"from the kill to the next finished iteration: {second.last[1].seconds} s")
    job.pods[0] = job.start_pod(0)
    (job.folder / "hurry").touch()
    assert job.ends() == [0, 0, 0], job
    assert job.iterations() == alone.iterations(), job
    told = job.recoveries()
    assert all((each.repeated or 0) <= INTERVAL for each in told.last), told
    assert (told.generation, told.count, told.counted, told.completed) == (2, 2, 0, True)


@pytest.mark.soak
def test_a_spare_that_is_lost_disturbs_nobody(started: Any) -> None:
    job = started("alone", spec={"parallelism": {**CUT, "spares": 1}}, script=SLOWLY)
    job.wait("pod 2 stands by", lambda: job.recoveries().spares_ready == 1)
    job.wait_for_iterations(3)
    job.kill(2, told=True)
    job.wait("there is none", lambda: job.recoveries().spares_ready == 0)
    job.pods[2] = job.start_pod(2)
    job.wait("it is back", lambda: job.recoveries().spares_ready == 1)
    (job.folder / "hurry").touch()
    assert job.ends() == [0, 0, 0], job
    told = job.recoveries()
    assert (told.generation, told.count, told.last) == (0, 0, [])
    assert sorted(job.iterations()) == list(range(ITERATIONS))


@pytest.mark.soak
def test_a_spare_takes_the_place_of_a_pod_that_does_not_come(started: Any) -> None:
    spec = {
        "parallelism": {**CUT, "spares": 1},
        "failurePolicy": {"maxRestarts": 2, "latePodSeconds": 2},
    }
    job = started("late", spec=spec, script=SLOWLY, late=[0])
    job.wait("pod 2 trains in the place of pod 0", lambda: job.recovered(1))
    (told,) = job.recoveries().last
    assert (job.recoveries().moved, told.went_on_with) == (((0, 2),), 0), f"{told}\n{job}"
    assert [(each.pod, each.instead_of) for each in told.spares] == [(2, 0)]
    job.pods[0] = job.start_pod(0)
    job.wait("pod 0 stands by", lambda: job.recoveries().spares_ready == 1)
    (job.folder / "hurry").touch()
    assert job.ends() == [0, 0, 0], job
    told = job.recoveries()
    assert (told.generation, told.count, told.counted) == (1, 1, 0)
    assert sorted(job.iterations()) == list(range(ITERATIONS))


def a_pod(tmp_path: Path, index: int) -> tuple[Pod, dict[str, str]]:
    """One of three pods of two ranks, of which the last is a spare; and its variables."""
    spec = {
        "parallelism": {**CUT, "spares": 1},
        "schedule": {"microbatches": 4},
        "trainer": {"module": "m", "iterations": 7},
        "failurePolicy": {"maxRestarts": 1},
    }
    about = {"apiVersion": "pipemorph.io/v1alpha1", "kind": "PipeMorphJob"}
    job = PipeMorphJob.model_validate({**about, "metadata": {"name": "gpt"}, "spec": spec})
    (tmp_path / "job.json").write_text(job.model_dump_json(by_alias=True))
    given = {
        "PIPEMORPH_POD_INDEX": str(index),
        "LOCAL_WORLD_SIZE": "2",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "gpt-0.svc",
        "MASTER_PORT": "29500",
        "PIPEMORPH_JOB_FILE": str(tmp_path / "job.json"),
        "PIPEMORPH_POD_ADDRESS": "gpt-{}.svc",
        "PIPEMORPH_KEPT_DIR": str(tmp_path),
    }
    return Pod.from_env(given), given


class PlayedMeeting(Meeting):
    """Says what it was given, in turn."""

    def __init__(self, *answers: GenerationState | str) -> None:
        self.missed, self.answers = False, list(answers)
        self.patience: list[float] = []
        self.url = "https://ingest:8443"

    def join(self, patience: float, *_: Any, **__: Any) -> GenerationState | str:
        self.patience.append(patience)
        return self.answers.pop(0)

    def meet(self, *_: Any, **__: Any) -> GenerationState | str:
        return self.answers.pop(0)


def begin(pod: Pod, given: dict[str, str], *answers: GenerationState | str) -> Life | Ending:
    with Interrupts(SimpleQueue()) as interrupts:
        met = PlayedMeeting(*answers)
        return PodSite(pod, [], 1.0, SimpleQueue(), interrupts, met, environ=given).first()


def test_a_spare_has_the_ranks_of_the_place_that_it_takes(tmp_path: Path) -> None:
    pod, given = a_pod(tmp_path, 2)
    assert (pod.index, pod.pods, pod.is_spare) == (2, 3, True)
    before = GenerationState(attempt=0, generation=0)
    assert not pod.runs_in(before)
    taken = GenerationState(attempt=0, generation=1, places=((0, 2),))
    life = begin(pod, given, before, taken)
    assert life == Life(generation=1, places=((0, 2),))
    assert isinstance(life, Life)
    with Interrupts(SimpleQueue()) as interrupts:
        site = PodSite(pod, [], 1.0, SimpleQueue(), interrupts, None, environ=given)
    env = {**given, **site._changed(tmp_path, life)}
    context = TrainerContext.from_env(pod.within(life).environment(1, env))
    assert (context.rank, context.kept_rank, context.world_size) == (1, 1, 4)
    assert context.master_addr == "gpt-2.svc", "it has rank 0"
    assert context.job is not None and context.job.spec.parallelism.replicas == 2
    # The pod that comes in the place of pod 0 is a spare.
    other, _ = a_pod(tmp_path, 0)
    assert not other.is_spare and not other.runs_in(taken)


def test_a_pod_beyond_the_spares_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="pod 3 with 2 ranks is outside of a job of 4 ranks and 1 "):
        a_pod(tmp_path, 3)


def test_a_spare_ends_with_the_job_and_by_itself_as_a_lost_pod(tmp_path: Path) -> None:
    pod, given = a_pod(tmp_path, 2)
    before = GenerationState(attempt=0, generation=0)
    done = before.model_copy(update={"verdict": "completed"})
    for answers in ((done,), (before, done)):
        ending = begin(pod, given, *answers)
        assert isinstance(ending, Ending) and exit_code(ending) == 0
    refused = begin(pod, given, before, "the ingest refuses this pod")
    assert isinstance(refused, Ending) and exit_code(refused) == EXIT_SIGTERM
    over = before.model_copy(update={"verdict": "attempt", "why": "maxRestarts is 1", "cause": 2})
    ended = begin(pod, given, before, over)
    assert isinstance(ended, Ending) and exit_code(ended) == 1
    assert ended.reason == "the attempt ends: maxRestarts is 1"


def test_only_a_spare_waits_for_an_ingest_without_end(tmp_path: Path) -> None:
    for index, waits in ((0, False), (2, True)):
        pod, given = a_pod(tmp_path, index)
        met = PlayedMeeting(GenerationState(attempt=0, generation=0, verdict="completed"))
        with Interrupts(SimpleQueue()) as interrupts:
            PodSite(pod, [], 1.0, SimpleQueue(), interrupts, met, environ=given).first()
        assert (met.patience[0] == float("inf")) == waits


def test_no_pod_starts_ranks_of_which_it_does_not_know_the_generation(tmp_path: Path) -> None:
    pod, given = a_pod(tmp_path, 1)
    ending = begin(pod, given, "no ingest knows this pod: timed out (waited 300 s)")
    assert isinstance(ending, Ending)
    assert exit_code(ending) == EXIT_SIGTERM, "the host makes it again, and it does not count"
    assert describe(ending).splitlines() == [
        "no ingest knows this pod: timed out (waited 300 s)",
        "  only the ingest knows which generation of the ranks runs: see that it runs, and that"
        " this pod reaches https://ingest:8443",
    ]


def test_the_job_of_the_ranks_is_that_of_the_manifest(tmp_path: Path) -> None:
    """A place in another pod changes neither its size nor its batch."""
    pod, given = a_pod(tmp_path, 2)
    life = Life(generation=1, places=((1, 2),))
    with Interrupts(SimpleQueue()) as interrupts:
        site = PodSite(pod, [], 1.0, SimpleQueue(), interrupts, None, environ=given)
    assert site._changed(tmp_path, life) == {"MASTER_ADDR": "gpt-0.svc"}
    assert (
        json.loads(pod.within(life).job.model_dump_json())["spec"]
        == json.loads(pod.job.model_dump_json())["spec"]
    )
