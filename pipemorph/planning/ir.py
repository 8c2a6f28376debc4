"""Schedule IR: the ops of each rank, in order, and the plan that contains them.

The op list has no communication. An op has a kind, a microbatch and a chunk: the index of its stage
among those of the rank, 0 if the rank has one stage. They determine the messages that the op waits
for (F waits for the F upstream, B for the B downstream). Names follow the zero-bubble literature: F
forward, B backward for the input, W backward for the weights, BW fused backward.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Literal, NamedTuple

from pipemorph.errors import InputError

StagePlacement = Literal["interleaved", "v"]
"""Assignment of stages to ranks that have several. interleaved: stage ``s`` is on rank ``s mod
ranks``. v: every second round goes from the last rank back to the first, so that the two stages at
a turning point share a rank; with two stages per rank, rank 0 has the first and the last one."""


def place_stages(stages: int, ranks: int, placement: StagePlacement) -> tuple[int, ...]:
    """Rank of each stage of a pipeline. ``ranks`` must divide ``stages``."""
    return tuple(
        ranks - 1 - stage % ranks if placement == "v" and stage // ranks % 2 else stage % ranks
        for stage in range(stages)
    )


class OpKind(StrEnum):
    """Kind of an op, which processes one microbatch."""

    F = "F"
    B = "B"
    W = "W"
    BW = "BW"


class Policy(StrEnum):
    """Algorithm that makes a schedule."""

    GPIPE = "gpipe"
    ONE_F_ONE_B = "1f1b"
    ZERO_BUBBLE = "zero-bubble"
    PIPEMORPH = "pipemorph"
    # Several stages per rank.
    ONE_F_ONE_B_INTERLEAVED = "1f1b-interleaved"
    ZERO_BUBBLE_V = "zero-bubble-v"

    @property
    def interleaved(self) -> bool:
        """True if ranks have several stages."""
        return self in (Policy.ONE_F_ONE_B_INTERLEAVED, Policy.ZERO_BUBBLE_V)


class Dispatch(StrEnum):
    """Rule by which a stage picks its next op.

    STATIC follows the plan's order. GUIDED runs the ready op that is first in the plan's order: the
    order varies with arrivals, and a late message does not block ready ops; see
    :mod:`pipemorph.planning.simulation.execution`.
    """

    STATIC = "static"
    GUIDED = "guided"


class Route(StrEnum):
    """Route of a link's data: direct by torch.distributed, or delegated to the transfer engine."""

    DIRECT = "direct"
    DELEGATED = "delegated"


class Op(NamedTuple):
    """Op of a rank: kind, microbatch (0 … N-1) and chunk (index of the stage on the rank)."""

    kind: OpKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}"


LETTER_OF_KIND = {OpKind.F: "F", OpKind.B: "I", OpKind.W: "W", OpKind.BW: "B"}
"""Letter of an op's kind in torch's notation: I is the backward for the inputs, B the fused one."""

KIND_OF_LETTER = {letter: kind for kind, letter in LETTER_OF_KIND.items()}

KINDS = (OpKind.F, OpKind.B, OpKind.W, OpKind.BW)
CODE_OF_KIND = {kind: code for code, kind in enumerate(KINDS)}
"""Number of an op's kind, for simulators."""
MAX_CHUNKS = 64
"""Most stages per rank. An op's code is a byte: that of its kind, plus 4 times its chunk."""
_TAKES_UP = (1, 0, -1, -1)
"""Change in the number of microbatches in flight by an op, by code."""


def count_in_flight_peak(ops: Iterable[Op]) -> int:
    """Peak number of microbatches of a stage between the start of F and the end of W (or BW)."""
    now = peak = 0
    for kind, *_ in ops:
        if kind is OpKind.F:
            now += 1
            peak = max(peak, now)
        elif kind is not OpKind.B:
            now -= 1
    return peak


