"""Warm-up counts for given delays: the paper's rule, and its initial plan."""

from __future__ import annotations

from math import ceil

from pipemorph.planning.policies import fit_warmup
from pipemorph.planning.problem import Problem


def paper_warmup(problem: Problem) -> tuple[int, ...]:
    """Adapted counts if a link has a delay; else the initial plan's, if memory is known."""
    undisturbed = not any(link.delay for link in problem.links)
    if undisturbed and problem.stages[0].in_flight_limit is not None:
        return initial_warmup(problem)
    return adapted_warmup(problem)


def adapted_warmup(problem: Problem) -> tuple[int, ...]:
    """``x_{S-1} = 1``, then backwards the slackness that absorbs each link's delay.

    ``Δ_i = max(2, ceil((tF_i + tB_i + 2 c_i) / (tF_{i+1} + tB_{i+1})))`` (paper,
    "adaptation"). The paper bounds Δ by ``N - 2S``, which is not positive for short
    pipelines; here counts are bounded by N and the in-flight caps instead.
    """
    stages, links = problem.stages, problem.links
    count = problem.stage_count
    warmup = [1] * count
    for i in range(count - 2, -1, -1):
        here = stages[i].forward + stages[i].backward_input + 2 * links[i].delay
        below = stages[i + 1].forward + stages[i + 1].backward_input
        # Near-equal times must not cost a whole microbatch for a rounding error.
        slack = ceil(here / below - 1e-9) if here < below * problem.microbatches else 10**6
        warmup[i] = warmup[i + 1] + max(2, slack)
    return fit_warmup(warmup, problem)


def initial_warmup(problem: Problem) -> tuple[int, ...]:
    """As much slackness as memory allows, spread evenly (paper, "initial plan").

    ``x_0`` is the first stage's cap (or N), ``x_{S-1} = 1``, and the smallest Δ is as large
    as it can be; what is left over goes to the last links, which a delay hurts most.
    """
    count = problem.stage_count
    if count == 1:
        return fit_warmup([1], problem)
    limit = problem.stages[0].in_flight_limit
    most = problem.microbatches if limit is None else min(limit, problem.microbatches)
    each, more = divmod(max(0, most - 1), count - 1)
    warmup = [1] * count
    for i in range(count - 2, -1, -1):
        warmup[i] = warmup[i + 1] + each + (1 if i >= count - 1 - more else 0)
    return fit_warmup(warmup, problem)
