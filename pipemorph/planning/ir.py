"""Schedule IR: the ops of each stage, in order, and the plan that contains them.

The op list has no communication. An op has a kind and a microbatch, which determine the messages it
waits for (F waits for the F upstream, B for the B downstream). Names follow the zero-bubble
literature: F forward, B backward for the input, W backward for the weights, BW fused backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from pipemorph.errors import InputError

StagePlacement = Literal["interleaved", "v"]
"""Which of a pipeline's stages a rank has, if several. interleaved: the ranks get the stages in
turn, ``s mod ranks``. v: every other turn goes from the last rank back to the first, so that two
consecutive stages at a turning point are on one rank, and rank 0 has the first and the last stage
of two per rank."""


def place_stages(stages: int, ranks: int, placement: StagePlacement) -> tuple[int, ...]:
    """The rank of every stage of one pipeline, of ``ranks`` that divide the ``stages``."""
    return tuple(
        ranks - 1 - stage % ranks if placement == "v" and stage // ranks % 2 else stage % ranks
        for stage in range(stages)
    )


class OpKind(StrEnum):
    """The kind of an op, which processes one microbatch."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


class Policy(StrEnum):
    """The algorithm that makes a schedule."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    ZERO_BUBBLE = "zero-bubble"
    PIPEMORPH = "pipemorph"
    # Several stages per rank; see pipemorph.planning.simulation.interleaved.
    ONE_F_ONE_B_INTERLEAVED = "1f1b-interleaved"
    ZERO_BUBBLE_V = "zero-bubble-v"

    @property
    def interleaved(self) -> bool:
        """Whether a rank has several stages."""
        return self in (Policy.ONE_F_ONE_B_INTERLEAVED, Policy.ZERO_BUBBLE_V)


class Dispatch(StrEnum):
    """How a stage picks its next op.

    STATIC keeps the plan's order. GUIDED runs, of the ready ops, the first in the plan's order, so
    that a late message does not block ready ops; see
    :mod:`pipemorph.planning.simulation.guided`.
    """

    STATIC = "static"
    GUIDED = "guided"

    @property
    def varies(self) -> bool:
        """Whether the order depends on when messages arrive."""
        return self is not Dispatch.STATIC


class Route(StrEnum):
    """How a link sends data: direct by torch.distributed, or delegated to the transfer engine."""

    DIRECT = "direct"
    DELEGATED = "delegated"


class Op(NamedTuple):
    """One op of one stage: kind and microbatch (0 … N-1)."""

    kind: OpKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


LETTERS = {OpKind.F: "F", OpKind.B: "I", OpKind.W: "W", OpKind.BW: "B"}
"""An op's kind in one letter, as torch writes it: I is the backward of the inputs, B the whole."""

KIND_OF_LETTER = {letter: kind for kind, letter in LETTERS.items()}

KINDS = (OpKind.F, OpKind.B, OpKind.W, OpKind.BW)
CODE = {kind: code for code, kind in enumerate(KINDS)}
"""An op's kind as a number, for simulators."""
_TAKES_UP = (1, 0, -1, -1)
"""By code, how many microbatches more are in flight after the op."""


def in_flight_peak(ops: Iterable[Op]) -> int:
    """Most microbatches of a stage whose F has started and whose W (or BW) has not finished."""
    now = peak = 0
    for kind, _ in ops:
        if kind is OpKind.F:
            now += 1
            peak = max(peak, now)
        elif kind is not OpKind.B:
            now -= 1
    return peak


