"""Jobs to look at, as a host knows them: ops of the simulator, plans of the planner, link states as
an agent would report them."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from manifests import job_of

from pipemorph.control.decide.forecast import Forecast, Outlook
from pipemorph.control.decide.situation import Situation
from pipemorph.control.first_plan import initial_plan, select_planning_fields
from pipemorph.local.service import ControlSnapshot
from pipemorph.planning import Plan, Route, StageTimes
from pipemorph.protocol import AdaptationRecord, Health, IterationSample, LinkState
from pipemorph.spec.job_spec import PipeMorphJob
from pipemorph.spec.job_status import JobState, TrainingStatus
from pipemorph.spec.status_links import SlowLink
from pipemorph.views.live_page.link_history import LinkHistory
from pipemorph.views.live_page.page_builder import StageTrace, WatchedJob
from pipemorph.views.live_page.page_document import RecoveryEntry

NOW = 1_790_000_000.0
WIRE, LATE = 0.001, 0.06
ACTIVATIONS, ROOM, PEAK = 48 << 20, 16 << 30, 21 << 30
"""Bytes: of one microbatch on each stage, ``activationMemory``, and the peak of all memory."""
SLOW_AT, CHANGED_AT, WELL_AT, RETURNED_AT = 12, 15, 40, 43
Case = Literal["healthy", "slow", "adapted", "recovered", "recovering", "failed"]


def job(stages: int, microbatches: int, iterations: int = 100, replicas: int = 1) -> PipeMorphJob:
    times = {"forward": 10.0, "backwardInput": 10.5, "backwardWeight": 5.5}
    return job_of(
        {
            "parallelism": {"stages": stages, "replicas": replicas},
            "schedule": {
                "microbatches": microbatches,
                "stageTimes": [times] * stages,
                "activationMemory": ROOM,
            },
            "trainer": {"module": "train", "iterations": iterations},
        },
        f"job-of-{stages}",
    )


def situation_of(stages: int, delays: dict[int, float]) -> Situation:
    links = range(stages - 1)
    times = StageTimes(
        forward=0.01, backward_input=0.0105, backward_weight=0.0055, activation_bytes=ACTIVATIONS
    )

    return Situation(
        stages=(times,) * stages,
        wire_times=tuple(WIRE + delays.get(i, 0.0) for i in links),
        delays=tuple(delays.get(i, 0.0) for i in links),
        slow=tuple(i in delays for i in links),
        unknown=(False,) * len(links),
    )


def link_states(
    stages: int,
    slow: dict[int, float],
    since: int | None,
    *,
    known: bool = True,
    replica: int = 0,
) -> list[LinkState]:
    """States of the links. ``since``: the first iteration in which they were found ``slow``."""

    def state(i: int) -> LinkState:
        if not known:
            return LinkState(i, Health.UNKNOWN)
        if i not in slow:
            return LinkState(i, Health.HEALTHY, wire_time=WIRE, confidence=0.99)
        return LinkState(
            i, Health.SLOW, delay=slow[i], wire_time=WIRE + slow[i], confidence=0.99,
            since_iteration=since, replica=replica,
        )  # fmt: skip

    return [state(i) for i in range(stages - 1)]


def record(version: int, kind: Literal["adapt", "return"], at: int, plan: Plan, **more: object
           ) -> AdaptationRecord:  # fmt: skip
    given = {
        "plan_version": version, "kind": kind, "detected_at": NOW - 60 + at,
        "detected_at_iteration": at - 1, "detectable_at": at - 2, "applied_at_iteration": at,
        "reason": "link 1 is slow" if kind == "adapt" else "a link recovered, none is slow",
        "links": [], "warmup_before": [1], "warmup_after": list(plan.warmup),
        "routes": list(plan.routes), "predicted_seconds_before": 1.0,
        "predicted_seconds_after": 0.8,
    }  # fmt: skip
    return AdaptationRecord.model_validate(given | more)


def watched(
    stages: int,
    microbatches: int,
    case: Case = "adapted",
    *,
    delegated: bool = True,
    replicas: int = 1,
) -> tuple[WatchedJob, list[StageTrace]]:
    """A job in the iteration before which the case has come about, and the ops of that. Of several
    replicas the one in the middle has the slow link."""
    made = job(stages, microbatches, replicas=replicas)
    mesh = made.spec.parallelism.mesh
    rules, first = select_planning_fields(made.spec), initial_plan(made.spec)
    link = stages // 2 - 1 if stages > 2 else 0
    slow, replica = {link: LATE}, replicas // 2
    ill, well = situation_of(stages, slow), situation_of(stages, {})
    routes = tuple(
        Route.DELEGATED if delegated and i == link else Route.DIRECT for i in range(stages - 1)
    )
    hurt = Forecast(rules, ill)
    better = replace(hurt.choose_best(hurt.make_options(routes)).plan, version=1)
    usual, late, after = (
        Forecast(rules, well).predict_option(first).seconds,
        hurt.predict_option(first).seconds,
        hurt.predict_option(better).seconds,
    )
    phases = [(0, SLOW_AT, usual, 0)]
    if case != "healthy":
        phases.append((SLOW_AT, CHANGED_AT, late, 0))
    if case not in ("healthy", "slow"):
        phases.append((CHANGED_AT, WELL_AT, after, 1))
    if case == "recovered":
        phases.append(
            (WELL_AT, RETURNED_AT, Forecast(rules, well).predict_option(better).seconds, 1)
        )
        phases.append((RETURNED_AT, 60, usual, 2))
    samples = [
        IterationSample(
            index=i, seconds=seconds * (1 + 0.01 * (i % 3)), loss=None, plan_version=version,
            bubble_fraction=0.1,
        )
        for begin, end, seconds, version in phases
        for i in range(begin, end)
    ]  # fmt: skip
    lanes, direct = LinkHistory(), first.routes
    lanes.record_states(0, link_states(stages, {}, None, known=False), direct, {})
    lanes.record_states(1, link_states(stages, {}, None), direct, {})
    changes, version, situation, running = [], 0, well, first
    if case != "healthy":
        found = link_states(stages, slow, SLOW_AT, replica=replica)
        lanes.record_states(SLOW_AT + 1, found, direct, {})
        situation = ill
    if case not in ("healthy", "slow"):
        lanes.record_states(CHANGED_AT, found, routes, {})
        change = record(
            1, "adapt", CHANGED_AT, better, promised=1 - after / late,
            measured=1.02 * (1 - after / late), iteration_seconds_before=late,
            reason=f"link {link} is slow by {1e3 * LATE:.0f} ms one way",
            routes=list(routes), warmup_before=list(first.warmup),
            warmup_after=list(better.warmup),
            iteration_seconds_after=after, saving=late - after, saved=25 * (late - after),
            links=[{"link": link, "health": "slow", "delay": LATE, "wire_time": WIRE + LATE,
                    "confidence": 0.99, "replica": replica}],
        )  # fmt: skip
        changes, version, running = [change], 1, better
    if case == "recovered":
        lanes.record_states(WELL_AT + 1, link_states(stages, {}, WELL_AT), routes, {})
        lanes.record_states(RETURNED_AT, link_states(stages, {}, WELL_AT), direct, {})
        changes.append(record(2, "return", RETURNED_AT, first, saving=0.0))
        version, situation, running = 2, well, replace(first, version=2)
    recoveries = []
    if case in ("recovering", "failed"):
        recoveries = [
            RecoveryEntry(lost_at=NOW - 30, cause="rank 3 was killed by SIGKILL", went_on_with=28,
                      seconds=2.3, repeated=0)
        ]  # fmt: skip
    saved = (late - after) * 25 if version else 0.0
    slow_links = []
    if any(situation.slow):
        slow_links = [SlowLink(link=link, replica=replica, direction="forward",
                               delay_ms=1e3 * LATE, wire_time_ms=1e3 * (WIRE + LATE),
                               confidence=0.99)]  # fmt: skip
    training = TrainingStatus(
        iteration=samples[-1].index + 1,
        iteration_seconds=samples[-1].seconds,
        wanted_plan_version=version,
        applied_plan_version=version,
        slow_link_count=len(slow_links),
        slow_links=slow_links,
        adaptations=len(changes),
        saved_seconds=saved,
        saved_error_seconds=0.15 * saved,
        peak_memory=[PEAK] * stages,
        routes=[route.value for route in running.routes],
    )
    state: JobState = {"recovering": "Restarting", "failed": "Failed"}.get(case, "Running")
    why = "rank 2 raised RuntimeError: CUDA out of memory"
    known = WatchedJob(
        job=made,
        now=NOW,
        status=ControlSnapshot(training, [], None).to_status(
            state, why if state != "Running" else ""
        ),
        samples=samples,
        changes=changes,
        link_history=lanes,
        recoveries=recoveries,
        available=[sample.index for sample in samples],
        outlook=Outlook(rules, situation, first, running),
    )
    traces: list[StageTrace] = []
    others = tuple(i for i in range(replicas) if i != replica)
    for columns, links in (((replica,), situation), (others, well)):
        rows = [
            tuple(op._replace(start=NOW + op.start, end=NOW + op.end) for _, op in row)
            for row in Forecast(rules, links).simulate_plan(running)
        ]
        traces += (
            StageTrace(
                mesh.find_rank(stage, column), stage, column, samples[-1].index, version, ops
            )
            for column in columns
            for stage, ops in enumerate(rows)
        )
    return known, traces
