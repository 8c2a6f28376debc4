"""The plans of one stage: which may run here, and room in the engine for their messages."""

from __future__ import annotations

from collections.abc import Sequence

from pipemorph.errors import InputError
from pipemorph.planning import Path, Plan
from pipemorph_trainer.executor.receives import SPARE
from pipemorph_trainer.links.channels.message import Batch, TensorMeta
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.plans.plan_book import PlanBook
from pipemorph_trainer.topology.coordinate import Coordinate


class StagePlans:
    """Takes in plans for one rank; :attr:`book` has those that are ready to run.

    ``no_offload``: why activations of this stage have to stay on the device; empty if they need
    not. Raises :class:`InputError` if the first plan does not fit.
    """

    def __init__(
        self, first: Plan, coordinate: Coordinate, ends: Sequence[LinkEnd], *, no_offload: str
    ) -> None:
        self._coordinate, self._ends = coordinate, ends
        self._no_offload = no_offload
        self._microbatches = first.schedule.microbatches
        self._metas: dict[int, tuple[TensorMeta, ...]] = {}
        """What is received on each link, as far as shapes are known."""
        self.book = PlanBook(first, self.reserve)
        self._check_paths(first)

    def install(self, plan: Plan) -> None:
        """Make a plan ready to run. Raises :class:`InputError` if it does not fit this job."""
        self._check_paths(plan)
        check_offload(plan, self._coordinate, self._no_offload)
        self.book.prepare(plan)

    def forbid_offload(self, why: str) -> None:
        """The stage turned out to be one whose activations have to stay on the device. Raises
        :class:`InputError` if a plan that is prepared moves some."""
        self._no_offload = why
        for plan in self.book.prepared():
            check_offload(plan, self._coordinate, why)

    def shapes_known(self, end: LinkEnd, metas: tuple[TensorMeta, ...]) -> None:
        """Shapes of a link became known: grant slots for every plan prepared so far.

        ``metas``: of the tensors that this rank receives on the link, per microbatch.
        """
        self._metas[end.link] = metas
        for plan in self.book.prepared():
            self._reserve(end, plan)

    def reserve(self, plan: Plan) -> None:
        """Grant receive slots for a plan's messages, as far as shapes are known."""
        for end in self._ends:
            self._reserve(end, plan)

    def _reserve(self, end: LinkEnd, plan: Plan) -> None:
        metas = self._metas.get(end.link)
        # On a device slots are page-locked, which must not wait until a direct path breaks.
        delegated = Path.DELEGATED in (plan.paths[end.link], end.path) or end.staged
        if not metas or end.delegated is None or not delegated:
            return
        slack = plan.warmup[end.link] - plan.warmup[end.link + 1]
        messages = min(self._microbatches, max(0, slack) + SPARE)
        end.expect(messages)
        end.delegated.reserve(messages, Batch(0, 0, self._microbatches, metas))

    def _check_paths(self, plan: Plan) -> None:
        for end in self._ends:
            if end.link < len(plan.paths) and not end.has(plan.paths[end.link]):
                raise InputError(
                    f"plan {plan.version} delegates link {end.link}, which has no engine link; "
                    "build the transfer engine or plan for the direct path"
                )


def check_stages(plan: Plan, coordinate: Coordinate) -> None:
    """Raise :class:`InputError` if a plan has other stages than the job."""
    if plan.schedule.stage_count != coordinate.stages:
        raise InputError(
            f"the plan has {plan.schedule.stage_count} stages; this job runs {coordinate.stages}"
        )


def check_offload(plan: Plan, coordinate: Coordinate, no_offload: str) -> None:
    """Raise :class:`InputError` if a plan moves activations of a stage that must not be moved.

    ``no_offload``: why they must not; empty if they may.
    """
    limit = plan.device_limits[coordinate.stage]
    if limit is not None and no_offload:
        raise InputError(
            f"plan {plan.version} moves activations of stage {coordinate.stage} to host memory"
            f" (device_limit {limit}), but: {no_offload}"
        )
