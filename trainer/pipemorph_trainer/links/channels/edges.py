"""Creates the process groups of direct routes, so that failover can handle their errors."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from pipemorph_trainer.errors import PipelineError, first_sentence
from pipemorph_trainer.links.message import Direction
from pipemorph_trainer.topology.accelerator import Accelerator, accelerator_of
from pipemorph_trainer.topology.groups import Groups

if TYPE_CHECKING:
    from pipemorph.api.mesh import Coordinate

log = logging.getLogger("pipemorph.trainer")

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SETUP_SECONDS = 120.0
"""Longest time to connect two neighbours."""
SURVIVABLE = ("0", "2")
"""Values with which NCCL does nothing, or aborts the communicator. Others end the process."""


def make_edges(
    coordinate: Coordinate,
    device: torch.device,
    deadline: float,
    groups: Groups,
    *,
    gpus: Sequence[str | None],
) -> dict[int, dict[Direction, dist.ProcessGroup]]:
    """Point-to-point groups of this rank's links, by link. Collective: all ranks create all groups.

    ``gpus``: the GPU of each rank, by UUID; None for the CPU. A link between two ranks on one GPU
    has none: NCCL refuses it.

    With gloo, both directions share a connection without delaying each other. NCCL runs all
    operations of a communicator in order, so each direction has its own.

    Raises :class:`PipelineError`, with the link and the rank that did not join.
    """
    # Longer than the executor's deadlines, also than those of the first iteration: the executor's
    # errors name the missing message.
    timeout = timedelta(seconds=2 * deadline * coordinate.stages + 60)
    nccl = device.type == "cuda"
    accelerator = accelerator_of(device)
    mine: dict[int, dict[Direction, dist.ProcessGroup]] = {}

    def make(link: int, column: int) -> None:
        lower, upper = (coordinate.mesh.rank(stage, column) for stage in (link, link + 1))
        if lower == upper or (gpus[lower] is not None and gpus[lower] == gpus[upper]):
            return
        joins = coordinate.rank in (lower, upper)
        peer = upper if coordinate.rank == lower else lower

        def make_groups() -> None:
            made: list[Any] = [
                groups.new(
                    [lower, upper],
                    timeout=timeout,
                    backend="nccl" if nccl else "gloo",
                    group_desc=f"pipemorph link {link} of column {column}",
                )
                for _ in range(2 if nccl else 1)
            ]
            if joins:
                mine[link] = {Direction.FORWARD: made[0], Direction.BACKWARD: made[-1]}
                if nccl:
                    connect_edge(mine[link], device, is_lower=coordinate.rank == lower)

        if joins:
            _in_time(make_groups, f"the direct route of link {link} to rank {peer}", accelerator)
        else:
            make_groups()

    with survivable(coordinate) if nccl else nullcontext():
        for column in range(coordinate.mesh.columns):
            # Every second link first: in their order, each would wait for the one before.
            for link in sorted(range(coordinate.stages - 1), key=lambda link: link % 2):
                make(link, column)
    return mine


def _in_time(make: Callable[[], None], what: str, accelerator: Accelerator | None) -> None:
    """Call ``make``, which waits for another rank, within :data:`SETUP_SECONDS`. torch has no such
    limit: a rank that ends meanwhile would be waited for without an end, and inside torch.

    Raises :class:`PipelineError` with ``what`` was to be made."""
    failed: list[Exception] = []

    def making() -> None:
        try:
            if accelerator is not None:
                accelerator.enter_thread()
            make()
        except Exception as error:  # noqa: BLE001  raised below
            failed.append(error)

    thread = threading.Thread(target=making, name="pipemorph-edges", daemon=True)
    thread.start()
    thread.join(SETUP_SECONDS)
    if thread.is_alive():
        raise PipelineError(
            f"{what} was not there after {SETUP_SECONDS:g} s: that rank has not joined it; see"
            " its log, and whether the two reach each other"
        )
    for error in failed:
        if not isinstance(error, RuntimeError):
            raise error
        raise PipelineError(f"{what} could not be made: {first_sentence(error)}") from error


def connect_edge(
    edge: Mapping[Direction, dist.ProcessGroup], device: torch.device, *, is_lower: bool
) -> None:
    """Send one number in each direction, to create the communicators before the first message. NCCL
    creates one at its first use, which takes long and waits for the device. Both ends call it."""
    for direction in Direction:
        group = edge[direction]
        number = torch.zeros(1, device=device)
        sends = is_lower is (direction is Direction.FORWARD)
        move = group.send if sends else group.recv
        move([number], 1 - group.rank(), 0).wait()
        # wait() only made the stream wait; this makes the host wait.
        number.item()


@contextmanager
def survivable(coordinate: Coordinate) -> Iterator[None]:
    """Context in which NCCL groups are created so that a broken link does not end the process, and
    failover can replace it. A value set by the user is kept; if it prevents failover, rank 0 logs a
    warning."""
    found = os.environ.get(ASYNC_ERRORS, os.environ.get(ASYNC_ERRORS.removeprefix("TORCH_")))
    if found is not None:
        if found not in SURVIVABLE and coordinate.rank == 0:
            log.warning(
                "%s: %s=%s ends the process when a direct link breaks; unset it or set it to 2"
                " for failover to the engine", coordinate, ASYNC_ERRORS, found,
            )  # fmt: skip
        yield
        return
    os.environ[ASYNC_ERRORS] = "2"
    try:
        yield
    finally:
        del os.environ[ASYNC_ERRORS]
