"""The ingest is killed at its writes of a job, status and plan, from the first to the last."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import get_args

import pytest
from api_proxy import ApiProxy, Moment, api_proxy
from operator_support import DEADLINE, FULL_NAME, Jobs, Object, Program, manifest
from played_ranks import Followers
from testbed import NotYet, wait_for

from pipemorph.wire import Loss, PodReport

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

STAGES = 2
MOMENTS: tuple[Moment, ...] = get_args(Moment)
PASSED = 1, 2
"""Writes between two that the ingest is killed at, in turn. A plan follows its status: so both are
killed at, and both get through."""


class Killer:
    """Kills the ingest at writes of a job: in turn the write is lost, arrives after another ingest
    serves the job, or has arrived and nobody was told."""

    def __init__(self, proxy: ApiProxy, ingest: Program, seed: int) -> None:
        self.proxy, self.ingest, self.seed = proxy, ingest, seed
        self.kills: list[Moment] = []
        self._stop = threading.Event()

    @contextmanager
    def at_work(self) -> Iterator["Killer"]:
        with ThreadPoolExecutor(1) as pool:
            self._working = pool.submit(self._work)
            try:
                yield self
            finally:
                self._stop.set()
                self._working.result()

    def expect_at_work(self) -> None:
        """Raise what has ended its work, if anything has."""
        if self._working.done():
            self._working.result()

    def _work(self) -> None:
        for number in count(self.seed):
            spared = PASSED[number % len(PASSED)] if self.kills else self.seed
            if not self._until(partial(self._have_passed, self._passed() + spared)):
                return
            moment = MOMENTS[number % len(MOMENTS)]
            self.proxy.hold(_First(), moment)
            if not self._until(lambda: self.proxy.holds):
                self.proxy.open()
                return
            self.ingest.kill()
            self.kills.append(moment)
            if moment == "late":
                self.ingest.start()
                self.proxy.open()
            else:
                self.proxy.open()
                self.ingest.start()

    def _until(self, holds: Callable[[], bool]) -> bool:
        """Whether it holds before this is stopped."""
        while not holds():
            if self._stop.wait(0.005):
                return False
        return True

    def _have_passed(self, number: int) -> bool:
        return self._passed() >= number

    def _passed(self) -> int:
        """Writes that have reached the API server."""
        return sum(_writes_job(*each) for each in self.proxy.asked)


class _First:
    """The first write of a job that is asked."""

    def __init__(self) -> None:
        self._asked = False

    def __call__(self, method: str, path: str) -> bool:
        if self._asked or not _writes_job(method, path):
            return False
        self._asked = True
        return True


def _writes_job(method: str, path: str) -> bool:
    """Whether it writes the status or the plan of a job."""
    return method != "GET" and ("/pipemorphjobs/" in path or "/pipemorphplans" in path)


class Launchers:
    """Those of a job's pods, which tell of their ranks' ends, again until they are answered."""

    def __init__(self, jobs: Jobs, name: str, pods: list[Object], port: int) -> None:
        self.jobs, self.name, self.port = jobs, name, port
        self.tokens = [jobs.token(name, pod) for pod in pods]

    def fail(self, generation: int, finished: int) -> None:
        """A rank of pod 0 fails in this generation; the next one follows."""
        loss = Loss(reason="rank 0 was killed by SIGKILL", at=1.0, rank=0)
        self._tell(generation, 0, "failed", loss, finished)
        for pod in range(len(self.tokens)):
            self._tell(generation, pod, "gone", loss if pod == 0 else None, finished)
        for pod in range(len(self.tokens)):

            def follows(pod: int = pod) -> bool:
                loss_of = loss if pod == 0 else None
                newest = self._tell(generation, pod, "gone", loss_of, finished)
                assert newest["generation"] <= generation + 1, newest
                assert not newest.get("verdict"), newest
                return bool(newest["generation"] == generation + 1)

            wait_for(f"generation {generation + 1} at pod {pod} of {self.name}", follows, DEADLINE)

    def _tell(
        self, generation: int, pod: int, event: str, loss: Loss | None, finished: int
    ) -> Object:
        report = PodReport.model_validate(
            {
                "attempt": 0, "generation": generation, "pod": pod, "launcher": f"pod-{pod}",
                "event": event, "loss": loss, "finished": finished if event == "gone" else 0,
            }
        )  # fmt: skip
        path = f"/v1/jobs/{self.jobs.namespace}/{self.name}/generation"
        body = report.model_dump_json().encode()

        def told() -> Object:
            try:
                status, answer = self.jobs.installation.request(
                    "POST", path, token=self.tokens[pod], body=body, port=self.port
                )
            except OSError as error:
                raise NotYet(f"it does not answer: {error!r}") from None
            if status != 200:
                raise NotYet(f"it answered {status}: {answer}")
            return answer

        return wait_for(f"the ingest to hear that pod {pod} {event}", told, DEADLINE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(i, marks=pytest.mark.soak) for i in range(1, 6))]
)
def test_killed_at_writes_of_every_transition(jobs: Jobs, tmp_path: Path, seed: int) -> None:
    """No version is two plans, also not over attempts; each change of a link is answered with a
    newer plan; a failure is one generation, counted once; the last word is right."""
    installation = jobs.installation
    installation.ingest.process.stop()
    account = installation.account(f"{FULL_NAME}-ingest")
    with api_proxy(jobs.cluster, account, tmp_path / "ingest") as proxy:
        ingest, port = installation.ingest_replica("killed", proxy.kubeconfig)
        ingest.start()
        try:
            with Killer(proxy, ingest, seed).at_work() as killer:
                _live(jobs, port, killer)
        finally:
            ingest.process.stop()
    assert set(killer.kills) == set(MOMENTS), killer.kills
    print(f"{len(killer.kills)} kills")


def _live(jobs: Jobs, port: int, killer: Killer) -> None:
    """A job that adapts, loses ranks, is suspended, adapts again, and completes."""
    name = "killed-at"
    endless = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000}
    jobs.apply(manifest(name, stages=STAGES, trainer=endless, failurePolicy={"maxRestarts": 3}))
    pods = jobs.run(name, STAGES)
    ranks = Followers(jobs, name, [port], pods[0])
    ranks.run(4)
    _adapt(ranks, killer, (0.06, 0.0, 0.12))
    launchers = Launchers(jobs, name, pods, port)
    for generation in range(2):
        launchers.fail(generation, finished=ranks.iteration)
        ranks.run(2)
    recoveries = jobs.wait(
        name, lambda job: job["status"].get("recoveries", {}).get("generation") == 2
    )["status"]["recoveries"]
    assert (recoveries["count"], recoveries["counted"]) == (2, 0), recoveries
    _adapt(ranks, killer, (0.0,))
    before, plans = ranks.observed, ranks.plans
    jobs.patch(name, {"suspend": True})
    jobs.wait(name, "Suspended")
    jobs.expect_none_left(name)
    jobs.patch(name, {"suspend": False})
    pods = jobs.run(name, STAGES, attempt=1)
    ranks = Followers(jobs, name, [port], pods[0], attempt=1)
    ranks.plans = plans
    ranks.run(4)
    _adapt(ranks, killer, (0.06,))
    assert ranks.observed > before, "an attempt begins with versions that the one before it had"
    control = jobs.get(name)["status"]["control"]
    assert control["reserved"] >= ranks.observed, control
    jobs.succeed(pods)
    jobs.wait(name, "Complete")


def _adapt(ranks: Followers, killer: Killer, delays: tuple[float, ...]) -> None:
    """Each delay of the link is answered with a plan that is newer than all before."""
    for delay in delays:
        before, ranks.delays[0] = ranks.observed, delay

        def newer(before: int = before) -> bool:
            killer.expect_at_work()
            ranks.run(1)
            return ranks.observed > before

        wait_for(
            f"a plan for a delay of {delay} s, newer than {before}",
            newer,
            DEADLINE,
            interval=0.0,
            details=lambda: f"{killer.kills} {killer.ingest.process.log_end(40)}",
        )
        ranks.run(2)
