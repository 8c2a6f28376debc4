"""The planner's input: op times, caps and links, and the problem file.

A problem has no fixed unit of time: results are in the unit of its times. The PROBLEM file of
``pipemorph plan`` has milliseconds; the adaptation controller uses seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import floor, gcd
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from pipemorph.document import check_plain, named, only_document, read_text
from pipemorph.errors import InputError
from pipemorph.planning.ir import Dispatch, Plan, Policy, StagePlacement, place_stages, stages_of
from pipemorph.planning.offload import recompute_reach
from pipemorph.removed import DISPATCHES, POLICIES, PROBLEM_FIELDS, removal

MAX_CELLS = 512 * 2048
"""Most stages × microbatches. Far above any real pipeline; small enough that a typo in
``microbatches`` gives an error instead of exhausting the memory."""
MAX_OPS = 3 * MAX_CELLS
"""Each microbatch has an F, a B and a W on each stage."""
MAX_VALUES = 1_000_000
"""Most numbers, texts and keys of a problem file."""
MAX_LAYERS = 4096
MAX_BYTES = 64 << 20
"""Largest problem file; a problem of 1000 stages has 100 KB."""


def _number(value: object) -> object:
    """Reject values that pydantic would coerce to a number (``true``, ``'3'``)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError("is not a number")
    return value


def integer(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("is not a whole number")
    return value


Time = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1e12, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(integer), Field(ge=1, le=2**31 - 1)]
"""What the compiled core takes as an int."""
Bytes = Annotated[int, BeforeValidator(integer), Field(ge=1, le=10**15)]
Rate = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1e6, allow_inf_nan=False)]
"""10^9 bit/s."""
Messages = Annotated[Count, Field(le=MAX_OPS)]
"""A number of messages, at most as many as a plan can send."""


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StageTimes(_Model):
    """Time of one microbatch's F, B and W on a stage, and its in-flight cap ``K_i``.

    A fused backward (BW) takes ``fused_backward``, by default ``backward_input +
    backward_weight``. ``in_flight_limit``: most microbatches whose F has started and whose W has
    not finished; None: no limit.

    ``device_limit``: most of these with their activations on the device; the others are copied to
    host memory and back (:mod:`pipemorph.planning.offload`), which takes ``offload_copy`` each way.
    None: no offload. ``activation_bytes``: size of one microbatch's activations between its F and
    its W; only `pipemorph advise` uses it.

    ``recompute_limit``: most microbatches in flight if the stage drops their activations, keeps
    their inputs and computes them again, one at a time; None: it must not. Policy pipemorph
    recomputes only as many as it needs. ``recompute``: the stage does so with those beyond
    ``device_limit``, instead of copying them; ``in_flight_limit`` is that with recomputation then.

    ``reduction``: what follows the stage's last op before an iteration is over: the part of its
    gradient reduction over replicas that its own last W does not hide. None: nothing follows.
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
        """Whether a fused backward is shorter than its parts."""
        return self.whole_backward < self.backward_input + self.backward_weight

    @property
    def least_backward(self) -> float:
        """Time of one microbatch's backward, fused or split, whichever is shorter."""
        return min(self.whole_backward, self.backward_input + self.backward_weight)

    @property
    def may_recompute(self) -> bool:
        """Whether recomputation allows more microbatches in flight."""
        cap, most = self.in_flight_limit, self.recompute_limit
        return cap is not None and most is not None and most > cap

    @property
    def leaving(self) -> float:
        """Time for which an F is longer if its activations leave the device."""
        return 0.0 if self.recompute else self.offload_copy or 0.0

    @property
    def returning(self) -> float:
        """Time for which a backward is longer if its activations have left the device."""
        return self.forward if self.recompute else self.offload_copy or 0.0


class Layers(_Model):
    """``count`` equal consecutive layers of the model; times are those of one layer."""

    forward: Time
    backward_input: Time
    backward_weight: Time
    activation_bytes: Bytes | None = None
    count: Annotated[Count, Field(le=4096)] = 1


