"""Replicas with plans of their own: who shares one, what they promise, and what becomes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from plant_support import BASE, Plant, spec

from pipemorph.api.mesh import MeshShape
from pipemorph.api.running import Running
from pipemorph.api.spec import JobSpec
from pipemorph.api.status import MAX_PLANS
from pipemorph.control import Health, JobController, initial_plan
from pipemorph.control.decide.forecast import Forecast, Option, folded
from pipemorph.control.decide.replan import OwnPlans, Proposal, Replan, propose, together
from pipemorph.control.decide.situation import (
    ReplicaLinks,
    Situation,
    change_of_links,
    seen,
    sources_of,
    without,
)
from pipemorph.control.decide.truth import Evidence
from pipemorph.control.first_plan import planning_rules
from pipemorph.control.observe.observer import Observer
from pipemorph.control.observed.reports import LinkTable
from pipemorph.control.observed.stages import expected_times
from pipemorph.planning import Dispatch, Plan, Route, problem_for
from pipemorph.planning.simulation.simulator import simulate
from pipemorph.replay.ranks import JobTelemetry, PlayedRanks
from pipemorph.wire import (
    DirectiveEnvelope,
    IterationSample,
    LinkSample,
    LinkState,
    PlanMessage,
    WireTime,
)

STAGES, LINKS = 4, 3


def job(replicas: int, *, stages: int = STAGES, **fields: Any) -> JobSpec:
    fields.setdefault("parallelism", {"stages": stages, "replicas": replicas})
    return spec(stages, fields.pop("microbatches", 12), **fields)


def links(
    replicas: tuple[int, ...], delays: Mapping[int, float], count: int = LINKS
) -> ReplicaLinks:
    late = tuple(delays.get(link, 0.0) for link in range(count))
    return ReplicaLinks(
        replicas=replicas,
        wire_times=tuple(BASE + each for each in late),
        delays=late,
        slow=tuple(each > 0 for each in late),
        unknown=(False,) * count,
        transfers=(0.0,) * count,
    )


def situation(job: JobSpec, delays: Mapping[int, Mapping[int, float]]) -> Situation:
    """Delays by replica and link; all other replicas are well."""
    count = job.parallelism.stages - 1
    own = [links((replica,), each, count) for replica, each in sorted(delays.items())]
    well = tuple(r for r in range(job.parallelism.replicas) if r not in delays)
    own += [links(well, {}, count)] if well else []
    worst = own[0]
    for each in own[1:]:
        worst = worst.joined(each)
    times = expected_times(job)
    assert times is not None
    return Situation(
        times, worst.wire_times, worst.delays, worst.slow, worst.unknown, own=tuple(own)
    )


def asked(job: JobSpec, now: Situation, current: Plan | None = None, **fields: Any) -> Replan:
    first = initial_plan(job)
    rest: dict[str, Any] = {"cause": "slow", "lost": False, "remaining": 1000}
    rest |= {"change_seconds": 0.0, "evidence": Evidence()}
    return Replan(
        spec=planning_rules(job),
        situation=now,
        current=current or first,
        running=current or first,
        baseline=first,
        **rest | fields,
    )


def chosen(proposal: Proposal) -> Option:
    assert proposal.chosen is not None, proposal.found
    return proposal.chosen


# --- who shares a plan ----------------------------------------------------------------------


def test_replicas_with_equal_delays_share_a_plan() -> None:
    own = [links((r,), {1: 0.040 + 0.001 * r}) for r in range(3)]
    groups = folded([*own, links((3, 4), {}), links((5,), {2: 0.040})], least=0.002, most=8)
    assert [each.replicas for each in groups] == [(0, 1, 2), (5,), (3, 4)]
    assert groups[0].delays == (0.0, pytest.approx(0.042), 0.0), "the worst of them"
    assert [each.replicas for each in folded(own[:1], least=0.002, most=8)] == [(0,)]


def test_of_too_many_the_least_delayed_share_one() -> None:
    own = [links((r,), {r % LINKS: 0.010 * (r + 1)}) for r in range(10)]
    groups = folded(own, least=0.001, most=4)
    assert len(groups) == 4
    assert sorted(r for each in groups for r in each.replicas) == list(range(10))
    assert (9,) in [each.replicas for each in groups]
    merged = next(each for each in groups if 0 in each.replicas)
    assert all(
        late >= own[r].delays[i] for r in merged.replicas for i, late in enumerate(merged.delays)
    )


def test_the_plan_of_most_replicas_is_that_of_all_that_are_not_named() -> None:
    first = initial_plan(job(2))
    moved = replace(first, routes=(Route.DELEGATED, *first.routes[1:]))
    guided = replace(first, dispatch=Dispatch.GUIDED)
    plan = together([((3,), moved), ((7,), guided), ((0, 5), first), ((1,), moved), ((4,), first)])
    assert plan.routes == first.routes
    assert [replicas for replicas, _ in plan.own] == [(1, 3), (7,)]
    plan = replace(plan, version=6)
    for replica, expected in ((0, first), (2, first), (3, moved), (7, guided)):
        assert plan.of_replica(replica) == replace(expected, version=6)
    assert plan.delegated == (0,), "of any replica"
    assert plan.all_routes == moved.routes
    assert not plan.runs_as(replace(first, version=6))
    assert PlanMessage.model_validate_json(PlanMessage.of(plan).body()).plan() == plan
    assert PlanMessage.of(plan).of_replica(3) == PlanMessage.of(plan.of_replica(3))


# --- what is chosen -------------------------------------------------------------------------


def test_each_replica_runs_the_plan_for_its_own_slow_links() -> None:
    limited = job(4, stages=8, microbatches=24, schedule={"inFlightLimit": 10})
    now = situation(limited, {1: {0: 0.06}, 3: {6: 0.06}})
    found = propose(asked(limited, now))
    best = chosen(found)
    assert [replicas for replicas, _ in best.plan.own] == [(1,), (3,)]
    one, three = best.plan.of_replica(1), best.plan.of_replica(3)
    assert (one.delegated, three.delegated) == ((0,), (6,))
    assert best.plan.of_replica(0).schedule == initial_plan(limited).schedule
    joint = propose(asked(limited, replace(now, own=())))
    forecast = Forecast(limited, now)
    assert best.seconds < 0.9 * forecast.of(chosen(joint).plan).seconds
    # The iteration is that of the slowest replica, each with its own delays.
    each = [forecast.under(now.of([r])).of(best.plan.of_replica(r)).seconds for r in range(4)]
    assert best.seconds == pytest.approx(max(each))
    (told,) = (each for each in found.found if isinstance(each, OwnPlans))
    assert told.rows == (((1,), ((0, 0.06),)), ((3,), ((6, 0.06),)))


def test_one_plan_stays_if_it_is_as_good() -> None:
    """Without caps, warm-up for one link costs little on another."""
    free = job(3, microbatches=24)
    now = situation(free, {1: {0: 0.02}, 2: {2: 0.02}})
    assert not chosen(propose(asked(free, now))).plan.own
    slow = situation(free, {r: {1: 0.05} for r in range(3)})
    assert not chosen(propose(asked(free, slow))).plan.own, "all are alike"
    eager = job(3, microbatches=24, adaptation={"minGain": 0.0})
    assert not chosen(propose(asked(eager, slow))).plan.own


def test_a_replica_keeps_the_first_plan_while_another_one_is_slower_anyway() -> None:
    limited = job(3, stages=8, microbatches=24, schedule={"inFlightLimit": 10})
    now = situation(limited, {0: {0: 0.08}, 1: {3: 0.08}, 2: {5: 0.003}})
    best = chosen(propose(asked(limited, now))).plan
    assert best.of_replica(2).schedule == initial_plan(limited).schedule
    assert best.of_replica(2).delegated == ()


def test_only_the_slowest_replica_needs_a_plan_that_is_hard_to_find(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searched: list[tuple[float, ...]] = []

    def longer_searched(self: Forecast, best: Option) -> list[Option]:
        searched.append(self._situation.delays)
        return []

    monkeypatch.setattr(Forecast, "longer_searched", longer_searched)
    limited = job(3, stages=8, microbatches=24, schedule={"inFlightLimit": 10})
    now = situation(limited, {0: {0: 0.08}, 1: {3: 0.02}})
    assert len(chosen(propose(asked(limited, now))).plan.own) == 2
    assert searched == [now.delays, now.own[0].delays]


def test_a_plan_of_any_replica_must_keep_to_the_limits() -> None:
    limited = job(2, stages=8, microbatches=24, schedule={"inFlightLimit": 10})
    wide = initial_plan(job(2, stages=8, microbatches=24))
    plan = together([((0, 2), initial_plan(limited)), ((1,), wide)])
    now = situation(limited, {1: {0: 0.06}})
    rooms = JobController(limited)._observed.stages.rooms
    forecast = Forecast(limited, replace(now, rooms=rooms))
    assert forecast.excess(initial_plan(limited)) is None
    assert forecast.excess(plan) is not None


def test_large_plans_are_fewer() -> None:
    """A directive is bounded: of the largest plans there is room for one."""
    for stages, microbatches, most in ((8, 24, MAX_PLANS), (512, 512, 4), (512, 2048, 1)):
        large = JobSpec.model_validate(
            {
                "parallelism": {"stages": stages, "replicas": 12},
                "schedule": {"microbatches": microbatches},
                "trainer": {"module": "x", "iterations": 1},
            }
        )
        count = stages - 1
        own = tuple(links((r,), {r % count: 0.05 + 0.02 * r}, count) for r in range(12))
        now = replace(SMALL, own=own)
        assert len(Forecast(large, now).parts) == (most if most > 1 else 0)


SMALL = situation(job(2), {})


def test_evidence_is_taken_out_of_every_replica() -> None:
    two = job(3)
    before = situation(two, {1: {2: 0.03}})
    now = situation(two, {0: {0: 0.05}, 1: {2: 0.03, 0: 0.05}})
    left = without(now, {0}, before)
    assert left.slow_as(before)
    assert not now.slow_as(before)
    assert left.of([1]).delays == (0.0, 0.0, 0.03)
    assert left.of([1]).wire_times == pytest.approx((BASE, BASE, BASE + 0.03))
    assert left.of([0]).delays == (0.0,) * LINKS


def test_the_same_link_of_another_replica_is_other_evidence() -> None:
    three = job(3)
    before, now = situation(three, {1: {0: 0.03, 2: 0.03}}), situation(three, {2: {0: 0.03}})
    assert not situation(three, {1: {0: 0.03}}).slow_as(now), "the worst of each link is the same"
    now = situation(three, {1: {0: 0.03, 2: 0.03}, 2: {0: 0.03}})
    assert change_of_links(now, before, LEAST) == "slow"
    assert sources_of("slow", now, before, LEAST) == {0}


LEAST = 0.001


def test_what_is_not_known_of_a_replica_is_as_it_was_there() -> None:
    three = job(3)
    before = situation(three, {1: {0: 0.03}})
    unknown = [LinkState(link, Health.UNKNOWN) for link in range(LINKS)]
    own = [((1,), unknown), ((0, 2), unknown)]
    now = seen(before, unknown, own)
    assert now.slow_as(before)
    assert now.of([1]).delays == (0.03, 0.0, 0.0)
    assert now.of([0]).delays == (0.0, 0.0, 0.0)
    assert change_of_links(now, before, LEAST) is None


# --- the loop closed ------------------------------------------------------------------------


class Replicas(Plant):
    """Several replicas, each with its own ``delays_of``; an iteration lasts as long as the slowest
    one's."""

    def __init__(self, spec: JobSpec, **fields: Any) -> None:
        super().__init__(spec, **fields)
        self.delays_of = [[0.0] * (self.stages - 1) for _ in range(spec.parallelism.replicas)]

    def step(self) -> None:
        if self.prepared is not None and self.iteration >= self.prepared[0]:
            self.plan, self.prepared = self.prepared[1], None
        ran = [self._simulate(replica) for replica in range(len(self.delays_of))]
        seconds = max(result.makespan for result in ran)
        windows = max(2, int(seconds / 0.05))
        for _ in range(windows):
            self.now += seconds / windows
            self.send(
                links=[
                    self.sample(link, direction, BASE + delays[link]).model_copy(
                        update={
                            "replica": replica * self.spec.parallelism.mesh.lockstep,
                            "route": self.plan.of_replica(replica).routes[link],
                        }
                    )
                    for replica, delays in enumerate(self.delays_of)
                    for link in range(self.stages - 1)
                    for direction in ("forward", "backward")
                ]
            )
        self.seconds.append(seconds)
        self.versions.append(self.plan.version)
        self.iteration += 1
        sample = IterationSample(
            index=self.iteration - 1,
            seconds=seconds,
            loss=1.0,
            plan_version=self.plan.version,
            bubble_fraction=ran[0].bubble_fraction,
        )
        profiles = [self.profile(i, op) for i, op in enumerate(self.ops)]
        self.send(stages=profiles, iterations=[sample])

    def _simulate(self, replica: int) -> Any:
        plan = self.plan.of_replica(replica)
        felt = [BASE + delay for delay in self.delays_of[replica]]
        count = self.spec.schedule.microbatches
        problem = problem_for(count, self.ops, felt, plan.routes, queues=8).under(plan)
        return simulate(plan.schedule, problem, delay_at=lambda link, _: felt[link])


