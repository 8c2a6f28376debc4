"""Schedule IR: the ops of each rank, in order, and the plan that contains them.

The op list has no communication. An op has a kind, a microbatch and a chunk, which is the place of
its stage among those of the rank, 0 where a rank has one stage. They determine the messages it
waits for (F waits for the F upstream, B for the B downstream). Names follow the zero-bubble
literature: F forward, B backward for the input, W backward for the weights, BW fused backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
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
    # Several stages per rank.
    ONE_F_ONE_B_INTERLEAVED = "1f1b-interleaved"
    ZERO_BUBBLE_V = "zero-bubble-v"

    @property
    def interleaved(self) -> bool:
        """Whether a rank has several stages."""
        return self in (Policy.ONE_F_ONE_B_INTERLEAVED, Policy.ZERO_BUBBLE_V)


class Dispatch(StrEnum):
    """How a stage picks its next op.

    STATIC keeps the plan's order. GUIDED runs, of the ready ops, the first in the plan's order, so
    that the order varies with arrivals and a late message does not block ready ops; see
    :mod:`pipemorph.planning.simulation.core`.
    """

    STATIC = "static"
    GUIDED = "guided"


class Route(StrEnum):
    """How a link sends data: direct by torch.distributed, or delegated to the transfer engine."""

    DIRECT = "direct"
    DELEGATED = "delegated"


class Op(NamedTuple):
    """One op of one rank: kind, microbatch (0 … N-1), and chunk: which of the rank's stages."""

    kind: OpKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


LETTERS = {OpKind.F: "F", OpKind.B: "I", OpKind.W: "W", OpKind.BW: "B"}
"""An op's kind in one letter, as torch writes it: I is the backward of the inputs, B the whole."""

KIND_OF_LETTER = {letter: kind for kind, letter in LETTERS.items()}

KINDS = (OpKind.F, OpKind.B, OpKind.W, OpKind.BW)
CODE = {kind: code for code, kind in enumerate(KINDS)}
"""An op's kind as a number, for simulators."""
MAX_CHUNKS = 64
"""Stages per rank. An op's code is a byte: that of its kind, plus 4 times its chunk."""
_TAKES_UP = (1, 0, -1, -1)
"""By code, how many microbatches more are in flight after the op."""


def in_flight_peak(ops: Iterable[Op]) -> int:
    """Most microbatches of a stage whose F has started and whose W (or BW) has not finished."""
    now = peak = 0
    for kind, *_ in ops:
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


_WIRE_OP = re.compile(r"(\d*)(\D)", re.ASCII)


