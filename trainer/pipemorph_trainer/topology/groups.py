"""Process groups of a pipeline: creates them, aborts them after a failure, destroys them.

torch destroys groups when the interpreter ends, which is too late for gloo. A worker thread may
still hold the tensors of a finished collective, and needs the interpreter to release them. A thread
that acquires the ending interpreter is terminated in a destructor, which aborts the process
("terminate called without an active exception"; pytorch/pytorch#190489). A group joins its workers
when its last reference is dropped, so groups are dropped while the interpreter still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pipemorph.errors import one_line
from pipemorph_trainer.errors import PipelineError

_ABANDON_TAG = 1 << 20
"""Tag that no message has."""
MOST_BYTES = 256 << 20
"""Largest value that a rank may send to the others at the start, bytes."""

_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Groups with an aborted communicator, which cannot be shut down."""

T = TypeVar("T")
_JSON = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")


def gather_values(value: T, kind: Any, group: dist.ProcessGroup | None) -> list[T]:
    """Gather the values of all ranks of ``group``, in its order; None: default group. Collective.

    Values travel as JSON and are validated as ``kind``, a type that pydantic supports. torch's
    ``all_gather_object`` would unpickle them: a process that answers at an address of the group
    could run code in this process.

    Raises :class:`PipelineError`, on the ranks that received it, if a value is of another kind.
    """
    adapter = TypeAdapter(list[kind], config=_JSON)
    body = adapter.dump_json([value])
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(body)]), group=group)
    most = max(int(size) for size in sizes)
    if most > MOST_BYTES or any(int(size) < 0 for size in sizes):
        raise PipelineError(
            f"a rank is to send {most} bytes to the others at the start; expected at most"
            f" {MOST_BYTES}"
        )
    own = torch.zeros(most, dtype=torch.uint8)
    own[: len(body)] = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    bodies = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(bodies, own, group=group)
    found: list[T] = []
    for number, (received, size) in enumerate(zip(bodies, sizes, strict=True)):
        try:
            found += adapter.validate_json(bytes(received[: int(size)].numpy()))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"][1:])) or "the value"
            sender = number if group is None else dist.get_global_rank(group, number)
            raise PipelineError(
                f"rank {sender} sent a value that is not valid: {where}: {one_line(first['msg'])};"
                " start all ranks with the same version of PipeMorph"
            ) from None
    return found


class ProcessGroups:
    """Process groups of a pipeline."""

    def __init__(self) -> None:
        self._made: list[tuple[dist.ProcessGroup, str]] = []
        """Groups with their backends, which torch forgets when the user destroys a group."""

    def create_group(self, ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """Create a group that ends with the pipeline, by ``dist.new_group``. Collective over all
        ranks of the world, including those outside the group.

        Without ``backend`` it has the backends of the default group, and always one for the CPU.
        """
        if "backend" not in options and not carries_cpu_tensors(dist.GroupMember.WORLD):
            options["backend"] = f"cpu:gloo,{dist.get_backend_config()}"
        return self.adopt_group(dist.new_group(ranks, **options))

    def adopt_group(self, group: Any) -> dist.ProcessGroup:
        """Add an existing group to those that end with the pipeline."""
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append((group, dist.get_backend_config(group)))
        made: dist.ProcessGroup = group
        return made

    def destroy_all(self, *, clean: bool) -> None:
        """Destroy the groups in reverse order. Idempotent.

        ``clean``: all ranks have waited for everything that was posted. Otherwise operations in
        progress are aborted first, so that this does not wait for a peer; peers see connections
        close.
        """
        while self._made:
            group, backends = self._made.pop()
            if (not clean and not abort_group(group, backends)) or group in _aborted:
                continue
            # A user may have destroyed all groups already, as torch's own scripts do last.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def carries_cpu_tensors(group: dist.ProcessGroup | None) -> bool:
    """True if a group carries tensors in host memory; False for one with ``nccl`` alone."""
    return "cpu:" in dist.get_backend_config(group)


def abort_group(group: dist.ProcessGroup, backends: str) -> bool:
    """Abort all operations in progress in a group, without its peers. With gloo, peers see
    connections close. With NCCL they may see nothing, and must abort their ends themselves.
    ``backends``: of the group, such as ``cpu:gloo,cuda:nccl`` or ``gloo``.

    Returns False if the group must not be destroyed: an aborted communicator cannot be shut down.
    """
    if group.size() < 2:
        return True
    if "gloo" in backends:
        # gloo has no abort, but a receive that times out closes the group's connections, and
        # all operations on them fail.
        with contextlib.suppress(RuntimeError):
            probe = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _ABANDON_TAG)
            probe.wait(timedelta(milliseconds=1))
    if "nccl" in backends and group not in _aborted:
        _aborted.add(group)
        group.abort()
    return "nccl" not in backends


def destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Destroy the default group when the interpreter ends, unless the user has done so.

    It outlives the pipeline: a script may still use the group that its first pipeline made. The
    handler is registered before those of the pipelines, so it runs after them.
    """

    made_by = os.getpid()

    def destroy_default_group() -> None:
        if os.getpid() != made_by:
            return  # A forked child: the connections are its parent's.
        if not dist.is_initialized() or group is not dist.GroupMember.WORLD:
            return
        if abort_group(group, dist.get_backend_config(group)):
            dist.destroy_process_group()

    atexit.register(destroy_default_group)