def capped(**fields: Any) -> JobSpec:
    return job(3, stages=6, microbatches=18, schedule={"inFlightLimit": 8}, **fields)


def moved(plant: Replicas) -> list[tuple[int, ...]]:
    """Delegated links of each replica."""
    return [plant.plan.of_replica(r).delegated for r in range(len(plant.delays_of))]


def test_the_plan_of_each_replica_follows_its_own_links() -> None:
    plant = Replicas(capped())
    plant.run(6)
    undisturbed = plant.seconds[-1]
    plant.delays_of[1][0] = 0.06
    plant.run(10)
    assert moved(plant) == [(0,)] * 3, "one plan is as good for one slow link"
    plant.delays_of[2][4] = 0.06
    plant.run(10)
    assert moved(plant) == [(), (0,), (4,)]
    disturbed = plant.seconds[-1]
    newest, view = plant.controller.records[-1], plant.controller.view(plant.now)
    assert list(view.own_plans) == [own.text for own in newest.own_plans]
    for text, (replica, link) in zip(view.own_plans, ((1, 0), (2, 4)), strict=True):
        assert re.fullmatch(rf"replica {replica}: own plan for link {link} \+(59|60)\.\d ms", text)
    assert all(text in newest.reason for text in view.own_plans)
    lines = {each.plan_version: each.line for each in plant.controller.decisions}
    assert re.search(r"warm-up 8[-\d]+-1, 2 own plans", lines[newest.plan_version])
    assert [r.value for r in view.routes] == ["delegated", *["direct"] * 3, "delegated"]

    # The same link of another replica: the worst delay of the link does not change.
    plant.delays_of[0][0] = 0.06
    plant.run(10)
    assert moved(plant) == [(0,), (0,), (4,)], "nothing new was seen"
    assert plant.seconds[-1] == pytest.approx(disturbed, rel=0.02)
    plant.delays_of[0][0] = plant.delays_of[1][0] = 0.0
    plant.run(16)
    assert moved(plant)[2] == (4,)
    assert 0 not in plant.plan.delegated
    plant.delays_of[2][4] = 0.0
    plant.run(16)
    assert plant.plan.own == plant.plan.delegated == ()
    # The first plan, or one for which there was more time to search.
    assert plant.seconds[-1] <= 1.001 * undisturbed
    for record in plant.controller.records:
        assert record.kind != "revert", record
        if record.promised and record.iteration_seconds_after:
            assert record.measured == pytest.approx(record.promised, abs=0.12), record