@dataclass(frozen=True)
class Schedule:
    """Per-rank op order. ``ranks[r]``: the ops of rank *r*, in order.

    ``placement[s]``: the rank of stage *s*; a rank's chunks are its stages in the order of their
    numbers. Empty: stage *i* is on rank *i*.
    """

    microbatches: int
    ranks: tuple[tuple[Op, ...], ...]
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.ranks))))

    @staticmethod
    def placed(microbatches: int, ranks: Sequence[Sequence[tuple[int, OpKind, int]]]) -> Schedule:
        """A schedule from ``(stage, kind, microbatch)`` of each rank's ops, in order. Raises
        :class:`InputError` if a stage is on no rank or on two, or a rank has no stage or too
        many."""
        rank_of: dict[int, int] = {}
        for rank, ops in enumerate(ranks):
            if not ops:
                raise InputError(f"rank {rank} has no ops; expected at least those of one stage")
            for stage, *_ in ops:
                if rank_of.setdefault(stage, rank) != rank:
                    raise InputError(
                        f"stage {stage} is on rank {rank_of[stage]} and on rank {rank};"
                        " expected one rank"
                    )
        stages = range(len(rank_of))
        for stage in stages:
            if stage not in rank_of:
                raise InputError(
                    f"there are ops of {len(rank_of)} stages but none of stage {stage};"
                    " expected stages numbered from 0 without gaps"
                )
        placement = tuple(rank_of[stage] for stage in stages)
        for rank, mine in enumerate(stages_of(placement)):
            if len(mine) > MAX_CHUNKS:
                raise InputError(
                    f"rank {rank} has {len(mine)} stages; at most {MAX_CHUNKS} are supported"
                )
        chunk_of = _chunks(placement)
        return Schedule(
            microbatches,
            tuple(
                tuple(Op(kind, microbatch, chunk_of[stage]) for stage, kind, microbatch in ops)
                for ops in ranks
            ),
            placement,
        )

    @property
    def stage_count(self) -> int:
        return len(self.placement)

    @cached_property
    def one_stage_each(self) -> bool:
        """Whether stage *i* is the only one of rank *i*."""
        return self.placement == tuple(range(len(self.ranks)))

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """The stages of each rank: chunk *c* is the stage at position *c*."""
        return stages_of(self.placement)

    @cached_property
    def stages(self) -> tuple[tuple[Op, ...], ...]:
        """The ops of each stage, in order."""
        if self.one_stage_each:
            return self.ranks
        return tuple(
            tuple(op for op in self.ranks[rank] if op.chunk == chunk)
            for rank, chunk in zip(self.placement, _chunks(self.placement), strict=True)
        )

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
        """By rank, the :data:`CODE` of each op plus 4 times its chunk. Kept: it is predicted many
        times."""
        return tuple(
            bytes([CODE[kind] + 4 * chunk for kind, _, chunk in ops]) for ops in self.ranks
        )

    @cached_property
    def kinds(self) -> tuple[bytes, ...]:
        """By stage, the :data:`CODE` of each op."""
        if self.one_stage_each:
            return self.codes
        return tuple(bytes([CODE[op.kind] for op in ops]) for ops in self.stages)

    @cached_property
    def mixed(self) -> int | None:
        """The first stage with both fused and split backwards; None if there is none."""
        both = CODE[OpKind.B], CODE[OpKind.BW]
        found = (i for i, codes in enumerate(self.kinds) if all(each in codes for each in both))
        return next(found, None)

    @cached_property
    def fused(self) -> tuple[int, ...]:
        """Stages with fused backwards."""
        return tuple(i for i, codes in enumerate(self.kinds) if CODE[OpKind.BW] in codes)

    def slackness(self) -> tuple[int, ...]:
        """``Δ_i = x_i - x_{i+1}``, one per link: the warm-up that absorbs delay on link *i*."""
        x = self.warmup()
        return tuple(x[i] - x[i + 1] for i in range(len(x) - 1))

    def in_flight_peak(self) -> tuple[int, ...]:
        """By stage, most microbatches whose F has started and whose W (or BW) has not finished."""
        return self._in_flight_peak

    @cached_property
    def _in_flight_peak(self) -> tuple[int, ...]:
        return tuple(max(0, *accumulate(map(_TAKES_UP.__getitem__, codes))) for codes in self.kinds)

    def to_plan(self) -> Plan:
        """Plan 0 in this order: all links direct, and no limits."""
        links, none = self.stage_count - 1, (None,) * self.stage_count
        return Plan(0, Policy.PIPEMORPH, self, (Route.DIRECT,) * links, none)

    def encode(self) -> list[str]:
        """The wire format: per rank one of :data:`LETTERS` for each op, after its chunk if that is
        not 0.

        Each kind of a valid schedule runs in microbatch order on its stage, so this says all. 512
        stages of 2048 microbatches take 3 MB, and a tenth of it compressed.
        """
        return [
            "".join([f"{chunk or ''}{LETTERS[kind]}" for kind, _, chunk in ops])
            if any(op.chunk for op in ops)
            else "".join([LETTERS[op.kind] for op in ops])
            for ops in self.ranks
        ]

    @staticmethod
    def decode(microbatches: int, ranks: Sequence[str], placement: Sequence[int] = ()) -> Schedule:
        """Inverse of :meth:`encode`. Raises :class:`InputError` that names a rank and an op."""
        if placement and set(placement) != set(range(len(ranks))):
            raise InputError(
                f"the stages are on ranks {dashed(placement)}; expected all of {len(ranks)} ranks"
            )
        chunks = list(map(len, stages_of(placement))) or [1] * len(ranks)
        most = min(microbatches, max(map(len, ranks), default=0))
        # All ranks share these: a large plan has millions of ops.
        ops: dict[str, list[Op]] = {}
        return Schedule(
            microbatches,
            tuple(_decode(i, text, chunks[i], most, ops) for i, text in enumerate(ranks)),
            tuple(placement),
        )


