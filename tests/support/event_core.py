"""The event core in Python, short and slow: an oracle for the compiled one (``csrc/planner``).

It proceeds in order of time. An event is ``(time, phase, rank)``: at equal times ends
of ops come first, since another rank may wait for their message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from pipemorph.planning.ir import KINDS
from pipemorph.planning.offload import DeviceResidency
from pipemorph.planning.simulation.execution import (
    INF,
    Costs,
    DelayAt,
    DispatchGuide,
    DispatchRules,
    Execution,
    Waits,
)

F, B, W, BW = range(4)
_END, _CHOOSE = 0, 1


class _Op(NamedTuple):
    code: int
    stage: int
    kind: int
    microbatch: int


_Chooser = Callable[[int, float], tuple[_Op | None, float]]
"""(rank, now) → the op that it starts now; or None, and the time of the next try."""


class _Core:
    """The state of an iteration. The arguments are those of :func:`execute_in_order`."""

    def __init__(self, costs: Costs, delay_at: DelayAt | None, transfer_at: DelayAt | None) -> None:
        n, stages, stages_of = costs.microbatches, costs.stage_count, costs.stages_by_rank
        self.costs, self.delay_at, self.transfer_at = costs, delay_at, transfer_at
        self.last = stages - 1
        self.ranks = len(stages_of)
        self.rank_of = {stage: rank for rank, mine in enumerate(stages_of) for stage in mine}
        self.done = [[0] * stages for _ in range(3)]
        self.arrival = [[[INF] * n for _ in range(stages)] for _ in (F, B)]
        self.arrival[F][0] = [0.0] * n
        self.residency = [DeviceResidency(limit) for limit in costs.device_limits]
        # Arrivals over each half-duplex link, both directions in the order of their sends.
        self.shared: list[list[float]] = [[] for _ in costs.delay]
        # When each direction of each link has sent all it was given; of half-duplex links one.
        self.wires = [[0.0, 0.0] for _ in costs.delay]
        self.codes = [bytearray() for _ in stages_of]
        self.start: list[list[float]] = [[] for _ in stages_of]
        self.end: list[list[float]] = [[] for _ in stages_of]
        self.free: list[list[float]] = [[] for _ in stages_of]

    def op(self, code: int, stage: int) -> _Op:
        """The next op of its kind on a stage."""
        kind = code % 4
        return _Op(code, stage, kind, self.done[B if kind == BW else kind][stage])

    def arrived(self, op: _Op) -> float:
        """Time at which the input of an op is there."""
        if op.kind == W:
            return 0.0
        return self.arrival[B if op.kind == BW else op.kind][op.stage][op.microbatch]

    def fits(self, stage: int, kind: int, m: int) -> bool:
        return self.residency[stage].can_run(KINDS[kind], m)

    def clear(self, op: _Op) -> float:
        """Time at which the link takes the message of an op."""
        to, link, row = self._way(op)
        bound = self.costs.outstanding[link] if to is not None else 0
        return row[op.microbatch - bound] if bound and op.microbatch >= bound else 0.0

    def run(self, choose: _Chooser) -> Execution:
        """Run until nothing can."""
        running: list[_Op | None] = [None] * self.ranks
        begins = self.costs.rank_starts
        events = [(begins[rank], _CHOOSE, rank) for rank in range(self.ranks)]
        heapify(events)
        while events:
            now, phase, rank = heappop(events)
            op = running[rank]
            if phase == _END:
                assert op is not None
                if (clear := self.clear(op)) > now:
                    heappush(events, (clear, _END, rank))
                    continue
                self.free[rank].append(now)
                if (sent := self._send(op, now)) is not None:
                    heappush(events, (sent[1], _CHOOSE, sent[0]))
                running[rank] = None
                heappush(events, (now, _CHOOSE, rank))
            elif op is None and now >= begins[rank]:
                op, again = choose(rank, now)
                if op is not None:
                    running[rank] = op
                    heappush(events, (self._begin(rank, op, now), _END, rank))
                elif again < INF:
                    heappush(events, (again, _CHOOSE, rank))
        codes = [bytes(row) for row in self.codes]
        return Execution(codes, self.start, self.end, self.free, *self.arrival)

    def _begin(self, rank: int, op: _Op, now: float) -> float:
        """Record an op; returns its end."""
        for kind in (B, W) if op.kind == BW else (op.kind,):
            self.done[kind][op.stage] += 1
        costs = self.costs
        times = (costs.forward, costs.backward_input, costs.backward_weight, costs.whole_backward)
        factor = self.costs.factors[op.stage][op.microbatch] if self.costs.factors else 1.0
        took = times[op.kind][op.stage] * factor
        if self.residency[op.stage].record_op(KINDS[op.kind], op.microbatch):
            extra = self.costs.departure_times if op.kind == F else self.costs.return_times
            took += extra[op.stage] * factor
        self.codes[rank].append(op.code)
        self.start[rank].append(now)
        self.end[rank].append(now + took)
        return now + took

    def _way(self, op: _Op) -> tuple[int | None, int, list[float]]:
        """Receiving stage (None: the op sends nothing), link, arrivals of its direction."""
        to = op.stage + 1 if op.kind == F else op.stage - 1
        if op.kind == W or not 0 <= to <= self.last:
            return None, 0, []
        return to, min(op.stage, to), self.arrival[F if op.kind == F else B][to]

    def _send(self, op: _Op, now: float) -> tuple[int, float] | None:
        """Hand over the message of an op; returns the receiving rank and the arrival.

        Messages of a direction leave in microbatch order, one at a time for the transfer; with half
        duplex both directions share queues and wire, first come, first served.
        """
        if op.kind == F and op.stage == self.last:
            self.arrival[B][op.stage][op.microbatch] = now
        to, link, row = self._way(op)
        if to is None:
            return None
        queues = self.costs.queues[link]
        changes = self.rank_of[op.stage] != self.rank_of[to]
        delay, transfer = self.costs.delay[link], self.costs.transfer[link]
        if changes and self.delay_at is not None:
            delay = self.delay_at(link, now)
        if changes and self.transfer_at is not None:
            transfer = self.transfer_at(link, now)
        history = self.shared[link] if self.costs.half_duplex[link] else row[: op.microbatch]
        busy = history[-queues] if queues and len(history) >= queues else now
        leaves = max(now, busy)
        if transfer:
            wire, way = self.wires[link], op.kind != F and not self.costs.half_duplex[link]
            wire[way] = leaves = max(leaves, wire[way]) + transfer
        row[op.microbatch] = arrival = leaves + delay
        self.shared[link].append(arrival)
        return self.rank_of[to], arrival


def execute_in_order(
    costs: Costs,
    codes: Sequence[bytes],
    delay_at: DelayAt | None = None,
    transfer_at: DelayAt | None = None,
) -> Execution:
    """See :func:`pipemorph.planning.simulation.execution.execute_in_order`."""
    core = _Core(costs, delay_at, transfer_at)

    def choose(rank: int, now: float) -> tuple[_Op | None, float]:
        position = len(core.codes[rank])
        if position == len(codes[rank]):
            return None, INF
        code = codes[rank][position]
        op = core.op(code, costs.stages_by_rank[rank][code // 4])
        ready = core.arrived(op)
        return (op, now) if ready <= now else (None, ready)

    return core.run(choose)


def schedule_online(costs: Costs, rules: DispatchRules) -> tuple[list[bytes], float]:
    """See :func:`pipemorph.planning.simulation.execution.schedule_online`: the first ready op of B,
    F, W, of two stages that of the later one."""
    core = _Core(costs, None, None)
    n, done = costs.microbatches, core.done

    def choose(rank: int, now: float) -> tuple[_Op | None, float]:
        later, again = list(enumerate(costs.stages_by_rank[rank]))[::-1], INF
        for kind in (B, F):
            for place, i in later:
                f, b, w = (done[each][i] for each in (F, B, W))
                if kind == B:
                    runs = b < f and f >= rules.warmup[i]
                else:
                    held = rules.exact_warmup and b == 0 and f >= rules.warmup[i]
                    runs = f < n and f - w < rules.caps[i] and not held
                if not runs:
                    continue
                op = core.op(4 * place + (BW if kind == B and rules.fused[i] else kind), i)
                if not core.fits(i, op.kind, op.microbatch):
                    continue
                at = core.arrived(op)
                # An F waits for a free send before it starts, so that another op may run first.
                if kind == F and at < INF:
                    at = max(at, core.clear(op))
                if at <= now:
                    return op, now
                again = min(again, at)
        for place, i in later:
            if done[W][i] < done[B][i]:
                return core.op(4 * place + W, i), now
        return None, again

    ran = core.run(choose)
    return list(ran.op_codes), ran.compute_makespan(costs.rank_tails)


def execute_guided(
    costs: Costs, guide: DispatchGuide, delay_at: DelayAt | None, transfer_at: DelayAt | None
) -> Execution:
    """See :func:`pipemorph.planning.simulation.execution.execute_guided`: of the ready ops the
    first in the plan's order."""
    core = _Core(costs, delay_at, transfer_at)
    n, stages_of = costs.microbatches, costs.stages_by_rank
    position = [[_positions(row, 4 * p) for p in range(len(mine))]
                for row, mine in zip(guide.op_codes, stages_of, strict=True)]  # fmt: skip
    backwards = [[[code % 4 for code in row if code in (4 * p + B, 4 * p + BW)]
                  for p in range(len(mine))]
                 for row, mine in zip(guide.op_codes, stages_of, strict=True)]  # fmt: skip
    waits = list(map(frozenset, guide.waits))

    def choose(rank: int, now: float) -> tuple[_Op | None, float]:
        nexts: list[tuple[int, _Op, bool, bool]] = []
        """Position, op, whether it may run at all and out of turn."""
        for place, i in enumerate(stages_of[rank]):
            f, b, w = (core.done[kind][i] for kind in (F, B, W))
            kinds = [F, backwards[rank][place][b] if b < n else B, W]
            runs = (f < n, b < f and (kinds[B] == B or w == b), w < b)
            early = (f - w < guide.caps[i], True, True)
            for kind, m in ((F, f), (B, b), (W, w)):
                if m < n:
                    op = core.op(4 * place + kinds[kind], i)
                    nexts.append((position[rank][place][kind][m], op, runs[kind], early[kind]))
        if not nexts:
            return None, INF
        # The W of a fused backward has its position, too; the backward comes first here.
        turn, its, *_ = min(nexts, key=lambda each: each[0])
        alone = turn in waits[rank] and core.fits(its.stage, its.kind, its.microbatch)
        found, first, again = None, INF, INF
        for at, op, runs_now, may_go_first in nexts:
            out_of_turn = at != turn
            if not runs_now or (out_of_turn and (alone or not may_go_first)):
                continue
            if op.kind != W and not core.fits(op.stage, op.kind, op.microbatch):
                continue
            ready = core.arrived(op)
            # An F waits for a free send before it starts, so that another op may run first.
            if op.kind == F and ready < INF and not (alone and not out_of_turn):
                ready = max(ready, core.clear(op))
            if ready > now:
                again = min(again, ready)
            elif at < first:
                found, first = op, at
        return (found, now) if found is not None else (None, again)

    return core.run(choose)


