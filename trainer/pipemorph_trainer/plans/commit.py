"""Which plan runs: prepared by each rank, committed by all of them at one iteration boundary.

A plan that comes in a directive is prepared: checked, and given room for its messages
(:class:`PlanBook`). At the end of iteration t every rank offers the plans it has prepared, in one
small collective (:class:`Rounds`). The newest plan that **all** have prepared is committed at the
beginning of iteration t+2, so the collective has a whole iteration to finish and nothing waits for
it. Ranks hear of directives at different times and may miss one that was soon replaced: a plan
counts only if every rank holds exactly that version.

The same collective carries when each rank began and ended, so an iteration is reported when its
round is over; until then what this rank knows of it is kept here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from pipemorph.planning import Plan, Route
from pipemorph.wire import IterationSample
from pipemorph_trainer.executor.receives import SPARE
from pipemorph_trainer.executor.timed import TimedOp
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.message import Batch, TensorMeta
from pipemorph_trainer.plans.checks import check_offload, check_plan, check_routes
from pipemorph_trainer.topology.coordinate import Coordinate
from pipemorph_trainer.topology.world import World

log = logging.getLogger("pipemorph.trainer")

CANDIDATES = 4
"""Plans a rank offers per round: the one in force and its newest three."""
_WIDTH = CANDIDATES + 3


class PlanBook:
    """The plans that one rank has prepared, and the one in force.

    ``no_offload``: why activations of this stage have to stay on the device; empty if they need
    not. Raises :class:`InputError` if the first plan does not fit.
    """

    def __init__(
        self, first: Plan, coordinate: Coordinate, ends: Sequence[LinkEnd], *, no_offload: str
    ) -> None:
        self._coordinate, self._ends = coordinate, ends
        self._no_offload = no_offload
        self._metas: dict[int, tuple[TensorMeta, ...]] = {}
        """What is received on each link, as far as shapes are known."""
        check_plan(first, first)
        check_routes(first, ends)
        self._plans = {first.version: first}
        self.in_force = first

    @property
    def newest(self) -> int:
        return max(self._plans)

    def prepare(self, plan: Plan) -> None:
        """Make a plan ready to run. Raises :class:`InputError` if it does not fit the job or this
        rank; then it is never committed, since this rank does not offer it."""
        check_routes(plan, self._ends)
        check_offload(plan, self._coordinate, self._no_offload)
        if plan.version <= self.in_force.version or plan.version in self._plans:
            return
        check_plan(plan, self.in_force)
        self.reserve(plan)
        self._plans[plan.version] = plan

    def forbid_offload(self, why: str) -> None:
        """The stage turned out to be one whose activations have to stay on the device. Raises
        :class:`InputError` if a plan that is prepared moves some."""
        self._no_offload = why
        for plan in self._plans.values():
            check_offload(plan, self._coordinate, why)

    def versions(self) -> tuple[int, ...]:
        """What to offer: the plan in force, then the newest ones."""
        current = self.in_force.version
        newest = sorted((v for v in self._plans if v != current), reverse=True)
        return (current, *newest[: CANDIDATES - 1])

    def commit(self, version: int) -> bool:
        """Use ``version`` from now on and forget older ones. True if that is a change."""
        changed = version != self.in_force.version
        if changed:
            self.in_force = self._plans[version]
            self._plans = {v: plan for v, plan in self._plans.items() if v >= version}
        return changed

    def shapes_known(self, end: LinkEnd, metas: tuple[TensorMeta, ...]) -> None:
        """Shapes of a link became known: grant slots for every plan prepared so far.

        ``metas``: of the tensors that this rank receives on the link, per microbatch.
        """
        self._metas[end.link] = metas
        for plan in self._plans.values():
            self._reserve(end, plan)

    def reserve(self, plan: Plan) -> None:
        """Grant receive slots for a plan's messages, as far as shapes are known."""
        for end in self._ends:
            self._reserve(end, plan)

    def _reserve(self, end: LinkEnd, plan: Plan) -> None:
        metas = self._metas.get(end.link)
        # On a device slots are page-locked, which must not wait until a direct route breaks.
        delegated = Route.DELEGATED in (plan.routes[end.link], end.route) or end.staged
        if not metas or end.delegated is None or not delegated:
            return
        slack = plan.warmup[end.link] - plan.warmup[end.link + 1]
        microbatches = plan.schedule.microbatches
        messages = min(microbatches, max(0, slack) + SPARE)
        end.expect(messages)
        end.delegated.reserve(messages, Batch(0, 0, microbatches, metas))


class RankRow(NamedTuple):
    """What one rank contributes at the end of an iteration. Times are wall clock, seconds."""

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
    """The newest version in every row, never below ``in_force``."""
    common = set(rows[0].versions).intersection(*(row.versions for row in rows[1:]))
    return max([in_force, *common])


def bubble_fraction(rows: Sequence[RankRow]) -> float:
    """Idle time over ranks × span, from first op to last op anywhere."""
    span = max(row.ended for row in rows) - min(row.began for row in rows)
    if span <= 0:
        return 0.0
    return min(1.0, max(0.0, 1.0 - sum(row.busy for row in rows) / (len(rows) * span)))


class _Round:
    """An iteration that has begun and is not reported yet, and its collective once this rank has
    offered its row. Times are monotonic, seconds."""

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
        """Everyone's rows, once :attr:`work` has been waited for."""
        return [RankRow.decode(values.tolist()) for values in self._all]


class Rounds:
    """One round per iteration: :meth:`begin`, :meth:`offer`, :meth:`end`, :meth:`finish`.

    ``book``: whose plans are offered, and where the agreed one is committed. ``report`` gets every
    iteration once all ranks have told of it.
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
        """Commit what all ranks agreed on two iterations ago; returns the plan to run.

        ``at``: when step() was called, monotonic.
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
        """Forget an iteration that was refused before it had an effect."""
        del self._open[iteration]

    def offer(self, iteration: int, ops: Sequence[TimedOp], loss: float) -> None:
        """Tell all ranks of this rank's part: the plans it has, and when its ops ran. Does not wait
        for theirs."""
        busy = sum(op.end - op.start for op in ops)
        row = RankRow(self._book.versions(), ops[0].start, ops[-1].end, busy)
        self._open[iteration].offer(row, loss, self._world.control)

    def wait(self, iteration: int) -> None:
        """Wait until the collective of an iteration is through, for which ranks need no more than
        to get to the end of it as well."""
        self._wait_for(self._open[iteration].work, f"all ranks to finish iteration {iteration}")

    def end(self, iteration: int, at: float) -> None:
        """The next step() has begun, or nothing follows.

        An iteration lasts from its step() to the next one, less the time a checkpoint took: the
        optimizer, the gradient norm and the data are part of what a user waits for.
        """
        self._open[iteration].ended = at

    def finish(self, iteration: int) -> None:
        """Wait for an iteration's collective (long done), take its agreement and report it."""
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
        """As :meth:`finish`, but only if that does not wait."""
        found = self._open.get(iteration)
        if found is not None and found.work is not None and found.work.is_completed():
            self.finish(iteration)

    def finish_all(self) -> None:
        for iteration in sorted(self._open):
            self.finish(iteration)
