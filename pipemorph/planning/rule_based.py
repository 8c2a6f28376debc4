"""Rule-based schedules, made from op times and caps without delays."""

from __future__ import annotations

from collections.abc import Iterator

from pipemorph.errors import InputError
from pipemorph.planning.ir import Op, OpKind, Policy, Schedule
from pipemorph.planning.problem import Problem
from pipemorph.planning.simulation.execution import (
    Costs,
    DispatchRules,
    compute_zero_bubble_warmup,
    decode_schedule,
    fit_warmup,
    schedule_online,
)


def schedule_gpipe(problem: Problem) -> Schedule:
    """GPipe schedule: all F, then all fused backwards. Raises :class:`InputError` for a cap < N."""
    n = problem.microbatches
    for i, stage in enumerate(problem.stages):
        if stage.in_flight_limit is not None and stage.in_flight_limit < n:
            raise InputError(
                f"stages[{i}].in_flight_limit is {stage.in_flight_limit}; policy gpipe holds all"
                f" {n} microbatches in flight, use 1f1b, zero-bubble or pipemorph"
            )
    if problem.warmup is not None and any(x != n for x in problem.warmup):
        raise InputError(f"warmup is {list(problem.warmup)}; policy gpipe runs all {n} F first")
    order = [Op(OpKind.F, m) for m in range(n)] + [Op(OpKind.BW, m) for m in range(n)]
    return Schedule(n, (tuple(order),) * problem.stage_count)


def schedule_1f1b(problem: Problem) -> Schedule:
    """1F1B schedule (PipeDream-flush): ``S - i`` forwards, then fused backwards and forwards
    alternate."""
    n, count = problem.microbatches, problem.stage_count
    warmup = problem.warmup or fit_warmup([count - i for i in range(count)], problem)
    stages = []
    for x in warmup:
        order = [Op(OpKind.F, m) for m in range(x)]
        for m in range(n):
            order.append(Op(OpKind.BW, m))
            if m + x < n:
                order.append(Op(OpKind.F, m + x))
        stages.append(tuple(order))
    return Schedule(n, tuple(stages))


def schedule_zero_bubble(problem: Problem) -> Schedule:
    """Zero-bubble schedule: enough warm-up that the last stage never idles; W fills gaps.

    Without delays, ``2 (S-i) - 1`` forwards cover the round trip of equal stages (ZB-H2, 7-5-3-1
    for S=4); a cap reduces the warm-up (ZB-H1 for ``K = S``). The order is a list schedule for
    links without delay, so delays are ignored.
    """
    warmup = problem.warmup or compute_zero_bubble_warmup(problem)
    rules = DispatchRules.from_problem(problem, warmup, exact_warmup=True)
    return decode_schedule(
        schedule_online(Costs.from_problem(problem).without_delay(), rules)[0], problem.microbatches
    )