def compute_jittered_makespans(
    costs: Costs, guide: DispatchGuide, most: float, draws: int
) -> tuple[float, float]:
    """See :func:`pipemorph.planning.simulation.execution.compute_jittered_makespans`."""
    own = guided_ = 0.0
    for draw in range(draws):

        def delay_at(link: int, sent: float, draw: int = draw) -> float:
            mixed = int(min(sent / most * 1e6, 9e18)) * 0x9E3779B1
            mixed = (mixed + link * 0x85EBCA6B + draw * 0xC2B2AE35) % 2**32
            mixed = (mixed ^ mixed >> 15) * 0x2C1B3C6D % 2**32
            mixed = (mixed ^ mixed >> 12) * 0x297A2D39 % 2**32
            return costs.delay[link] + most * ((mixed ^ mixed >> 15) / 2**32)

        own += execute_in_order(costs, guide.op_codes, delay_at).compute_makespan(costs.rank_tails)
        guided_ += execute_guided(costs, guide, delay_at, None).compute_makespan(costs.rank_tails)
    return own / draws, guided_ / draws


def _positions(codes: bytes, place: int) -> list[list[int]]:
    """Positions of the ops of a stage in the order of its rank, per kind and microbatch. ``place``:
    first codes of its kinds. A BW is a B and a W."""
    found: list[list[int]] = [[], [], []]
    for position, code in enumerate(codes):
        if place <= code < place + 4:
            for each in (B, W) if code - place == BW else (code - place,):
                found[each].append(position)
    return found


