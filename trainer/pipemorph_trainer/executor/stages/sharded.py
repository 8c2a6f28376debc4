"""Gathers the parameters and reduces the gradients of a distributed stage.

Of a stage that ``fully_shard`` has sharded (FSDP2), parameters stay gathered from the first op of
an iteration to its last W. Their gradients add up unsharded on each rank, and are reduce-scattered
once. Between iterations the stage is sharded, as the optimizer, the gradient norm and checkpoints
need it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn

from pipemorph.errors import InputError
from pipemorph_trainer.topology.placement import loaded, misplaced


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
            # Else every F and B of a microbatch gathers again.
            root.set_reshard_after_forward(False)

    def gather(self) -> None:
        """Gather the parameters, for any number of F, B and W."""
        for root in self._roots:
            root.set_requires_gradient_sync(False)
            root.set_reshard_after_backward(False)
        for handle in [module.unshard(async_op=True) for module in self._modules]:
            if handle is not None:
                handle.wait()

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
    def gathered(self) -> Iterator[None]:
        """Gather the parameters, and shard them again at the end."""
        self.gather()
        try:
            yield
        finally:
            self.reduce()


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
