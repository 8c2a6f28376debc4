"""``python -m pipemorph.ingest.planner_worker``: plans for a host that has no time to.

Reads pickled :class:`~pipemorph.control.decide.replan.Replan` or
:class:`~pipemorph.control.first_plan.FirstPlan` from standard input, writes the pickled answer to
standard output, each after its length in 8 bytes, and ends when its input does. Both ends are one
program of one version, joined by a pipe.
"""

from __future__ import annotations

import logging
import pickle
import signal
import sys
from typing import BinaryIO

from pipemorph.control import first_plan
from pipemorph.control.decide.findings import NoPlan
from pipemorph.control.decide.replan import Proposal, Replan, propose
from pipemorph.control.first_plan import FirstPlan
from pipemorph.errors import InputError
from pipemorph.log_level import log_level
from pipemorph.planning import Schedule

HEADER_BYTES = 8

log = logging.getLogger("pipemorph.planner")


Question = Replan | FirstPlan
Answer = Proposal | Schedule | InputError | None


def frame(value: Question | Answer) -> bytes:
    """As it goes through the pipe."""
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    return len(data).to_bytes(HEADER_BYTES, "big") + data


def answer(asked: Question) -> Answer:
    """The proposal or the schedule; a fault of the planner is one more reason to have none."""
    try:
        return propose(asked) if isinstance(asked, Replan) else first_plan.answer(asked)
    except Exception as error:
        log.exception("a plan could not be made")
        why = f"{type(error).__name__}: {error}"
        if isinstance(asked, Replan):
            return Proposal(None, None, (NoPlan(why),))
        return InputError(f"no plan was found: {why}")


def serve(questions: BinaryIO, answers: BinaryIO) -> None:
    """Answer until there is nothing more to read."""
    while len(header := questions.read(HEADER_BYTES)) == HEADER_BYTES:
        asked: Question = pickle.loads(questions.read(int.from_bytes(header, "big")))
        answers.write(frame(answer(asked)))
        answers.flush()


def main() -> None:
    logging.basicConfig(
        level=log_level(),
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    # The host ends us by closing the pipe, also when it is interrupted.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