def schedule_1f1b_interleaved(problem: Problem) -> Schedule:
    """Interleaved 1F1B (Narayanan et al. 2021, "Efficient large-scale language model training
    on GPU clusters", section 2.2): stage *s* on rank ``s mod ranks``, fused backwards.

    A rank runs its stages in rounds of about as many microbatches as there are ranks, and starts
    with two forwards more than the next rank.
    """
    ranks, n = _count_ranks(problem, Policy.ONE_F_ONE_B_INTERLEAVED), problem.microbatches
    chunks = problem.stage_count // ranks
    rounds = max(1, n // ranks)
    if n % rounds:
        raise InputError(
            f"microbatches is {n}; policy 1f1b-interleaved on {ranks} ranks runs {rounds} rounds"
            f" and needs a multiple of {rounds}"
        )
    per_round = n // rounds

    def iterate_ops(rank: int, kind: OpKind) -> Iterator[tuple[int, OpKind, int]]:
        """Ops of one kind in order: a round on one stage, then on the next."""
        for first in range(0, n, per_round):
            for chunk in range(chunks):
                place = chunk if kind is OpKind.F else chunks - 1 - chunk
                for m in range(first, first + per_round):
                    yield (place * ranks + rank, kind, m)

    found = []
    for rank in range(ranks):
        forwards, backwards = list(iterate_ops(rank, OpKind.F)), list(iterate_ops(rank, OpKind.BW))
        warmup = min(len(forwards), (chunks - 1) * per_round + 2 * (ranks - 1 - rank))
        order = forwards[:warmup]
        for k, backward in enumerate(backwards):
            order += forwards[warmup + k : warmup + k + 1]
            order.append(backward)
        found.append(tuple(order))
    return Schedule.from_stage_ops(n, found)


def schedule_zero_bubble_v(problem: Problem) -> Schedule:
    """ZB-V (Qi et al. 2023, "Zero bubble pipeline parallelism", section 6): two stages per
    rank, in a V over the ranks, so that rank 0 has the first and the last stage.

    If all ops take equal time the only bubble is the fill, with the memory of 1F1B.
    """
    ranks, n = _count_ranks(problem, Policy.ZERO_BUBBLE_V), problem.microbatches
    return Schedule.from_stage_ops(
        n,
        tuple(
            tuple(op for op in _order_v_ops(rank, ranks, n) if op[2] < n) for rank in range(ranks)
        ),
    )


def _order_v_ops(rank: int, ranks: int, microbatches: int) -> list[tuple[int, OpKind, int]]:
    """Order of a rank's ops; may contain microbatches beyond the last, to fill the pattern."""
    n = max(2 * ranks - 1, microbatches)
    down, up = rank, 2 * ranks - 1 - rank
    done: dict[tuple[int, OpKind], int] = {}
    order: list[tuple[int, OpKind, int]] = []

    def append_ops(stage: int, *kinds: OpKind) -> None:
        for kind in kinds:
            m = done[stage, kind] = done.get((stage, kind), -1) + 1
            order.append((stage, kind, m))

    def count_appended(stage: int, kind: OpKind) -> int:
        return done.get((stage, kind), -1) + 1

    forward, backward, weight = OpKind.F, OpKind.B, OpKind.W
    for _ in range(2 * (ranks - rank) - 1):
        append_ops(down, forward)
    for _ in range(rank):
        append_ops(up, forward)
        append_ops(down, forward)
    for _ in range(ranks - rank):
        append_ops(up, forward, backward, weight)
    while (
        count_appended(up, forward) < count_appended(down, forward)
        or count_appended(down, forward) < n
    ):
        if count_appended(down, forward) < n:
            append_ops(down, forward)
        append_ops(down, backward, weight)
        append_ops(up, forward, backward, weight)
    for _ in range(rank):
        append_ops(down, backward)
        append_ops(up, backward)
    for _ in range(ranks - rank):
        append_ops(down, backward, weight)
    for stage in (up, down):
        while count_appended(stage, weight) < count_appended(stage, backward):
            append_ops(stage, weight)
    return order


def _count_ranks(problem: Problem, policy: Policy) -> int:
    """Number of ranks of a problem. Raises :class:`InputError` if the stages do not fit them."""
    stages = problem.stage_count
    if policy is Policy.ZERO_BUBBLE_V:
        ranks = problem.ranks if problem.ranks is not None else stages // 2
        if stages != 2 * ranks:
            raise InputError(
                f"stages has {stages} entries for {ranks} ranks; policy zero-bubble-v puts two"
                " on each rank"
            )
        return ranks
    if problem.ranks is None:
        raise InputError("ranks is missing; policy 1f1b-interleaved needs the number of ranks")
    if stages % problem.ranks:
        raise InputError(
            f"stages has {stages} entries for {problem.ranks} ranks; policy 1f1b-interleaved needs"
            " a multiple of the ranks"
        )
    return problem.ranks
