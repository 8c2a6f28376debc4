"""Several replicas of the ingest serve: jobs are dealt among them, and move when one is killed."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
from operator_support import DEADLINE, FULL_NAME, SYSTEM, Jobs, Program, manifest
from played_ranks import Followers
from testbed import wait_for
from testbed.waiting import patience

from pipemorph_operator.ingest.seats.dealing import seat_of

pytest_plugins = ("operator_fixtures",)
pytestmark = pytest.mark.cluster

SEATS = [f"{FULL_NAME}-ingest-{i}" for i in range(2)]


@contextmanager
def two(jobs: Jobs) -> Iterator[dict[str, tuple[Program, int]]]:
    """Two replicas in place of the installation's one, by seat."""
    jobs.installation.ingest.process.stop()
    made = [jobs.installation.ingest_replica(f"replica-{i}", seats=2) for i in range(2)]
    try:
        for i, (program, _) in enumerate(made):
            program.start()
            serves(program, i + 1)
        yield dict(zip(SEATS, made, strict=True))
    finally:
        for program, _ in made:
            program.process.stop()


def serves(program: Program, members: int) -> None:
    def look() -> bool:
        acts = program.metric("pipemorph_ingest_leads") == 1.0
        return acts and program.metric("pipemorph_ingest_members") == members

    wait_for(
        f"{program.process.name} to serve as one of {members}",
        look,
        DEADLINE,
        interval=0.05,
        details=program.process.log_end,
    )


def dealt(jobs: Jobs, service: list[int], each: int) -> dict[str, list[Followers]]:
    """So many jobs for each seat. Their UIDs deal them, so it takes some tries."""
    endless = {"module": "pipemorph_trainer.examples.emulated", "iterations": 1_000_000}
    made: dict[str, list[Followers]] = {seat: [] for seat in SEATS}
    for i in range(40):
        name = f"dealt-{i}"
        jobs.apply(manifest(name, trainer=endless))
        seat = seat_of(jobs.get(name)["metadata"]["uid"], SEATS)
        assert seat is not None
        if len(made[seat]) < each:
            pods = jobs.run(name, 4)
            made[seat].append(Followers(jobs, name, service, pods[0]))
        else:
            jobs.cluster.client.delete("pipemorphjobs", name, jobs.namespace)
        if all(len(found) == each for found in made.values()):
            return made
    raise AssertionError(f"40 jobs are dealt like this: {made}")


def test_jobs_of_a_killed_replica_are_served_by_the_other_and_no_others_move(jobs: Jobs) -> None:
    with two(jobs) as replicas:
        (first, first_port), (second, second_port) = replicas.values()
        assert first.says() == f"ok\nreplica-0 has {SEATS[0]}; 2 replicas serve\n"
        found = dealt(jobs, [first_port, second_port], each=2)
        moving, staying = found[SEATS[0]], found[SEATS[1]]
        stop = threading.Event()

        def train(ranks: Followers) -> None:
            while not stop.is_set():
                ranks.run(1)

        with ThreadPoolExecutor(4) as pool:
            training = [pool.submit(train, ranks) for ranks in moving + staying]

            def all_have(what: str, holds: Any) -> None:
                def look() -> bool:
                    for each in training:
                        if each.done():
                            each.result()
                    return all(holds(ranks) for ranks in moving + staying)

                wait_for(what, look, DEADLINE, interval=0.05, details=second.process.log_end)

            try:
                all_have("iterations", lambda ranks: ranks.iteration >= 3)
                assert {tuple(ranks.owners) for ranks in moving} == {(first_port,)}
                assert {tuple(ranks.owners) for ranks in staying} == {(second_port,)}
                for ranks in moving + staying:
                    ranks.delays[1] = 0.06
                all_have("a plan", lambda ranks: ranks.observed > 0)
                before = {ranks.name: ranks.observed for ranks in moving + staying}
                killed = time.monotonic()
                first.kill()
                # Half a second: answers that were under way are not of the second.
                all_have(
                    "an answer of the second",
                    lambda ranks: (
                        ranks.owners[-1] == second_port and ranks.answered[-1] > killed + 0.5
                    ),
                )
                served = {
                    ranks.name: next(at for at in ranks.answered if at > killed + 0.5) - killed
                    for ranks in moving
                }
                assert max(served.values()) < 10.0 * patience(), served
                for ranks in moving + staying:
                    ranks.delays[1] = 0.0
                all_have("another plan", lambda ranks: ranks.observed > before[ranks.name])
                # It is back: it has its jobs again, and their plans.
                kept = {ranks.name: ranks.observed for ranks in moving}
                first.start()
                all_have(
                    "the first's answers",
                    lambda ranks: ranks in staying or ranks.owners[-1] == first_port,
                )
            finally:
                stop.set()
            for each in training:
                each.result()
        for ranks in staying:
            assert ranks.owners == [second_port], "it was disturbed"
            gaps = [b - a for a, b in zip(ranks.answered, ranks.answered[1:], strict=False)]
            assert max(gaps) < 3.0 * patience(), max(gaps)
        for ranks in moving:
            assert ranks.owners == [first_port, second_port, first_port]
            assert ranks.observed >= kept[ranks.name]
            control = jobs.get(ranks.name)["status"]["control"]
            assert control["reserved"] >= ranks.observed
        print("seconds without an answer:", json.dumps(served))


def test_a_replica_that_is_stopped_hands_over_at_once(jobs: Jobs) -> None:
    with two(jobs) as replicas:
        (first, first_port), (_, second_port) = replicas.values()
        found = dealt(jobs, [first_port, second_port], each=1)
        (ranks,) = found[SEATS[0]]
        ranks.run(2)
        assert ranks.owners == [first_port]
        first.process.stop()
        assert not jobs.cluster.client.get("leases", SEATS[0], SYSTEM)["spec"]["holderIdentity"]
        began = time.monotonic()
        ranks.run(1)
        took = time.monotonic() - began
        assert took < 5.0 * patience(), f"served again after {took:.1f} s"
        assert ranks.owners == [first_port, second_port]


def test_one_without_a_seat_stands_by_and_names_no_owner(jobs: Jobs) -> None:
    third, port = jobs.installation.ingest_replica("third")
    third.start()
    try:
        assert third.says() == "ok\nthird stands by; 1 replica serves\n"
        status, answer = jobs.installation.request(
            "POST", "/v1/jobs/a/b/reports", token="x", body=b"{}", port=port
        )
        assert (status, set(answer)) == (421, {"error"})
    finally:
        third.process.stop()