def test_a_restarted_host_knows_the_plans_of_all_replicas() -> None:
    plant = Replicas(capped())
    plant.run(6)
    plant.delays_of[1][0], plant.delays_of[2][4] = 0.06, 0.06
    plant.run(10)
    assert len(plant.plan.own) == 2
    before = plant.controller
    saved = json.loads(json.dumps(before.snapshot()))
    plant.controller = JobController.restore(plant.spec, saved)
    assert plant.controller.wanted == before.wanted
    assert plant.controller.view(plant.now).own_plans == before.view(plant.now).own_plans
    version = plant.plan.version
    plant.run(6)
    assert plant.controller.decisions == [], "nothing has changed"
    assert plant.plan.version == version
    plant.delays_of[1][0] = plant.delays_of[2][4] = 0.0
    plant.run(16)
    assert plant.plan.own == ()


@pytest.mark.full
def test_fewer_replicas_keep_a_plan_of_all_and_get_others_of_their_own_anew() -> None:
    plant = Replicas(capped())
    plant.run(6)
    plant.delays_of[1][0] = 0.06
    plant.run(10)
    fewer = Running(plant.spec.parallelism, (0,)).spec(plant.spec)
    assert plant.controller.resized(fewer).wanted == plant.plan, "one of all replicas"
    plant.delays_of[2][4] = 0.06
    plant.run(10)
    assert len(plant.plan.own) == 2
    left = Replicas(fewer, controller=plant.controller.resized(fewer))
    assert left.controller.wanted == initial_plan(fewer), "replicas have other numbers"
    assert left.controller.plan_version == plant.controller.plan_version
    assert left.controller.records == plant.controller.records
    left.now, left.iteration, left.sequence = plant.now, plant.iteration, plant.sequence
    left.delays_of[0][0] = left.delays_of[1][4] = 0.06
    left.run(12)
    assert moved(left) == [(0,), (4,)]
    assert left.plan.version > plant.plan.version


