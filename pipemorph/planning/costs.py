"""A problem laid out for the inner loops: flat lists indexed by stage and link."""

from __future__ import annotations

from typing import NamedTuple

from pipemorph.planning.problem import Problem

INF = float("inf")


class Costs(NamedTuple):
    """Times in the problem's unit. ``queues`` and ``outstanding`` are 0 for "no bound"."""

    microbatches: int
    forward: list[float]
    backward_input: list[float]
    backward_weight: list[float]
    delay: list[float]
    queues: list[int]
    outstanding: list[int]
    half_duplex: list[bool]

    @property
    def stage_count(self) -> int:
        return len(self.forward)

    @staticmethod
    def of(problem: Problem) -> Costs:
        stages, links = problem.stages, problem.links
        return Costs(
            problem.microbatches,
            [s.forward for s in stages],
            [s.backward_input for s in stages],
            [s.backward_weight for s in stages],
            [link.delay for link in links],
            [link.queues or 0 for link in links],
            [link.outstanding or 0 for link in links],
            [link.half_duplex for link in links],
        )

    def without_delay(self) -> Costs:
        """The same stages on links that take no time: what a delay-oblivious policy sees."""
        count = len(self.delay)
        return self._replace(
            delay=[0.0] * count,
            queues=[0] * count,
            outstanding=[0] * count,
            half_duplex=[False] * count,
        )
