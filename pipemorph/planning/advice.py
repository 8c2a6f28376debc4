"""Compares changes to a problem: more microbatches, another split of the layers, offload.

Each change is applied to the problem and planned, so that its bubble, iteration time and memory can
be compared with today's. A lower bubble is no gain if it needs memory that does not exist: caps
apply to every change, converted to bytes if a microbatch or a stage changes its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from pydantic import ValidationError

from pipemorph.errors import InputError
from pipemorph.planning.analysis.partition import split_layers, split_over_ranks
from pipemorph.planning.analysis.what_if import evened, layers_of, parts, shrunk, split_anew, work
from pipemorph.planning.ir import Policy, dashed
from pipemorph.planning.offload import device_peak, rank_peaks
from pipemorph.planning.planner import plan
from pipemorph.planning.problem import Problem, describe
from pipemorph.planning.search.variants import Variant, exceeding_variants
from pipemorph.planning.simulation.simulator import Simulation, simulate

DEVICE_BUFFERS = 2
"""Microbatches on the device of an offloading stage without a cap: one in use, one being copied."""
FACTORS = (2, 4)
"""Multiples of the number of microbatches to try."""
EVEN = 1.02
"""Ratio of the slowest stage to the mean up to which no other split is suggested."""


@dataclass(frozen=True)
class Option:
    """Today's plan, or the plan after one change. Times in the problem's unit.

    ``in_flight``: most microbatches on the device of each stage. ``batch``: batch size relative to
    today's. ``memory``: largest activation memory of any rank, of all its stages at a moment,
    relative to today's; ``activation_bytes``: the same in bytes; ``host_bytes``: largest host
    memory of any rank used by offload. Bytes are None if no stage gives ``activation_bytes``.
    """

    lever: str
    change: str
    makespan: float
    bubble_fraction: float
    in_flight: tuple[int, ...]
    batch: float
    memory: float
    activation_bytes: int | None
    host_bytes: int | None
    gain: float
    """Share of the time per sample that the change saves; negative if it is slower."""
    note: str = ""


@dataclass(frozen=True)
class Advice:
    """``options[0]`` is today. ``missing``: options that could not be computed, and why."""

    options: tuple[Option, ...]
    missing: tuple[str, ...]

    @property
    def best(self) -> Option | None:
        """The option that saves most with the same batch and no more memory; None if all save less
        than 1%."""
        today = self.options[0]
        helpful = [
            option
            for option in self.options[1:]
            if option.gain >= 0.01
            and option.batch == 1
            and option.memory <= today.memory * (1 + 1e-9)
        ]
        return max(helpful, key=lambda option: option.gain, default=None)


def advise(problem: Problem) -> Advice:
    """Plan the problem as it is and with each change, and compare.

    Raises :class:`InputError` if the problem cannot be planned as it is.
    """
    problem.check_makespan("advise")
    advisor = _Advisor(problem, _planned(problem))
    options, missing = [advisor.today], []
    for lever in (advisor.microbatches, advisor.split, advisor.offload):
        for found in lever():
            if isinstance(found, Option):
                options.append(found)
            else:
                missing.append(found)
    return Advice(tuple(options), tuple(missing))


@dataclass(frozen=True)
class _Ran:
    """A plan, simulated with the problem's dispatch. ``device_limits``: by stage."""

    simulation: Simulation
    device_limits: tuple[int | None, ...]

    @staticmethod
    def of(planned: Variant) -> _Ran:
        problem = planned.problem
        ran = simulate(planned.schedule, problem, problem.dispatch)
        return _Ran(ran, problem.device_limits())

    def peaks(self, units: Sequence[float]) -> tuple[float, float]:
        """Most memory of activations on the device of any rank, and in host memory. ``units``: of
        one microbatch, by stage."""
        schedule = self.simulation.schedule
        ranks = range(len(schedule.ranks))
        found = [rank_peaks(schedule, rank, self.device_limits, units) for rank in ranks]
        return max(device for device, _ in found), max(host for _, host in found)


