"""Replicas of each process, two: one acts, and the other takes over, however the first one ends."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from api_proxy import api_proxy
from operator_support import DEADLINE, FULL_NAME, SYSTEM, Jobs, Object, Program, manifest
from testbed import wait_for
from testbed.waiting import patience

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

SHORT = 2
"""Seconds of a Lease where what is tried is the order of things, not how long they take."""


def leads(program: Program) -> bool:
    return program.metric("pipemorph_operator_leads") == 1.0


def wait_leads(program: Program) -> float:
    """Wait until it leads; return the seconds that took."""
    began = time.monotonic()
    wait_for(
        f"{program.process.name} to lead",
        lambda: leads(program),
        DEADLINE,
        interval=0.02,
        details=program.process.log_end,
    )
    return time.monotonic() - began


def lease(jobs: Jobs) -> Object:
    found: Object = jobs.cluster.client.get("leases", FULL_NAME, SYSTEM)["spec"]
    return found


@contextmanager
def two(
    jobs: Jobs, *, lease_seconds: int = SHORT, through: Path | None = None
) -> Iterator[tuple[Program, Program]]:
    """Replicas in place of the installation's one; the first leads. ``through``: its way to the API
    server, if not the usual one."""
    jobs.installation.operator.process.stop()
    kube = jobs.installation.account()
    both = (
        jobs.installation.replica("first", through or kube, lease_seconds=lease_seconds),
        jobs.installation.replica("second", kube, lease_seconds=lease_seconds),
    )
    try:
        for program in both:
            program.start()
            wait_leads(both[0])
        yield both
    finally:
        for program in reversed(both):
            program.process.stop()


def test_another_leads_when_the_leader_is_killed_in_the_middle_of_something(jobs: Jobs) -> None:
    """The leader ends without notice, as on a lost node. The Lease has the chart's duration."""
    with two(jobs, lease_seconds=6) as (first, second):
        assert second.says() == "ok\nsecond stands by; first leads\n"
        jobs.apply(manifest("handed", stages=2, failurePolicy={"maxRestarts": 1}))
        pods = jobs.run("handed", 2)
        jobs.cluster.fake_pod_failed(jobs.namespace, pods[0]["metadata"]["name"], exit_code=3)
        time.sleep(random.Random(3).uniform(0.0, 0.15))  # A moment inside the restart.
        first.kill()
        took = wait_leads(second)
        assert took < 10.0 * patience(), f"another led after {took:.1f} s"
        jobs.run("handed", 2, attempt=1)
        status = jobs.get("handed")["status"]
        assert (status["attempt"], status["restarts"]) == (1, 1), "an attempt was counted twice"
        assert [a["attempt"] for a in status["attempts"]] == [0]
        assert second.says() == "ok\nsecond leads\n"
        assert "second became leader" in jobs.cluster.events("leases", FULL_NAME, SYSTEM)


def test_a_leader_that_slept_over_the_end_of_its_lease_writes_nothing(
    jobs: Jobs, tmp_path: Path
) -> None:
    """Leader stopped between a read and the write that would have followed."""
    kube = jobs.installation.account()
    with (
        api_proxy(jobs.cluster, kube, tmp_path / "kubeconfig") as proxy,
        two(jobs, through=proxy.kubeconfig) as (first, second),
    ):
        proxy.hold(lambda method, path: path.endswith("/pipemorphjobs/asleep"))
        jobs.apply(manifest("asleep", stages=1))
        proxy.wait_held()  # It has read the job, to create what belongs to it.
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            wait_leads(second)
            pods = jobs.run("asleep", 1)
            written = proxy.writes()
            proxy.open()
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        stands_by = "ok\nfirst stands by; second leads\n"
        wait_for("the first to stand by", lambda: first.says() == stands_by, DEADLINE)
        # Whatever it still had in hand has come to an end.
        log = first.process.log
        wait_for(
            "the first to give up",
            lambda: "first does not lead any more" in log.read_text(),
            DEADLINE,
            details=first.process.log_end,
        )
        assert proxy.writes() == written
        assert ("GET", jobs.cluster.client.path("pipemorphjobs", jobs.namespace, "asleep")) in (
            proxy.requests
        )
        # The replica still follows: once it leads again, it goes on from there.
        second.process.stop()
        wait_leads(first)
        jobs.succeed(pods)
        jobs.wait("asleep", "Complete")
        assert len(proxy.writes()) > len(written)