class Link(_Model):
    """The connection of stages *i* and *i+1*, the same in both directions.

    With only ``delay`` it is pure latency: every message arrives ``delay`` after its send. With a
    rate, a message first occupies its direction for ``transfer``, one message at a time: in a file,
    give the rate as ``gbps`` (10^9 bit/s per direction) with ``message_bytes``; in Python,
    ``transfer`` in the problem's unit. ``queues`` limits how many messages of one direction travel
    at a time: they are assigned round robin to that many queues, and each occupies its queue from
    its first byte to its arrival. ``outstanding`` limits the
    sends of one direction that have not arrived: a further send blocks the *compute* of its stage
    until the oldest has arrived (head-of-line blocking).

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
    def _shares_something(self) -> Link:
        if self.half_duplex and self.queues is None:
            raise ValueError("has half_duplex without queues; set queues to 1 or more")
        return self

    @model_validator(mode="after")
    def _takes_its_time(self) -> Link:
        if self.gbps is not None:
            if self.message_bytes is None:
                raise ValueError("has gbps without message_bytes; set both")
            object.__setattr__(self, "transfer", transfer_ms(self.message_bytes, self.gbps))
        return self

    @property
    def wire_time(self) -> float:
        """From the first byte of a message to its arrival."""
        return self.transfer + self.delay


def transfer_ms(message_bytes: int, gbps: float) -> float:
    """Milliseconds that one message occupies a link."""
    return message_bytes * 8 / (gbps * 1e6)


class Problem(_Model):
    """The planner's input. ``links[i]`` connects ``stages[i]`` and ``stages[i+1]``.

    ``warmup``: fixes ``x_i``, the forwards of stage *i* before its first backward. ``dispatch``:
    whether stages keep the plan's order or run the next ready op. ``objective``: what policy
    pipemorph minimizes: the makespan of an iteration, or the longest time from the start of a
    stage's first op to the end of its last one, which is the time per iteration (period) if nothing
    makes stages wait for each other between iterations. ``ranks``: number of ranks, if they have
    several stages each, as ``placement`` says; links still connect consecutive stages.
    ``rank_memory``: most that a rank may hold in flight at a time, of all its stages: in bytes if
    the stages have ``activation_bytes``, else in microbatches. ``layers``:
    all layers of the model, and ``layer_split``: their number per stage, for `pipemorph advise`.
    Raises :class:`pydantic.ValidationError`; :func:`parse_problem` converts it to one line.
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
    layers: tuple[Layers, ...] | None = Field(default=None, min_length=1)
    layer_split: tuple[Count, ...] | None = None

    @model_validator(mode="after")
    def _fits_together(self) -> Problem:
        count = len(self.stages)
        if len(self.links) != count - 1:
            raise ValueError(
                f"links has {_entries(len(self.links))}; {count} stages need {count - 1}"
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
        return self

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Memory of one microbatch in flight by stage, in the unit of ``rank_memory``."""
        return tuple(stage.activation_bytes or 1 for stage in self.stages)

    @property
    def several(self) -> bool:
        """Whether ranks have several stages."""
        return self.ranks not in (None, self.stage_count)

    @property
    def placed(self) -> tuple[int, ...]:
        """The rank of each stage. Raises :class:`InputError` if the ranks do not divide the
        stages."""
        stages, ranks = self.stage_count, self.ranks
        if ranks is None or ranks == stages:
            return tuple(range(stages))
        if stages % ranks:
            raise InputError(f"ranks is {ranks}; expected a number that divides {stages} stages")
        return place_stages(stages, ranks, self.placement)

    def shared_out(self) -> Problem:
        """The problem in which the stages of a rank share its memory out, each for as many
        microbatches: what they hold fits at any moment, whenever they hold it."""
        if self.rank_memory is None:
            return self
        stages = list(self.stages)
        for mine in stages_of(self.placed):
            share = self.rank_memory // sum(self.sizes[i] for i in mine)
            for i in mine:
                cap = _least(share, stages[i].in_flight_limit)
                if stages[i].device_limit is None:
                    stages[i] = stages[i].model_copy(update={"in_flight_limit": cap})
                else:
                    cap = _least(share, stages[i].device_limit)
                    stages[i] = stages[i].model_copy(update={"device_limit": cap})
        return self.model_copy(update={"stages": tuple(stages), "rank_memory": None})

    def in_flight_limits(self) -> tuple[int | None, ...]:
        """``K_i`` per stage; None: no cap."""
        return tuple(stage.in_flight_limit for stage in self.stages)

    def device_limits(self) -> tuple[int | None, ...]:
        """``D_i`` per stage; None: neither offload nor recomputation."""
        return tuple(stage.device_limit for stage in self.stages)

    def recompute(self) -> tuple[bool, ...]:
        """Per stage, whether activations that leave the device are computed again."""
        return tuple(stage.recompute for stage in self.stages)

    def under(self, plan: Plan) -> Problem:
        """The same problem with the limits of a plan in place of its own."""
        own = (self.in_flight_limits(), self.device_limits(), self.recompute())
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
        """The problem with ``limits[i]`` as device limit of stage *i*, unless its own is lower.
        None: no offload, so that its own device limit becomes an in-flight cap. ``recompute[i]``:
        the stage recomputes; empty: none does. Raises :class:`InputError` unless there is one limit
        per stage, or if a stage must not recompute."""
        again = recompute or (False,) * self.stage_count
        for name, given in (("device_limit", limits), ("recompute", again)):
            if len(given) != self.stage_count:
                raise InputError(
                    f"{name} has {_entries(len(given))}; {self.stage_count} stages need"
                    f" {self.stage_count}"
                )
        stages = []
        for i, (stage, limit, drops) in enumerate(zip(self.stages, limits, again, strict=True)):
            kept = _least(stage.in_flight_limit, stage.device_limit)
            update: dict[str, object] = {"in_flight_limit": kept, "device_limit": None}
            if limit is not None and drops:
                most = stage.recompute_limit
                if most is None or kept is None or most <= kept:
                    raise InputError(
                        f"the plan recomputes on stage {i}, and stages[{i}].recompute_limit is"
                        f" {most}; expected more than in_flight_limit, {kept}"
                    )
                reach = recompute_reach(limit, kept, most)
                update = {"in_flight_limit": reach, "device_limit": limit}
            elif limit is not None:
                update = {"device_limit": _least(limit, stage.device_limit)}
            update["recompute"] = drops and limit is not None
            stages.append(stage.model_copy(update=update))
        return self.model_copy(update={"stages": tuple(stages)})

    def recomputing(self) -> Problem:
        """The problem in which the stages that may recompute do: their device limit is what fits on
        the device, and their in-flight limit is that with recomputation. No other stage has a
        device limit."""
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
        """The problem with ``delays[i]`` on link *i*; queues and limits stay."""
        links = tuple(
            link.model_copy(update={"delay": float(delay)})
            for link, delay in zip(self.links, delays, strict=True)
        )
        return self.model_copy(update={"links": links})

    def check_makespan(self, what: str) -> None:
        """Raise :class:`InputError` if the objective is another, which ``what`` does not know."""
        if self.objective != "makespan":
            raise InputError(
                f"objective is {self.objective}; {what} knows only makespan: leave objective out,"
                " or plan with policy pipemorph"
            )

    def with_warmup(self, warmup: Sequence[int]) -> Problem:
        """The problem with fixed warm-up counts. Raises :class:`InputError` if they are invalid."""
        try:
            _check_warmup(warmup, self)
        except ValueError as error:
            raise InputError(str(error)) from None
        return self.model_copy(update={"warmup": tuple(warmup)})


def _least(*limits: int | None) -> int | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count} entries"


def _check_memory(problem: Problem) -> None:
    """Raise ValueError unless every rank has memory for one microbatch on all its stages: the
    first one is in flight on all of them at once."""
    memory, known = problem.rank_memory, [s.activation_bytes is not None for s in problem.stages]
    if any(known) and not all(known):
        raise ValueError(
            f"rank_memory is {memory}; give activation_bytes of every stage, or of none, to count"
            " in microbatches"
        )
    if problem.several and problem.stage_count % (problem.ranks or 1):
        return  # Said where stages are placed.
    for rank, mine in enumerate(stages_of(problem.placed)):
        least = sum(problem.sizes[i] for i in mine)
        if memory is not None and memory < least:
            raise ValueError(
                f"rank_memory is {memory}; rank {rank} needs {least} for one microbatch on"
                f" {_entries(len(mine)).replace('entries', 'stages').replace('entry', 'stage')}"
            )


def _check_warmup(warmup: Sequence[int], problem: Problem) -> None:
    """Raise ValueError unless ``warmup`` can run without deadlock and within the caps.

    Counts must be non-increasing along the stages, else two stages wait for each other; at most the
    smallest cap up to their stage; at most the number of microbatches.
    """
    shown = list(warmup)
    if len(warmup) != problem.stage_count:
        raise ValueError(
            f"warmup is {shown}, {_entries(len(warmup))}; {problem.stage_count} stages need"
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
    layers: Sequence[Layers] | None, split: Sequence[int] | None, stages: int
) -> None:
    """Raise ValueError unless ``layers`` and ``layer_split`` fit together and to the stages."""
    if layers is None or split is None:
        missing = "layers" if layers is None else "layer_split"
        raise ValueError(f"{missing} is missing; give both layers and layer_split, or neither")
    if len(split) != stages:
        raise ValueError(f"layer_split has {_entries(len(split))}; {stages} stages need {stages}")
    total = sum(each.count for each in layers)
    if total > MAX_LAYERS:
        raise ValueError(f"layers has {total} layers; expected at most {MAX_LAYERS}")
    if sum(split) != total:
        raise ValueError(f"layer_split is {list(split)}, {sum(split)} layers; layers has {total}")


# --- whole numbers of one grain -------------------------------------------------------------
#
# Sums of whole numbers are exact in any order, and the same times in another unit are the same
# numbers, so that all that compares times comes out the same.

FINEST = 2.0**-24
"""Smallest common divisor of times that is looked for, of the longest: of 10 ms, 1 ns is found."""
EXACT = 2.0**-46
"""Most that a time may differ from a multiple of it, of the longest: rounding in its unit."""
GRAINS = 2**30
"""Grains of the longest time if they have none. Sums of as many ops as a plan can have are exact,
and what rounding in a unit changes is far less than a grain."""

_STAGE = ("forward", "backward_input", "backward_weight", "fused_backward", "offload_copy")
_TIMES = {StageTimes: (*_STAGE, "reduction"), Link: ("delay", "transfer")}


def in_grains(problem: Problem, *, down: bool = False) -> tuple[Problem, float]:
    """The problem with its times as whole numbers that have no common divisor, and what they are
    multiples of, in its unit. ``down``: none is longer than it is, as a lower bound needs it."""
    every = (*problem.stages, *problem.links)
    times = {getattr(each, name) for each in every for name in _TIMES[type(each)]} - {None, 0.0}
    if not times:
        return problem, 1.0
    counts = _counts(times, down=down) | {0.0: 0.0, None: None}
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


def with_times_of(problem: Problem, other: Problem) -> Problem:
    """The problem with its own limits and the times of another one, which has as many stages."""
    stages = tuple(
        own.model_copy(update={name: getattr(timed, name) for name in _TIMES[StageTimes]})
        for own, timed in zip(problem.stages, other.stages, strict=True)
    )
    return problem.model_copy(update={"stages": stages, "links": other.links})


def _counts(times: Iterable[float], *, down: bool) -> dict[float | None, float | None]:
    ordered = sorted(times, reverse=True)
    grain = longest = ordered[0]
    for time in ordered:
        grain = longest / round(longest / _divisor(grain, time, longest * FINEST))
    counts = {time: round(time / grain) for time in ordered}
    if any(abs(count * grain - time) > longest * EXACT for time, count in counts.items()):
        # In a plan no time becomes 0: ops that take none are planned in another way.
        count = floor if down else lambda grains: max(1, round(grains))
        counts = {time: count(time / longest * GRAINS) for time in ordered}
    least = gcd(*counts.values())
    return {time: float(count // least) for time, count in counts.items()}


def _divisor(a: float, b: float, small: float) -> float:
    """The greatest common divisor, by Euclid's algorithm with the nearest multiples."""
    while b > small:
        a, b = b, abs(a - round(a / b) * b)
    return a


# --- reading -------------------------------------------------------------------------------


def field_name(location: Iterable[int | str]) -> str:
    """``("stages", 0, "forward")`` → ``"stages[0].forward"``."""
    name = ""
    for part in location:
        name += f"[{part}]" if isinstance(part, int) else f".{part}" if name else part
    return name


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


_EXPECTED = {
    "missing": "is missing",
    "extra_forbidden": "is not a known field",
    "model_type": "is not a mapping",
    "tuple_type": "is not a list",
    "too_short": "needs at least one entry",
    "finite_number": "is not a finite number",
}


def describe(error: ValidationError) -> str:
    """The first validation error as one line with the field and its value."""
    first = error.errors(include_url=False)[0]
    name, kind, found = field_name(first["loc"]), first["type"], first["input"]
    context = first.get("ctx", {})
    if kind == "value_error":
        message = str(context["error"])
        return f"{name}: {shown(found)} {message}" if name else message
    if kind == "missing":
        return f"{name} is missing"
    if kind == "extra_forbidden" and (gone := removal(PROBLEM_FIELDS, str(first["loc"][-1]))):
        return f"{name} {gone}"
    if kind == "enum":
        gone = removal({"policy": POLICIES, "dispatch": DISPATCHES}.get(name, {}), str(found))
        if gone is not None:
            return f"{name}: {shown(found)} {gone}"
        return f"{name}: {shown(found)} is not one of {context['expected'].replace(chr(39), '')}"
    if kind == "greater_than_equal":
        return f"{name}: {shown(found)} is less than {context['ge']:g}"
    if kind == "less_than_equal":
        return f"{name}: {shown(found)} is more than {context['le']:g}"
    wrong = _EXPECTED.get(kind, f"is invalid ({first['msg']})")
    return f"{name}: {shown(found)} {wrong}" if name else f"{shown(found)} {wrong}"


def parse_problem(text: str) -> Problem:
    """Parse a problem from YAML or JSON text. Raises :class:`InputError`, one line without file
    name."""
    data = only_document(text)
    if not isinstance(data, dict):
        raise InputError(f"is {shown(data)}; expected the fields of a problem")
    check_plain(data, MAX_VALUES)
    try:
        return Problem.model_validate(data)
    except ValidationError as error:
        raise InputError(describe(error)) from None


def load_problem(path: str) -> Problem:
    """Load a problem from a file (``-``: standard input). Raises :class:`InputError`, one line."""
    text = read_text(path, MAX_BYTES)
    try:
        return parse_problem(text)
    except InputError as error:
        raise InputError(f"{named(path)}: {error}") from None
