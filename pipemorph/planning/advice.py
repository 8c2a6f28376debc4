"""Compares changes to a problem: more microbatches, another split of the layers, offload.

Each change is applied to the problem and planned; its bubble, iteration time and memory are
compared with today's. A lower bubble is no gain without the memory for it, so caps apply to every
change, converted to bytes if a microbatch or a stage changes its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from pydantic import ValidationError

from pipemorph.errors import InputError
from pipemorph.planning.analysis.partition import split_layers, split_layers_over_ranks
from pipemorph.planning.analysis.what_if import (
    apply_layer_split,
    compute_stage_work,
    even_out_stages,
    list_layers,
    shrink_stage,
    slice_by_counts,
)
from pipemorph.planning.ir import Policy, join_dashed
from pipemorph.planning.offload import count_device_peak, measure_rank_peaks
from pipemorph.planning.planner import plan
from pipemorph.planning.problem import CostRows, Problem, describe_problem_error
from pipemorph.planning.search.plan_variants import PlanVariant, generate_exceeding_variants
from pipemorph.planning.simulation.simulator import Simulation, simulate

DEVICE_BUFFERS = 2
"""Microbatches on the device of an offloading stage without a cap: one in use, one being copied."""
FACTORS = (2, 4)
"""Multiples of the number of microbatches to try."""
LEAST_OTHER_WORK = 0.05
"""Share of a stage's time from which its work besides layers is named."""
MOST_UNEVENNESS = 1.02
"""Ratio of the slowest stage to the mean below which no other split is suggested."""


@dataclass(frozen=True)
class AdviceOption:
    """Today's plan, or the plan after one change. Times in the problem's unit.

    ``in_flight``: most microbatches on the device of each stage. ``batch``: batch size relative to
    today's. ``memory``: peak activation memory of the fullest rank, over all its stages, relative
    to today's; ``activation_bytes``: that peak in bytes; ``host_bytes``: peak host memory that
    offload uses on any rank. Bytes are None if no stage has ``activation_bytes``.
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
    """Compared options. ``options[0]``: today. ``missing_options``: with the reasons."""

    options: tuple[AdviceOption, ...]
    missing_options: tuple[str, ...]

    @property
    def best_option(self) -> AdviceOption | None:
        """Option with the largest gain at the same batch and no more memory; None below 1%."""
        today = self.options[0]
        helpful = [
            option
            for option in self.options[1:]
            if option.gain >= 0.01
            and option.batch == 1
            and option.memory <= today.memory * (1 + 1e-9)
        ]
        return max(helpful, key=lambda option: option.gain, default=None)


def compare_changes(problem: Problem) -> Advice:
    """Plan the problem as it is and with each change, and compare.

    Raises :class:`InputError` if the problem cannot be planned as it is.
    """
    problem.require_makespan("advise")
    planned = plan(problem)
    advisor = _Advisor(problem, _SimulatedPlan.from_variant(planned), planned.microbatch_order)
    options, missing = [advisor.today], []
    for lever in (advisor.try_more_microbatches, advisor.try_layer_splits, advisor.try_offload):
        for found in lever():
            if isinstance(found, AdviceOption):
                options.append(found)
            else:
                missing.append(found)
    return Advice(tuple(options), tuple(missing))


@dataclass(frozen=True)
class _SimulatedPlan:
    """A plan, simulated with the problem's dispatch. ``device_limits``: by stage."""

    simulation: Simulation
    device_limits: tuple[int | None, ...]

    @staticmethod
    def from_variant(planned: PlanVariant) -> _SimulatedPlan:
        problem = planned.problem
        ran = simulate(planned.schedule, problem, problem.dispatch)
        return _SimulatedPlan(ran, problem.list_device_limits())

    def measure_peak_memory(self, units: Sequence[float]) -> tuple[float, float]:
        """Peak activation memory of any rank on its device, and in host memory. ``units``: memory
        of one microbatch, by stage."""
        schedule = self.simulation.schedule
        ranks = range(len(schedule.ranks))
        found = [measure_rank_peaks(schedule, rank, self.device_limits, units) for rank in ranks]
        return max(device for device, _ in found), max(host for _, host in found)