def find_waits(costs: Costs, codes: Sequence[bytes], peaks: Sequence[int]) -> Waits:
    """See :func:`pipemorph.planning.simulation.execution.find_planned_waits`."""
    ran = execute_in_order(costs, codes)
    return tuple(_find_rank_waits(costs, ran, rank, peaks) for rank in range(len(codes)))


def _find_rank_waits(
    costs: Costs, ran: Execution, rank: int, peaks: Sequence[int]
) -> tuple[int, ...]:
    mine = costs.stages_by_rank[rank]
    n, codes, free = costs.microbatches, ran.op_codes[rank], ran.free_at[rank]
    backwards = [
        [code % 4 for code in codes if code in (4 * place + B, 4 * place + BW)]
        for place in range(len(mine))
    ]
    done = [[0, 0, 0] for _ in mine]
    idle_since, found = 0.0, []
    for position, (code, start) in enumerate(zip(codes, ran.start[rank], strict=True)):
        its, kind = divmod(code, 4)
        stage, forwards = mine[its], done[its][F]
        sends = costs.outstanding[stage] if kind == F and stage < costs.stage_count - 1 else 0
        taken = (
            ran.forward_arrivals[stage + 1][forwards - sends]
            if sends and forwards >= sends
            else 0.0
        )
        if start > idle_since or taken > start:
            other = INF
            for place, each in enumerate(mine):
                f, b, w = done[place]
                here = kind if place == its else None
                if here != F and f < n and f - w < peaks[each]:
                    other = min(other, ran.forward_arrivals[each][f])
                splits = b < f and (backwards[place][b] == B or w == b)
                if here not in (B, BW) and splits:
                    other = min(other, ran.gradient_arrivals[each][b])
                if here != W and w < b:
                    other = idle_since
            if max(other, idle_since) < start or taken > start:
                found.append(position)
        idle_since = free[position]
        done[its][F] += kind == F
        done[its][B] += kind in (B, BW)
        done[its][W] += kind in (W, BW)
    return tuple(found)