def dashed(values: Sequence[int], most: int = 8) -> str:
    """``7-5-3-1``, as for the warm-up of each stage; of more than ``most`` without the middle."""
    shown = [str(value) for value in values]
    if len(shown) > most:
        shown = [*shown[: most // 2], "…", *shown[-(most // 4) :]]
    return "-".join(shown)


@dataclass(frozen=True)
class Schedule:
    """Per-stage op order. ``stages[i]``: the ops of stage *i*, in order."""

    microbatches: int
    stages: tuple[tuple[Op, ...], ...]

    @property
    def stage_count(self) -> int:
        return len(self.stages)

    def warmup(self) -> tuple[int, ...]:
        """``x_i``: forwards stage *i* runs before its first backward (B or BW)."""
        return self._warmup

    @cached_property
    def _warmup(self) -> tuple[int, ...]:
        counts = []
        for ops in self.stages:
            forwards = 0
            for op in ops:
                if op.kind in (OpKind.B, OpKind.BW):
                    break
                if op.kind is OpKind.F:
                    forwards += 1
            counts.append(forwards)
        return tuple(counts)

    @cached_property
    def codes(self) -> tuple[bytes, ...]:
        """By stage, the :data:`CODE` of each op. Kept: it is predicted many times."""
        return tuple(bytes([CODE[kind] for kind, _ in ops]) for ops in self.stages)

    @cached_property
    def mixed(self) -> int | None:
        """The first stage with both fused and split backwards; None if there is none."""
        both = CODE[OpKind.B], CODE[OpKind.BW]
        found = (i for i, codes in enumerate(self.codes) if all(each in codes for each in both))
        return next(found, None)

    @cached_property
    def fused(self) -> tuple[int, ...]:
        """Stages with fused backwards."""
        return tuple(i for i, codes in enumerate(self.codes) if CODE[OpKind.BW] in codes)

    def slackness(self) -> tuple[int, ...]:
        """``Δ_i = x_i - x_{i+1}``, one per link: the warm-up that absorbs delay on link *i*."""
        x = self.warmup()
        return tuple(x[i] - x[i + 1] for i in range(len(x) - 1))

    def in_flight_peak(self) -> tuple[int, ...]:
        """Most microbatches whose F has started and whose W (or BW) has not finished."""
        return self._in_flight_peak

    @cached_property
    def _in_flight_peak(self) -> tuple[int, ...]:
        return tuple(max(0, *accumulate(map(_TAKES_UP.__getitem__, codes))) for codes in self.codes)

    def encode(self) -> list[str]:
        """The wire format: per stage one of :data:`LETTERS` for each op.

        Each kind of a valid schedule runs in microbatch order, so the kinds say all. 512 stages of
        2048 microbatches take 3 MB, and a tenth of it compressed.
        """
        return ["".join([LETTERS[kind] for kind, _ in ops]) for ops in self.stages]

    @staticmethod
    def decode(microbatches: int, stages: Sequence[str]) -> Schedule:
        """Inverse of :meth:`encode`. Raises :class:`InputError` that names a stage and an op."""
        longest = min(microbatches, max(map(len, stages), default=0))
        # All stages share these: a large plan has millions of ops.
        ops = {
            letter: [Op(kind, m) for m in range(longest)] for letter, kind in KIND_OF_LETTER.items()
        }
        return Schedule(microbatches, tuple(_decode(i, text, ops) for i, text in enumerate(stages)))


def _decode(stage: int, text: str, ops: Mapping[str, Sequence[Op]]) -> tuple[Op, ...]:
    found: list[Op] = []
    forwards = backwards = weights = 0
    for position, letter in enumerate(text):
        if letter not in ops:
            raise InputError(
                f"stage {stage}, op {position} is {letter!r}; expected F, I (backward of the"
                " inputs), W or B (the whole backward)"
            )
        turn = forwards if letter == "F" else weights if letter == "W" else backwards
        if turn >= len(ops[letter]):
            raise InputError(
                f"stage {stage}, op {position} is a {letter} of microbatch {turn}; the schedule has"
                f" {len(ops[letter])} microbatches"
            )
        found.append(ops[letter][turn])
        forwards += letter == "F"
        backwards += letter in ("I", "B")
        weights += letter in ("W", "B")
    return tuple(found)


@dataclass(frozen=True)
class Plan:
    """A schedule, its in-flight caps and the route of each link, with a version.

    ``version``: version of its directive; 0 for the initial plan, which every rank derives from the
    job spec, and for a plan that is not issued yet. ``in_flight_limits[i]``: ``K_i``, None for no
    limit. ``routes[i]``: route of link *i*. ``device_limits[i]``: most microbatches whose
    activations may be on the device of stage *i* at a time; the others are in host memory
    (:mod:`pipemorph.planning.offload`), or dropped and computed again if ``recompute[i]``; None:
    neither. ``turns[r]``: for ranks with several
    stages, the stage of each op that rank *r* of a pipeline runs, in order: the next op of that
    stage. Empty: one stage per rank. ``waits[i]``: for guided dispatch, positions of ops of stage
    *i* before which nothing runs in their turn; empty: there are none. ``own``: data-parallel
    replicas that run another plan under this version, and that plan; all other replicas run this
    one. Only these run without ``own``.
    """

    version: int
    policy: Policy
    schedule: Schedule
    routes: tuple[Route, ...]
    in_flight_limits: tuple[int | None, ...]
    dispatch: Dispatch = Dispatch.STATIC
    warmup: tuple[int, ...] = field(default=())
    device_limits: tuple[int | None, ...] = field(default=())
    recompute: tuple[bool, ...] = field(default=())
    turns: tuple[tuple[int, ...], ...] = ()
    waits: tuple[tuple[int, ...], ...] = ()
    own: tuple[tuple[tuple[int, ...], Plan], ...] = ()

    def __post_init__(self) -> None:
        if not self.warmup:
            object.__setattr__(self, "warmup", self.schedule.warmup())
        if not self.device_limits:
            object.__setattr__(self, "device_limits", (None,) * self.schedule.stage_count)
        if not self.recompute:
            object.__setattr__(self, "recompute", (False,) * self.schedule.stage_count)
        if not any(self.waits):
            object.__setattr__(self, "waits", ())

    @property
    def each(self) -> tuple[Plan, ...]:
        """The different plans of the replicas: this one, and those of ``own``."""
        return (self, *(plan for _, plan in self.own))

    def of_replica(self, replica: int) -> Plan:
        """The plan of one replica."""
        if not self.own:
            return self
        found = next((plan for replicas, plan in self.own if replica in replicas), self)
        return replace(found, version=self.version, own=())

    @property
    def offloading(self) -> tuple[int, ...]:
        """Stages that may move activations to host memory, in any replica."""
        return self._limited(recompute=False)

    @property
    def offloads(self) -> bool:
        """Whether any stage may move activations to host memory."""
        return bool(self.offloading)

    @property
    def recomputing(self) -> tuple[int, ...]:
        """Stages that may drop activations and run the forward again, in any replica."""
        return self._limited(recompute=True)

    def _limited(self, *, recompute: bool) -> tuple[int, ...]:
        return _any(
            i
            for plan in self.each
            for i, limit in enumerate(plan.device_limits)
            if limit is not None and plan.recompute[i] is recompute
        )

    @property
    def delegated(self) -> tuple[int, ...]:
        """Links whose bytes the engine carries, in any replica."""
        return _any(
            i
            for plan in self.each
            for i, route in enumerate(plan.routes)
            if route is Route.DELEGATED
        )

    @property
    def all_routes(self) -> tuple[Route, ...]:
        """Route of each link: delegated if it is in any replica."""
        moved = self.delegated
        return tuple(Route.DELEGATED if i in moved else r for i, r in enumerate(self.routes))

    @property
    def fused(self) -> tuple[int, ...]:
        """Stages with fused backwards, in any replica."""
        return _any(i for plan in self.each for i in plan.schedule.fused)

    def runs_as(self, other: Plan) -> bool:
        """Whether ranks do the same under both: versions differ, and caps that nothing reaches."""

        def acts(plan: Plan) -> tuple[object, ...]:
            return (
                plan.schedule, plan.dispatch, plan.waits, plan.turns, plan.routes,
                plan.device_limits, plan.recompute,
            )  # fmt: skip

        mine, theirs = (list(map(acts, plan.each)) for plan in (self, other))
        return mine == theirs and [r for r, _ in self.own] == [r for r, _ in other.own]


def _any(indices: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted(set(indices)))
