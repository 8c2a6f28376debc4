"""Replicas train on while a pod of another is missing: real launchers, ranks and ingest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from manifests import manifest_of
from pods import DEADLINE, Job

from pipemorph.http_client import HttpClient
from pipemorph.local.generation_runner import RankGeneration
from pipemorph.local.processes.interrupts import InterruptHandler
from pipemorph_trainer import ModelShard, TrainerContext
from pipemorph_trainer.examples import gpt
from pipemorph_trainer.launcher.pod import Pod
from pipemorph_trainer.launcher.pod_rank_host import PodRankHost
from pipemorph_trainer.launcher.restart_client import RestartClient

pytestmark = pytest.mark.timeout(300)

MICROBATCHES, MICROBATCH, SEED, ITERATIONS = 4, 2, 0, 70
ARGS: dict[str, Any] = {
    "width": 32, "heads": 2, "sequence": 32, "microbatch_size": MICROBATCH, "clip": 1e9,
}  # fmt: skip
SCRIPT = """
import sys, time
from pathlib import Path
from pipemorph_trainer.examples import gpt

draw, hurry = gpt.sample_batch, Path(__file__).with_name("hurry")

def sample_batch(*args, **given):
    if not hurry.exists():
        # Slower and slower, so that iterations remain however long a pod takes.
        time.sleep(0.4 if given["iteration"] < 40 else 4.0)
    return draw(*args, **given)

gpt.sample_batch = sample_batch
sys.exit(gpt.main())
"""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    made: list[Job] = []

    def start(batch: str = "shrink") -> Job:
        spec = {
            "parallelism": {
                "stages": 2, "replicas": 2, "minReplicas": 1, "batch": batch, "layers": 2,
            },
            "schedule": {"microbatches": MICROBATCHES},
            "failurePolicy": {"maxRestarts": 3, "replacementSeconds": 0},
        }  # fmt: skip
        made.append(
            Job(tmp_path / "job", size=1, spec=spec, script=SCRIPT, iterations=ITERATIONS, **ARGS)
        )
        return made[-1]

    yield start
    for job in made:
        job.close()


def losses_of_one_process(replicas: list[int]) -> list[float]:
    """The losses of the same model on the same batches. ``replicas``: of each iteration."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    arguments = gpt.GPTArguments(**ARGS)
    stages = []
    for stage in range(2):
        torch.manual_seed(SEED * 1000 + stage)
        stages.append(gpt.GPTStage(arguments, ModelShard(stage, 2), 2))
    model = torch.nn.Sequential(*stages)
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate)
    corpus, found = gpt.load_corpus(), []
    for iteration, count in enumerate(replicas):
        batches = [
            gpt.sample_batch(
                corpus,
                seed=SEED,
                iteration=iteration,
                replica=replica,
                batch=MICROBATCH * MICROBATCHES,
                sequence=32,
            )
            for replica in range(count)
        ]
        tokens, target = (torch.cat(each) for each in zip(*batches, strict=True))
        optimizer.zero_grad()
        loss = gpt.loss_fn(model(tokens), target)
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    torch.set_num_threads(threads)
    return found


def ran(job: Job) -> list[int]:
    """Replicas of each iteration, by the records of recoveries."""
    total = max(job.iterations()) + 1
    found = [2] * total
    for record in job.recoveries().last:
        assert record.went_on_with is not None and record.replicas is not None
        found[record.went_on_with :] = [record.replicas] * (total - record.went_on_with)
    return found


def compare(job: Job, *, whole_batch: bool = False) -> None:
    """Compare losses with one process's. ``whole_batch``: both replicas' batches."""
    expected = losses_of_one_process([2] * len(ran(job)) if whole_batch else ran(job))
    for iteration, loss in job.iterations().items():
        assert loss == pytest.approx(expected[iteration], abs=2e-4), f"{iteration}: {ran(job)}"