def test_replicas_that_share_out_the_batch_begin_with_a_plan_for_it() -> None:
    cut = {"stages": STAGES, "replicas": 2, "minReplicas": 1, "batch": "keep"}
    plant = Replicas(job(2, parallelism=cut, failurePolicy={"maxRestarts": 1}))
    plant.run(6)
    plant.delays_of[0][0] = plant.delays_of[1][0] = 0.06
    plant.run(10)
    assert plant.plan.version > 0
    fewer = Running(plant.spec.parallelism, (0,)).spec(plant.spec)
    assert fewer.schedule.microbatches == 2 * plant.spec.schedule.microbatches
    left = Replicas(fewer, controller=plant.controller.resized(fewer))
    assert left.controller.wanted == initial_plan(fewer)
    assert left.controller.directive() is None
    # As a host that starts again after only the smaller job was written.
    restored = JobController.restore(fewer, plant.controller.snapshot())
    assert restored.wanted == initial_plan(fewer) and restored.directive() is None
    assert restored.plan_version == plant.plan.version
    left.now, left.iteration, left.sequence = plant.now, plant.iteration, plant.sequence
    left.delays_of[0][0] = 0.06
    left.run(12)
    assert left.plan.version > plant.plan.version
    assert left.plan.schedule.microbatches == fewer.schedule.microbatches


