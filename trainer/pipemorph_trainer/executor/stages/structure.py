"""The structure of what a stage returns: tensors in tuples, lists, dicts and what torch's pytrees
know besides, such as the outputs of Hugging Face's models.

Tensors are sent as a flat sequence; the structure and what is not a tensor are sent once, with the
shapes. The next stage gets them put together again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_structure,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)

from pipemorph_trainer.errors import ShapeError, SplitError
from pipemorph_trainer.topology.placement import is_dtensor

_PLAIN = (bool, int, float, str, type(None))


class Structure(NamedTuple):
    """Where the tensors are in the output of a stage. ``constants``: the leaves that are no
    tensors, by their place among all leaves."""

    tree: TreeSpec
    constants: tuple[tuple[int, Any], ...] = ()

    def arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments of the next stage: a tuple or list is its positional
        arguments, a mapping its keyword arguments, and anything else one argument."""
        if self == SINGLE:
            return tuple(tensors), {}
        leaves = list(tensors)
        for place, value in self.constants:
            leaves.insert(place, value)
        whole = tree_unflatten(leaves, self.tree)
        if isinstance(whole, (tuple, list)):
            return tuple(whole), {}
        return ((), dict(whole)) if isinstance(whole, Mapping) else ((whole,), {})

    def encode(self) -> str:
        """As text. Raises :class:`ShapeError` if it has a type that torch cannot describe."""
        try:
            return json.dumps([treespec_dumps(self.tree), self.constants])
        except (NotImplementedError, TypeError) as error:
            raise ShapeError(
                f"the stage's output cannot be described to the next: {error}"
            ) from None

    @staticmethod
    def decode(text: str) -> Structure:
        tree, constants = json.loads(text)
        return Structure(treespec_loads(tree), tuple((place, value) for place, value in constants))


SINGLE = Structure(tree_structure(0))
"""One tensor."""


def take_apart(output: Any) -> tuple[tuple[Tensor, ...], Structure]:
    """The tensors of a stage's output, and its structure. Raises :class:`SplitError` if it has
    something else than tensors, numbers, strings and None."""
    if isinstance(output, Tensor):
        _check_local(output, "")
        return (output,), SINGLE
    # The next stage gets these as arguments, whatever their types.
    if isinstance(output, tuple):
        output = tuple(output)
    elif isinstance(output, Mapping):
        output = dict(output)
    leaves, tree = tree_flatten(output)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    if len(tensors) == len(leaves) and not any(map(is_dtensor, tensors)):
        return tensors, Structure(tree)
    for path, leaf in tree_flatten_with_path(output)[0]:
        _check_local(leaf, keystr(path))
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            where = f"output{keystr(path)} of the stage"
            raise SplitError(
                f"{where} is a {type(leaf).__name__}; a stage returns tensors, numbers, strings or "
                "None, in tuples, lists or dicts"
            )
    constants = [(at, leaf) for at, leaf in enumerate(leaves) if not isinstance(leaf, Tensor)]
    return tensors, Structure(tree, tuple(constants))


def _check_local(value: Any, where: str) -> None:
    if is_dtensor(value):
        raise SplitError(
            f"output{where} of the stage is a DTensor; return this rank's part, as "
            "parallelize_module does with use_local_output=True, or out.to_local()"
        )
