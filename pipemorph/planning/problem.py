"""Input of the planner: op times, caps and links, and the problem file.

A problem has no fixed unit of time: results are in the unit of its times. The PROBLEM file of
``pipemorph plan`` is in milliseconds; the adaptation controller uses seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, gcd, isfinite
from statistics import fmean
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pipemorph.errors import InputError
from pipemorph.field_names import suggest_field
from pipemorph.planning.ir import (
    Dispatch,
    Plan,
    Policy,
    StagePlacement,
    group_stages_by_rank,
    place_stages,
)
from pipemorph.planning.offload import compute_in_flight_reach
from pipemorph.removed import DISPATCHES, POLICIES, PROBLEM_FIELDS, describe_removal
from pipemorph.yaml_json import check_plain_data, display_name, parse_single_document, read_text

MAX_CELLS = 512 * 2048
"""Most stages × microbatches. Far above any real pipeline; small enough that a typo in
``microbatches`` gives an error instead of exhausting the memory."""
MAX_OPS = 3 * MAX_CELLS
"""Most ops: each microbatch has an F, a B and a W on each stage."""
MAX_VALUES = 1_000_000
"""Most numbers, texts and keys of a problem file."""
MAX_LAYERS = 4096
MAX_BYTES = 64 << 20
"""Largest problem file; a problem of 1000 stages takes 100 KB."""


def _check_number(value: object) -> object:
    """Reject values that pydantic would coerce to a number (``true``, ``'3'``)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is not a number")
    return value


def check_integer(value: object) -> object:
    """Reject values that pydantic would coerce to a whole number."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("is not a whole number")
    return value


Time = Annotated[float, BeforeValidator(_check_number), Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(check_integer), Field(ge=1, le=2**31 - 1)]
"""A count that fits the compiled core's int."""
Bytes = Annotated[int, BeforeValidator(check_integer), Field(ge=1, le=10**15)]
Rate = Annotated[float, BeforeValidator(_check_number), Field(gt=0, le=1e6, allow_inf_nan=False)]
"""Rate in 10^9 bit/s."""
Messages = Annotated[Count, Field(le=MAX_OPS)]
"""Number of messages, at most as many as a plan can send."""


MOST_COST = 1e6
"""Largest cost of a microbatch, relative to the stage times."""
CostRows = tuple[tuple[float, ...], ...]
"""Costs of the microbatches: one row for all stages, or one per stage."""


def parse_microbatch_costs(value: object) -> object:
    """Rows of costs from a row of numbers, or a list of rows. Raises ValueError that names the
    first bad value; None for no costs."""
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value:
        raise ValueError("is not a list of numbers, or of one such list per stage")
    several = any(isinstance(row, list | tuple) for row in value)
    for i, row in enumerate(value if several else [value]):
        where = f"[{i}]" if several else ""
        if not isinstance(row, list | tuple):
            raise ValueError(f"has {quote_value(row)} at {where}; expected a list of numbers")
        for m, cost in enumerate(row):
            number = isinstance(cost, int | float) and not isinstance(cost, bool)
            if not (number and isfinite(cost) and 0 <= cost <= MOST_COST):
                raise ValueError(
                    f"has {quote_value(cost)} at {where}[{m}]; expected a number from 0 to"
                    f" {MOST_COST:g}"
                )
    rows = value if several else [value]
    return tuple(tuple(map(float, row)) for row in rows)


