"""Descriptions and fingerprints of parameters and buffers, by which ranks compare stages."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor, nn

from pipemorph.spec.mesh import Coordinate
from pipemorph_trainer.backward.gradient_form import describe_grad_dtype
from pipemorph_trainer.topology.placement import (
    TensorPlacement,
    find_placement,
    to_local,
)

_CPU_PIECE_WORDS, _PIECE_WORDS = 1 << 16, 1 << 22
"""Numbers of 64-bit words hashed at a time: on the CPU they fit into a cache."""
_SPREAD, _MIX = -7046029254386353131, -4658895280553007687
"""Odd 64-bit constants (of splitmix64), so that multiplication loses no information."""
_63_BITS = (1 << 63) - 1


def _parse_dtype(name: object) -> torch.dtype:
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{str(name)[:40]!r} is not a dtype of torch")
    return found


Dtype = Annotated[
    torch.dtype,
    PlainValidator(_parse_dtype),
    PlainSerializer(lambda d: str(d).removeprefix("torch.")),
]
"""Dtype that pydantic writes and reads by its name, such as ``float32``."""


class TensorDescription(NamedTuple):
    """Description of a parameter or buffer of a stage.

    ``fingerprint``: of this rank's part; None if its bytes cannot be read: sparse, quantized, on
    the meta device, or another subclass of Tensor. ``matrix``: it is a trainable parameter with at
    least two dimensions and elements that are not all equal, so two stages do not have equal ones
    by chance. ``gradients``: text about their dtype if it differs.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: Dtype
    trainable: bool
    fingerprint: int | None
    matrix: bool
    placement: TensorPlacement = TensorPlacement()
    stage: int = 0
    gradients: str = ""

    @property
    def form(self) -> str:
        """Dtype and shape for messages: ``float32[4, 8]``."""
        dtype = str(self.dtype).removeprefix("torch.")
        frozen = ", frozen" if self.kind == "parameter" and not self.trainable else ""
        sharded = ", ".join(self.placement.sharded)
        over = f" sharded over {sharded}" if sharded else ""
        return f"{dtype}{list(self.shape)}{frozen}{over}{self.gradients}"


def describe_tensors(module: nn.Module, coordinate: Coordinate) -> tuple[TensorDescription, ...]:
    """Describe all parameters and buffers of a stage, in the order of the module. Raises
    :class:`InputError` if one is distributed in a way that stages do not support."""
    parameters = [("parameter", *each) for each in module.named_parameters()]
    buffers = [("buffer", *each) for each in module.named_buffers()]
    return tuple(_describe_tensor(*each, coordinate) for each in (*parameters, *buffers))


def _describe_tensor(
    kind: str, name: str, value: Tensor, coordinate: Coordinate
) -> TensorDescription:
    trainable = kind == "parameter" and value.requires_grad
    part = to_local(value)
    known = is_comparable(part)
    return TensorDescription(
        name=name,
        kind=kind,
        shape=tuple(value.shape),
        dtype=value.dtype,
        trainable=trainable,
        fingerprint=compute_fingerprint(part) if known else None,
        matrix=trainable and value.dim() >= 2 and known and not _is_constant(part),
        placement=find_placement(name, value, coordinate),
        stage=coordinate.stage,
        gradients=describe_grad_dtype(value) if trainable else "",
    )


def is_comparable(value: Tensor) -> bool:
    """True if a tensor has bytes that describe it fully."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def view_tensor_bytes(value: Tensor) -> Tensor:
    """Return a tensor's elements in order, as uint8; a view if the tensor is contiguous."""
    return value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def compute_fingerprint(value: Tensor) -> int:
    """Compute a 63-bit hash on the tensor's device. Two tensors of the same shape and dtype that
    differ in any bit have the same hash with a probability of 2^-63."""
    raw = view_tensor_bytes(value)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    most = _CPU_PIECE_WORDS if raw.device.type == "cpu" else _PIECE_WORDS
    step = min(most, max(1, words.numel()))
    places = torch.arange(step, dtype=torch.int64, device=raw.device) * _SPREAD
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), step):
        piece = words[start : start + step]
        total += _sum_mixed_words(piece + places[: piece.numel()], start)
    tail = int.from_bytes(bytes(raw[whole:].tolist()), "little")
    return (int(total) + tail * _MIX) & _63_BITS


def _sum_mixed_words(words: Tensor, start: int) -> Tensor:
    """Mix each word and return their sum. Overflow is intended."""
    words ^= (start * _MIX) & _63_BITS
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _MIX
    words ^= (words >> 29) & 0x7FFFFFFFF
    return words.sum()


def _is_constant(value: Tensor) -> bool:
    rows = view_tensor_bytes(value).view(value.numel(), value.element_size())
    return bool((rows[:64] == rows[:1]).all()) and bool((rows == rows[:1]).all())