def _decode(
    rank: int, text: str, chunks: int, most: int, ops: dict[str, list[Op]]
) -> tuple[Op, ...]:
    """``ops``: by what stands for one, its ops of all microbatches, which is added to."""
    found: list[Op] = []
    done: dict[str, list[int]] = {}
    """By the number of a chunk, how many F, B and W there are so far."""
    for position, (number, letter) in enumerate(_WIRE_OP.findall(text + "." * text[-1:].isdigit())):
        turns = done.get(number)
        if turns is None:
            if len(number) > 2 or number[:1] == "0" or int(number or 0) >= chunks:
                raise InputError(
                    f"rank {rank}, op {position} is of chunk {number[:9]}; the rank has {chunks}"
                )
            turns = done[number] = [0, 0, 0]
        kind = KIND_OF_LETTER.get(letter)
        if kind is None:
            raise InputError(
                f"rank {rank}, op {position} is {letter!r}; expected F, I (backward of the"
                " inputs), W or B (the whole backward)"
            )
        turn = turns[0] if letter == "F" else turns[2] if letter == "W" else turns[1]
        if turn >= most:
            raise InputError(
                f"rank {rank}, op {position} is a {letter} of microbatch {turn}; the schedule has"
                f" {most} microbatches"
            )
        its = ops.get(number + letter)
        if its is None:
            its = ops[number + letter] = [Op(kind, m, int(number or 0)) for m in range(most)]
        found.append(its[turn])
        turns[0] += letter == "F"
        turns[1] += letter in ("I", "B")
        turns[2] += letter in ("W", "B")
    return tuple(found)


def stages_of(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The stages of each rank, from the rank of each stage."""
    found: list[list[int]] = [[] for _ in range(max(placement, default=-1) + 1)]
    for stage, rank in enumerate(placement):
        found[rank].append(stage)
    return tuple(map(tuple, found))


def _chunks(placement: Sequence[int]) -> list[int]:
    """The chunk of each stage."""
    before: dict[int, int] = {}
    found = []
    for rank in placement:
        found.append(before.get(rank, 0))
        before[rank] = found[-1] + 1
    return found


@dataclass(frozen=True)
class Plan:
    """A schedule, its in-flight caps and the route of each link, with a version.

    ``version``: version of its directive; 0 for the initial plan, which every rank derives from the
    job spec, and for a plan that is not issued yet. ``in_flight_limits[i]``: ``K_i``, None for no
    limit. ``routes[i]``: route of link *i*. ``device_limits[i]``: most microbatches whose
    activations may be on the device of stage *i* at a time; the others are in host memory
    (:mod:`pipemorph.planning.offload`), or dropped and computed again if ``recompute[i]``; None:
    neither. ``waits[r]``: for guided dispatch, positions of ops of rank
    *r* before which nothing runs in their turn; empty: there are none.
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
    waits: tuple[tuple[int, ...], ...] = ()

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
    def offloading(self) -> tuple[int, ...]:
        """Stages that may move activations to host memory."""
        return self._limited(recompute=False)

    @property
    def offloads(self) -> bool:
        """Whether any stage may move activations to host memory."""
        return bool(self.offloading)

    @property
    def recomputing(self) -> tuple[int, ...]:
        """Stages that may drop activations and run the forward again."""
        return self._limited(recompute=True)

    def _limited(self, *, recompute: bool) -> tuple[int, ...]:
        return tuple(
            i
            for i, limit in enumerate(self.device_limits)
            if limit is not None and self.recompute[i] is recompute
        )

    @property
    def delegated(self) -> tuple[int, ...]:
        """Links whose bytes the engine carries."""
        return tuple(i for i, route in enumerate(self.routes) if route is Route.DELEGATED)

    def runs_as(self, other: Plan) -> bool:
        """Whether ranks do the same under both: versions differ, and caps that nothing reaches."""

        def acts(plan: Plan) -> tuple[object, ...]:
            return (
                plan.schedule, plan.dispatch, plan.waits, plan.routes,
                plan.device_limits, plan.recompute,
            )  # fmt: skip

        return acts(self) == acts(other)
