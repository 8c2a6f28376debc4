"""The first exchange between all ranks, before the pipeline is set up.

Every rank sends a :class:`Start`, even one that cannot take part: then all end with its reason
instead of waiting for it. The exchange also shows whether replicas begin with the same weights, and
whether two stages begin with the same matrix.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from pipemorph.api.mesh import COLUMN, DATA, LOCKSTEP, Dimension, MeshShape
from pipemorph.errors import InputError
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.state.gradients import (
    averaged_over,
    broadcast,
    levelled_over,
    measured_over,
)
from pipemorph_trainer.state.reduction import Wait
from pipemorph_trainer.state.tied import Forms, Holder, Tie
from pipemorph_trainer.state.tied import check as check_tied
from pipemorph_trainer.state.weights import Held, fingerprint
from pipemorph_trainer.topology.groups import Groups, gather_values
from pipemorph_trainer.topology.mesh import device_mesh, join_process_group
from pipemorph_trainer.topology.placement import Placement, local
from pipemorph_trainer.topology.world import World

MOST_NAMES = 3
"""Most parameters that a message names; it counts the others."""


_ONE_RANK = MeshShape()


@dataclass(frozen=True)
class Start:
    """What one rank sends to the others. ``refusal``: why it cannot take part, else empty; the
    other fields are only valid if it is empty."""

    refusal: str = ""
    mesh: MeshShape = _ONE_RANK
    split: tuple[int, ...] = ()
    """By stage, how many layers it holds; empty: evenly many."""
    microbatches: int = 0
    plan: str = ""
    """The :func:`digest` of its first plan."""
    held: tuple[Held, ...] = ()
    ties: tuple[Tie, ...] = ()
    tied: Forms = field(default_factory=dict)
    secret: bytes = b""
    """All ranks use that of rank 0 if the host provides no secret."""


def digest(plan: str) -> str:
    """Hash of a plan's text, short enough for a message: 12 hex digits."""
    return hashlib.sha256(plan.encode()).hexdigest()[:12]


def exchange(mine: Start, group: dist.ProcessGroup) -> list[Start]:
    """Exchange the starts of all ranks; returns them in rank order. Collective over ``group``.

    Raises the same on every rank if the ranks cannot train together, see :func:`check_starts`.
    """
    starts = gather_values(mine, Start, group)
    check_starts(starts)
    return starts


def check_starts(starts: Sequence[Start]) -> None:
    """Raise :class:`InputError` if a rank refuses, or if ranks differ in what all must share;
    :class:`PipelineError` if in what another start may change."""
    refusals = [(rank, start.refusal) for rank, start in enumerate(starts) if start.refusal]
    if refusals:
        rank, why = refusals[0]
        if len(refusals) == len(starts) and len({text for _, text in refusals}) == 1:
            raise InputError(why)
        others = len(refusals) - 1
        more = f" ({_count(others, 'other rank')} cannot start either)" if others else ""
        raise InputError(f"rank {rank}: {why}{more}")
    first = starts[0]
    for rank, start in enumerate(starts):
        if start.split != first.split:
            # Two ingests have begun one generation, as neither could write that.
            raise PipelineError(
                f"rank {rank} was started with {_layers(start.split)} per stage and rank 0 with"
                f" {_layers(first.split)}; the ranks have to start again, all with the same"
            )
        for what, mine, expected in (
            ("stages", start.mesh.stages, first.mesh.stages),
            ("microbatches", start.microbatches, first.microbatches),
            ("mesh", start.mesh.described(), first.mesh.described()),
        ):
            if mine != expected:
                raise InputError(
                    f"rank {rank} was given {what}={mine} and rank 0 {what}={expected}; give every "
                    "rank the same"
                )
        if start.plan != first.plan:
            raise InputError(
                f"rank {rank} begins with plan {start.plan} and rank 0 with plan {first.plan}; "
                "two builds may plan differently: install the same build of PipeMorph on both, and "
                "give both the same plan or policy"
            )
        if start.ties != first.ties:
            raise InputError(
                f"rank {rank} was given another tied= than rank 0; give every rank the same"
            )
    check_tied(first.ties, (start.tied for start in starts))
    for rank, start in enumerate(starts):
        coordinate = first.mesh.coordinate(rank)
        other = first.mesh.coordinate(coordinate.first_along(DATA))
        told = _other_form(start.held, starts[other.rank].held, str(other))
        if told:
            raise InputError(
                f"{coordinate} has {told}; the replicas of a stage have to be the same module"
            )


