"""Whether guided dispatch is as fast as the plan's own order while messages come a little late.

It runs another op as soon as one is late. Where the late one comes a moment later, it then waits
for the other one to end. Without in-flight limits the plan has room for that; with tight ones
iterations get up to 3% longer, though links are well. So it is tried under drawn delays, from a
twentieth of an op to half of one.
"""

from __future__ import annotations

from statistics import fmean

from pipemorph.planning.ir import Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation import core
from pipemorph.planning.simulation.costs import Costs
from pipemorph.planning.simulation.waits import Waits, guide_of

AMPLITUDES = (0.05, 0.1, 0.2, 0.5)
"""Most that a message comes late, in forwards."""
DRAWS = 3
"""Iterations that are simulated for each."""
SLOWER = 0.001
"""Fraction by which iterations may get longer on average."""
CELLS = 8192
"""Largest number of stages × microbatches that is tried."""


def as_fast_guided(schedule: Schedule, problem: Problem, waits: Waits) -> bool:
    """Whether a valid plan takes no longer under guided dispatch, whatever the jitter. Larger
    problems are not tried: no. The same on every machine."""
    if problem.stage_count * problem.microbatches > CELLS:
        return False
    unit = fmean(stage.forward for stage in problem.stages)
    if unit <= 0:
        return False
    costs, guide = Costs.of(problem, schedule.placement), guide_of(schedule, problem, waits)
    for amplitude in AMPLITUDES:
        own, guided = core.jittered(costs, guide, amplitude * unit, DRAWS)
        if guided > own * (1 + SLOWER):
            return False
    return True