class _FrozenModel(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageTimes(_FrozenModel):
    """Time of one microbatch's F, B and W on a stage, and its in-flight cap ``K_i``.

    A fused backward (BW) takes ``fused_backward``, by default ``backward_input +
    backward_weight``. ``in_flight_limit``: most microbatches whose F has started and whose W has
    not finished; None: no limit.

    ``device_limit``: most of these with their activations on the device; the others are copied to
    host memory and back (:mod:`pipemorph.planning.offload`), which takes ``offload_copy`` each way.
    None: no offload. ``activation_bytes``: size of one microbatch's activations between its F and
    its W; only `pipemorph advise` uses it.

    ``recompute_limit``: most microbatches in flight if the stage drops their activations, retains
    their inputs and computes them again, one at a time; None: recomputation is not allowed. Policy
    pipemorph recomputes as few as it can. ``recompute``: the stage recomputes those beyond
    ``device_limit`` instead of copying them; ``in_flight_limit`` is then the recomputation's.

    ``reduction``: time between the stage's last op and the end of the iteration: the part of its
    gradient reduction over replicas that its last W does not hide. None: 0.
    """

    forward: Time
    backward_input: Time
    backward_weight: Time
    in_flight_limit: Count | None = None
    activation_bytes: Bytes | None = None
    offload_copy: Time | None = None
    fused_backward: Time | None = None
    device_limit: Count | None = None
    reduction: Time | None = None
    recompute_limit: Count | None = None
    recompute: bool = False

    @property
    def whole_backward(self) -> float:
        """Time of a fused backward."""
        if self.fused_backward is not None:
            return self.fused_backward
        return self.backward_input + self.backward_weight

    @property
    def fusing_pays(self) -> bool:
        """True if a fused backward is shorter than its parts."""
        return self.whole_backward < self.backward_input + self.backward_weight

    @property
    def least_backward(self) -> float:
        """Time of a microbatch's backward, fused or split, whichever is shorter."""
        return min(self.whole_backward, self.backward_input + self.backward_weight)

    @property
    def may_recompute(self) -> bool:
        """True if recomputation allows more microbatches in flight."""
        cap, most = self.in_flight_limit, self.recompute_limit
        return cap is not None and most is not None and most > cap

    @property
    def departure_time(self) -> float:
        """Extra time of an F whose activations leave the device."""
        return 0.0 if self.recompute else self.offload_copy or 0.0

    @property
    def return_time(self) -> float:
        """Extra time of a backward whose activations are away from the device."""
        return self.forward if self.recompute else self.offload_copy or 0.0


class LayerTimes(_FrozenModel):
    """Equal consecutive layers of the model, ``count`` of them; times are those of one layer."""

    forward: Time
    backward_input: Time
    backward_weight: Time
    activation_bytes: Bytes | None = None
    count: Annotated[Count, Field(le=4096)] = 1


class Link(_FrozenModel):
    """Connection of stages *i* and *i+1*, equal in both directions.

    With only ``delay`` it is pure latency: every message arrives ``delay`` after its send. With a
    rate, a message first occupies its direction for ``transfer``, one message at a time: in a file,
    give the rate as ``gbps`` (10^9 bit/s per direction) with ``message_bytes``; in Python,
    ``transfer`` in the problem's unit. ``queues`` limits the messages of one direction that travel
    at a time: they are assigned round robin to that many queues, and each occupies its queue from
    its first byte to its arrival. ``outstanding`` limits the sends of one direction that have not
    arrived: a further send blocks the *compute* of its stage until the oldest has arrived
    (head-of-line blocking).

    With ``half_duplex`` both directions share queues and rate, first come, first served.

    A direct route is ``queues=1, outstanding=2``, plus ``half_duplex`` if a pair of ranks has one
    communicator for both directions. A delegated route has ``queues=8`` and no limit on sends,
    since the engine takes them over (paper, "delegation").
    """

    delay: Time = 0.0
    transfer: Time = 0.0
    gbps: Rate | None = None
    message_bytes: Bytes | None = None
    queues: Messages | None = None
    outstanding: Messages | None = None
    half_duplex: bool = False

    @model_validator(mode="after")
    def _check_half_duplex(self) -> Link:
        if self.half_duplex and self.queues is None:
            raise ValueError("has half_duplex without queues; set queues to 1 or more")
        return self

    @model_validator(mode="after")
    def _set_transfer(self) -> Link:
        if self.gbps is not None:
            if self.message_bytes is None:
                raise ValueError("has gbps without message_bytes; set both")
            object.__setattr__(self, "transfer", transfer_ms(self.message_bytes, self.gbps))
        return self

    @property
    def wire_time(self) -> float:
        """Time from the first byte of a message to its arrival."""
        return self.transfer + self.delay


def transfer_ms(message_bytes: int, gbps: float) -> float:
    """Milliseconds for which a message occupies a link."""
    return message_bytes * 8 / (gbps * 1e6)


class Problem(_FrozenModel):
    """Input of the planner. ``links[i]`` connects ``stages[i]`` and ``stages[i+1]``.

    ``warmup``: fixed ``x_i``, the forwards of stage *i* before its first backward. ``dispatch``:
    stages follow the plan's order, or run the next ready op. ``objective``: time that policy
    pipemorph minimizes. *makespan*: that of an iteration. *period*: the longest time from the start
    of a stage's first op to the end of its last one, which is the time per iteration if stages do
    not wait for each other between iterations. ``ranks``: number of ranks, if they have several
    stages each, assigned by ``placement``; links still connect consecutive stages.
    ``rank_memory``: most memory in flight of a rank, over all its stages: in bytes if the stages
    have ``activation_bytes``, else in microbatches. ``layers``: all layers of the model, and
    ``layer_split``: their number per stage, for `pipemorph advise`.

    ``microbatch_costs``: rows of factors, one per microbatch, by which the times of its ops differ
    from those of the stages: one row for all stages, or one per stage; None: all are 1. They do not
    change transfers and memory. ``reorder``: policy pipemorph may run the microbatches in another
    order than 0, 1, …; a schedule then names *places* in that order instead of microbatches. Raises
    :class:`pydantic.ValidationError`; :func:`parse_problem` converts it to one line.
    """

    microbatches: Count
    stages: tuple[StageTimes, ...] = Field(min_length=1)
    links: tuple[Link, ...] = ()
    policy: Policy = Policy.PIPEMORPH
    warmup: tuple[Count, ...] | None = None
    dispatch: Dispatch = Dispatch.STATIC
    objective: Literal["makespan", "period"] = "makespan"
    ranks: Count | None = None
    placement: StagePlacement = "interleaved"
    rank_memory: Bytes | None = None
    layers: tuple[LayerTimes, ...] | None = Field(default=None, min_length=1)
    layer_split: tuple[Count, ...] | None = None
    microbatch_costs: Annotated[CostRows | None, BeforeValidator(parse_microbatch_costs)] = None
    reorder: bool = True

    @model_validator(mode="after")
    def _check_consistency(self) -> Problem:
        count = len(self.stages)
        if len(self.links) != count - 1:
            raise ValueError(
                f"links has {_format_entries(len(self.links))}; {count} stages need {count - 1}"
            )
        if count * self.microbatches > MAX_CELLS:
            raise ValueError(
                f"microbatches is {self.microbatches}; at {count} stages"
                f" at most {MAX_CELLS // count} can be planned"
            )
        if self.rank_memory is not None:
            _check_memory(self)
        if self.warmup is not None:
            _check_warmup(self.warmup, self)
        if self.layers is not None or self.layer_split is not None:
            _check_layers(self.layers, self.layer_split, count)
        if self.microbatch_costs is not None:
            _check_costs(self.microbatch_costs, self)
        return self

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    @property
    def stage_costs(self) -> CostRows:
        """Costs of the microbatches, one row per stage; empty if all microbatches are equal."""
        rows = self.microbatch_costs
        if rows is None:
            return ()
        return rows if len(rows) == self.stage_count else rows * self.stage_count

    @property
    def reorders(self) -> bool:
        """True if a plan may run the microbatches in another order."""
        return self.reorder and self.microbatch_costs is not None

    def with_microbatch_order(self, order: Sequence[int]) -> Problem:
        """Problem whose microbatches are the places of ``order``, which plans may not change.
        ``order[k]``: the microbatch in place *k*; empty: microbatch *k*. Raises
        :class:`InputError` unless it has each microbatch once, or if the problem forbids to
        ``reorder``."""
        if order and sorted(order) != list(range(self.microbatches)):
            raise InputError(
                f"microbatch_order is {quote_value(list(order))}; expected each microbatch from 0"
                f" to {self.microbatches - 1} once"
            )
        if not self.reorder and any(m != place for place, m in enumerate(order)):
            raise InputError(
                f"microbatch_order is {quote_value(list(order))}; the problem has reorder: false"
            )
        if self.microbatch_costs is None:
            return self
        rows = self.microbatch_costs
        if order:
            rows = tuple(tuple(row[m] for m in order) for row in rows)
        return self.model_copy(update={"microbatch_costs": rows, "reorder": False})

    def with_mean_costs(self) -> Problem:
        """Problem with equal microbatches, whose ops take the stages' mean times."""
        if self.microbatch_costs is None:
            return self
        stages = tuple(map(_scale_times, self.stages, map(fmean, self.stage_costs)))
        return self.model_copy(update={"stages": stages, "microbatch_costs": None})

    def require_equal_microbatches(self, what: str) -> None:
        """Raise :class:`InputError` if the problem has ``microbatch_costs``, which ``what`` does
        not support."""
        if self.microbatch_costs is not None:
            raise InputError(
                f"microbatch_costs are given; {what} supports only equal microbatches: omit"
                " microbatch_costs"
            )

    @property
    def microbatch_sizes(self) -> tuple[int, ...]:
        """Memory of a microbatch in flight, by stage, in the unit of ``rank_memory``."""
        return tuple(stage.activation_bytes or 1 for stage in self.stages)

    @property
    def multi_stage(self) -> bool:
        """True if ranks have several stages."""
        return self.ranks not in (None, self.stage_count)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """Rank of each stage. Raises :class:`InputError` unless the ranks divide the stages."""
        stages, ranks = self.stage_count, self.ranks
        if ranks is None or ranks == stages:
            return tuple(range(stages))
        if stages % ranks:
            raise InputError(f"ranks is {ranks}; expected a number that divides {stages} stages")
        return place_stages(stages, ranks, self.placement)

    def with_divided_memory(self) -> Problem:
        """Problem whose ranks divide their memory among their stages, for equally many microbatches
        each. The stages' peaks then fit, even if all occur at once."""
        if self.rank_memory is None:
            return self
        stages = list(self.stages)
        for mine in group_stages_by_rank(self.stage_ranks):
            share = self.rank_memory // sum(self.microbatch_sizes[i] for i in mine)
            for i in mine:
                cap = _smallest_limit(share, stages[i].in_flight_limit)
                if stages[i].device_limit is None:
                    stages[i] = stages[i].model_copy(update={"in_flight_limit": cap})
                else:
                    cap = _smallest_limit(share, stages[i].device_limit)
                    stages[i] = stages[i].model_copy(update={"device_limit": cap})
        return self.model_copy(update={"stages": tuple(stages), "rank_memory": None})

    def list_in_flight_limits(self) -> tuple[int | None, ...]:
        """``K_i`` per stage; None: no cap."""
        return tuple(stage.in_flight_limit for stage in self.stages)

    def list_device_limits(self) -> tuple[int | None, ...]:
        """``D_i`` per stage; None: neither offload nor recomputation."""
        return tuple(stage.device_limit for stage in self.stages)

    def list_recompute_flags(self) -> tuple[bool, ...]:
        """Flags by stage: True if activations that leave the device are computed again."""
        return tuple(stage.recompute for stage in self.stages)

    def with_plan_limits(self, plan: Plan) -> Problem:
        """Problem with the limits of a plan in place of its own."""
        own = (self.list_in_flight_limits(), self.list_device_limits(), self.list_recompute_flags())
        if self.rank_memory is None and own == (
            plan.in_flight_limits,
            plan.device_limits,
            plan.recompute,
        ):
            return self
        limits = zip(
            self.stages, plan.in_flight_limits, plan.device_limits, plan.recompute, strict=True
        )
        stages = tuple(
            stage.model_copy(
                update={"in_flight_limit": cap, "device_limit": device, "recompute": again}
            )
            for stage, cap, device, again in limits
        )
        return self.model_copy(update={"stages": stages, "rank_memory": None})

    def with_device_limits(
        self, limits: Sequence[int | None], recompute: Sequence[bool] = ()
    ) -> Problem:
        """Problem with ``limits[i]`` as device limit of stage *i*, unless the stage's is lower.
        None: no offload, so the stage's device limit becomes an in-flight cap. ``recompute[i]``:
        the stage recomputes; empty: none does. Raises :class:`InputError` for another number of
        limits than of stages, or if a stage must not recompute."""
        again = recompute or (False,) * self.stage_count
        for name, given in (("device_limit", limits), ("recompute", again)):
            if len(given) != self.stage_count:
                raise InputError(
                    f"{name} has {_format_entries(len(given))}; {self.stage_count} stages need"
                    f" {self.stage_count}"
                )
        stages = []
        for i, (stage, limit, drops) in enumerate(zip(self.stages, limits, again, strict=True)):
            own = _smallest_limit(stage.in_flight_limit, stage.device_limit)
            update: dict[str, object] = {"in_flight_limit": own, "device_limit": None}
            if limit is not None and drops:
                most = stage.recompute_limit
                if most is None or own is None or most <= own:
                    raise InputError(
                        f"the plan recomputes on stage {i}, and stages[{i}].recompute_limit is"
                        f" {most}; expected more than in_flight_limit, {own}"
                    )
                reach = compute_in_flight_reach(limit, own, most)
                update = {"in_flight_limit": reach, "device_limit": limit}
            elif limit is not None:
                update = {"device_limit": _smallest_limit(limit, stage.device_limit)}
            update["recompute"] = drops and limit is not None
            stages.append(stage.model_copy(update=update))
        return self.model_copy(update={"stages": tuple(stages)})

    def with_recomputation(self) -> Problem:
        """Problem whose stages recompute if they may: ``in_flight_limit`` becomes their device
        limit, ``recompute_limit`` their in-flight limit. Other stages have no device limit."""
        stages = [
            stage.model_copy(
                update={
                    "in_flight_limit": stage.recompute_limit,
                    "device_limit": stage.in_flight_limit,
                    "recompute": True,
                }
            )
            if stage.may_recompute
            else stage
            for stage in self.with_device_limits((None,) * self.stage_count).stages
        ]
        return self.model_copy(update={"stages": tuple(stages)})

    def with_delays(self, delays: Sequence[float]) -> Problem:
        """Problem with ``delays[i]`` on link *i*; queues and limits do not change."""
        links = tuple(
            link.model_copy(update={"delay": float(delay)})
            for link, delay in zip(self.links, delays, strict=True)
        )
        return self.model_copy(update={"links": links})

    def require_makespan(self, what: str) -> None:
        """Raise :class:`InputError` if the objective is another, which ``what`` cannot handle."""
        if self.objective != "makespan":
            raise InputError(
                f"objective is {self.objective}; {what} supports only makespan: omit objective,"
                " or plan with policy pipemorph"
            )

    def with_warmup(self, warmup: Sequence[int]) -> Problem:
        """Problem with fixed warm-up counts. Raises :class:`InputError` if they are invalid."""
        try:
            _check_warmup(warmup, self)
        except ValueError as error:
            raise InputError(str(error)) from None
        return self.model_copy(update={"warmup": tuple(warmup)})


def _scale_times(stage: StageTimes, factor: float) -> StageTimes:
    """Stage whose ops take ``factor`` times as long."""
    times = {name: getattr(stage, name) for name in _STAGE}
    update = {name: None if time is None else time * factor for name, time in times.items()}
    return stage.model_copy(update=update)


def _check_costs(rows: CostRows, problem: Problem) -> None:
    """Raise ValueError unless the rows fit the stages and microbatches of a problem, and its
    objective supports them."""
    stages, n = problem.stage_count, problem.microbatches
    if len(rows) not in (1, stages):
        raise ValueError(
            f"microbatch_costs has {len(rows)} rows; expected one for all stages, or one for each"
            f" of {stages}"
        )
    for i, row in enumerate(rows):
        if len(row) != n:
            where = f"microbatch_costs[{i}]" if len(rows) > 1 else "microbatch_costs"
            raise ValueError(f"{where} has {_format_entries(len(row))}; microbatches is {n}")
    if problem.objective != "makespan":
        raise ValueError(
            f"objective is {problem.objective}; microbatch_costs support only makespan: omit one of"
            " them"
        )


def _smallest_limit(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _format_entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _check_memory(problem: Problem) -> None:
    """Raise ValueError unless every rank has memory for one microbatch on all its stages: the
    first microbatch is in flight on all of them at once."""
    memory, known = problem.rank_memory, [s.activation_bytes is not None for s in problem.stages]
    if any(known) and not all(known):
        raise ValueError(
            f"rank_memory is {memory}; give activation_bytes of every stage, or of none, to count"
            " in microbatches"
        )
    if problem.multi_stage and problem.stage_count % (problem.ranks or 1):
        return  # Problem.placed raises the error.
    for rank, mine in enumerate(group_stages_by_rank(problem.stage_ranks)):
        least = sum(problem.microbatch_sizes[i] for i in mine)
        if memory is not None and memory < least:
            stages = _format_entries(len(mine)).replace("entries", "stages")
            raise ValueError(
                f"rank_memory is {memory}; rank {rank} needs {least} for one microbatch on"
                f" {stages.replace('entry', 'stage')}"
            )


def _check_warmup(warmup: Sequence[int], problem: Problem) -> None:
    """Raise ValueError unless ``warmup`` can run without deadlock and within the caps.

    Counts must not increase along the stages, else two stages wait for each other. They are at most
    the smallest cap up to their stage, and the number of microbatches.
    """
    shown = list(warmup)
    if len(warmup) != problem.stage_count:
        raise ValueError(
            f"warmup is {shown}, {_format_entries(len(warmup))}; {problem.stage_count} stages need"
            f" {problem.stage_count}"
        )
    cap: int | None = None
    for i, x in enumerate(warmup):
        if x < 1:
            raise ValueError(f"warmup[{i}] is {x}; expected at least 1")
        if x > problem.microbatches:
            raise ValueError(f"warmup[{i}] is {x}; there are {problem.microbatches} microbatches")
        if i and x > warmup[i - 1]:
            raise ValueError(
                f"warmup[{i}] is {x}, more than warmup[{i - 1}], {warmup[i - 1]}:"
                f" stages {i - 1} and {i} would wait for each other"
            )
        limit = problem.stages[i].in_flight_limit
        if limit is not None:
            cap = limit if cap is None else min(cap, limit)
        if cap is not None and x > cap:
            raise ValueError(f"warmup[{i}] is {x}; in_flight_limit allows {cap} up to stage {i}")


def _check_layers(
    layers: Sequence[LayerTimes] | None, split: Sequence[int] | None, stages: int
) -> None:
    """Raise ValueError unless ``layers``, ``layer_split`` and the stages fit together."""
    if layers is None or split is None:
        missing = "layers" if layers is None else "layer_split"
        raise ValueError(f"{missing} is missing; give both layers and layer_split, or neither")
    if len(split) != stages:
        raise ValueError(
            f"layer_split has {_format_entries(len(split))}; {stages} stages need {stages}"
        )
    total = sum(each.count for each in layers)
    if total > MAX_LAYERS:
        raise ValueError(f"layers has {total} layers; expected at most {MAX_LAYERS}")
    if sum(split) != total:
        raise ValueError(f"layer_split is {list(split)}, {sum(split)} layers; layers has {total}")


# --- times as multiples of a grain ----------------------------------------------------------
#
# Sums of whole numbers are exact in any order, and times in another unit give the same numbers.
# Comparisons of times thus have the same result in any unit.

FINEST_GRAIN = 2.0**-24
"""Smallest common divisor sought, relative to the longest time: 1 ns is found for 10 ms."""
ROUNDING_TOLERANCE = 2.0**-46
"""Rounding error of a multiple of the divisor, relative to the longest time."""
MOST_GRAINS = 2**30
"""Grains of the longest time if there is no common divisor. Sums over all ops of a plan are exact,
and rounding errors in a unit are far below a grain."""

_STAGE = ("forward", "backward_input", "backward_weight", "fused_backward", "offload_copy")
_TIMES = {StageTimes: (*_STAGE, "reduction"), Link: ("delay", "transfer")}


def convert_to_grains(problem: Problem, *, down: bool = False) -> tuple[Problem, float]:
    """Problem with its times as whole numbers without common divisor, and the grain that they are
    multiples of, in its unit. ``down``: round times down, as a lower bound needs."""
    every = (*problem.stages, *problem.links)
    times = {getattr(each, name) for each in every for name in _TIMES[type(each)]} - {None, 0.0}
    if not times:
        return problem, 1.0
    counts = _count_grains(times, down=down) | {0.0: 0.0, None: None}
    stages = tuple(
        stage.model_copy(update={t: counts[getattr(stage, t)] for t in _TIMES[StageTimes]})
        for stage in problem.stages
    )
    links = tuple(
        link.model_copy(update={t: counts[getattr(link, t)] for t in _TIMES[Link]})
        for link in problem.links
    )
    longest = max(times)
    grained = problem.model_copy(update={"stages": stages, "links": links})
    return grained, longest / counts[longest]


def copy_times(problem: Problem, other: Problem) -> Problem:
    """Problem with its own limits, and the times and costs of ``other``, which has as many stages
    and microbatches."""
    stages = tuple(
        own.model_copy(update={name: getattr(timed, name) for name in _TIMES[StageTimes]})
        for own, timed in zip(problem.stages, other.stages, strict=True)
    )
    costs = {"microbatch_costs": other.microbatch_costs, "reorder": other.reorder}
    return problem.model_copy(update={"stages": stages, "links": other.links, **costs})


def _count_grains(times: Iterable[float], *, down: bool) -> dict[float | None, float | None]:
    ordered = sorted(times, reverse=True)
    grain = longest = ordered[0]
    for time in ordered:
        grain = longest / round(longest / _find_common_divisor(grain, time, longest * FINEST_GRAIN))
    counts = {time: round(time / grain) for time in ordered}
    if any(
        abs(count * grain - time) > longest * ROUNDING_TOLERANCE for time, count in counts.items()
    ):
        # For a plan no time becomes 0: ops that take no time are planned in another way.
        count = floor if down else lambda grains: max(1, round(grains))
        counts = {time: count(time / longest * MOST_GRAINS) for time in ordered}
    least = gcd(*counts.values())
    return {time: float(count // least) for time, count in counts.items()}


def _find_common_divisor(a: float, b: float, small: float) -> float:
    """Greatest common divisor, by Euclid's algorithm with the nearest multiples."""
    while b > small:
        a, b = b, abs(a - round(a / b) * b)
    return a


# --- reading -------------------------------------------------------------------------------


def format_field_name(location: Iterable[int | str]) -> str:
    """Field name of a location: ``("stages", 0, "forward")`` → ``"stages[0].forward"``."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def quote_value(value: object) -> str:
    """Format a value as Python would, shortened."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_EXPECTED = {
    "missing": "is missing",
    "model_type": "is not a mapping",
    "tuple_type": "is not a list",
    "too_short": "needs at least one entry",
    "finite_number": "is not a finite number",
}


def describe_problem_error(error: ValidationError) -> str:
    """Describe the first validation error in one line, with the field and its value."""
    first = error.errors(include_url=False)[0]
    name, kind, found = format_field_name(first["loc"]), first["type"], first["input"]
    context = first.get("ctx", {})
    if kind == "value_error":
        message = str(context["error"])
        return f"{name}: {quote_value(found)} {message}" if name else message
    if kind == "missing":
        return f"{name} is missing"
    if kind == "extra_forbidden":
        if gone := describe_removal(PROBLEM_FIELDS, str(first["loc"][-1])):
            return f"{name} {gone}"
        hint = suggest_field(Problem, first["loc"])
        return f"{name}: {quote_value(found)} is not a known field{hint}"
    if kind == "enum":
        gone = describe_removal(
            {"policy": POLICIES, "dispatch": DISPATCHES}.get(name, {}), str(found)
        )
        if gone is not None:
            return f"{name}: {quote_value(found)} {gone}"
        return (
            f"{name}: {quote_value(found)} is not one of {context['expected'].replace(chr(39), '')}"
        )
    if kind == "greater_than_equal":
        return f"{name}: {quote_value(found)} is less than {context['ge']:g}"
    if kind == "less_than_equal":
        return f"{name}: {quote_value(found)} is more than {context['le']:g}"
    wrong = _EXPECTED.get(kind, f"is invalid ({first['msg']})")
    return f"{name}: {quote_value(found)} {wrong}" if name else f"{quote_value(found)} {wrong}"


def parse_problem(text: str) -> Problem:
    """Parse a problem from YAML or JSON text. Raises :class:`InputError`, one line without file
    name."""
    data = parse_single_document(text)
    if not isinstance(data, dict):
        raise InputError(f"is {quote_value(data)}; expected the fields of a problem")
    check_plain_data(data, MAX_VALUES)
    if data.get("kind") == "PipeMorphJob":
        raise InputError(
            "is the manifest of a job, for pipemorph run; expected a problem: microbatches, stages "
            "with their op times, and links (docs/reference/problem-file.md)"
        )
    try:
        return Problem.model_validate(data)
    except ValidationError as error:
        raise InputError(describe_problem_error(error)) from None


def load_problem(path: str) -> Problem:
    """Load a problem from a file (``-``: standard input). Raises :class:`InputError`, one line."""
    text = read_text(path, MAX_BYTES)
    try:
        return parse_problem(text)
    except InputError as error:
        raise InputError(f"{display_name(path)}: {error}") from None
