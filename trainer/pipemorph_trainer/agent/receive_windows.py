"""Conditions for posting the receive of a message, and limits on messages that arrive early.

If a receive is posted while its sender still waits for this stage, it completes only after later
work of this stage. On a device such a receive occupies resources, and a call that waits for all
work of the device, as page-locking memory may, would never return. So on a device a receive is
posted when this stage has sent everything that the sender needs from it. The message cannot be sent
before that anyway. The sender may also wait for another stage of a rank with several stages,
directly or through other ranks, so such a rank counts its ops and not the messages of a link.

Under guided dispatch a message may be sent earlier than in the plan's order, but only the plan's
order is guaranteed, so receives are posted for that order. An earlier send waits, as long as the
sender would wait for this stage anyway.

A message that arrives before its op uses memory of this stage. So the messages received ahead are
limited to the link's slackness and a few more, as many as the delegated route has slots for.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from pipemorph.planning import Dispatch, OpKind, Plan, Schedule

OpsBefore = dict[tuple[int, bool], tuple[int, ...]]
"""Result of :func:`count_ops_before_receives`, by stage and direction (True: for its F)."""

SPARE_MESSAGES = 4
"""Messages ahead of their ops beyond a link's slackness: in flight because of a delay."""


def count_sends_before_forward(plan: Plan, stage: int) -> tuple[int, ...]:
    """Count the messages that ``stage``, at least 1, must have sent up before the stage above can
    send it each message for an F."""
    return _count_preceding_ops(plan.schedule, stage - 1, forward=True)


def count_sends_before_backward(plan: Plan, stage: int) -> tuple[int, ...]:
    """Count the messages that ``stage``, not the last one, must have sent down before the stage
    below can send it each message for a B."""
    return _count_preceding_ops(plan.schedule, stage + 1, forward=False)


def _count_preceding_ops(schedule: Schedule, sender: int, *, forward: bool) -> tuple[int, ...]:
    """Count the ops of the other direction that ``sender`` runs before each of its messages."""
    found, others = [], 0
    for kind, *_ in schedule.stages[sender]:
        if kind is OpKind.W:
            continue
        if (kind is OpKind.F) is forward:
            found.append(others)
        else:
            others += 1
    return tuple(found)


def count_ops_before_receives(schedule: Schedule, rank: int) -> OpsBefore:
    """Count the ops that ``rank``, of several stages, must have run before the neighbouring stage
    can send it each message. Keys are a stage of ``rank`` and a direction (True: for its F)."""
    needs: dict[tuple[int, bool], list[int]] = {
        (stage, forward): [] for stage in range(schedule.stage_count) for forward in (True, False)
    }
    """Ops of ``rank`` that precede each message a stage has sent: each kind runs in order."""
    ranks = len(schedule.ranks)
    at, so_far = [0] * ranks, [0] * ranks
    waits_since = 0
    while waits_since < ranks:
        for each, ops in enumerate(schedule.ranks):
            waits_since += 1
            while at[each] < len(ops):
                kind, microbatch, chunk = ops[at[each]]
                stage = schedule.stages_by_rank[each][chunk]
                forward = kind is OpKind.F
                came = needs.get((stage - 1 if forward else stage + 1, forward))
                if kind is not OpKind.W and came is not None:
                    if len(came) <= microbatch:
                        break
                    so_far[each] = max(so_far[each], came[microbatch])
                at[each] += 1
                if each == rank:
                    so_far[each] = at[each]
                if kind is not OpKind.W:
                    needs[stage, forward].append(so_far[each])
                waits_since = 0
    return {
        (stage, forward): tuple(needs.get((stage - 1 if forward else stage + 1, forward), ()))
        for stage in schedule.stages_by_rank[rank]
        for forward in (True, False)
    }


def compute_windows(plan: Plan) -> tuple[int, ...]:
    """Compute the number of messages of a direction that may arrive early, per link.

    For a fixed order these are the smallest numbers without a deadlock: a send waits while its
    receiver accepts no more messages, and two stages must not wait for each other in this way.
    Under guided dispatch many orders are possible, and the in-flight limits of the stages above
    bound the number of messages in both directions, so that no send waits.
    """
    links = plan.schedule.stage_count - 1
    if plan.dispatch is Dispatch.GUIDED:
        slack = tuple(accumulate(plan.schedule.count_in_flight_peaks()[:links], min))
    else:
        ahead = zip(plan.warmup, plan.warmup[1:], strict=False)
        slack = tuple(max(0, up - down) for up, down in ahead)
    return _find_least_windows(plan.schedule, slack)


@lru_cache(maxsize=8)
def compute_forward_window(schedule: Schedule) -> int:
    """Compute the window of all links of an iteration that has only forwards."""
    links = schedule.stage_count - 1
    return max(_find_least_windows(schedule, (0,) * links), default=SPARE_MESSAGES)


@lru_cache(maxsize=8)
def count_ops_before_forward_receives(schedule: Schedule, rank: int) -> dict[int, tuple[int, ...]]:
    """Count as :func:`count_ops_before_receives` for an iteration of only forwards, by stage."""
    found = count_ops_before_receives(schedule, rank)
    return {stage: ops for (stage, forward), ops in found.items() if forward}


def _find_least_windows(schedule: Schedule, slack: tuple[int, ...]) -> tuple[int, ...]:
    n, more = schedule.microbatches, 0
    while True:
        found = tuple(min(n, each + SPARE_MESSAGES + more) for each in slack)
        if all(each == n for each in found) or finishes_without_deadlock(schedule, found):
            return found
        more = 2 * more + 1


def finishes_without_deadlock(schedule: Schedule, window: tuple[int, ...]) -> bool:
    """True if all ranks finish their orders when each link accepts ``window`` messages ahead. The
    next op of a rank does not depend on times, so one run decides it."""
    last = schedule.stage_count - 1
    rank_of, ranks = schedule.placement, schedule.ranks
    within = [rank_of[i] == rank_of[i + 1] for i in range(last)]
    at = [0] * len(ranks)
    holding = [False] * len(ranks)
    """Ranks that have run an op whose message cannot be sent yet."""
    sent = {True: [0] * last, False: [0] * last}
    taken = {True: [0] * last, False: [0] * last}

    def advance_rank(rank: int) -> bool:
        if at[rank] == len(ranks[rank]):
            return False
        kind, microbatch, chunk = ranks[rank][at[rank]]
        stage = schedule.stages_by_rank[rank][chunk]
        forward = kind is OpKind.F
        if kind is not OpKind.W:
            source, to = (stage - 1, stage) if forward else (stage, stage - 1)
            if not holding[rank] and 0 <= source < last:
                if sent[forward][source] <= microbatch:
                    return False
                taken[forward][source] = microbatch + 1
            if 0 <= to < last:
                full = microbatch >= taken[forward][to] + window[to]
                holding[rank] = full and not within[to]
                if holding[rank]:
                    return False
                sent[forward][to] = microbatch + 1
        at[rank] += 1
        return True

    moving = True
    while moving:
        moving = False
        for rank in range(len(ranks)):
            while advance_rank(rank):
                moving = True
    return all(position == len(ops) for position, ops in zip(at, ranks, strict=True))