def _layers(split: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, split)) or 'evenly many'} layers"


def join(
    context: TrainerContext, device: torch.device, start: Start, mesh: DeviceMesh | None = None
) -> tuple[World, list[Start]]:
    """Join the job's process group, or use the existing one; exchange starts with all ranks; and
    make the groups of the pipeline. Returns the starts of all ranks, in rank order.

    ``mesh``: the user's; None: it is made here. Raises the same :class:`InputError` on all ranks if
    one of them refuses or if their starts do not fit together, or :class:`PipelineError`
    (:func:`~pipemorph_trainer.start.check_starts`).
    """
    groups, joined = Groups(), False
    try:
        joined = join_process_group(context, device)
        control = groups.new(backend="gloo", group_desc="pipemorph control")
        # Without a secret from the host, the ranks trust all members of the process group.
        secret = b"" if context.secret else secrets.token_bytes(32)
        starts = exchange(replace(start, secret=secret), control)
    except (InputError, PipelineError):
        groups.destroy(clean=True)
        if joined:
            # A script that corrects what was wrong may make another pipeline, of other ranks.
            dist.destroy_process_group()
        raise
    except RuntimeError as error:
        if not start.refusal:
            raise
        # The other ranks did not take part in the exchange.
        raise InputError(start.refusal) from error
    world = World(
        coordinate=start.mesh.coordinate(context.rank),
        mesh=device_mesh(start.mesh, device) if mesh is None else mesh,
        owns_mesh=mesh is None,
        groups=groups,
        control=control,
        secret=context.secret or starts[0].secret,
    )
    placements = {held.placement for start in starts for held in start.held}
    world.make_hierarchies([COLUMN, measured_over(placements)])
    world.make_groups([("pp",), DATA, LOCKSTEP, *_groups_of(placements)])
    world.connect_first_stages()
    # If rank 0 failed now, its store would vanish while the others still use it.
    dist.barrier(control)
    return world, starts


def _groups_of(placements: Iterable[Placement]) -> Iterator[Iterable[Dimension]]:
    """Groups over which tensors of any rank are averaged or levelled, the same on all ranks."""
    for spread in sorted(placements):
        yield averaged_over(spread)
        yield levelled_over(spread)


def level(
    world: World, starts: Sequence[Start], modules: Mapping[int, nn.Module], wait: Wait
) -> None:
    """Copy the values of the first replica to all replicas of this rank's stages, for tensors that
    differ, and check the result. Of a distributed tensor, copy each part to the ranks that should
    have the same. Collective over the ranks with the same stage and tensor coordinate.

    Raises :class:`PipelineError` if a received tensor differs from that of the first replica.
    """
    coordinate = world.coordinate
    if world.group(DATA) is None:
        return
    mine = {_key(held): held for held in starts[coordinate.rank].held}
    differing = {
        key for rank in coordinate.mesh.others(coordinate, DATA) for key in _differing(starts, rank)
    }
    for key, tensor in (pair for stage in modules for pair in _tensors(stage, modules[stage])):
        names = levelled_over(mine[key].placement)
        group = world.group(names)
        if key not in differing or group is None:
            continue
        first = coordinate.first_along(names)
        expected = next(held.fingerprint for held in starts[first].held if _key(held) == key)
        part = local(tensor)
        broadcast(part, first, group, wait)
        if fingerprint(part) != expected:
            raise PipelineError(
                f"{coordinate.of(key[0])}: {' '.join(key[1:])} differs from replica 0 right after"
                " it was received"
            )


def warnings(starts: Sequence[Start]) -> Iterator[str]:
    """Warnings about starts that can train together, one line each."""
    yield from _replicas_differ(starts)
    yield from _beyond_comparison(starts)
    yield from _one_matrix_twice(starts)


