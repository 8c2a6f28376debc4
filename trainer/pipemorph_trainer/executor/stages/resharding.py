"""Which sharded modules are to free their parameters after each use, as ``fully_shard`` was asked.

torch has no public way to read ``reshard_after_forward``; this module alone names what it uses of
torch's state for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

log = logging.getLogger("pipemorph.trainer")


class Resharding:
    """The sharded modules of a stage, in the order of the module tree, by what they were asked.

    ``freed``: those for which the script gave ``reshard_after_forward`` as True or a number. torch
    gathers each of them where a forward or a backward enters it, and shards it again where that
    leaves it. ``kept``: all others, also those for which it gave nothing. They stay as they are
    until they are gathered or sharded. torch's own default would free them, since it has one
    microbatch per gather; a pipeline would gather them 2 N times in an iteration. Those sharded
    over replicas are kept, too: replicas need not run their ops in one order, so no op may gather.
    """

    def __init__(self, modules: list[Any]) -> None:
        self.freed: list[Any] = []
        self.kept: list[Any] = []
        for module in modules:
            (self.freed if _asked(module) else self.kept).append(module)
        for module in self.kept:
            module.set_reshard_after_forward(False, recurse=False)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which the freed modules stay gathered, too, once they are."""
        before = [(group, group.post_forward_mesh_info) for group in _groups(self.freed)]
        for module in self.freed:
            module.set_reshard_after_forward(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
        try:
            yield
        finally:
            for module in self.freed:
                module.set_reshard_after_backward(True, recurse=False)
            for group, asked in before:
                group.post_forward_mesh_info = asked


def _asked(module: Any) -> bool:
    """Whether the script asked torch to shard a module again after its forward."""
    try:
        automatic = module._get_fsdp_state()._auto_reshard_after_forward
        asked = any(group.post_forward_mesh_info is not None for group in _groups([module]))
    except AttributeError as error:
        log.warning(
            "what reshard_after_forward is cannot be told with this torch (%s); parameters of the"
            " stage stay gathered within an iteration",
            error,
        )
        return False
    if asked and not automatic and _over_replicas(module):
        log.warning(
            "fully_shard(reshard_after_forward) over dp_replicate is not followed, since replicas"
            " may run their ops in different orders: parameters stay gathered within an iteration;"
            " shard over dp_shard to free them"
        )
        return False
    return asked and not automatic


def _over_replicas(module: Any) -> bool:
    infos = [group.mesh_info for group in _groups([module])]
    names = [(info.mesh.mesh_dim_names or ())[info.shard_mesh_dim :][:1] for info in infos]
    return ("dp_replicate",) in names


def _groups(modules: list[Any]) -> list[Any]:
    return [group for m in modules for group in m._get_fsdp_state()._fsdp_param_groups]
