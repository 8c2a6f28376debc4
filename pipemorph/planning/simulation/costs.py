"""A problem in the form of the inner loops: flat lists indexed by stage and link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from pipemorph.planning.ir import stages_of
from pipemorph.planning.problem import Link, Problem

if TYPE_CHECKING:
    from pipemorph.planning._planner import Costs as PackedCosts

INF = float("inf")
WITHIN = Link()
"""The link of two stages of one rank."""

DelayAt = Callable[[int, float], float]
"""(link, time of send) → delay or transfer, in the problem's unit."""
Changes = tuple[DelayAt, DelayAt | None]
"""Delays of an iteration, and its transfers if they change as well."""


class Costs(NamedTuple):
    """Times in the problem's unit. ``queues`` and ``outstanding``: 0 for no limit.

    ``transfer``: how long one message occupies its direction of a link. ``whole_backward``: time of
    a fused backward. ``device_limits``: None for stages whose activations stay on the device; else
    an F after which they leave takes ``leaving`` more, and their backward ``returning``.
    ``stages_of``: the stages of each rank. ``after``: what follows the last op of a rank, and so is
    part of the makespan. ``before``: when a rank may begin, 0 or later; only executions know it.
    """

    microbatches: int
    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    delay: list[float]
    transfer: list[float]
    queues: list[int]
    outstanding: list[int]
    half_duplex: list[bool]
    whole_backward: list[float]
    leaving: list[float]
    returning: list[float]
    device_limits: list[int | None]
    after: list[float]
    before: list[float]
    stages_of: Sequence[Sequence[int]]

    @property
    def stage_count(self) -> int:
        return len(self.forward)

    @staticmethod
    def of(problem: Problem, placement: Sequence[int] = ()) -> Costs:
        """``placement``: the rank of each stage; empty: as of the problem. A link within a rank
        takes no time. A rank reduces the gradients of all its stages after its last op."""
        stages, placement = problem.stages, placement or problem.placed
        ranks = stages_of(placement)
        links = [
            WITHIN if placement[i] == placement[i + 1] else link
            for i, link in enumerate(problem.links)
        ]
        return Costs(
            problem.microbatches,
            [s.forward for s in stages],
            [s.backward_input for s in stages],
            [s.backward_weight for s in stages],
            [link.delay for link in links],
            [link.transfer for link in links],
            [link.queues or 0 for link in links],
            [link.outstanding or 0 for link in links],
            [link.half_duplex for link in links],
            [s.whole_backward for s in stages],
            [s.leaving for s in stages],
            [s.returning for s in stages],
            [s.device_limit for s in stages],
            [max(stages[s].reduction or 0.0 for s in mine) for mine in ranks],
            [0.0] * len(ranks),
            ranks,
        )

    def least(self) -> Costs:
        """Costs with the shorter form of each backward, split or fused: a bound for both."""
        whole = [
            min(fused, b + w)
            for fused, b, w in zip(
                self.whole_backward, self.backward_input, self.backward_weight, strict=True
            )
        ]
        # Only if it is shorter: due to rounding, (b + w) - b may differ from w.
        backward = [min(b, least) for b, least in zip(self.backward_input, whole, strict=True)]
        weight = [
            w if least == b + w else least - first
            for w, b, least, first in zip(
                self.backward_weight, self.backward_input, whole, backward, strict=True
            )
        ]
        return self._replace(backward_input=backward, backward_weight=weight)

    def packed(self) -> PackedCosts:
        """As the compiled core takes them."""
        return (
            self.microbatches,
            (self.forward, self.backward_input, self.backward_weight, self.whole_backward),
            self.delay,
            self.transfer,
            self.queues,
            self.outstanding,
            self.half_duplex,
            self.leaving,
            self.returning,
            # One that no stage can reach is none, however large.
            [min(limit or 0, self.microbatches + 1) for limit in self.device_limits],
            self.after,
            self.before,
            self.stages_of,
        )

    def for_period(self) -> Costs:
        """Costs whose makespan is the period (see :class:`~pipemorph.planning.problem.Problem`) of
        these plus :meth:`last_start`: what a rank begins later than others, it may end later."""
        begins, last = self.begins(), self.last_start()
        after = [
            last - begins[mine[0]] + tail
            for mine, tail in zip(self.stages_of, self.after, strict=True)
        ]
        return self._replace(after=after)

    def last_start(self) -> float:
        """When the last rank begins its first op, the F of its first stage."""
        begins = self.begins()
        return max(begins[mine[0]] for mine in self.stages_of)

    def begins(self) -> list[float]:
        """When each stage begins its first op, in any schedule: the forward of microbatch 0."""
        begins = [0.0]
        for forward, transfer, delay in zip(self.forward, self.transfer, self.delay, strict=False):
            begins.append(begins[-1] + forward + transfer + delay)
        return begins

    def without_delay(self) -> Costs:
        """The same stages with links without delay, for policies that ignore delays."""
        count = len(self.delay)
        return self._replace(
            delay=[0.0] * count,
            transfer=[0.0] * count,
            queues=[0] * count,
            outstanding=[0] * count,
            half_duplex=[False] * count,
        )
