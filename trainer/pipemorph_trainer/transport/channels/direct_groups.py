"""Process groups of the direct routes, created so that failover can handle their errors."""

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
from pipemorph_trainer.topology.accelerator import Accelerator, get_accelerator
from pipemorph_trainer.topology.groups import ProcessGroups
from pipemorph_trainer.transport.message import Direction

if TYPE_CHECKING:
    from pipemorph.spec.mesh import Coordinate

log = logging.getLogger("pipemorph.trainer")

ASYNC_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
SETUP_SECONDS = 120.0
"""Longest time to connect two neighbours."""
SURVIVABLE = ("0", "2")
"""Values with which NCCL ignores an error or aborts the communicator. Others end the process."""


def make_direct_groups(
    coordinate: Coordinate,
    device: torch.device,
    deadline: float,
    groups: ProcessGroups,
    *,
    gpus: Sequence[str | None],
) -> dict[int, dict[Direction, dist.ProcessGroup]]:
    """Create the point-to-point groups of this rank's links, by link. Collective: all ranks create
    all groups.

    ``gpus``: UUID of the GPU of each rank; None for the CPU. A link between two ranks on one GPU
    has no group, since NCCL refuses it.

    With gloo, both directions share a connection without delaying each other. NCCL runs all
    operations of a communicator in order, so each direction has its own.

    Raises :class:`PipelineError`, which names the link and the rank that did not join.
    """
    # The executor's deadlines, also those of the first iteration, must end first: their errors name
    # the missing message.
    timeout = timedelta(seconds=2 * deadline * coordinate.stages + 60)
    nccl = device.type == "cuda"
    accelerator = get_accelerator(device)
    mine: dict[int, dict[Direction, dist.ProcessGroup]] = {}

    def make_link_groups(link: int, column: int) -> None:
        lower, upper = (coordinate.mesh.find_rank(stage, column) for stage in (link, link + 1))
        if lower == upper or (gpus[lower] is not None and gpus[lower] == gpus[upper]):
            return
        joins = coordinate.rank in (lower, upper)
        peer = upper if coordinate.rank == lower else lower

        def create_groups() -> None:
            made: list[Any] = [
                groups.create_group(
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
                    create_communicators(mine[link], device, is_lower=coordinate.rank == lower)

        if joins:
            _run_with_timeout(
                create_groups, f"the direct route of link {link} to rank {peer}", accelerator
            )
        else:
            create_groups()

    with keep_process_on_nccl_error(coordinate) if nccl else nullcontext():
        for column in range(coordinate.mesh.columns):
            # Even links first: in sequence, each link would wait for the previous one.
            for link in sorted(range(coordinate.stages - 1), key=lambda link: link % 2):
                make_link_groups(link, column)
    return mine


def _run_with_timeout(make: Callable[[], None], what: str, accelerator: Accelerator | None) -> None:
    """Call ``make``, which waits for another rank, within :data:`SETUP_SECONDS`. torch has no such
    limit: if the other rank ends, the call would wait inside torch without end.

    Raises :class:`PipelineError`, which begins with ``what``."""
    failed: list[Exception] = []

    def run_make() -> None:
        try:
            if accelerator is not None:
                accelerator.enter_thread()
            make()
        except Exception as error:  # noqa: BLE001  raised below
            failed.append(error)

    thread = threading.Thread(target=run_make, name="pipemorph-edges", daemon=True)
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


def create_communicators(
    edge: Mapping[Direction, dist.ProcessGroup], device: torch.device, *, is_lower: bool
) -> None:
    """Send one number in each direction, to create the communicators before the first message. NCCL
    creates one at its first use, which is slow and waits for the device. Both ends call this."""
    for direction in Direction:
        group = edge[direction]
        number = torch.zeros(1, device=device)
        sends = is_lower is (direction is Direction.FORWARD)
        move = group.send if sends else group.recv
        move([number], 1 - group.rank(), 0).wait()
        # wait() only made the stream wait; this makes the host wait.
        number.item()


@contextmanager
def keep_process_on_nccl_error(coordinate: Coordinate) -> Iterator[None]:
    """Context for creating NCCL groups whose broken link does not end the process, so that failover
    is possible. A value set by the user stays; if it prevents failover, rank 0 logs a warning."""
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
