"""A trainer in simulation, for tests of the controller.

:class:`Plant` runs the plan in effect through the simulator under the true delays, reports what
ranks would measure, and commits a directive in the iteration after the one in which it was
received, as the ranks do.
"""

from __future__ import annotations

import random
from typing import Any, Literal

from observing import Agent

from pipemorph.control import AdaptationRecord, Health, JobController, initial_plan
from pipemorph.control.decide.plan_choice import decide
from pipemorph.planning import OpKind, Plan, Route, StageTimes, build_problem, validate
from pipemorph.planning.offload import count_device_peak
from pipemorph.planning.simulation.simulator import compute_next_starts, simulate
from pipemorph.protocol import IterationSample, LinkSample, StageProfile, WireTime
from pipemorph.spec.job_spec import JobSpec

OP = {"forward": 10.0, "backwardInput": 10.0, "backwardWeight": 10.0}
BASE = 0.004


def spec(stages: int = 4, microbatches: int = 12, **fields: Any) -> JobSpec:
    """A job whose stages keep the plan's order, unless ``schedule`` says otherwise: so every delay
    shows."""
    schedule = {"microbatches": microbatches, "stageTimes": [OP] * stages, "policy": "pipemorph"}
    schedule["dispatch"] = "static"
    schedule |= fields.pop("schedule", {})
    return JobSpec.model_validate(
        {
            "parallelism": {"stages": stages},
            "schedule": schedule,
            "trainer": {"module": "x", "iterations": 1000},
        }
        | fields
    )


def settle(controller: JobController, now: float) -> None:
    """Make the decision that waits, if one does."""
    request = controller.pending_request
    if request is not None:
        controller.apply_proposal(request, decide(request), now)


class Plant:
    """A trainer in simulation. ``delays`` and ``ops`` are the truth, seconds."""

    def __init__(self, spec: JobSpec, *, seed: int = 0, controller: JobController | None = None):
        self.spec = spec
        self.controller = controller or JobController(spec)
        self.rng = random.Random(seed)
        self.stages = spec.parallelism.stages
        self.delays = [0.0] * (self.stages - 1)
        self.ops = [StageTimes(forward=0.01, backward_input=0.01, backward_weight=0.01)] * (
            self.stages
        )
        self.plan = initial_plan(spec)
        self.prepared: tuple[int, Plan] | None = None
        self.iteration = self.sequence = self.observed = 0
        self.issued_at: float | None = None
        """Time of issue of the newest directive that it has received."""
        self.now = 1000.0
        self.agent: Agent | None = None
        self.agent_of = 0
        """Attempt of the agent."""
        self.seconds: list[float] = []
        self.versions: list[int] = []
        self.overhead = 0.0
        """Seconds that the delegated route adds to the normal wire time."""
        self.avoided = False
        """True if the delegated route has none of the delays."""
        self.split: Literal["module", "emulated"] = "emulated"
        self.decides = True
        """True if decisions are made as soon as they are requested."""
        self.activation_bytes: int | None = None
        """Measured bytes of a microbatch; ``ops`` give the time of a copy."""
        self.input_bytes: int | None = None
        """Bytes of a microbatch that is computed again."""
        self.barrier: bool | None = None
        """Report of the ranks on a barrier between iterations."""
        self.waits = True
        """True if there is a barrier."""
        self._before = [0.0] * self.stages

    def run(self, iterations: int) -> None:
        for _ in range(iterations):
            self.step()

    def step(self) -> None:
        """Run an iteration: reports in the middle of it, commit at its start."""
        if self.prepared is not None and self.iteration >= self.prepared[0]:
            self.plan, self.prepared = self.prepared[1], None
        felt = [
            BASE + (delay if route is Route.DIRECT else self.overhead + delay * (not self.avoided))
            for delay, route in zip(self.delays, self.plan.routes, strict=True)
        ]
        problem = build_problem(
            self.spec.schedule.microbatches, self.ops, felt, self.plan.routes, queues=8
        ).with_plan_limits(self.plan)
        result = simulate(
            self.plan.schedule, problem, self.plan.dispatch, delay_at=lambda link, _: felt[link],
            before=self._before, waits=self.plan.waits,
        )  # fmt: skip
        seconds = result.makespan
        if not self.waits:
            seconds, self._before = compute_next_starts(result.execution.free_at, result.rank_tails)
        windows = max(2, int(seconds / 0.05))
        for _ in range(windows):
            self.now += seconds / windows
            links = [
                self.sample(link, direction, felt[link])
                for link in range(self.stages - 1)
                for direction in ("forward", "backward")
            ]
            self.send(links=links)
        self.seconds.append(seconds)
        self.versions.append(self.plan.version)
        self.iteration += 1
        self.send(
            stages=[self.profile(i, op) for i, op in enumerate(self.ops)],
            iterations=[
                IterationSample(
                    index=self.iteration - 1,
                    seconds=seconds,
                    loss=1.0,
                    plan_version=self.plan.version,
                    bubble_fraction=result.bubble_fraction,
                    barrier=self.barrier,
                    ops_seconds=seconds,
                )
            ],
        )

    def profile(self, stage: int, op: StageTimes) -> StageProfile:
        """Profile that the stage's rank measures. While it fuses, that is one time for B and W."""
        ops = self.plan.schedule.stages[stage]
        fuses = any(each.kind is OpKind.BW for each in ops)
        held = count_device_peak(ops, self.plan.device_limits[stage])
        return StageProfile(
            stage=stage,
            forward=op.forward,
            backward_input=op.whole_backward if fuses else op.backward_input,
            backward_weight=0.0 if fuses else op.backward_weight,
            split=self.split,
            peak_memory=(self.activation_bytes or 1 << 20) * held,
            activation_bytes=self.activation_bytes,
            input_bytes=self.input_bytes,
            offload_copy=op.offload_copy,
            fused_backward=op.fused_backward,
        )

    def sample(self, link: int, direction: Any, wire: float) -> LinkSample:
        value = max(1e-4, self.rng.gauss(wire, 0.0003))
        return LinkSample(
            link=link,
            direction=direction,
            route=self.plan.routes[link],
            transport="gloo",
            iteration=self.iteration,
            bytes=1 << 20,
            wire=WireTime(count=2, exact=2, min=value, p50=value, p99=value, mean=value),
            queue_p50=0.0,
        )

    def send(self, **fields: Any) -> None:
        if self.agent is None or self.agent_of != self.controller.attempt:
            self.agent_of = self.controller.attempt
            self.agent = Agent(self.spec, attempt=self.agent_of, paced=True)
        self.agent.sequence = self.sequence
        self.agent.tell(
            self.controller,
            self.now,
            observed=self.observed,
            issued_at=self.issued_at,
            iteration=self.iteration,
            applied_plan_version=self.plan.version,
            **fields,
        )
        self.sequence = self.agent.sequence
        if self.decides:
            settle(self.controller, self.now)
        directive = self.controller.get_directive(self.observed)
        if directive is not None:
            plan = directive.plan.to_plan()
            validate(plan.schedule, plan.in_flight_limits, plan.device_limits)
            self.observed, self.issued_at = directive.plan_version, directive.issued_at
            self.prepared = (self.iteration + 1, plan)

    def health(self) -> list[Health]:
        return [link.health for link in self.controller.get_link_states(self.now)]

    def only(self) -> AdaptationRecord:
        (record,) = self.controller.records
        return record
