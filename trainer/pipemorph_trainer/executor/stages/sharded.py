"""Gathers the parameters and reduces the gradients of a distributed stage.

Of a stage that ``fully_shard`` has sharded (FSDP2), parameters stay gathered from the first op of
an iteration to its last W, or, of modules that ask for it, only while an op is inside them. Their
gradients add up unsharded on each rank, and are reduce-scattered once. Between iterations the stage
is sharded, as the optimizer, the gradient norm and checkpoints need it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from pipemorph.errors import InputError
from pipemorph_trainer.topology.placement import loaded, misplaced

log = logging.getLogger("pipemorph.trainer")


class Sharded:
    """The sharded modules of a stage; none if ``fully_shard`` was not used.

    Gathering and reducing are collective over the ranks that share the parameters. Raises
    :class:`InputError` if this version of torch cannot reduce apart from the backward.
    """

    def __init__(self, stage: nn.Module) -> None:
        kind = loaded("torch.distributed.fsdp", "FSDPModule")
        self._modules: list[Any] = [m for m in stage.modules() if isinstance(m, kind)]
        below = {id(inner) for m in self._modules for inner in m.modules() if inner is not m}
        self._roots = [m for m in self._modules if id(m) not in below]
        for root in self._roots:
            if not hasattr(root, "finalize_backward"):
                raise InputError(
                    "the stage is sharded by fully_shard, which needs a torch with"
                    " FSDPModule.finalize_backward (2.15); update torch or give Pipeline the"
                    " module before it was sharded"
                )
            root.set_manual_backward_finalization(True)
        self._resharding = Resharding(self._modules)

    @property
    def frees(self) -> bool:
        """Whether there are modules that are gathered only while an op is inside them."""
        return bool(self._resharding.freed)

    def gather(self) -> None:
        """Gather the parameters, for any number of F, B and W, but those that each op gathers."""
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        for module in self._resharding.kept:
            module.set_reshard_after_backward(False, recurse=False)
        _unshard(self._resharding.kept)

    def reduce(self) -> None:
        """Reduce the gradients, add them to those of the shards, and shard the parameters again.
        Without gradients, as after a refused iteration, it only does the latter."""
        for root in self._roots:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            root.finalize_backward()
        for module in self._modules:
            # Those that no forward has used.
            module.reshard()

    @contextmanager
    def gathered_for_weights(self) -> Iterator[None]:
        """Gather, for a W that uses their values, what ops gather only for themselves."""
        _unshard(self._resharding.freed)
        try:
            yield
        finally:
            for module in self._resharding.freed:
                module.reshard()


def _unshard(modules: list[Any]) -> None:
    """Gather modules, each while others are on the way."""
    for handle in [module.unshard(async_op=True) for module in modules]:
        if handle is not None:
            handle.wait()


def is_sharded(stage: nn.Module) -> bool:
    """Whether ``fully_shard`` has sharded a module of the stage."""
    kind = loaded("torch.distributed.fsdp", "FSDPModule")
    return any(isinstance(module, kind) for module in stage.modules())


def place_gradients(stage: nn.Module) -> None:
    """Place every gradient as its parameter: add up partial sums, such as those of a norm whose
    ranks each have a part of the sequence, and cut whole ones, such as that of an embedding whose
    ranks each have a part of the vocabulary. Collective over the ranks of the parameter's mesh."""
    for parameter in stage.parameters():
        if misplaced(parameter):
            grad: Any = parameter.grad
            placements = cast(Any, parameter).placements
            parameter.grad = grad.redistribute(placements=placements)


# --- modules that free their parameters after each use ----------------------------------------
#
# torch has no public way to read `reshard_after_forward`; this section alone names what it uses of
# torch's state for it.


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
