"""Sharded stage: gathers its parameters and reduces its gradients.

Parameters of a stage that ``fully_shard`` has sharded (FSDP2) stay gathered from the first op of an
iteration to its last W; those of modules that are set to reshard, only while an op is inside them.
Gradients add up unsharded on each rank, and are reduce-scattered once. Between iterations the stage
is sharded, as the optimizer, the gradient norm and checkpoints need it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from pipemorph.errors import InputError
from pipemorph_trainer.topology.placement import get_loaded_class, has_misplaced_gradient

log = logging.getLogger("pipemorph.trainer")


class ShardedModules:
    """Sharded modules of a stage; none if ``fully_shard`` was not used.

    Gathering and reducing are collective over the ranks that share the parameters. Raises
    :class:`InputError` if this version of torch cannot reduce apart from the backward.
    """

    def __init__(self, stage: nn.Module) -> None:
        kind = get_loaded_class("torch.distributed.fsdp", "FSDPModule")
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
        self._resharding = ReshardingPolicy(self._modules)

    @property
    def frees_parameters(self) -> bool:
        """True if there are modules that are gathered only while an op is inside them."""
        return bool(self._resharding.freed)

    def gather_parameters(self) -> None:
        """Gather the parameters for any number of F, B and W, except those that each op gathers."""
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        for module in self._resharding.stays_gathered:
            module.set_reshard_after_backward(False, recurse=False)
        _unshard_modules(self._resharding.stays_gathered)

    def reduce_gradients(self) -> None:
        """Reduce the gradients, add them to those of the shards, and shard the parameters again.
        Without gradients, as after a refused iteration, it only shards."""
        for root in self._roots:
            root.set_requires_gradient_sync(True)
            root.set_reshard_after_backward(True)
            root.finalize_backward()
        for module in self._modules:
            # Shards modules that no forward has used.
            module.reshard()

    @contextmanager
    def gathered_for_weights(self) -> Iterator[None]:
        """Gather, for a W that uses their values, parameters that ops gather for themselves."""
        _unshard_modules(self._resharding.freed)
        try:
            yield
        finally:
            for module in self._resharding.freed:
                module.reshard()


def _unshard_modules(modules: list[Any]) -> None:
    """Gather modules concurrently."""
    for handle in [module.unshard(async_op=True) for module in modules]:
        if handle is not None:
            handle.wait()


def is_sharded(stage: nn.Module) -> bool:
    """True if ``fully_shard`` has sharded a module of the stage."""
    kind = get_loaded_class("torch.distributed.fsdp", "FSDPModule")
    return any(isinstance(module, kind) for module in stage.modules())


def place_gradients(stage: nn.Module) -> None:
    """Place every gradient like its parameter: add up partial sums, such as those of a norm under
    sequence parallelism, and split whole ones, such as that of an embedding whose ranks each have a
    part of the vocabulary. Collective over the ranks of the parameter's mesh."""
    for parameter in stage.parameters():
        if has_misplaced_gradient(parameter):
            grad: Any = parameter.grad
            placements = cast(Any, parameter).placements
            parameter.grad = grad.redistribute(placements=placements)


# --- modules that free their parameters after each use ----------------------------------------
# torch has no public way to read `reshard_after_forward`; only this section names the private state
# that it uses.


class ReshardingPolicy:
    """Sharded modules of a stage, in the order of the module tree, by their resharding.

    ``freed``: those for which the script set ``reshard_after_forward`` to True or a number. torch
    gathers each of them when a forward or a backward enters it, and shards it again afterwards.
    ``stays_gathered``: all others, also those without a setting. They stay gathered for the whole
    iteration. torch's own default would free them, since it has one microbatch per gather; a
    pipeline would gather them 2 N times in an iteration. Those sharded over replicas stay gathered,
    too: replicas may run their ops in different orders, so no op may gather.
    """

    def __init__(self, modules: list[Any]) -> None:
        self.freed: list[Any] = []
        self.stays_gathered: list[Any] = []
        for module in modules:
            (self.freed if _reshards_after_forward(module) else self.stays_gathered).append(module)
        for module in self.stays_gathered:
            module.set_reshard_after_forward(False, recurse=False)


def _reshards_after_forward(module: Any) -> bool:
    """True if the script set torch to shard a module again after its forward."""
    try:
        automatic = module._get_fsdp_state()._auto_reshard_after_forward
        requested = any(
            group.post_forward_mesh_info is not None for group in _list_parameter_groups([module])
        )
    except AttributeError as error:
        log.warning(
            "reshard_after_forward cannot be read with this torch (%s); the stage's parameters stay"
            " gathered within an iteration",
            error,
        )
        return False
    if requested and not automatic and _shards_over_replicas(module):
        log.warning(
            "fully_shard(reshard_after_forward) over dp_replicate is not followed, since replicas"
            " may run their ops in different orders: parameters stay gathered within an iteration;"
            " shard over dp_shard to free them"
        )
        return False
    return requested and not automatic


def _shards_over_replicas(module: Any) -> bool:
    infos = [group.mesh_info for group in _list_parameter_groups([module])]
    names = [(info.mesh.mesh_dim_names or ())[info.shard_mesh_dim :][:1] for info in infos]
    return ("dp_replicate",) in names


def _list_parameter_groups(modules: list[Any]) -> list[Any]:
    return [group for m in modules for group in m._get_fsdp_state()._fsdp_param_groups]
