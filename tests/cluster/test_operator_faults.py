"""The operator is killed in the middle of everything; the API server goes away and comes back."""

import asyncio
import random
import time

import pytest
from operator_support import DEADLINE, Jobs, Object, manifest
from played_ranks import Ranks
from testbed import wait_for

from pipemorph_operator.cluster.client import Cluster
from pipemorph_operator.config import OperatorConfig
from pipemorph_operator.reconcile.reconciler import Reconciler

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
    jobs.expect_none_left(name)
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
    jobs.expect_none_left(name)
    jobs.apply(manifest("fails", stages=2))
    pods = jobs.run("fails", 2)
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[1]["metadata"]["name"], exit_code=3)
    killer.strike()  # failing
    jobs.wait("fails", "Failed")
    jobs.patch("fails", {"ttlSecondsAfterFinished": 1})
    killer.strike()  # being cleaned up
    jobs.wait("fails", "deleted")
    assert killer.kills == 9


def test_the_ingest_killed_in_the_middle_of_an_adaptation(jobs: Jobs) -> None:
    """Before, while and after a directive is served and persisted: versions grow, none is two
    plans, and the ranks' plan is kept or replaced."""
    # So many iterations that a change of plan always pays, however long this takes.
    endless = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000}
    jobs.apply(manifest("reborn", trainer=endless))
    ranks = Ranks.of(jobs, "reborn", jobs.run("reborn", 4)[0])
    ranks.run(4)
    chance = random.Random(5)
    seen, plans = [0], {0: ranks.plan}

    def adapted() -> bool:
        ranks.run(1)
        plan = ranks.next.plan.plan() if ranks.next is not None else ranks.plan
        assert plans.setdefault(plan.version, plan) == plan, f"version {plan.version} is two plans"
        return ranks.observed > seen[-1]

    for delay in (0.06, 0.0, 0.12):
        ranks.delays[1] = delay
        # While evidence is gathered, which is gathered again, or the directive is on its way.
        for _ in range(chance.randint(1, 3)):
            adapted()
        jobs.installation.ingest.restart()
        wait_for(
            f"a directive for a delay of {delay} s after plan versions {seen}",
            adapted,
            DEADLINE,
            interval=0.0,
            details=lambda: f"{ranks.iteration}: {jobs.installation.ingest.process.log_end(40)}",
        )
        # It was served this moment, and may not be in status.
        jobs.installation.ingest.restart()
        adapted()
        adapted()
        seen.append(ranks.observed)
    assert seen == sorted(seen)


class Behind(Cluster):
    """The API server as one sees it who has read a job some time ago."""

    read: Object

    async def get(self, url: str) -> Object | None:
        return self.read if "/pipemorphjobs/" in url else await super().get(url)


def test_a_write_of_one_that_is_behind_is_not_taken(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an operator that was cut off and does not know that another took its place."""
    jobs.apply(manifest("fenced", stages=1))
    jobs.pods("fenced", 1)
    jobs.wait("fenced", "Starting")
    jobs.installation.operator.kill()
    old = jobs.get("fenced")
    newer = {"status": {"attempt": 5}}
    jobs.cluster.client.patch(
        "pipemorphjobs", "fenced", newer, jobs.namespace, subresource="status"
    )
    monkeypatch.setenv("KUBECONFIG", str(jobs.cluster.admin))

    async def turn() -> float | None:
        config = OperatorConfig(ingest_url="https://none.invalid")
        configuration = (await Cluster.configured())._configuration
        async with Behind(configuration) as api:
            # There is something to write.
            api.read = old | {"status": old["status"] | {"ready": "7/1"}}
            return await Reconciler(api, lambda: config, lambda *_: []).reconcile(
                jobs.namespace, "fenced"
            )

    assert asyncio.run(turn()) == 0.0
    status = jobs.get("fenced")["status"]
    assert (status["attempt"], status["ready"]) == (5, "0/1")


def test_one_attempt_at_a_time(jobs: Jobs) -> None:
    """The next attempt waits for the last one's ranks, which here have a kubelet that is slow."""
    jobs.apply(manifest("waits", stages=2, failurePolicy={"maxRestarts": 1}))
    node = f"{jobs.namespace}-slow"
    jobs.cluster.fake_node(node)
    pods = jobs.pods("waits", 2)
    for pod in pods:
        jobs.cluster.fake_pod_running(jobs.namespace, pod["metadata"]["name"], node=node)
    jobs.wait("waits", "Running")
    jobs.cluster.fake_pod_failed(jobs.namespace, pods[0]["metadata"]["name"])
    jobs.wait("waits", "Restarting")
    assert len(jobs.batch_jobs("waits")) == 1, "two attempts at a time"
    jobs.cluster.fake_pod_gone(jobs.namespace, pods[1]["metadata"]["name"])
    jobs.run("waits", 2, attempt=1)


def test_the_api_server_goes_away_and_comes_back(jobs: Jobs) -> None:
    plane = jobs.cluster.control_plane
    if plane is None:
        pytest.skip("the control plane is not ours to stop")
    jobs.apply(manifest("before", stages=2))
    pods = jobs.run("before", 2)
    ranks = Ranks.of(jobs, "before", pods[0])
    ranks.run(2)
    plane.restart_apiserver()
    ranks.run(2)
    plane.wait_for_controllers()
    jobs.apply(manifest("after", stages=2))
    jobs.run("after", 2)
    jobs.succeed(pods)
    jobs.wait("before", "Complete")
    for program in (jobs.installation.operator, jobs.installation.ingest):
        assert program.process.running, program.process.log_end()
