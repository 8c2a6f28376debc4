"""The commit protocol: each rank prepares plans, and all commit one at the same iteration boundary.

A rank prepares a plan from a directive: it checks the plan and reserves memory for its messages
(:class:`PlanBook`). At the end of iteration t every rank offers its prepared plans in one small
collective (:class:`Rounds`). The newest plan that **all** have prepared is committed at the
beginning of iteration t+2, so the collective has a whole iteration to finish and nothing waits for
it. Ranks receive directives at different times and may miss one that was soon replaced: a plan is
committed only if every rank has exactly that version.

The same collective carries when each rank began and ended. So an iteration is reported when its
round is over, and this rank's data of it is kept here until then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipemorph.api.mesh import Coordinate
from pipemorph.api.spec import ONLINE_IN_LOCKSTEP
from pipemorph.errors import InputError
from pipemorph.planning import Dispatch, Plan, Route, validate, validate_online
from pipemorph.wire import IterationSample
from pipemorph_trainer.executor.receives import SPARE
from pipemorph_trainer.executor.timed import TimedOp
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.message import Batch, TensorMeta
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

CANDIDATES = 4
"""Plans that a rank offers per round: the current one and the newest three others."""
_WIDTH = CANDIDATES + 3


# --- checks whether a plan may run in this job and on this rank ---------------------------


def check_plan(plan: Plan, current: Plan) -> None:
    """Raise :class:`InputError` unless ``plan`` can replace ``current``."""
    have, want = plan.schedule, current.schedule
    if have.stage_count != want.stage_count or have.microbatches != want.microbatches:
        raise InputError(
            f"plan {plan.version} has {have.stage_count} stages and {have.microbatches} "
            f"microbatches; the job runs {want.stage_count} and {want.microbatches}"
        )
    if len(plan.routes) != have.stage_count - 1:
        raise InputError(
            f"plan {plan.version} has {len(plan.routes)} routes; expected {have.stage_count - 1}"
        )
    if plan.dispatch is Dispatch.ONLINE:
        validate(have)
        validate_online(plan.warmup, plan.in_flight_limits, device_limits=plan.device_limits)
    else:
        validate(have, plan.in_flight_limits, plan.device_limits)


def check_stages(plan: Plan, coordinate: Coordinate) -> None:
    """Raise :class:`InputError` if a plan has another number of stages than the job, or an order of
    ops that the ranks of one stage cannot have in common."""
    if plan.schedule.stage_count != coordinate.stages:
        raise InputError(
            f"the plan has {plan.schedule.stage_count} stages; this job runs {coordinate.stages}"
        )
    if plan.dispatch is Dispatch.ONLINE and coordinate.mesh.lockstep > 1:
        raise InputError(f"plan {plan.version} has dispatch online; {ONLINE_IN_LOCKSTEP}")


def check_offload(plan: Plan, coordinate: Coordinate, no_offload: str) -> None:
    """Raise :class:`InputError` if a plan offloads activations of a stage that cannot.

    ``no_offload``: why it cannot; empty if it can.
    """
    limit = plan.device_limits[coordinate.stage]
    if limit is not None and no_offload:
        raise InputError(
            f"plan {plan.version} moves activations of stage {coordinate.stage} to host memory"
            f" (device_limit {limit}), but: {no_offload}"
        )


def check_routes(plan: Plan, ends: Iterable[LinkEnd]) -> None:
    """Raise :class:`InputError` if a plan delegates a link that has no engine link."""
    for end in ends:
        if end.link < len(plan.routes) and not end.has(plan.routes[end.link]):
            raise InputError(
                f"plan {plan.version} delegates link {end.link}, which has no engine link; "
                "build the transfer engine or plan for the direct route"
            )


# --- the plans of this rank ---------------------------------------------------------------


class PlanBook:
    """The plans that one rank has prepared, and the current one (``in_force``).

    ``no_offload``: why this stage cannot offload; empty if it can. Raises :class:`InputError` if
    the first plan does not fit.
    """

    def __init__(
        self, first: Plan, coordinate: Coordinate, ends: Sequence[LinkEnd], *, no_offload: str
    ) -> None:
        self._coordinate, self._ends = coordinate, ends
        self._no_offload = no_offload
        self._metas: dict[int, tuple[TensorMeta, ...]] = {}
        """Tensors received per link and microbatch, if their shapes are known."""
        check_plan(first, first)
        check_routes(first, ends)
        self._plans = {first.version: first}
        self.in_force = first

    @property
    def newest(self) -> int:
        return max(self._plans)

    def prepare(self, plan: Plan) -> None:
        """Make a plan ready to run. Raises :class:`InputError` if it does not fit the job or this
        rank. Such a plan is never committed, since this rank does not offer it."""
        check_stages(plan, self._coordinate)
        check_routes(plan, self._ends)
        check_offload(plan, self._coordinate, self._no_offload)
        if plan.version <= self.in_force.version or plan.version in self._plans:
            return
        check_plan(plan, self.in_force)
        self.reserve(plan)
        self._plans[plan.version] = plan

    def forbid_offload(self, why: str) -> None:
        """Refuse plans with offload from now on, since the self-test found that the stage cannot
        offload. Raises :class:`InputError` if a prepared plan needs it."""
        self._no_offload = why
        for plan in self._plans.values():
            check_offload(plan, self._coordinate, why)

    def versions(self) -> tuple[int, ...]:
        """Versions to offer: the current plan, then the newest ones."""
        current = self.in_force.version
        newest = sorted((v for v in self._plans if v != current), reverse=True)
        return (current, *newest[: CANDIDATES - 1])

    def commit(self, version: int) -> bool:
        """Make ``version`` the current plan and drop older ones. Returns whether it changed."""
        changed = version != self.in_force.version
        if changed:
            self.in_force = self._plans[version]
            self._plans = {v: plan for v, plan in self._plans.items() if v >= version}
        return changed

    def shapes_known(self, end: LinkEnd, metas: tuple[TensorMeta, ...]) -> None:
        """Reserve slots for every prepared plan, after the shapes of a link became known.

        ``metas``: the tensors that this rank receives on the link, per microbatch.
        """
        self._metas[end.link] = metas
        for plan in self._plans.values():
            self._reserve(end, plan)

    def reserve(self, plan: Plan) -> None:
        """Reserve receive slots for a plan's messages on links with known shapes."""
        for end in self._ends:
            self._reserve(end, plan)

    def _reserve(self, end: LinkEnd, plan: Plan) -> None:
        metas = self._metas.get(end.link)
        # On a device, slots are page-locked: too slow to do when a direct route breaks.
        delegated = Route.DELEGATED in (plan.routes[end.link], end.route) or end.staged
        if not metas or end.delegated is None or not delegated:
            return
        slack = plan.warmup[end.link] - plan.warmup[end.link + 1]
        microbatches = plan.schedule.microbatches
        messages = min(microbatches, max(0, slack) + SPARE)
        end.expect(messages)
        end.delegated.reserve(messages, Batch(0, 0, microbatches, metas))


