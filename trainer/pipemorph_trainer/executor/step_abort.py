"""Refusal of a step on all ranks, after which the next step can run.

A rank whose batch does not fit refuses before it sends anything of the step. The token carries the
refusal to the stages below, which then do nothing. The stages above may have begun: their messages
are sent as planned, but empty, so that none remains, and their results are dropped. No gradient has
changed by then: no backward can begin before every stage of a replica has run a forward, and with
several replicas their last stages wait for each other before their first backward. Finally the
loss, for which all ranks wait in any case, carries the refusal to all of them.
"""

from __future__ import annotations

import re
from functools import partial

import torch
import torch.distributed as dist

from pipemorph.errors import PipeMorphError
from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.errors import BatchError, ShapeError
from pipemorph_trainer.executor.waiting import CollectiveWaiter
from pipemorph_trainer.topology.hierarchy import PendingCollective, RankHierarchy
from pipemorph_trainer.topology.world import World

_TEXT_BYTES = 480
_AGAIN, _REFUSES, _CANNOT = range(3)
"""Verdict of a rank on a refused call: it can run again, this rank refuses it, or some of its
forwards cannot count a second time."""
_MACHINE_ERRORS: tuple[type[BaseException], ...] = (
    MemoryError, OSError, EOFError, torch.OutOfMemoryError, dist.DistError,
    *(found for found in (getattr(torch, "AcceleratorError", None),) if found is not None),
)  # fmt: skip
_NO_MEMORY = re.compile("can(no|')t allocate memory", re.IGNORECASE)
"""Text of torch's RuntimeError when the host has no memory."""


class BoundaryChangedError(ShapeError):
    """Error of a stage whose first output in a call has another form, unknown to the next stage."""


def is_batch_error(error: BaseException) -> bool:
    """True if a stage that raises this error in its first forward of a step, or in an evaluation,
    can continue with another batch. False for an error of the pipeline itself or of the machine (a
    device, memory, a disk, a connection), which may not recur.
    """
    if isinstance(error, ShapeError):
        return True
    if isinstance(error, (PipeMorphError, *_MACHINE_ERRORS)) or _NO_MEMORY.search(str(error)):
        return False
    return error.__cause__ is None or is_batch_error(error.__cause__)


class FirstForwardBarrier:
    """Barrier between the last stages of all columns: no backward before all have run a forward.

    Call on every last stage in each iteration: :meth:`begin_iteration`, then :meth:`report_forward`
    and, before the first backward, :meth:`wait_for_columns`; at the end :meth:`refuse_step` if the
    step is refused.
    """

    def __init__(self, columns: RankHierarchy, wait: CollectiveWaiter) -> None:
        self._columns, self._wait_for = columns, wait
        self._refused = torch.zeros(1)
        self._verdict: PendingCollective | None = None
        self._over = False

    def begin_iteration(self) -> None:
        """Begin an iteration."""
        self._verdict, self._over = None, False

    def report_forward(self) -> None:
        """Report that all stages of this column have run a forward. Does not wait."""
        self._post_verdict(refused=False)

    def wait_for_columns(self) -> bool:
        """Wait for all columns. Returns True if all have accepted."""
        assert self._verdict is not None, "this column has posted no verdict"
        self._verdict.wait(
            partial(self._wait_for, what="the other replicas to run their first forward")
        )
        self._over = True
        return not self._refused

    def refuse_step(self) -> None:
        """Refuse the step on this column. Waits for the other columns."""
        if self._verdict is None:
            self._post_verdict(refused=True)
        if not self._over:
            self.wait_for_columns()

    def _post_verdict(self, *, refused: bool) -> None:
        self._refused = torch.tensor([float(refused)])
        self._verdict = self._columns.all_reduce(self._refused, dist.ReduceOp.MAX)


def gather_refusals(
    world: World, wait: CollectiveWaiter, call: str, error: Exception | None, *, repeats: bool
) -> BatchError | None:
    """Make the error that all ranks raise for a refused call; None if they run it again, since only
    the form of a stage's output has changed. Collective.

    ``call``: such as ``step() of iteration 7``. ``error``: this rank's reason, None if only others
    refused. ``repeats``: this rank has the results of all forwards that it ran.
    """
    text = _describe_refusal(world.coordinate, error).encode()[:_TEXT_BYTES]
    mine = torch.zeros(_TEXT_BYTES + 1, dtype=torch.uint8)
    mine[-1] = _AGAIN if repeats else _CANNOT
    if error is not None and not isinstance(error, BoundaryChangedError):
        mine[-1] = _REFUSES
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else mine[:0]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(world.control))]
    work = dist.all_gather(everyone, mine, group=world.control, async_op=True)
    wait(work, f"all ranks to report why {call} is refused")
    if all(int(each[-1]) == _AGAIN for each in everyone):
        return None
    texts = [bytes(each[:-1].tolist()).rstrip(b"\0").decode(errors="replace") for each in everyone]
    reasons = [text for text in texts if text]
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return BatchError(
        f"{call} is refused on all ranks: {reasons[0]}{more}; no gradient has changed, and step() "
        "can be called again"
    )


def _describe_refusal(coordinate: Coordinate, error: Exception | None) -> str:
    if error is None:
        return ""
    text = str(error) if isinstance(error, PipeMorphError) else _describe_stage_error(error)
    return text if text.startswith(str(coordinate)) else f"{coordinate}: {text}"


def _describe_stage_error(error: Exception) -> str:
    lines = str(error).splitlines()
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"the stage raised {what} in its forward"
