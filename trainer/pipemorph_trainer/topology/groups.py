"""Process groups that belong to a pipeline: made, given up after a failure, destroyed.

torch leaves groups to the end of the interpreter, which is too late for gloo. A worker thread
of its may still hold the tensors of a collective that everybody has waited for; to let go of
them it needs the interpreter, and one that asks for an interpreter which is ending is ended by
it in a destructor, which aborts the process ("terminate called without an active exception";
pytorch/pytorch#190489). A group whose last reference is dropped joins its workers, so groups
are dropped while the interpreter still runs.
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
"""A tag nobody sends with."""


class Groups:
    """The groups that one pipeline made."""

    def __init__(self) -> None:
        self._made: list[tuple[dist.ProcessGroup, str]] = []
        """With their backends, which torch forgets of a group that the user has destroyed."""

    def new(self, ranks: list[int] | None = None, **options: Any) -> dist.ProcessGroup:
        """``dist.new_group``, for a group that ends with the pipeline. Collective: all ranks
        of the world call it, also those that are not in the group."""
        return self.adopt(dist.new_group(ranks, **options))

    def adopt(self, group: Any) -> dist.ProcessGroup:
        """Take over a group that was made for this pipeline."""
        if group is not dist.GroupMember.NON_GROUP_MEMBER:
            self._made.append((group, dist.get_backend_config(group)))
        made: dist.ProcessGroup = group
        return made

    def destroy(self, *, clean: bool) -> None:
        """End the groups, in the order opposite to that in which they were made. Idempotent.

        ``clean``: everything posted has been waited for, on all ranks. Otherwise what is under
        way is given up first, so that this waits for no peer; peers see connections close.
        """
        while self._made:
            group, backends = self._made.pop()
            if not clean and not abandon(group, backends):
                continue
            # A user may have destroyed all groups already, as torch's own scripts do last.
            with contextlib.suppress(ValueError):
                dist.destroy_process_group(group)


def abandon(group: dist.ProcessGroup, backends: str) -> bool:
    """Make all that is under way in a group fail at once, without its peers, which see
    connections close. ``backends``: what carries the group, as ``cpu:gloo,cuda:nccl`` or ``gloo``.

    False where nothing is left to destroy: a communicator that was aborted cannot be shut down.
    """
    if group.size() < 2:
        return True
    if "gloo" in backends:
        # gloo can abort nothing, but a receive that times out closes the group's connections,
        # with all that waits there.
        with contextlib.suppress(RuntimeError):
            probe = group.recv([torch.empty(1)], (group.rank() + 1) % group.size(), _ABANDON_TAG)
            probe.wait(timedelta(milliseconds=1))
    if "nccl" in backends:
        group.abort()
    return "nccl" not in backends


def destroy_at_exit(group: dist.ProcessGroup) -> None:
    """Destroy the default group at the end of the interpreter, unless the user has by then.

    Not with the pipeline: a script may use the group that its first pipeline made, and make
    another pipeline. Registered before those of the pipelines, this runs after them.
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