# --- the agreement of all ranks -----------------------------------------------------------


class RankRow(NamedTuple):
    """One rank's data in the collective of an iteration. Times are wall clock, seconds."""

    versions: tuple[int, ...]
    began: float
    ended: float
    busy: float

    def encode(self) -> list[float]:
        padded = (*self.versions, *([-1] * CANDIDATES))[:CANDIDATES]
        return [*map(float, padded), self.began, self.ended, self.busy]

    @staticmethod
    def decode(values: Sequence[float]) -> RankRow:
        versions = tuple(int(v) for v in values[:CANDIDATES] if v >= 0)
        return RankRow(versions, *values[CANDIDATES:])


def agree(rows: Sequence[RankRow], in_force: int) -> int:
    """The newest version that is in every row, but at least ``in_force``."""
    common = set(rows[0].versions).intersection(*(row.versions for row in rows[1:]))
    return max([in_force, *common])


def bubble_fraction(rows: Sequence[RankRow]) -> float:
    """Idle time divided by ranks × span; the span is from the first op to the last of any rank."""
    span = max(row.ended for row in rows) - min(row.began for row in rows)
    if span <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - sum(row.busy for row in rows) / (len(rows) * span)))


class _Round:
    """An iteration that has not been reported yet, with its collective after this rank has offered
    its row. Times are monotonic, seconds."""

    def __init__(self, plan_version: int, began: float) -> None:
        self.plan_version = plan_version
        self.began, self.ended = began, 0.0
        self.loss = 0.0
        self.work: Any = None
        """The collective; None before :meth:`offer`."""

    def offer(self, row: RankRow, loss: float, group: dist.ProcessGroup) -> None:
        self.loss = loss
        self._mine = torch.tensor(row.encode(), dtype=torch.float64)
        size = dist.get_world_size(group)
        self._all = [torch.empty(_WIDTH, dtype=torch.float64) for _ in range(size)]
        self.work = dist.all_gather(self._all, self._mine, group=group, async_op=True)

    def rows(self) -> list[RankRow]:
        """The rows of all ranks. Wait for :attr:`work` first."""
        return [RankRow.decode(values.tolist()) for values in self._all]


