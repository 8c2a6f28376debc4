"""The ingest is killed at its writes of a job, status and plan, from the first to the last: one
that starts again, or the leader of two, whose standby takes over."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import NamedTuple, get_args

import pytest
from api_proxy import ApiProxy, Moment, api_proxy
from operator_support import DEADLINE, FULL_NAME, Jobs, Object, Program, manifest
from played_ranks import Followers
from testbed import NotYet, wait_for
from testbed.waiting import patience

from pipemorph.protocol import PodFailure, PodReport

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

STAGES = 2
MOMENTS: tuple[Moment, ...] = get_args(Moment)
PASSED = 1, 2
"""Writes between two that the ingest is killed at, in turn. A plan follows its status: so both are
killed at, and both get through."""
FEW = 4
"""Kills of the leader of two, unless it is a long run: each takes as long as the Lease lasts."""
MOST_MORE = 12
"""Changes of the link at the end, until there was a kill of each kind."""
AWAY_SECONDS = 10.0
"""Seconds until the standby has answered for a killed one."""


class Replica(NamedTuple):
    """``proxy``: its way to the API server; ``port``: where it answers."""

    program: Program
    proxy: ApiProxy
    port: int

    @property
    def passed(self) -> int:
        """Writes that have reached the API server."""
        return sum(_writes_job(*each) for each in self.proxy.requests)


class Killer:
    """Kills the ingest at writes of a job: in turn the write is lost, arrives after another ingest
    serves the job, or has arrived unacknowledged. Of two replicas the leader is killed, and starts
    again once the other one has written in its stead. ``most``: kills; None: as many as there is
    time for."""

    def __init__(self, replicas: Sequence[Replica], seed: int, most: int | None) -> None:
        self.replicas, self.seed, self.most = replicas, seed, most
        self.kills: list[Moment] = []
        self.taken_over = 0
        """Number of kills after which another one has written."""
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
        """Raise the error that has ended its work, if any."""
        if self._working.done():
            self._working.result()

    def log_end(self) -> str:
        """Last log lines of the replicas."""
        return "\n".join(each.program.process.log_end(40) for each in self.replicas)

    def _work(self) -> None:
        for number in count(self.seed):
            if len(self.kills) == self.most:
                return
            spared = PASSED[number % len(PASSED)] if self.kills else self.seed
            if not self._until(partial(self._have_passed, self._passed() + spared)):
                return
            moment, first = MOMENTS[number % len(MOMENTS)], _First()
            for each in self.replicas:
                each.proxy.hold(first, moment)
            if not self._until(lambda: any(each.proxy.holds for each in self.replicas)):
                self._open()
                return
            killed = next(each for each in self.replicas if each.proxy.holds)
            others = [each for each in self.replicas if each is not killed]
            for each in others:
                each.proxy.open()
            before = [each.passed for each in others]
            killed.program.kill()
            self.kills.append(moment)
            if moment != "late":
                killed.proxy.open()
            if others:
                if not self._until(partial(_has_written, others, before)):
                    self._open()
                    return
                self.taken_over += 1
            if moment == "late" and others:
                killed.proxy.open()
            killed.program.start()
            killed.proxy.open()

    def _open(self) -> None:
        for each in self.replicas:
            each.proxy.open()

    def _until(self, holds: Callable[[], bool]) -> bool:
        """Return true if it holds before this is stopped."""
        while not holds():
            if self._stop.wait(0.005):
                return False
        return True

    def _have_passed(self, number: int) -> bool:
        return self._passed() >= number

    def _passed(self) -> int:
        """Writes that have reached the API server."""
        return sum(each.passed for each in self.replicas)


def _has_written(replicas: Sequence[Replica], before: Sequence[int]) -> bool:
    return any(each.passed > n for each, n in zip(replicas, before, strict=True))


class _First:
    """Matches the first write of a job."""

    def __init__(self) -> None:
        self._requested = False

    def __call__(self, method: str, path: str) -> bool:
        if self._requested or not _writes_job(method, path):
            return False
        self._requested = True
        return True


def _writes_job(method: str, path: str) -> bool:
    """True if it writes the status of a job."""
    return method != "GET" and "/pipemorphjobs/" in path


class Launchers:
    """Launchers of a job's pods, which report their ranks' ends, again until they are answered."""

    def __init__(self, jobs: Jobs, name: str, pods: list[Object], ports: Sequence[int]) -> None:
        self.jobs, self.name, self.ports = jobs, name, list(ports)
        self.tokens = [jobs.token(name, pod) for pod in pods]

    def fail(self, generation: int, finished: int) -> None:
        """A rank of pod 0 fails in this generation; the next one follows."""
        loss = PodFailure(reason="rank 0 was killed by SIGKILL", at=1.0, rank=0)
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
        self, generation: int, pod: int, event: str, loss: PodFailure | None, finished: int
    ) -> Object:
        report = PodReport.model_validate(
            {
                "attempt": 0, "generation": generation, "pod": pod, "launcher": f"pod-{pod}",
                "event": event, "loss": loss, "finished": finished if event == "gone" else 0,
            }
        )  # fmt: skip
        path = f"/v1/jobs/{self.jobs.namespace}/{self.name}/generation"
        body = report.model_dump_json().encode()

        def read_answer() -> Object:
            try:
                status, answer = self.jobs.installation.request(
                    "POST", path, token=self.tokens[pod], body=body, port=self.ports[0]
                )
            except OSError as error:
                self.ports.append(self.ports.pop(0))
                raise NotYet(f"it does not answer: {error!r}") from None
            if status != 200:
                self.ports.append(self.ports.pop(0))
                raise NotYet(f"it answered {status}: {answer}")
            return answer

        return wait_for(f"the ingest to hear that pod {pod} {event}", read_answer, DEADLINE)


@pytest.mark.parametrize(
    ("number", "seed", "most"),
    [
        (1, 0, None),
        (2, 0, FEW),
        *(pytest.param(1, i, None, marks=pytest.mark.soak) for i in range(1, 6)),
        *(pytest.param(2, i, None, marks=pytest.mark.soak) for i in range(1, 4)),
    ],
)
def test_killed_at_writes_of_every_transition(
    jobs: Jobs, tmp_path: Path, number: int, seed: int, most: int | None
) -> None:
    """Versions name one plan each, also over attempts; each change of a link is answered with a
    newer plan; a failure is one generation, counted once; the final status is right."""
    jobs.installation.ingest.process.stop()
    with (
        _replicas(jobs, tmp_path, number) as replicas,
        Killer(replicas, seed, most).at_work() as killer,
    ):
        away = _live(jobs, [each.port for each in replicas], killer)
    assert set(killer.kills) == set(MOMENTS), killer.kills
    print(f"{len(killer.kills)} kills; no answer for {away:.1f} s at most")
    if number > 1:
        assert killer.taken_over >= len(killer.kills) - 1, "but after the job's last write"
        assert away < AWAY_SECONDS * patience(), f"no answer for {away:.1f} s"


@contextmanager
def _replicas(jobs: Jobs, folder: Path, number: int) -> Iterator[list[Replica]]:
    """``number`` replicas, each with a way of its own to the API server; the first one leads."""
    installation = jobs.installation
    account = installation.account(f"{FULL_NAME}-ingest")
    with ExitStack() as stack:
        found = []
        for each in range(number):
            proxy = stack.enter_context(api_proxy(jobs.cluster, account, folder / f"ingest-{each}"))
            program, port = installation.ingest_replica(f"killed-{each}", proxy.kubeconfig)
            found.append(Replica(program, proxy, port))
        try:
            for replica in found:
                replica.program.start()
            yield found
        finally:
            for replica in found:
                replica.program.process.stop()


def _live(jobs: Jobs, ports: list[int], killer: Killer) -> float:
    """A job that adapts, loses ranks, is suspended, adapts again, and completes. Returns the most
    seconds that a report of it has waited for its answer."""
    name = "killed-at"
    endless = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000}
    jobs.apply(manifest(name, stages=STAGES, trainer=endless, failurePolicy={"maxRestarts": 3}))
    pods = jobs.run(name, STAGES)
    ranks = Followers(jobs, name, ports, pods[0])
    ranks.run(4)
    _adapt(ranks, killer, (0.06, 0.0, 0.12))
    launchers = Launchers(jobs, name, pods, ports)
    for generation in range(2):
        launchers.fail(generation, finished=ranks.iteration)
        ranks.run(2)
    recoveries = jobs.wait(
        name, lambda job: job["status"].get("recoveries", {}).get("generation") == 2
    )["status"]["recoveries"]
    assert (recoveries["count"], recoveries["counted"]) == (2, 0), recoveries
    _adapt(ranks, killer, (0.0,))
    before, plans, waits = ranks.observed, ranks.plans, ranks.delivered
    jobs.patch(name, {"suspend": True})
    jobs.wait(name, "Suspended")
    jobs.expect_all_gone(name)
    jobs.patch(name, {"suspend": False})
    pods = jobs.run(name, STAGES, attempt=1)
    ranks = Followers(jobs, name, ports, pods[0], attempt=1)
    ranks.plans = plans
    ranks.run(4)
    for delay in islice(cycle((0.06, 0.0)), MOST_MORE):
        _adapt(ranks, killer, (delay,))
        if set(killer.kills) == set(MOMENTS):
            break  # On a busy machine a killed replica is back late, and the next kill is as late.
    assert ranks.observed > before, "an attempt begins with versions that the one before it had"
    jobs.succeed(pods)
    jobs.wait(name, "Complete")
    return max(waits + ranks.delivered)


def _adapt(ranks: Followers, killer: Killer, delays: tuple[float, ...]) -> None:
    """Change the delay of the link; each change is answered with a plan newer than all before."""
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
            details=lambda: f"{killer.kills} {killer.log_end()}",
        )
        ranks.run(2)
