"""Structure of a stage's output: tensors in tuples, lists, dicts and other pytrees of torch, such
as the outputs of Hugging Face's models.

Tensors are sent as a flat sequence, with numbers as one more tensor. The structure, strings and
None are sent with the shapes. The next stage puts the output together again.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
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
_NUMBERS = (bool, int, float)
_DOUBLE, _WORD = struct.Struct("<d"), struct.Struct("<q")


class OutputStructure(NamedTuple):
    """Places of the tensors in the output of a stage. ``constants``: leaves that are strings, None
    or integers of more than 64 bits, by their place among all leaves. ``numbers``: places of other
    leaves that are no tensors; their values are in the last tensor."""

    tree: TreeSpec
    constants: tuple[tuple[int, Any], ...] = ()
    numbers: tuple[int, ...] = ()

    def build_arguments(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of the next stage: a tuple or list becomes
        positional arguments, a mapping keyword arguments, and anything else one argument."""
        if self == SINGLE_TENSOR:
            return tuple(tensors), {}
        leaves, others = list(tensors), list(self.constants)
        if self.numbers:
            others += zip(self.numbers, _unpack_numbers(leaves.pop()), strict=True)
        whole = self._fill_tree(leaves, others)
        if isinstance(whole, (tuple, list)):
            return tuple(whole), {}
        return ((), dict(whole)) if isinstance(whole, Mapping) else ((whole,), {})

    def _fill_tree(self, leaves: list[Any], others: Sequence[tuple[int, Any]]) -> Any:
        for place, value in sorted(others, key=lambda each: each[0]):
            leaves.insert(place, value)
        return tree_unflatten(leaves, self.tree)

    def __str__(self) -> str:
        tensors = self.tree.num_leaves - len(self.constants) - len(self.numbers)
        others = [*self.constants, *((place, _UnquotedWord("number")) for place in self.numbers)]
        return repr(self._fill_tree([_UnquotedWord("tensor")] * tensors, others))

    def encode(self) -> str:
        """Encode as text. Raises :class:`ShapeError` if no text represents it exactly."""
        for key in _iterate_keys(self.tree):
            if type(key) not in _PLAIN:
                raise ShapeError(
                    f"the stage's output has a dict with the key {key!r}, a {type(key).__name__};"
                    " between stages keys are strings, numbers or None"
                )
        try:
            return json.dumps([treespec_dumps(self.tree), self.constants, self.numbers])
        except (NotImplementedError, TypeError) as error:
            raise ShapeError(
                f"the stage's output cannot be described to the next: {error}"
            ) from None

    @staticmethod
    def decode(text: str) -> OutputStructure:
        tree, constants, numbers = json.loads(text)
        return OutputStructure(treespec_loads(tree), tuple(map(tuple, constants)), tuple(numbers))


class _UnquotedWord(str):
    """Word for a leaf in a description, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _iterate_keys(tree: TreeSpec) -> Iterator[Any]:
    if isinstance(tree.context, list):
        yield from tree.context
    for child in tree.children():
        yield from _iterate_keys(child)


def _pack_numbers(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Pack numbers as int64 (2 · numbers,): for each its type, and its value or its bits."""
    words: list[int] = []
    for value in numbers:
        bits = value
        if type(value) is float:
            (bits,) = _WORD.unpack(_DOUBLE.pack(value))
        words += _NUMBERS.index(type(value)), int(bits)
    return torch.tensor(words, dtype=torch.int64, device=device)


def _unpack_numbers(packed: Tensor) -> list[Any]:
    words = packed.tolist()
    return [
        _DOUBLE.unpack(_WORD.pack(bits))[0] if _NUMBERS[kind] is float else _NUMBERS[kind](bits)
        for kind, bits in zip(words[::2], words[1::2], strict=True)
    ]


SINGLE_TENSOR = OutputStructure(tree_structure(0))
"""Structure of a single tensor."""


def flatten_output(output: Any) -> tuple[tuple[Tensor, ...], OutputStructure]:
    """Return the tensors of a stage's output, and its structure. Raises :class:`SplitError` if it
    has leaves other than tensors, numbers, strings and None."""
    if isinstance(output, Tensor):
        _check_local(output, "")
        return (output,), SINGLE_TENSOR
    # The next stage gets their items as arguments, whatever their types.
    if isinstance(output, tuple):
        output = tuple(output)
    elif isinstance(output, Mapping):
        output = dict(output)
        for key in output:
            if not isinstance(key, str):
                raise SplitError(
                    f"the stage returned a dict with the key {key!r}; the next stage gets a dict as"
                    " keyword arguments, so its keys are strings"
                )
    leaves, tree = tree_flatten(output)
    tensors = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    if len(tensors) == len(leaves) and not any(map(is_dtensor, tensors)):
        return tensors, OutputStructure(tree)
    constants, numbers = [], []
    for at, (path, leaf) in enumerate(tree_flatten_with_path(output)[0]):
        _check_local(leaf, keystr(path))
        if isinstance(leaf, Tensor):
            continue
        kind = type(leaf)
        if kind not in _PLAIN:
            where = f"output{keystr(path)} of the stage"
            raise SplitError(
                f"{where} is a {kind.__name__}; a stage returns tensors, Python's own numbers and "
                "strings or None, in tuples, lists or dicts"
            )
        if kind in _NUMBERS and (kind is not int or -(1 << 63) <= leaf < 1 << 63):
            numbers.append(at)
        else:
            constants.append((at, leaf))
    if numbers:
        device = tensors[0].device if tensors else torch.device("cpu")
        tensors += (_pack_numbers([leaves[at] for at in numbers], device),)
    return tensors, OutputStructure(tree, tuple(constants), tuple(numbers))


def _check_local(value: Any, where: str) -> None:
    if is_dtensor(value):
        raise SplitError(
            f"output{where} of the stage is a DTensor; return this rank's part, as "
            "parallelize_module does with use_local_output=True, or out.to_local()"
        )