class Rounds:
    """One round per iteration: :meth:`begin`, :meth:`offer`, :meth:`end`, :meth:`finish`.

    ``book``: has the plans to offer, and gets the agreed one committed. ``report`` is called with
    every iteration when the rows of all ranks have arrived.
    """

    def __init__(
        self,
        book: PlanBook,
        *,
        world: World,
        wait: CollectiveWait,
        report: Callable[[IterationSample], None],
    ) -> None:
        # Not its group: a world that is left has the last reference to it.
        self._book, self._world = book, world
        self._wait_for, self._report = wait, report
        self._open: dict[int, _Round] = {}
        self._agreed = book.in_force.version

    def begin(self, iteration: int, *, at: float) -> Plan:
        """Commit the plan that all ranks agreed on two iterations ago, and return it.

        ``at``: time of the call of step(), monotonic.
        """
        self.finish(iteration - 2)
        if self._book.commit(self._agreed):
            log.info(
                "%s: plan %d from iteration %d on", self._world.coordinate, self._agreed, iteration
            )
        plan = self._book.in_force
        self._open[iteration] = _Round(plan.version, at)
        return plan

    def drop(self, iteration: int) -> None:
        """Drop a refused iteration, which had no effect."""
        del self._open[iteration]

    def offer(self, iteration: int, ops: Sequence[TimedOp], loss: float) -> None:
        """Send this rank's row: its plans, and when its ops ran. Does not wait for other ranks."""
        busy = sum(op.end - op.start for op in ops)
        row = RankRow(self._book.versions(), ops[0].start, ops[-1].end, busy)
        self._open[iteration].offer(row, loss, self._world.control)

    def wait(self, iteration: int) -> None:
        """Wait for the collective of an iteration, which ends when all ranks have finished it."""
        self._wait_for(self._open[iteration].work, f"all ranks to finish iteration {iteration}")

    def end(self, iteration: int, at: float) -> None:
        """End an iteration at the time ``at``: the next step() has begun, or none follows.

        An iteration lasts from its step() to the next one, without the time for a checkpoint. So it
        includes the optimizer, the gradient norm and data loading.
        """
        self._open[iteration].ended = at

    def finish(self, iteration: int) -> None:
        """Wait for an iteration's collective (usually done), apply its agreement, and report it."""
        found = self._open.get(iteration)
        if found is None or found.work is None:
            return
        del self._open[iteration]
        self._wait_for(found.work, f"all ranks to finish iteration {iteration}")
        rows = found.rows()
        self._agreed = agree(rows, self._agreed)
        self._report(
            IterationSample(
                index=iteration,
                seconds=max(0.0, found.ended - found.began),
                loss=found.loss,
                plan_version=found.plan_version,
                bubble_fraction=bubble_fraction(rows),
            )
        )

    def finish_if_done(self, iteration: int) -> None:
        """Like :meth:`finish`, but only if it does not have to wait."""
        found = self._open.get(iteration)
        if found is not None and found.work is not None and found.work.is_completed():
            self.finish(iteration)

    def finish_all(self) -> None:
        for iteration in sorted(self._open):
            self.finish(iteration)
