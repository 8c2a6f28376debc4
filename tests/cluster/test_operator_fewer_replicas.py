"""Replicas that train on with the whole batch while a pod of another is lost, and a job that ends
although that pod never runs: a real API server, Job controller, operator and ingest; launchers and
ranks are played."""

from typing import Any

import pytest
from operator_support import DEADLINE, Jobs, Object, condition, manifest, said
from played_ranks import Ranks
from testbed import NotYet, wait_for

from pipemorph.api.running import Running
from pipemorph.api.spec import JobSpec
from pipemorph.wire import PodReport

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

NAME = "fewer"
MICROBATCHES = 6
STEP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}


class Launcher:
    """That of one pod."""

    def __init__(self, jobs: Jobs, index: int, pod: Object, born: int = 0) -> None:
        self.jobs, self.index, self.pod = jobs, index, pod
        self._token, self._name = jobs.token(NAME, pod), f"{index} born {born}"

    def tell(self, event: str, generation: int, **fields: Any) -> Object:
        """What is answered at once."""
        report = PodReport(
            attempt=0, generation=generation, pod=self.index, launcher=self._name, event=event,
            **fields,
        )  # fmt: skip
        path = f"/v1/jobs/{self.jobs.namespace}/{NAME}/generation?wait=0"
        body = report.model_dump_json().encode()

        def told() -> Object:
            status, answer = self.jobs.installation.request(
                "POST", path, token=self._token, body=body
            )
            if status in (401, 403, 404):
                raise NotYet(f"it answered {status}: {answer}")  # It has not heard of the pod.
            assert status == 200, answer
            return answer

        return wait_for(f"an answer to pod {self.index}", told, DEADLINE)

    def until(self, event: str, generation: int, wanted: int, **fields: Any) -> Object:
        """Tell it until the answer is of generation ``wanted``, which its ranks may begin."""

        def begins() -> Object:
            told = self.tell(event, generation, **fields)
            if told["generation"] != wanted or told["over"]:
                raise NotYet(f"it is told {told}")
            return told

        return wait_for(f"generation {wanted} at pod {self.index}", begins, DEADLINE)


def lose(jobs: Jobs, launchers: list[Launcher], generation: int, finished: int) -> None:
    """Pod 3 is deleted, and its replica left out of the next generation."""
    jobs.cluster.client.delete("pods", launchers[3].pod["metadata"]["name"], jobs.namespace)
    jobs.wait(NAME, lambda job: len(job["status"].get("replacements", [])) > generation // 2)
    loss = {"reason": "rank 1 lost rank 3", "at": 1.0, "rank": 1, "lost_peer": True}
    gone = {"loss": loss, "finished": finished, "reached": finished}
    launchers[1].tell("gone", generation, **gone)
    for each in (launchers[0], launchers[2]):
        each.tell("gone", generation, **gone)
    for each in (launchers[0], launchers[2]):
        told = each.until("gone", generation, generation + 1, **gone)
        assert told["left_out"] == [1], told


def trains(before: Ranks, spec: JobSpec) -> Ranks:
    """The ranks of what runs now go on."""
    ranks = Ranks(before.jobs, NAME, spec, before.token, before.attempt)
    ranks.iteration, ranks.sequence = before.iteration, before.sequence
    ranks.run(3)
    return ranks


@pytest.mark.timeout(600)
def test_fewer_replicas_train_on_with_the_whole_batch_and_the_job_ends_without_the_lost_pod(
    jobs: Jobs,
) -> None:
    cut = {"stages": 2, "replicas": 2, "minReplicas": 1, "batch": "keep"}
    policy = {"maxRestarts": 3, "replacementSeconds": 0}
    schedule = {"microbatches": MICROBATCHES, "stageTimes": [STEP] * 2}
    job = manifest(NAME, parallelism=cut, schedule=schedule, failurePolicy=policy)
    jobs.apply(job)
    pods = jobs.run(NAME, 4)
    whole = JobSpec.model_validate(jobs.get(NAME)["spec"])
    half = Running(whole.parallelism, (1,)).spec(whole)
    assert half.schedule.microbatches == 2 * MICROBATCHES
    launchers = [Launcher(jobs, index, pod) for index, pod in enumerate(pods)]
    for each in launchers:
        each.tell("joined", 0)
    ranks = Ranks.of(jobs, NAME, pods[0])
    ranks.run(3)

    lose(jobs, launchers, 0, ranks.iteration)
    ranks = trains(ranks, half)
    found = jobs.wait(NAME, lambda job: condition(job, "ReplicasComplete")[0] == "False")
    assert found["status"]["recoveries"]["leftOut"] == [1]
    assert said(found, "ReplicasComplete").startswith("1 of 2 replicas train")
    ranks.delays = [0.06]
    ranks.until("ScheduleAdapted=True")
    planned = ranks.newest.plan.plan().schedule
    assert planned.microbatches == 2 * MICROBATCHES, "the batch of both replicas"
    ranks.delays = [0.0]
    ranks.run(3)

    # Another pod takes the place of the lost one, and both replicas train.
    pods = jobs.pods(NAME, 4)
    jobs.cluster.fake_pod_running(jobs.namespace, pods[3]["metadata"]["name"])
    launchers[3] = Launcher(jobs, 3, pods[3], born=1)
    waits = {"left_out": [1]}
    launchers[3].tell("joined", 0)
    launchers[1].tell("gone", 1, **waits)

    def leave() -> bool:
        launchers[3].tell("gone", 1, **waits)
        return bool(launchers[0].tell("resumed", 1, **waits)["leave"])

    wait_for("replica 0 to be told to leave", leave, DEADLINE)
    left = waits | {"finished": ranks.iteration, "reached": ranks.iteration, "left_for": {}}
    for each in (launchers[0], launchers[2]):
        each.tell("gone", 1, **left)
    for each in launchers:
        told = each.until("gone", 1, 2, **left)
        assert told["left_out"] == []
    ranks = trains(ranks, whole)
    jobs.wait(NAME, lambda job: condition(job, "ReplicasComplete")[0] == "True")

    # It is lost once more, and has no node this time.
    lose(jobs, launchers, 2, ranks.iteration)
    ranks = trains(ranks, half)
    ranks.send(state="finished")
    for each in (launchers[0], launchers[2]):
        each.tell("completed", 3, **waits)
    wait_for(
        "pod 1 to hear that the others have finished",
        lambda: launchers[1].tell("gone", 3, **waits)["verdict"] == "completed", DEADLINE,
    )  # fmt: skip
    jobs.succeed([pods[0], pods[1], pods[2]])
    done = jobs.wait(NAME, "Complete")
    assert condition(done, "Complete") == ("True", "FinishedWithoutPods")
    assert "not waited for: rank 3 (stage 1, replica 1)" in said(done, "Complete")
    recoveries = done["status"]["recoveries"]
    assert (recoveries["counted"], recoveries["completed"]) == (0, True), recoveries
    assert [each["replicas"] for each in recoveries["last"]] == [1, 2, 1]
    jobs.expect_none_left(NAME)
