"""Process groups of a pipeline: creates them, aborts them after a failure, destroys them.

torch destroys groups at the end of the interpreter, which is too late for gloo. One of its worker
threads may still hold the tensors of a finished collective. To release them it needs the
interpreter, and a thread that asks for the interpreter while it ends is terminated in a destructor,
which aborts the process ("terminate called without an active exception"; pytorch/pytorch#190489). A
group joins its workers when its last reference is dropped, so the groups are dropped while the
interpreter still runs.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_ABANDON_TAG = 1 << 20
"""A tag that no message has."""


class Groups:
    """The groups of one pipeline."""

    def __init__(self) -> None:
        self._made: list[tuple[dist.ProcessGroup, str]] = []
        """Groups with their backends, which torch forgets when the user destroys a group."""

    def new(self, ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """Create a group that ends with the pipeline, by ``dist.new_group``. Collective over all
        ranks of the world, including those that are not in the group.

        Without ``backend`` it has those of the default group, and carries CPU tensors in any case.
        """
        if "backend" not in options and not carries_cpu(dist.GroupMember.WORLD):
            options["backend"] = f"cpu:gloo,{dist.get_backend_config()}"
        return self.adopt(dist.new_group(ranks, **options))

    def adopt(self, group: Any) -> dist.ProcessGroup:
        """Add an existing group to those that end with the pipeline."""
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append((group, dist.get_backend_config(group)))
        made: dist.ProcessGroup = group
        return made

    def destroy(self, *, clean: bool) -> None:
        """Destroy the groups in reverse order. Idempotent.

        ``clean``: all ranks have waited for everything that was posted. Otherwise operations in
        progress are aborted first, so that this does not wait for a peer; peers see connections
        close.
        """
        while self._made:
            group, backends = self._made.pop()
            if not clean and not abandon(group, backends):
                continue
            # A user may have destroyed all groups already, as torch's own scripts do last.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def carries_cpu(group: dist.ProcessGroup | None) -> bool:
    """Whether tensors in host memory can go through a group. Not if the script has made it with
    ``nccl`` alone."""
    return "cpu:" in dist.get_backend_config(group)


def abandon(group: dist.ProcessGroup, backends: str) -> bool:
    """Abort all operations in progress in a group, without its peers, which see connections close.
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
    if "nccl" in backends:
        group.abort()
    return "nccl" not in backends


def destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Destroy the default group at the end of the interpreter, unless the user has done so.

    Not with the pipeline: a script may continue to use the group that its first pipeline made. This
    is registered before the pipelines' own handlers, so it runs after them.
    """

    made_by = os.getpid()

    def destroy() -> None:
        if os.getpid() != made_by:
            return  # A forked child: the connections are its parent's.
        if not dist.is_initialized() or group is not dist.GroupMember.WORLD:
            return
        if abandon(group, dist.get_backend_config(group)):
            dist.destroy_process_group()

    atexit.register(destroy)