def test_columns_that_share_collectives_run_one_plan() -> None:
    """One replica of two columns: the plan is for the worst delays of both."""
    sharded = job(1, parallelism={"stages": 6, "shard": 2}, stages=6)
    plant = Replicas(sharded)
    plant.run(6)
    plant.delays_of[0][0] = 0.06
    plant.run(10)
    assert plant.plan.delegated == (0,)
    assert plant.plan.own == ()


def test_links_are_told_apart_by_replica_and_not_by_column() -> None:
    """Two columns of each of three replicas; link 1 is slow in the second column of replica 1."""
    mesh = MeshShape(STAGES, 3, tensor=2)
    observer = Observer(mesh, job="j", namespace="n", attempt=0)
    ranks = PlayedRanks(mesh, observer)
    table = LinkTable(mesh, stale_after=30.0)
    now, slow = 1000.0, (1, 3)
    for window in range(40):
        now += 0.05
        samples = []
        for link in range(LINKS):
            for column in range(mesh.columns):
                for direction in ("forward", "backward"):
                    late = 0.05 * ((link, column) == slow and window > 20)
                    value = BASE + 0.0001 * (window % 3) + late
                    samples.append(
                        LinkSample(
                            link=link, replica=column, direction=direction, route=Route.DIRECT,
                            transport="gloo", iteration=window, bytes=1, queue_p50=0.0,
                            wire=WireTime(
                                count=2, exact=2, min=value, p50=value, p99=value, mean=value
                            ),
                        )
                    )  # fmt: skip
        ranks.observe(JobTelemetry(links=samples), now, refresh=True)
        report = observer.report(1, now, 0)
        observer.delivered(report, DirectiveEnvelope(memory="m"))
        table.take(report.directions, report.links, now)
        if window == 20:
            assert table.own_states(now) == []
    states = table.states(now)
    (mine, own), (others, usual) = table.own_states(now)
    assert (mine, others) == ((1,), (0, 2))
    assert [each.health for each in own] == [Health.HEALTHY, Health.SLOW, Health.HEALTHY]
    assert own[1] == states[1] and own[1].delay == pytest.approx(0.05, abs=0.005)
    assert [each.health for each in usual] == [Health.HEALTHY] * LINKS
    assert usual[1].wire_time == pytest.approx(BASE, abs=0.001)
    assert (own[0], own[2]) == (usual[0], usual[2]) == (states[0], states[2])
    ranks.observe(JobTelemetry(), now + 31, refresh=True)
    table.take(observer.report(2, now + 31, 0).directions, [], now + 31)
    (_, own), _ = table.own_states(now + 31)
    assert own[1].health is Health.UNKNOWN, "known to be slow, but not heard of lately"
