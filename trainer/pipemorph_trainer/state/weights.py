"""Fingerprints of a stage's parameters and buffers, with which ranks compare them."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from pydantic import PlainSerializer, PlainValidator
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from pipemorph.api.mesh import Coordinate
from pipemorph.errors import InputError
from pipemorph_trainer.executor.grad_form import told
from pipemorph_trainer.topology.placement import Placement, loaded, local, placement

_WORDS = {"cpu": 1 << 16}
_MOST_WORDS = 1 << 22
"""64-bit words that are hashed at a time: on the CPU as many as fit into a cache, else more."""
_SPREAD, _MIX = -7046029254386353131, -4658895280553007687
"""Odd 64-bit constants (of splitmix64), so that multiplication loses no information."""
_63_BITS = (1 << 63) - 1


def _dtype(name: object) -> torch.dtype:
    found = name if isinstance(name, torch.dtype) else getattr(torch, str(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{str(name)[:40]!r} is not a dtype of torch")
    return found


Dtype = Annotated[
    torch.dtype, PlainValidator(_dtype), PlainSerializer(lambda d: str(d).removeprefix("torch."))
]
"""A dtype that pydantic writes and reads by its name, as in ``float32``."""


class Held(NamedTuple):
    """One parameter or buffer of a stage.

    ``fingerprint``: of this rank's part; None if the bytes cannot be read: sparse, quantized or on
    the meta device, or another subclass of Tensor. ``matrix``: a trainable parameter with at least
    two dimensions whose elements are not all equal, so that two stages do not have the same one by
    chance. ``gradients``: their dtype, for messages, if it is another one.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: Dtype
    trainable: bool
    fingerprint: int | None
    matrix: bool
    placement: Placement = Placement()
    stage: int = 0
    gradients: str = ""

    @property
    def form(self) -> str:
        """Shape and dtype for messages: ``float32[4, 8]``."""
        dtype = str(self.dtype).removeprefix("torch.")
        frozen = ", frozen" if self.kind == "parameter" and not self.trainable else ""
        sharded = ", ".join(self.placement.sharded)
        over = f" sharded over {sharded}" if sharded else ""
        return f"{dtype}{list(self.shape)}{frozen}{over}{self.gradients}"


def check_stage(stage: object) -> None:
    """Raise :class:`InputError` if ``stage`` is no module, or a wrapper that distributes work
    itself.

    The pipeline averages gradients over replicas and schedules microbatches. A wrapper that does so
    too would do it twice, or wait for ranks that do not take part.
    """
    if not isinstance(stage, nn.Module):
        kind = type(stage).__name__
        if hasattr(stage, "submod"):
            raise InputError(
                f"the stage is a {kind} of torch.distributed.pipelining; give Pipeline the module "
                "in it (stage.submod), which it schedules itself"
            )
        raise InputError(f"the stage is a {kind}; expected an nn.Module or an EmulatedStage")
    for name, module in stage.named_modules():
        where = f"module {name!r} of the stage" if name else "the stage"
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise InputError(
                f"{where} is wrapped in {type(module).__name__}; give Pipeline the module in it "
                "(.module): step() averages gradients over the replicas itself"
            )
        if isinstance(module, loaded("torch.distributed.fsdp", "FullyShardedDataParallel")):
            raise InputError(
                f"{where} is wrapped in FullyShardedDataParallel; shard the module before it with "
                "fully_shard (FSDP2)"
            )
    for name, parameter in stage.named_parameters():
        if is_lazy(parameter):
            raise InputError(
                f"parameter {name!r} of the stage has no shape yet; run the lazy module once "
                "before it is given to Pipeline"
            )


def held_by(module: nn.Module, coordinate: Coordinate) -> tuple[Held, ...]:
    """All parameters and buffers of a stage, in the order of the module. Raises
    :class:`InputError` if one is distributed in a way that a stage cannot be."""
    parameters = [("parameter", *each) for each in module.named_parameters()]
    buffers = [("buffer", *each) for each in module.named_buffers()]
    return tuple(_held(*each, coordinate) for each in (*parameters, *buffers))


def _held(kind: str, name: str, value: Tensor, coordinate: Coordinate) -> Held:
    trainable = kind == "parameter" and value.requires_grad
    part = local(value)
    known = comparable(part)
    return Held(
        name=name,
        kind=kind,
        shape=tuple(value.shape),
        dtype=value.dtype,
        trainable=trainable,
        fingerprint=fingerprint(part) if known else None,
        matrix=trainable and value.dim() >= 2 and known and not _constant(part),
        placement=placement(name, value, coordinate),
        stage=coordinate.stage,
        gradients=told(value) if trainable else "",
    )


def comparable(value: Tensor) -> bool:
    """Whether a tensor is fully described by its bytes, and has them."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and value.layout is torch.strided
        and not value.is_quantized
        and not value.is_meta
    )


def bytes_of(value: Tensor) -> Tensor:
    """A tensor's elements in order, as uint8. A view if the tensor is contiguous."""
    return value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def fingerprint(value: Tensor) -> int:
    """A 63-bit hash. Two tensors of the same shape and dtype that differ in any bit have the same
    one with a probability of 2^-63. Computed on the tensor's device."""
    raw = bytes_of(value)
    if raw.storage_offset() % 8:
        raw = raw.clone()
    whole = raw.numel() // 8 * 8
    words = raw[:whole].view(torch.int64)
    step = min(_WORDS.get(raw.device.type, _MOST_WORDS), max(1, words.numel()))
    places = torch.arange(step, dtype=torch.int64, device=raw.device) * _SPREAD
    total = torch.zeros((), dtype=torch.int64, device=raw.device)
    for start in range(0, words.numel(), step):
        piece = words[start : start + step]
        total += _mixed(piece + places[: piece.numel()], start)
    tail = int.from_bytes(bytes(raw[whole:].tolist()), "little")
    return (int(total) + tail * _MIX) & _63_BITS


def _mixed(words: Tensor, start: int) -> Tensor:
    """The sum of the words, each of them mixed first. Overflow is intended."""
    words ^= (start * _MIX) & _63_BITS
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _MIX
    words ^= (words >> 29) & 0x7FFFFFFFF
    return words.sum()


def _constant(value: Tensor) -> bool:
    rows = bytes_of(value).view(value.numel(), value.element_size())
    return bool((rows[:64] == rows[:1]).all()) and bool((rows == rows[:1]).all())