def join_dashed(values: Sequence[int], most: int = 8) -> str:
    """Join numbers, such as warm-ups by stage, as ``7-5-3-1``; omits the middle above ``most``."""
    shown = [str(value) for value in values]
    if len(shown) > most:
        shown = [*shown[: most // 2], "…", *shown[-(most // 4) :]]
    return "-".join(shown)


_WIRE_OP = re.compile(r"(\d*)(\D)", re.ASCII)


@dataclass(frozen=True)
class Schedule:
    """Order of the ops on each rank. ``ranks[r]``: the ops of rank *r*, in order.

    ``placement[s]``: the rank of stage *s*; a rank's chunks are its stages in ascending order.
    Empty: stage *i* is on rank *i*.
    """

    microbatches: int
    ranks: tuple[tuple[Op, ...], ...]
    placement: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.placement:
            object.__setattr__(self, "placement", tuple(range(len(self.ranks))))

    @staticmethod
    def from_stage_ops(
        microbatches: int, ranks: Sequence[Sequence[tuple[int, OpKind, int]]]
    ) -> Schedule:
        """Schedule from ``(stage, kind, microbatch)`` of each rank's ops, in order. Raises
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
        for rank, mine in enumerate(group_stages_by_rank(placement)):
            if len(mine) > MAX_CHUNKS:
                raise InputError(
                    f"rank {rank} has {len(mine)} stages; at most {MAX_CHUNKS} are supported"
                )
        chunk_of = _number_chunks(placement)
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
        """True if stage *i* is the only one of rank *i*."""
        return self.placement == tuple(range(len(self.ranks)))

    @cached_property
    def stages_by_rank(self) -> tuple[tuple[int, ...], ...]:
        """Stages of each rank: chunk *c* is the stage at position *c*."""
        return group_stages_by_rank(self.placement)

    @cached_property
    def stages(self) -> tuple[tuple[Op, ...], ...]:
        """Ops of each stage, in order."""
        if self.one_stage_each:
            return self.ranks
        return tuple(
            tuple(op for op in self.ranks[rank] if op.chunk == chunk)
            for rank, chunk in zip(self.placement, _number_chunks(self.placement), strict=True)
        )

    def rename_microbatches(self, names: Sequence[int]) -> Schedule:
        """Schedule in which microbatch *m* is ``names[m]``; one that has no name stays. Empty: all
        stay. Valid schedules run microbatches in order, so the result is for files and pictures.
        """
        if not names:
            return self
        ranks = tuple(
            tuple(
                op._replace(microbatch=names[op.microbatch]) if op.microbatch < len(names) else op
                for op in ops
            )
            for ops in self.ranks
        )
        return Schedule(self.microbatches, ranks, self.placement)

    def count_warmup(self) -> tuple[int, ...]:
        """``x_i``: forwards stage *i* runs before its first backward (B or BW)."""
        return self._warmup_counts

    @cached_property
    def _warmup_counts(self) -> tuple[int, ...]:
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
    def op_codes(self) -> tuple[bytes, ...]:
        """:data:`CODE_OF_KIND` of each op plus 4 times its chunk, by rank. Cached."""
        return tuple(
            bytes([CODE_OF_KIND[kind] + 4 * chunk for kind, _, chunk in ops]) for ops in self.ranks
        )

    @cached_property
    def stage_op_codes(self) -> tuple[bytes, ...]:
        """:data:`CODE_OF_KIND` of each op, by stage."""
        if self.one_stage_each:
            return self.op_codes
        return tuple(bytes([CODE_OF_KIND[op.kind] for op in ops]) for ops in self.stages)

    @cached_property
    def first_mixed_stage(self) -> int | None:
        """First stage with both fused and split backwards; None if there is none."""
        both = CODE_OF_KIND[OpKind.B], CODE_OF_KIND[OpKind.BW]
        found = (
            i for i, codes in enumerate(self.stage_op_codes) if all(each in codes for each in both)
        )
        return next(found, None)

    @cached_property
    def fused_stages(self) -> tuple[int, ...]:
        """Stages with fused backwards."""
        return tuple(
            i for i, codes in enumerate(self.stage_op_codes) if CODE_OF_KIND[OpKind.BW] in codes
        )

    def compute_slackness(self) -> tuple[int, ...]:
        """``Δ_i = x_i - x_{i+1}`` of each link: the warm-up that absorbs delay on link *i*."""
        x = self.count_warmup()
        return tuple(x[i] - x[i + 1] for i in range(len(x) - 1))

    def count_in_flight_peaks(self) -> tuple[int, ...]:
        """Peak number of microbatches in flight, from the start of F to the end of W, by stage."""
        return self._in_flight_peaks

    @cached_property
    def _in_flight_peaks(self) -> tuple[int, ...]:
        return tuple(
            max(0, *accumulate(map(_TAKES_UP.__getitem__, codes))) for codes in self.stage_op_codes
        )

    def to_plan(self) -> Plan:
        """Plan version 0 in this order: all links direct, and no limits."""
        links, none = self.stage_count - 1, (None,) * self.stage_count
        return Plan(0, Policy.PIPEMORPH, self, (Route.DIRECT,) * links, none)

    def encode(self) -> list[str]:
        """Encode the schedule for the wire: per rank a letter of :data:`LETTER_OF_KIND` for each
        op, after its chunk unless that is 0.

        Each kind of op of a valid schedule runs in microbatch order on its stage, so the letters
        define it. 512 stages of 2048 microbatches take 3 MB, and 0.3 MB compressed.
        """
        return [
            "".join([f"{chunk or ''}{LETTER_OF_KIND[kind]}" for kind, _, chunk in ops])
            if any(op.chunk for op in ops)
            else "".join([LETTER_OF_KIND[op.kind] for op in ops])
            for ops in self.ranks
        ]

    @staticmethod
    def decode(microbatches: int, ranks: Sequence[str], placement: Sequence[int] = ()) -> Schedule:
        """Inverse of :meth:`encode`. The :class:`InputError` of a bad text names rank and op."""
        if placement and set(placement) != set(range(len(ranks))):
            raise InputError(
                f"the stages are on ranks {join_dashed(placement)}; expected all of {len(ranks)}"
                " ranks"
            )
        chunks = list(map(len, group_stages_by_rank(placement))) or [1] * len(ranks)
        most = min(microbatches, max(map(len, ranks), default=0))
        # All ranks share these: a large plan has millions of ops.
        ops: dict[str, list[Op]] = {}
        return Schedule(
            microbatches,
            tuple(_decode_rank(i, text, chunks[i], most, ops) for i, text in enumerate(ranks)),
            tuple(placement),
        )


def _decode_rank(
    rank: int, text: str, chunks: int, most: int, ops: dict[str, list[Op]]
) -> tuple[Op, ...]:
    """Ops of a rank from its text. ``ops``: cache, from chunk and letter to the ops of all
    microbatches."""
    found: list[Op] = []
    done: dict[str, list[int]] = {}
    """Counts of F, B and W so far, by chunk."""
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


def invert_order(order: Sequence[int]) -> tuple[int, ...]:
    """Place of each microbatch in an order of all of them."""
    return tuple(sorted(range(len(order)), key=order.__getitem__))


def group_stages_by_rank(placement: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Stages of each rank, from the rank of each stage."""
    found: list[list[int]] = [[] for _ in range(max(placement, default=-1) + 1)]
    for stage, rank in enumerate(placement):
        found[rank].append(stage)
    return tuple(map(tuple, found))


def _number_chunks(placement: Sequence[int]) -> list[int]:
    """Chunk of each stage."""
    before: dict[int, int] = {}
    found = []
    for rank in placement:
        found.append(before.get(rank, 0))
        before[rank] = found[-1] + 1
    return found


@dataclass(frozen=True)
class Plan:
    """Schedule, in-flight caps and the route of each link, with a version.

    ``version``: version of its directive; 0 for the initial plan, which every rank derives from the
    job spec, and for a plan that is not issued yet. ``in_flight_limits[i]``: ``K_i``, None for no
    limit. ``routes[i]``: route of link *i*. ``device_limits[i]``: most microbatches whose
    activations may be on the device of stage *i* at a time; the others are in host memory
    (:mod:`pipemorph.planning.offload`), or dropped and computed again if ``recompute[i]``; None:
    neither. ``waits[r]``: for guided dispatch, positions of the ops of rank *r* for which the rank
    waits, running no other op; empty: none. ``microbatch_order[k]``: the microbatch that runs as
    microbatch *k* of the schedule; empty: *k* itself.

    ``shares[r]``: microbatches of replica *r*; empty: all replicas have those of ``schedule``.
    ``resized``: plans of the other numbers of microbatches in ``shares``, of the same version,
    routes and dispatch.
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
    microbatch_order: tuple[int, ...] = ()
    shares: tuple[int, ...] = ()
    resized: tuple[Plan, ...] = ()

    def __post_init__(self) -> None:
        if not self.warmup:
            object.__setattr__(self, "warmup", self.schedule.count_warmup())
        if not self.device_limits:
            object.__setattr__(self, "device_limits", (None,) * self.schedule.stage_count)
        if not self.recompute:
            object.__setattr__(self, "recompute", (False,) * self.schedule.stage_count)
        if not any(self.waits):
            object.__setattr__(self, "waits", ())
        if self.microbatch_order == tuple(range(self.schedule.microbatches)):
            object.__setattr__(self, "microbatch_order", ())

    def for_replica(self, replica: int) -> Plan:
        """Plan of the microbatches of a replica. Raises :class:`InputError` if there is none."""
        wanted = self.shares[replica] if self.shares else self.schedule.microbatches
        for each in (self, *self.resized):
            if each.schedule.microbatches == wanted:
                return replace(each, version=self.version, shares=(), resized=())
        raise InputError(
            f"plan {self.version} gives replica {replica} {wanted} microbatches, and has no"
            " schedule of so many"
        )

    @property
    def offloading_stages(self) -> tuple[int, ...]:
        """Stages that may move activations to host memory."""
        return self._list_limited_stages(recompute=False)

    @property
    def offloads(self) -> bool:
        """True if any stage may move activations to host memory."""
        return bool(self.offloading_stages)

    @property
    def recomputing_stages(self) -> tuple[int, ...]:
        """Stages that may drop activations and run the forward again."""
        return self._list_limited_stages(recompute=True)

    def _list_limited_stages(self, *, recompute: bool) -> tuple[int, ...]:
        return tuple(
            i
            for i, limit in enumerate(self.device_limits)
            if limit is not None and self.recompute[i] is recompute
        )

    @property
    def delegated_links(self) -> tuple[int, ...]:
        """Links whose bytes the engine carries."""
        return tuple(i for i, route in enumerate(self.routes) if route is Route.DELEGATED)

    def runs_same_as(self, other: Plan) -> bool:
        """True if ranks do the same under both plans. Ignores versions, and caps out of reach."""

        def list_executed_fields(plan: Plan) -> tuple[object, ...]:
            return (
                plan.schedule, plan.dispatch, plan.waits, plan.routes,
                plan.device_limits, plan.recompute, plan.microbatch_order, plan.shares,
                tuple(map(list_executed_fields, plan.resized)),
            )  # fmt: skip

        return list_executed_fields(self) == list_executed_fields(other)
