"""The operator is killed at any moment; the API server goes away and comes back."""

import random
import time

import pytest
from operator_support import Jobs, manifest

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster


class Killer:
    """Kills the operator a random moment after a change, and starts it again."""

    def __init__(self, jobs: Jobs, seed: int) -> None:
        self.jobs = jobs
        self.random = random.Random(seed)
        self.kills = 0

    def strike(self) -> None:
        # A moment inside a reconcile, which takes some tens of milliseconds.
        time.sleep(self.random.uniform(0.0, 0.15))
        self.jobs.installation.operator.kill()
        self.kills += 1
        self.jobs.installation.operator.start()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_killed_in_the_middle_of_every_transition(jobs: Jobs, seed: int) -> None:
    killer = Killer(jobs, seed)
    name = "killed"
    jobs.apply(manifest(name, stages=2, failurePolicy={"maxRestarts": 1}))
    killer.strike()  # creation
    pods = jobs.pods(name, 2)
    for pod in pods:
        jobs.cluster.fake_pod_running(jobs.namespace, pod["metadata"]["name"])
    killer.strike()  # running
    jobs.wait(name, "Running")
    jobs.patch(name, {"suspend": True})
    killer.strike()  # suspending
    jobs.wait(name, "Suspended")
    jobs.expect_all_gone(name)
    jobs.patch(name, {"suspend": False})
    killer.strike()  # resuming
    pods = jobs.run(name, 2, attempt=1)
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[0]["metadata"]["name"], exit_code=3)
    killer.strike()  # restarting
    pods = jobs.run(name, 2, attempt=2)
    status = jobs.get(name)["status"]
    assert (status["attempt"], status["restarts"]) == (2, 1), "an attempt was counted twice"
    assert [a["attempt"] for a in status["attempts"]] == [0, 1]
    jobs.succeed(pods)
    killer.strike()  # completing
    done = jobs.wait(name, "Complete")
    assert done["status"]["attempt"] == 2
    jobs.cluster.client.delete("pipemorphjobs", name, jobs.namespace)
    killer.strike()  # deleting
    jobs.wait(name, "deleted")
    jobs.expect_all_gone(name)
    jobs.apply(manifest("fails", stages=2))
    pods = jobs.run("fails", 2)
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[1]["metadata"]["name"], exit_code=3)
    killer.strike()  # failing
    jobs.wait("fails", "Failed")
    jobs.patch("fails", {"ttlSecondsAfterFinished": 1})
    killer.strike()  # being cleaned up
    jobs.wait("fails", "deleted")
    assert killer.kills == 9
