"""Rules of the online list schedule: which of its ready ops a stage may run.

On each rank the first ready op of B, F, W runs, of two stages that of the later one in the model.
The paper's list scheduler ("full schedule") is the same, run before the iteration, with its order
as result. :class:`Rules` restricts what a stage may run; a stage's device limit does, too
(:class:`~pipemorph.planning.offload.Residency`).

Several stages on a rank do not make ranks wait for each other forever: an idle rank has no ready op
on any of its stages, so each of them waits as it would on a rank of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pipemorph.planning.problem import Problem
from pipemorph.planning.validator import validate_online


@dataclass(frozen=True)
class Rules:
    """Restrictions on what each stage may run. One entry per stage.

    - ``warmup[i]``: only F until this many have run.
    - ``caps[i]``: F only while fewer microbatches than this are in flight (F start to W end).
    - ``exact_warmup``: no F beyond ``warmup`` before the first backward.
    - ``fused[i]``: one BW in place of B and W.
    """

    warmup: tuple[int, ...]
    caps: tuple[int, ...]
    fused: tuple[bool, ...]
    exact_warmup: bool = False

    @staticmethod
    def of(
        problem: Problem,
        warmup: Sequence[int],
        *,
        exact_warmup: bool = False,
        fused: Sequence[bool] | None = None,
    ) -> Rules:
        """Rules for a problem, with its caps.

        Raises :class:`~pipemorph.planning.validator.ScheduleError` if the schedule could
        deadlock.
        """
        limits = problem.in_flight_limits()
        validate_online(warmup, limits, problem.device_limits())
        n = problem.microbatches
        return Rules(
            tuple(min(n, x) for x in warmup),
            tuple(n if limit is None else min(n, limit) for limit in limits),
            tuple(fused) if fused is not None else (False,) * problem.stage_count,
            exact_warmup=exact_warmup,
        )
