"""Replicas that train on with the whole batch while a pod of another is lost, and a job that ends
although that pod never runs: a real API server, Job controller, operator and ingest; launchers and
ranks are played."""

from typing import Any

import pytest
from operator_support import DEADLINE, Jobs, Object, condition, manifest, said
from played_ranks import Ranks
from testbed import NotYet, wait_for

from pipemorph.protocol import PodReport
from pipemorph.spec.job_spec import JobSpec
from pipemorph.spec.running_subset import RunningSubset

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

NAME = "fewer"
MICROBATCHES = 6
STEP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}


class Launcher:
    """Launcher of one pod."""

    def __init__(self, jobs: Jobs, index: int, pod: Object, born: int = 0) -> None:
        self.jobs, self.index, self.pod = jobs, index, pod
        self._token, self._name = jobs.token(NAME, pod), f"{index} born {born}"

    def tell(self, event: str, generation: int, **fields: Any) -> Object:
        """Send a report and return the immediate answer."""
        report = PodReport(
            attempt=0, generation=generation, pod=self.index, launcher=self._name, event=event,
            **fields,
        )  # fmt: skip
        path = f"/v1/jobs/{self.jobs.namespace}/{NAME}/generation?wait=0"
        body = report.model_dump_json().encode()

        def read_answer() -> Object:
            status, answer = self.jobs.installation.request(
                "POST", path, token=self._token, body=body
            )
            if status in (401, 403, 404):
                raise NotYet(f"it answered {status}: {answer}")  # The pod is unknown yet.
            assert status == 200, answer
            return answer

        return wait_for(f"an answer to pod {self.index}", read_answer, DEADLINE)

    def until(self, event: str, generation: int, wanted: int, **fields: Any) -> Object:
        """Repeat a report until its ranks may begin generation ``wanted``."""

        def begins() -> Object:
            answer = self.tell(event, generation, **fields)
            if answer["generation"] != wanted or answer["over"]:
                raise NotYet(f"it got {answer}")
            return answer

        return wait_for(f"generation {wanted} at pod {self.index}", begins, DEADLINE)


def lose(jobs: Jobs, launchers: list[Launcher], generation: int, finished: int) -> None:
    """Delete pod 3, whose replica is omitted from the next generation."""
    jobs.cluster.client.delete("pods", launchers[3].pod["metadata"]["name"], jobs.namespace)
    jobs.wait(NAME, lambda job: len(job["status"].get("replacements", [])) > generation // 2)
    loss = {"reason": "rank 1 lost rank 3", "at": 1.0, "rank": 1, "lost_peer": True}
    gone = {"loss": loss, "finished": finished, "reached": finished}
    launchers[1].tell("gone", generation, **gone)
    for each in (launchers[0], launchers[2]):
        each.tell("gone", generation, **gone)
    for each in (launchers[0], launchers[2]):
        answer = each.until("gone", generation, generation + 1, **gone)
        assert answer["excluded_replicas"] == [1], answer


def trains(before: Ranks, spec: JobSpec) -> Ranks:
    """Train on with the present ranks; returns them."""
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
    half = RunningSubset(whole.parallelism, (1,)).build_reduced_spec(whole)
    assert half.schedule.microbatches == 2 * MICROBATCHES
    launchers = [Launcher(jobs, index, pod) for index, pod in enumerate(pods)]
    for each in launchers:
        each.tell("joined", 0)
    ranks = Ranks.of(jobs, NAME, pods[0])
    ranks.run(3)

    lose(jobs, launchers, 0, ranks.iteration)
    ranks = trains(ranks, half)
    found = jobs.wait(NAME, lambda job: condition(job, "ReplicasComplete")[0] == "False")
    assert found["status"]["recoveries"]["excludedReplicas"] == [1]
    assert said(found, "ReplicasComplete").startswith("1 of 2 replicas train")
    ranks.delays = [0.06]
    ranks.until("ScheduleAdapted=True")
    planned = ranks.newest.plan.to_plan().schedule
    assert planned.microbatches == 2 * MICROBATCHES, "the batch of both replicas"
    ranks.delays = [0.0]
    ranks.run(3)

    # Another pod takes the place of the lost one, and both replicas train.
    pods = jobs.pods(NAME, 4)
    jobs.cluster.fake_pod_running(jobs.namespace, pods[3]["metadata"]["name"])
    launchers[3] = Launcher(jobs, 3, pods[3], born=1)
    waits = {"excluded_replicas": [1]}
    launchers[3].tell("joined", 0)
    launchers[1].tell("gone", 1, **waits)

    def leave() -> bool:
        launchers[3].tell("gone", 1, **waits)
        return bool(launchers[0].tell("resumed", 1, **waits)["leave"])

    wait_for("a request to replica 0 to depart", leave, DEADLINE)
    departed = waits | {"finished": ranks.iteration, "reached": ranks.iteration, "left_for": {}}
    for each in (launchers[0], launchers[2]):
        each.tell("gone", 1, **departed)
    for each in launchers:
        answer = each.until("gone", 1, 2, **departed)
        assert answer["excluded_replicas"] == []
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
    jobs.expect_all_gone(NAME)
