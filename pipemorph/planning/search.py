"""The pipemorph policy: list scheduling inside a search over warm-up and W."""

from __future__ import annotations

from pipemorph.planning.adapt import adapted_warmup
from pipemorph.planning.costs import Costs
from pipemorph.planning.dispatch import Rules, dispatch
from pipemorph.planning.ir import Schedule
from pipemorph.planning.policies import as_schedule
from pipemorph.planning.problem import Problem


def search(problem: Problem, bound: float) -> Schedule:
    """The best order found, stopping at ``bound`` (no schedule is shorter)."""
    warmup = problem.warmup or adapted_warmup(problem)
    exact = problem.warmup is not None
    costs = Costs.of(problem)
    best = dispatch(costs, Rules.of(problem, warmup, exact_warmup=exact))
    return as_schedule(best.runs, problem)
