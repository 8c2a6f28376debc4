"""Handles a refused step on all ranks, so that the next step can run.

A rank whose batch does not fit refuses before it sends anything of the step. The token tells the
stages below, which then do nothing. The stages above may have begun: their messages are sent as
planned, but empty, so that none is left over, and their results are dropped. No gradient has
changed by then: no backward can begin before every stage of a replica has run a forward, and with
several replicas their last stages wait for each other before their first backward. Finally the
loss, for which all ranks wait in any case, says that the step was refused.
"""

from __future__ import annotations

import re
from functools import partial

import torch
import torch.distributed as dist

from pipemorph.api.mesh import Coordinate
from pipemorph.errors import PipeMorphError
from pipemorph_trainer.errors import BatchError, ShapeError
from pipemorph_trainer.executor.waiting import CollectiveWait
from pipemorph_trainer.topology.hierarchy import Hierarchy, Pending
from pipemorph_trainer.topology.world import World

_TEXT_BYTES = 480
_AGAIN, _REFUSES, _CANNOT = range(3)
"""What a rank says of a refused call: nothing against running it again, why it refuses, or that it
has forwards that cannot count a second time."""
_OF_MACHINE: tuple[type[BaseException], ...] = (
    MemoryError, OSError, EOFError, torch.OutOfMemoryError, dist.DistError,
    *(found for found in (getattr(torch, "AcceleratorError", None),) if found is not None),
)  # fmt: skip
_NO_MEMORY = re.compile("can(no|')t allocate memory", re.IGNORECASE)
"""What torch says without memory of the host, in a RuntimeError."""


class BoundaryChanged(ShapeError):
    """The stage's first output of a call is not like those before. The next stage has to know."""


def is_of_batch(error: BaseException) -> bool:
    """Whether a stage that raises this error in its first forward of a step, or in an evaluation,
    can continue with another batch: not after an error of the pipeline itself or of the machine (a
    device, memory, a disk, a connection), which may go well another time.
    """
    if isinstance(error, ShapeError):
        return True
    if isinstance(error, (PipeMorphError, *_OF_MACHINE)) or _NO_MEMORY.search(str(error)):
        return False
    return error.__cause__ is None or is_of_batch(error.__cause__)


class Gate:
    """Barrier between the last stages of all columns: no backward before all have run a forward.

    Call on every last stage in each iteration: :meth:`begin`, then :meth:`accept` and, before the
    first backward, :meth:`passed`; at the end :meth:`refuse` if the step is refused.
    """

    def __init__(self, columns: Hierarchy, wait: CollectiveWait) -> None:
        self._columns, self._wait_for = columns, wait
        self._refused = torch.zeros(1)
        self._said: Pending | None = None
        self._over = False

    def begin(self) -> None:
        """Begin an iteration."""
        self._said, self._over = None, False

    def accept(self) -> None:
        """Say that all stages of this column have run a forward. Does not wait."""
        self._post(refused=False)

    def passed(self) -> bool:
        """Wait for all columns; return whether all have accepted."""
        assert self._said is not None, "this column has not said whether it accepts"
        self._said.wait(
            partial(self._wait_for, what="the other replicas to run their first forward")
        )
        self._over = True
        return not self._refused

    def refuse(self) -> None:
        """Refuse the step on this column. Waits for the other columns."""
        if self._said is None:
            self._post(refused=True)
        if not self._over:
            self.passed()

    def _post(self, *, refused: bool) -> None:
        self._refused = torch.tensor([float(refused)])
        self._said = self._columns.all_reduce(self._refused, dist.ReduceOp.MAX)


def tell(
    world: World, wait: CollectiveWait, call: str, error: Exception | None, *, repeats: bool
) -> BatchError | None:
    """Make the error that all ranks raise for a refused call; None if they run it again, since
    nothing but what crosses a boundary has changed. Collective.

    ``call``: such as ``step() of iteration 7``. ``error``: why this rank refused it, None if others
    did. ``repeats``: whether this rank has the results of all forwards that it ran.
    """
    said = _describe(world.coordinate, error).encode()[:_TEXT_BYTES]
    mine = torch.zeros(_TEXT_BYTES + 1, dtype=torch.uint8)
    mine[-1] = _AGAIN if repeats else _CANNOT
    if error is not None and not isinstance(error, BoundaryChanged):
        mine[-1] = _REFUSES
    mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8) if said else mine[:0]
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(world.control))]
    work = dist.all_gather(everyone, mine, group=world.control, async_op=True)
    wait(work, f"all ranks to say why {call} is refused")
    if all(int(each[-1]) == _AGAIN for each in everyone):
        return None
    texts = [bytes(each[:-1].tolist()).rstrip(b"\0").decode(errors="replace") for each in everyone]
    reasons = [text for text in texts if text]
    more = f", and {len(reasons) - 1} more" if len(reasons) > 1 else ""
    return BatchError(
        f"{call} is refused on all ranks: {reasons[0]}{more}; no gradient has changed, and step() "
        "can be called again"
    )


def _describe(coordinate: Coordinate, error: Exception | None) -> str:
    if error is None:
        return ""
    text = str(error) if isinstance(error, PipeMorphError) else _of_stage(error)
    return text if text.startswith(str(coordinate)) else f"{coordinate}: {text}"


def _of_stage(error: Exception) -> str:
    lines = str(error).splitlines()
    what = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return f"the stage raised {what} in its forward"