class _Advisor:
    def __init__(self, problem: Problem, ran: _Ran) -> None:
        self.problem = problem
        self.placement = ran.simulation.schedule.placement
        self.today_makespan = ran.simulation.makespan
        known = all(stage.activation_bytes for stage in problem.stages)
        self.sized = known
        # Without bytes, a microbatch counts as 1 on every stage.
        self.units = [
            float(stage.activation_bytes or 1) if known else 1.0 for stage in problem.stages
        ]
        self.today_memory, _ = ran.peaks(self.units)
        self.today = self._option("today", "as it is", ran, self.units)

    # --- the changes: options, or a message about missing input -------------------------------

    def microbatches(self) -> Iterator[Option | str]:
        """More microbatches: of the same size (a larger batch), or smaller (the same batch)."""
        n = self.problem.microbatches
        for factor in FACTORS:
            larger = self._changed(self.problem, microbatches=n * factor)
            yield from self._plan(
                "microbatches",
                f"{n} → {n * factor}, batch {factor}×",
                larger,
                self.units,
                batch=factor,
            )
        for factor in FACTORS:
            stages = tuple(shrunk(stage, factor) for stage in self.problem.stages)
            smaller = self._changed(self.problem, microbatches=n * factor, stages=stages)
            yield from self._plan(
                "microbatches",
                f"{n} → {n * factor} of 1/{factor} the size",
                smaller,
                [unit / factor for unit in self.units],
                note=f"if a microbatch of 1/{factor} the size takes 1/{factor} the time",
            )

    def split(self) -> Iterator[Option | str]:
        """Another split of the layers; without layers, the ideal of equal stages."""
        problem = self.problem
        totals = [0.0] * (max(self.placement) + 1)
        for rank, stage in zip(self.placement, problem.stages, strict=True):
            totals[rank] += work(stage, problem.policy)
        mean = sum(totals) / len(totals)
        uneven = max(totals) / mean if mean else 1.0
        if problem.layers is None or problem.layer_split is None:
            if uneven <= EVEN:
                return
            slowest = "slowest rank" if self._several else "slowest"
            yield from self._plan(
                "split",
                f"even stages ({slowest} is {uneven:.2f}× the mean)",
                self._changed(problem, stages=evened(problem.stages)),
                self.units,
                note="at best",
            )
            yield "give layers and layer_split to get a split of whole layers"
            return
        yield from self._split_of_layers(problem.layer_split)

    def _split_of_layers(self, today: Sequence[int]) -> Iterator[Option | str]:
        problem = self.problem
        layers = layers_of(problem)
        times = [work(layer, problem.policy) for layer in layers]
        # Work of a stage beside its layers (embedding, loss) stays on the stage.
        fixed = [
            max(0.0, work(stage, problem.policy) - sum(times[part]))
            for stage, part in zip(problem.stages, parts(today), strict=True)
        ]
        if self._several:
            counts, of = split_over_ranks(times, fixed, self.placement), "rank"
        else:
            counts, of = split_layers(times, fixed), "stage"
        if counts == tuple(today):
            yield f"the split {dashed(today, 16)} is the best for its slowest {of}"
            return
        sized = self.sized and all(layer.activation_bytes for layer in layers)
        stages, units = split_anew(problem, counts, self.units, sized=sized)
        note = "" if sized else "memory by the number of layers"
        yield from self._plan(
            "split",
            f"layers {dashed(today, 16)} → {dashed(counts, 16)}",
            self._changed(problem, stages=stages, layers=None, layer_split=None),
            units,
            note=note,
        )

    def offload(self) -> Iterator[Option | str]:
        """Offload of activations: today's in-flight cap becomes a device limit, without a cap."""
        problem = self._changed(self.problem)
        caps = problem.in_flight_limits()
        capped = problem.policy is not Policy.GPIPE and any(k is not None for k in caps)
        if not capped:
            yield "offload saves memory, not time: no in_flight_limit delays any op"
            caps = (DEVICE_BUFFERS,) * problem.stage_count
        stages = tuple(
            stage.model_copy(
                update={"in_flight_limit": None, "device_limit": stage.device_limit or cap}
            )
            for stage, cap in zip(problem.stages, caps, strict=True)
        )
        complete = all(stage.offload_copy is not None for stage in problem.stages)
        if not complete:
            yield "give offload_copy of every stage to include the cost of the copies"
        try:
            planned = _offloaded(problem.model_copy(update={"stages": stages}))
        except InputError as error:
            yield f"offload: {error}"
            return
        if planned is None:
            yield "offload saves nothing: no plan needs more microbatches than fit on the device"
            return
        yield self._option(
            "offload",
            "activations to host memory, no cap" if capped else "activations to host memory",
            planned,
            self.units,
            note="copies not overlapped" if complete else "if its copies cost nothing",
        )

    # --- planning one change ---------------------------------------------------------------

    @property
    def _several(self) -> bool:
        """Whether a rank has several stages."""
        return len(set(self.placement)) < len(self.placement)

    def _changed(self, problem: Problem, **update: object) -> Problem:
        """The problem with changed fields; drops the fixed warm-up, which was chosen for today."""
        return problem.model_copy(update={"warmup": None, **update})

    def _plan(
        self,
        lever: str,
        change: str,
        problem: Problem,
        units: Sequence[float],
        *,
        batch: float = 1.0,
        note: str = "",
    ) -> Iterator[Option | str]:
        try:
            checked = Problem.model_validate(problem.model_dump())
            planned = _planned(checked)
        except ValidationError as error:
            yield f"{lever}, {change}: {describe(error)}"
            return
        except InputError as error:
            yield f"{lever}, {change}: {error}"
            return
        yield self._option(lever, change, planned, units, batch=batch, note=note)

    def _option(
        self,
        lever: str,
        change: str,
        ran: _Ran,
        units: Sequence[float],
        *,
        batch: float = 1.0,
        note: str = "",
    ) -> Option:
        simulation = ran.simulation
        held = map(device_peak, simulation.schedule.stages, ran.device_limits)
        memory, host = ran.peaks(units)
        per_batch = simulation.makespan / batch
        today = self.today_makespan
        return Option(
            lever=lever,
            change=change,
            makespan=simulation.makespan,
            bubble_fraction=simulation.bubble_fraction,
            in_flight=tuple(held),
            batch=batch,
            memory=memory / self.today_memory,
            activation_bytes=ceil(memory) if self.sized else None,
            host_bytes=ceil(host) if self.sized and host else None,
            gain=1.0 - per_batch / today if today else 0.0,
            note=note,
        )


def _planned(problem: Problem) -> _Ran:
    """Plan a problem and simulate it. Raises :class:`InputError` if it cannot be planned."""
    return _Ran.of(plan(problem))


def _offloaded(problem: Problem) -> _Ran | None:
    """The best plan that offloads; None if no plan does."""
    if problem.policy is not Policy.PIPEMORPH:
        return _planned(problem)
    found = list(exceeding_variants(problem, None))
    return _Ran.of(found[-1]) if found else None