@pytest.mark.full
def test_a_replica_trains_on_alone_until_the_lost_pod_is_back(started: Any) -> None:
    """The replica trains with the whole batch."""
    job = started(batch="keep")
    job.wait_for_iterations(5)
    job.kill(3, replaced=True)
    job.wait("replica 0 trains on", lambda: job.recovered(1))
    (first,) = job.recoveries().last
    assert (first.replicas, first.pod, first.repeated, first.state) == (1, 3, 0, "kept"), first
    assert job.recoveries().excluded_replicas == [1]
    print(f"from the kill to the next finished iteration: {first.seconds} s")
    job.wait("pod 1 waits", lambda: "generation 1 runs without replicas 1" in job.log("pod-1"))
    done = len(job.iterations())
    job.wait_for_iterations(done + 3)
    job.pods[3] = job.start_pod(3)
    job.wait("both replicas train", lambda: job.recovered(2))
    (job.folder / "hurry").touch()
    second = job.recoveries().last[1]
    assert (second.replicas, second.repeated, second.state) == (2, 0, "replica"), second
    assert second.cause == "all pods of replica 1 are present again"
    print(f"from leaving to the next finished iteration: {second.seconds} s")
    assert job.ends() == [0, 0, 0, 0], job
    state = job.recoveries()
    assert (state.generation, state.count, state.counted, state.excluded_replicas) == (2, 1, 0, [])
    assert sorted(job.iterations()) == list(range(ITERATIONS))
    assert ran(job).count(1) >= 4
    compare(job, whole_batch=True)


@pytest.mark.soak
def test_pods_that_wait_or_come_late_end_when_the_others_have_finished(started: Any) -> None:
    """The pod of rank 0 is lost, and with it the agent; replica 1 trains on to the end, with a
    batch of half the size."""
    job = started()
    job.wait_for_iterations(3)
    job.kill(0, replaced=True)
    job.wait("replica 1 trains on", lambda: job.recovered(1))
    assert job.recoveries().excluded_replicas == [0]
    (job.folder / "hurry").touch()
    assert [job.pods[pod].wait(DEADLINE) for pod in (1, 2, 3)] == [0, 0, 0], job
    assert job.recoveries().completed
    assert max(job.iterations()) == ITERATIONS - 1
    assert "runs without replicas 0; this pod waits" in job.log("pod-2")
    job.pods[0] = job.start_pod(0)
    assert job.pods[0].wait(DEADLINE) == 0, job
    compare(job)


def test_a_rank_of_fewer_replicas_sees_a_smaller_job(tmp_path: Path) -> None:
    """The replica of rank 0 is gone, whose pod all others meet at otherwise."""
    spec = {
        "parallelism": {"stages": 2, "replicas": 3, "minReplicas": 1},
        "schedule": {"microbatches": 4, "globalBatchSize": 24},
        "trainer": {"module": "m", "iterations": 7},
        "failurePolicy": {"maxRestarts": 1},
    }
    (tmp_path / "job.json").write_text(json.dumps(manifest_of(spec, namespace="team")))
    given = {
        "PIPEMORPH_POD_INDEX": "4",
        "LOCAL_WORLD_SIZE": "1",
        "WORLD_SIZE": "6",
        "MASTER_ADDR": "gpt-0.svc",
        "MASTER_PORT": "29500",
        "PIPEMORPH_JOB_FILE": str(tmp_path / "job.json"),
        "PIPEMORPH_POD_ADDRESS": "gpt-{}.svc",
        "PIPEMORPH_KEPT_DIR": str(tmp_path),
    }
    pod = Pod.from_env(given)
    fewer = RankGeneration(excluded_replicas=(0,))
    assert not pod.runs_in(RankGeneration(excluded_replicas=(1,))) and pod.runs_in(fewer)
    small = pod.select_generation(fewer)
    with InterruptHandler(SimpleQueue()) as interrupts:
        site = PodRankHost(pod, [], 1.0, SimpleQueue(), interrupts, None, environ=given)
    env = {**given, **site._make_changed_environment(tmp_path, fewer)}
    context = TrainerContext.from_env(small.make_rank_environment(0, env))
    # Rank 4 is stage 1 of replica 1 in the whole job.
    assert (context.rank, context.place, context.world_size) == (2, 4, 4)
    assert (context.coordinate().stage, context.coordinate().replica) == (1, 0)
    assert context.master_addr == "gpt-1.svc"
    assert context.job.spec.schedule.global_batch_size == 16
    assert context.job.metadata.namespace == "team"

    # Its copies are of no use once others have gone on without it.
    (tmp_path / "rank-4.generation-0").mkdir()
    site.restart_client = RestartClient(HttpClient("http://127.0.0.1:1"), 4, 0, print)
    site._remove_stale_copies()
    assert (tmp_path / "rank-4.generation-0").exists()
    site.restart_client.missed_generation = True
    site._remove_stale_copies()
    assert (
        not (tmp_path / "rank-4.generation-0").exists()
        and not site.restart_client.missed_generation
    )