class _Advisor:
    def __init__(self, problem: Problem, ran: _SimulatedPlan, order: tuple[int, ...]) -> None:
        self.problem = problem
        self.today_order = order
        self.placement = ran.simulation.schedule.placement
        self.today_makespan = ran.simulation.makespan
        known = all(stage.activation_bytes for stage in problem.stages)
        self.sized = known
        # Without bytes, a microbatch counts as 1 on every stage.
        self.units = [
            float(stage.activation_bytes or 1) if known else 1.0 for stage in problem.stages
        ]
        self.today_memory, _ = ran.measure_peak_memory(self.units)
        self.today = self._make_option("today", "as it is", ran, self.units)

    # --- changes: each yields options, or a message about missing input -----------------------

    def try_more_microbatches(self) -> Iterator[AdviceOption | str]:
        """Try more microbatches: of the same size (a larger batch), or smaller (the same batch)."""
        n, rows = self.problem.microbatches, self.problem.microbatch_costs
        for factor in FACTORS:
            larger = self._change_problem(
                self.problem, microbatches=n * factor, microbatch_costs=_repeat_costs(rows, factor)
            )
            yield from self._plan_option(
                "microbatches",
                f"{n} → {n * factor}, batch {factor}×",
                larger,
                self.units,
                batch=factor,
            )
        for factor in FACTORS:
            stages = tuple(shrink_stage(stage, factor) for stage in self.problem.stages)
            smaller = self._change_problem(
                self.problem,
                microbatches=n * factor,
                stages=stages,
                microbatch_costs=_divide_costs(rows, factor),
            )
            yield from self._plan_option(
                "microbatches",
                f"{n} → {n * factor} of 1/{factor} the size",
                smaller,
                [unit / factor for unit in self.units],
                note=f"if a microbatch of 1/{factor} the size takes 1/{factor} the time",
            )

    def try_layer_splits(self) -> Iterator[AdviceOption | str]:
        """Try another split of the layers; if layers are unknown, the ideal of equal stages."""
        problem = self.problem
        if len(set(problem.stage_costs)) > 1:
            yield "split: microbatch_costs differ between the stages; give one row for all of them"
            return
        totals = [0.0] * (max(self.placement) + 1)
        for rank, stage in zip(self.placement, problem.stages, strict=True):
            totals[rank] += compute_stage_work(stage, problem.policy)
        mean = sum(totals) / len(totals)
        uneven = max(totals) / mean if mean else 1.0
        if problem.layers is None or problem.layer_split is None:
            if uneven <= MOST_UNEVENNESS:
                return
            slowest = "slowest rank" if self._multi_stage else "slowest"
            yield from self._plan_option(
                "split",
                f"even stages ({slowest} is {uneven:.2f}× the mean)",
                self._change_problem(problem, stages=even_out_stages(problem.stages)),
                self.units,
                note="at best",
            )
            yield "give layers and layer_split to get a split of whole layers"
            return
        yield from self._split_whole_layers(problem.layer_split)

    def _split_whole_layers(self, today: Sequence[int]) -> Iterator[AdviceOption | str]:
        problem = self.problem
        layers = list_layers(problem)
        times = [compute_stage_work(layer, problem.policy) for layer in layers]
        # Other work of a stage (embedding, loss) stays on the stage.
        fixed = [
            max(0.0, compute_stage_work(stage, problem.policy) - sum(times[part]))
            for stage, part in zip(problem.stages, slice_by_counts(today), strict=True)
        ]
        if self._multi_stage:
            counts, of = split_layers_over_ranks(times, fixed, self.placement), "rank"
        else:
            counts, of = split_layers(times, fixed), "stage"
        longest = max(range(len(fixed)), key=fixed.__getitem__)
        total = compute_stage_work(problem.stages[longest], problem.policy)
        other = f"stage {longest}: {fixed[longest]:.3g} of {total:.3g} is no layer (such as a loss"
        other += " head or an embedding) and stays with any split"
        if fixed[longest] >= LEAST_OTHER_WORK * total:
            yield f"split: {other}"
        if counts == tuple(today):
            yield f"the split {join_dashed(today, 16)} is the best for its slowest {of}"
            return
        sized = self.sized and all(layer.activation_bytes for layer in layers)
        stages, units = apply_layer_split(problem, counts, self.units, sized=sized)
        note = "" if sized else "memory by the number of layers"
        yield from self._plan_option(
            "split",
            f"layers {join_dashed(today, 16)} → {join_dashed(counts, 16)}",
            self._change_problem(problem, stages=stages, layers=None, layer_split=None),
            units,
            note=note,
        )

    def try_offload(self) -> Iterator[AdviceOption | str]:
        """Try offload of activations: today's in-flight cap becomes a device limit, and no cap."""
        problem = self._change_problem(self.problem.with_microbatch_order(self.today_order))
        caps = problem.list_in_flight_limits()
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
            planned = _plan_offloaded(problem.model_copy(update={"stages": stages}))
        except InputError as error:
            yield f"offload: {error}"
            return
        if planned is None:
            yield "offload saves nothing: no plan needs more microbatches than fit on the device"
            return
        yield self._make_option(
            "offload",
            "activations to host memory, no cap" if capped else "activations to host memory",
            planned,
            self.units,
            note="copies not overlapped" if complete else "if its copies cost nothing",
        )

    # --- planning of a change --------------------------------------------------------------

    @property
    def _multi_stage(self) -> bool:
        """True if a rank has several stages."""
        return len(set(self.placement)) < len(self.placement)

    def _change_problem(self, problem: Problem, **update: object) -> Problem:
        """Problem with changed fields, without the fixed warm-up, which was chosen for today."""
        return problem.model_copy(update={"warmup": None, **update})

    def _plan_option(
        self,
        lever: str,
        change: str,
        problem: Problem,
        units: Sequence[float],
        *,
        batch: float = 1.0,
        note: str = "",
    ) -> Iterator[AdviceOption | str]:
        try:
            checked = Problem.model_validate(problem.model_dump())
            planned = _plan_and_simulate(checked)
        except ValidationError as error:
            yield f"{lever}, {change}: {describe_problem_error(error)}"
            return
        except InputError as error:
            yield f"{lever}, {change}: {error}"
            return
        yield self._make_option(lever, change, planned, units, batch=batch, note=note)

    def _make_option(
        self,
        lever: str,
        change: str,
        ran: _SimulatedPlan,
        units: Sequence[float],
        *,
        batch: float = 1.0,
        note: str = "",
    ) -> AdviceOption:
        simulation = ran.simulation
        held = map(count_device_peak, simulation.schedule.stages, ran.device_limits)
        memory, host = ran.measure_peak_memory(units)
        per_batch = simulation.makespan / batch
        today = self.today_makespan
        return AdviceOption(
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


def _repeat_costs(rows: CostRows | None, factor: int) -> CostRows | None:
    """Costs of ``factor`` times as many microbatches of the same kind."""
    return None if rows is None else tuple(row * factor for row in rows)


def _divide_costs(rows: CostRows | None, factor: int) -> CostRows | None:
    """Costs of ``factor`` parts of each microbatch, relative to stages of that part of the time."""
    if rows is None:
        return None
    return tuple(tuple(cost for cost in row for _ in range(factor)) for row in rows)


def _plan_and_simulate(problem: Problem) -> _SimulatedPlan:
    """Plan a problem and simulate it. Raises :class:`InputError` if it cannot be planned."""
    return _SimulatedPlan.from_variant(plan(problem))


def _plan_offloaded(problem: Problem) -> _SimulatedPlan | None:
    """Best plan that offloads; None if no plan does."""
    if problem.policy is not Policy.PIPEMORPH:
        return _plan_and_simulate(problem)
    found = list(generate_exceeding_variants(problem, None))
    return _SimulatedPlan.from_variant(found[-1]) if found else None