def _replicas_differ(starts: Sequence[Start]) -> Iterator[str]:
    differing = {rank: found for rank in range(len(starts)) if (found := _differing(starts, rank))}
    if not differing:
        return
    rank, keys = next(iter(differing.items()))
    others = len(differing) - 1
    more = f", and {_count(others, 'other rank')} likewise" if others else ""
    where = starts[0].mesh.coordinate(rank)
    yield (
        f"replicas began with different values: {where} in {len(keys)} of "
        f"{len(starts[rank].held)} tensors ({_named([name for *_, name in keys])}){more}; all now "
        "have those of replica 0. Build a stage with the same seed on every replica to begin alike"
    )


def _beyond_comparison(starts: Sequence[Start]) -> Iterator[str]:
    """Warn of tensors that cannot be compared between replicas by their bytes."""
    mesh = starts[0].mesh
    firsts = [starts[mesh.rank(stage, 0)] for stage in range(mesh.sizes["pp"])]
    names = [h.name for start in firsts for h in start.held if h.fingerprint is None]
    if names and mesh.columns > 1:
        yield (
            f"{_count(len(names), 'tensor')} ({_named(names)}) cannot be compared between replicas "
            "(sparse, quantized or a tensor subclass); see to it yourself that they begin equal"
        )


def _one_matrix_twice(starts: Sequence[Start]) -> Iterator[str]:
    """Warn of a matrix that two stages begin with, as a tied embedding that was split."""
    seen: dict[tuple[object, ...], tuple[int, str]] = {}
    pairs: list[tuple[int, str, int, str]] = []
    mesh = starts[0].mesh
    tied = {holder: tie for tie in starts[0].ties for holder in tie}
    for stage in range(mesh.stages):
        for held in starts[mesh.rank(stage, 0)].held:
            if held.matrix and held.stage == stage:
                what = (held.fingerprint, held.shape, held.dtype)
                first, name = seen.setdefault(what, (stage, held.name))
                tie = tied.get(Holder(name, first), ())
                if first != stage and Holder(held.name, stage) not in tie:
                    pairs.append((first, name, stage, held.name))
    if not pairs:
        return
    first, name, stage, other = pairs[0]
    more = f" (and {_count(len(pairs) - 1, 'other pair')})" if len(pairs) > 1 else ""
    yield (
        f"{name!r} of stage {first} and {other!r} of stage {stage} begin with the same values"
        f"{more}. Each stage trains its own. If they are one weight (an embedding and the output "
        f"layer), give Pipeline tied=[({name!r}, {first}), ({other!r}, {stage})]; if they are not, "
        "seed each stage differently"
    )


def _differing(starts: Sequence[Start], rank: int) -> list[Key]:
    """Keys of a rank's tensors whose values differ from those of replica 0."""
    coordinate = starts[0].mesh.coordinate(rank)
    first = {
        spread: starts[coordinate.first_along(levelled_over(spread))].held
        for spread in {held.placement for held in starts[rank].held}
    }
    return [
        _key(mine)
        for index, mine in enumerate(starts[rank].held)
        if mine.fingerprint != first[mine.placement][index].fingerprint
    ]


def _other_form(mine: Sequence[Held], first: Sequence[Held], other: str) -> str:
    """The first difference in name, shape or type between the tensors of a replica and those of
    ``other``; empty if there is none."""
    here, there = {_key(h): h for h in mine}, {_key(h): h for h in first}
    for key, held in here.items():
        what = f"{held.kind} {held.name!r}"
        if key not in there:
            return f"{what} ({held.form}), which {other} has not"
        if held.form != there[key].form:
            return f"{what} as {held.form}, and {other} as {there[key].form}"
    for key, held in there.items():
        if key not in here:
            return f"no {held.kind} {held.name!r}, which {other} has ({held.form})"
    if list(here) != list(there):
        return f"its parameters and buffers in another order than {other}"
    return ""


Key = tuple[int, str, str]
"""Stage, kind and name of a tensor."""


def _tensors(stage: int, module: nn.Module) -> Iterator[tuple[Key, Tensor]]:
    for name, parameter in module.named_parameters():
        yield (stage, "parameter", name), parameter
    for name, buffer in module.named_buffers():
        yield (stage, "buffer", name), buffer


def _key(held: Held) -> Key:
    return held.stage, held.kind, held.name


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
