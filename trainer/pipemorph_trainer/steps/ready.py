"""Runs the ops of a rank whose order depends on when messages arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from time import time

from pipemorph.planning import OpKind
from pipemorph.planning.offload import Residency
from pipemorph_trainer.agent.choosers import Candidate, Chooser
from pipemorph_trainer.executor.dispatch import NEVER, Executor
from pipemorph_trainer.executor.mailbox import Mailbox


def run_ready(
    chooser: Chooser,
    executors: Mapping[int, Executor],
    mail: Mailbox,
    *,
    pace: Callable[[], None] | None,
) -> Iterator[Candidate]:
    """Run ops, of those that ``chooser`` allows the first whose message has arrived, and yield each
    when it has run. Ends when all have, or when an executor's iteration is refused: then the rest
    is to be run in the plan's order.

    ``executors``: of the stages that have begun the iteration; others may be added meanwhile.
    ``pace``: on a device, called before each op: waits until the device is not too far behind.
    """

    held: dict[int, Residency] = {}

    def allowed() -> list[Candidate]:
        nonlocal held
        if len(held) < len(executors):
            # A copy, since another thread may describe the wait while a stage begins.
            begun = list(executors.items())
            held = {stage: executor.residency for stage, executor in begun}
        return chooser.candidates(held)

    def refused() -> bool:
        return any(executor.refused for executor in executors.values())

    def look() -> tuple[Candidate | None, float]:
        """What can run now; None, and when that changes without another message."""
        now, first = time(), NEVER
        for candidate in allowed():
            stage, kind, microbatch, waits_for_send = candidate
            at = executors[stage].ready_at(kind, microbatch, waits_for_send=waits_for_send)
            if at <= now:
                return candidate, now
            first = min(first, at)
        return None, first

    def awaited() -> str:
        """The messages with which the rank could continue, those for F first."""
        rows = sorted(allowed(), key=lambda each: each.kind is not OpKind.F)
        found = (executors[each.stage].message(each.kind, each.microbatch) for each in rows)
        return " or ".join(filter(None, found)) or "the token of a stage that has not begun"

    mail.listen()
    while not chooser.finished:
        if pace is not None:
            pace()
        found, waited = mail.wait_for_any(look, awaited, stop=refused)
        if found is None:
            return
        stage, kind, microbatch, _ = found
        # Of the ops that it could have run, the one whose message came.
        executors[stage].run_now(kind, microbatch, waited)
        chooser.ran(stage, kind)
        yield found
