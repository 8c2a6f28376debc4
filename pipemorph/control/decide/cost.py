"""Says what a decision costs before it is made, and whether it may wait: whose turn it is follows
from that."""

from __future__ import annotations

from pipemorph.control.decide.forecast import THOROUGH_CELLS
from pipemorph.control.decide.replan import Cause, Replan
from pipemorph.planning.search.variants import allows_variants, steps

MAY_WAIT: frozenset[Cause] = frozenset({"profile", "barrier", "steady"})
"""Causes for which nothing has changed in the last seconds. All jobs that a host has just met have
them at the same time."""
ANY = 0.002
THOROUGH_CELL = 0.1e-3
"""Seconds of a search with the thorough effort, per stage × microbatch, if no plan is proven
shortest."""
CELL = 8e-6
"""With the usual effort."""
SEVERAL_CELL = 0.2e-3
"""With several stages per rank: of all orders, each with what else it may be dispatched by."""
VARIANTS_CELL, VARIANTS = 25e-6, 3
"""Where activations may leave the device, or backwards may be fused: per stage × microbatch of each
plan that is tried, and how many are tried at least, beside changes of them."""
VARYING = 3
"""Times as long if a delay varies: plans are made for longer delays as well."""


def estimated_seconds(asked: Replan) -> float:
    """Processor time of :func:`~pipemorph.control.decide.replan.propose`, roughly. Most
    decisions take less, few more than three times as long."""
    rules, situation = asked.spec, asked.situation
    cut = rules.parallelism
    cells = cut.stages * rules.schedule.microbatches
    if asked.previous is not None or cut.stages == 2:
        one = CELL * cells
    elif cut.stages_per_rank > 1:
        one = SEVERAL_CELL * cells
    elif allows_variants(situation.stages):
        one = VARIANTS_CELL * cells * (VARIANTS + steps(cells))
    elif cells <= THOROUGH_CELLS:
        one = THOROUGH_CELL * cells
    else:
        one = CELL * cells
    if any(situation.recent):
        one *= VARYING
    parts = max(1, len({each.slow for each in situation.own}))
    return ANY + one * parts
