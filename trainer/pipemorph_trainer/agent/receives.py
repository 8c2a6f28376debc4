"""When a stage may post the receive of a message, and how many messages may arrive early.

If a receive is posted while its sender still waits for this stage, it can only complete after later
work of this stage. On a device such a receive occupies resources, and a call that waits for all
work of the device, as page-locking memory may, would never return. So there a receive is posted
when this stage has sent everything that the sender needs from it. Before that, the message cannot
be sent anyway. The sender of a rank with several stages may also wait for another stage of that
rank, directly or through other ranks, so such a rank counts its ops and not the messages of a link.

Under guided dispatch a message may be sent earlier than in the plan's order, but only in that order
it is sure to be: so receives are posted as for this order. An earlier send waits, as long as the
sender would wait for this stage anyway.

A message that arrives before its op uses memory of this stage. So at most the link's slackness and
a few more messages are received ahead, as many as the delegated route has slots for.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate

from pipemorph.planning import Dispatch, OpKind, Plan, Schedule

OpsBefore = dict[tuple[int, bool], tuple[int, ...]]
"""See :func:`after_ops`."""

SPARE = 4
"""Messages ahead of their ops beyond a link's slackness: those in flight because of a delay."""


def after_above(plan: Plan, stage: int) -> tuple[int, ...]:
    """Per message for the F of ``stage``, at least 1: the number of messages that ``stage`` must
    have sent up before the stage above can send it."""
    return _preceding(plan.schedule, stage - 1, forward=True)


def after_below(plan: Plan, stage: int) -> tuple[int, ...]:
    """The same for the B of ``stage``, which is not the last, and messages sent down."""
    return _preceding(plan.schedule, stage + 1, forward=False)


def _preceding(schedule: Schedule, sender: int, *, forward: bool) -> tuple[int, ...]:
    """Per message of ``sender``, the number of ops of the other direction that it runs before."""
    found, others = [], 0
    for kind, *_ in schedule.stages[sender]:
        if kind is OpKind.W:
            continue
        if (kind is OpKind.F) is forward:
            found.append(others)
        else:
            others += 1
    return tuple(found)


def after_ops(schedule: Schedule, rank: int) -> OpsBefore:
    """For a ``rank`` with several stages, by its stage and direction (True: for its F): per message
    from the next stage there, the number of ops that ``rank`` must have run before that can send
    it."""
    needs: dict[tuple[int, bool], list[int]] = {
        (stage, forward): [] for stage in range(schedule.stage_count) for forward in (True, False)
    }
    """Ops of ``rank`` that precede what a stage has sent so far: each kind runs in order."""
    ranks = len(schedule.ranks)
    at, so_far = [0] * ranks, [0] * ranks
    waits_since = 0
    while waits_since < ranks:
        for each, ops in enumerate(schedule.ranks):
            waits_since += 1
            while at[each] < len(ops):
                kind, microbatch, chunk = ops[at[each]]
                stage = schedule.stages_of[each][chunk]
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
        for stage in schedule.stages_of[rank]
        for forward in (True, False)
    }


def windows(plan: Plan) -> tuple[int, ...]:
    """Per link, the number of messages of a direction that may arrive early.

    For a fixed order, the smallest numbers without a deadlock: a send waits while its receiver
    takes no more messages, and two stages must not wait for each other in this way. Under
    guided dispatch many orders are possible, and what the stages above may have in flight
    bounds the number of messages in both directions, so that no send waits.
    """
    links = plan.schedule.stage_count - 1
    if plan.dispatch is Dispatch.GUIDED:
        slack = tuple(accumulate(plan.schedule.in_flight_peak()[:links], min))
    else:
        ahead = zip(plan.warmup, plan.warmup[1:], strict=False)
        slack = tuple(max(0, up - down) for up, down in ahead)
    return _least(plan.schedule, slack)


@lru_cache(maxsize=8)
def forward_window(schedule: Schedule) -> int:
    """The same for all links of an iteration that has only forwards."""
    links = schedule.stage_count - 1
    return max(_least(schedule, (0,) * links), default=SPARE)


@lru_cache(maxsize=8)
def forward_ops(schedule: Schedule, rank: int) -> dict[int, tuple[int, ...]]:
    """:func:`after_ops` of an iteration that has only forwards, by stage."""
    found = after_ops(schedule, rank)
    return {stage: ops for (stage, forward), ops in found.items() if forward}


def _least(schedule: Schedule, slack: tuple[int, ...]) -> tuple[int, ...]:
    n, more = schedule.microbatches, 0
    while True:
        found = tuple(min(n, each + SPARE + more) for each in slack)
        if all(each == n for each in found) or ends(schedule, found):
            return found
        more = 2 * more + 1


def ends(schedule: Schedule, window: tuple[int, ...]) -> bool:
    """Whether all ranks finish their orders if a link takes ``window`` messages ahead. The next op
    of a rank does not depend on times, so one run decides it."""
    last = schedule.stage_count - 1
    rank_of, ranks = schedule.placement, schedule.ranks
    within = [rank_of[i] == rank_of[i + 1] for i in range(last)]
    at = [0] * len(ranks)
    holding = [False] * len(ranks)
    """Whether an op has run whose message cannot be sent yet."""
    sent = {True: [0] * last, False: [0] * last}
    taken = {True: [0] * last, False: [0] * last}

    def advance(rank: int) -> bool:
        if at[rank] == len(ranks[rank]):
            return False
        kind, microbatch, chunk = ranks[rank][at[rank]]
        stage = schedule.stages_of[rank][chunk]
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
            while advance(rank):
                moving = True
    return all(position == len(ops) for position, ops in zip(at, ranks, strict=True))
