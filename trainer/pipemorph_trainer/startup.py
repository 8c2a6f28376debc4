"""First exchange between all ranks, before the pipeline is set up.

Every rank sends a :class:`StartupInfo`. A rank that cannot take part sends the reason, with which
all ranks end instead of waiting for it. The exchange also finds replicas that begin with different
weights, and stages that begin with the same matrix.
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

from pipemorph.errors import InputError
from pipemorph.spec.mesh import (
    COLUMN_DIMENSIONS,
    DATA_DIMENSIONS,
    LOCKSTEP_DIMENSIONS,
    Dimension,
    MeshShape,
)
from pipemorph_trainer.context import TrainerContext
from pipemorph_trainer.errors import PipelineError
from pipemorph_trainer.sync.fingerprints import TensorDescription, compute_fingerprint
from pipemorph_trainer.sync.gradients import (
    broadcast_tensor,
    get_averaged_dimensions,
    get_norm_dimensions,
    get_replicated_dimensions,
)
from pipemorph_trainer.sync.reduction import WaitForCollective
from pipemorph_trainer.sync.tied_weights import Holder, Tie, TiedForms
from pipemorph_trainer.sync.tied_weights import check_forms as check_tied
from pipemorph_trainer.topology.groups import ProcessGroups, gather_values
from pipemorph_trainer.topology.mesh import create_device_mesh, join_process_group
from pipemorph_trainer.topology.placement import TensorPlacement, to_local
from pipemorph_trainer.topology.world import World

MOST_NAMES = 3
"""Most parameters that a message names; others are counted."""

_ONE_RANK = MeshShape()


@dataclass(frozen=True)
class StartupInfo:
    """Information that a rank sends to the others. ``refusal``: why it cannot take part; the other
    fields are valid only if it is empty."""

    refusal: str = ""
    mesh: MeshShape = _ONE_RANK
    split: tuple[int, ...] = ()
    """Number of layers of each stage; empty: evenly split."""
    microbatches: int = 0
    reorder: str = ""
    plan: str = ""
    """:func:`hash_plan` of its first plan."""
    tensors: tuple[TensorDescription, ...] = ()
    ties: tuple[Tie, ...] = ()
    tied_forms: TiedForms = field(default_factory=dict)
    rebalance: bool = False
    """True if replicas may get unequal numbers of microbatches."""
    secret: bytes = b""
    """Secret; all ranks use that of rank 0 if the host provides none."""


def hash_plan(plan: str) -> str:
    """Hash a plan's text; short enough for a message: 12 hex digits."""
    return hashlib.sha256(plan.encode()).hexdigest()[:12]


def exchange_startup_info(mine: StartupInfo, group: dist.ProcessGroup) -> list[StartupInfo]:
    """Exchange the starts of all ranks; return them in rank order. Collective over ``group``.

    Raises the same error on every rank if they cannot train together, see
    :func:`check_startup_info`.
    """
    starts = gather_values(mine, StartupInfo, group)
    check_startup_info(starts)
    return starts


def check_startup_info(starts: Sequence[StartupInfo]) -> None:
    """Raise :class:`InputError` if a rank refuses, or if ranks differ in settings that all must
    share; :class:`PipelineError` if another start may remove the difference."""
    refusals = [(rank, start.refusal) for rank, start in enumerate(starts) if start.refusal]
    if refusals:
        rank, why = refusals[0]
        if len(refusals) == len(starts) and len({text for _, text in refusals}) == 1:
            raise InputError(why)
        others = len(refusals) - 1
        more = f" ({_format_count(others, 'other rank')} cannot start either)" if others else ""
        raise InputError(f"rank {rank}: {why}{more}")
    first = starts[0]
    for rank, start in enumerate(starts):
        if start.split != first.split:
            # Two ingests have started the same generation, since neither could record it.
            raise PipelineError(
                f"rank {rank} was started with {_describe_layers(start.split)} per stage and rank"
                f" 0 with {_describe_layers(first.split)}; the ranks have to start again, all with"
                " the same"
            )
        for what, mine, expected in (
            ("stages", start.mesh.stages, first.mesh.stages),
            ("microbatches", start.microbatches, first.microbatches),
            ("rebalance", start.rebalance, first.rebalance),
            ("mesh", start.mesh.describe_order(), first.mesh.describe_order()),
            ("reorder", start.reorder, first.reorder),
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
    check_tied(first.ties, (start.tied_forms for start in starts))
    for rank, start in enumerate(starts):
        coordinate = first.mesh.find_coordinate(rank)
        other = first.mesh.find_coordinate(coordinate.find_first_along(DATA_DIMENSIONS))
        difference = _find_form_difference(start.tensors, starts[other.rank].tensors, str(other))
        if difference:
            raise InputError(
                f"{coordinate} has {difference}; the replicas of a stage have to be the same module"
            )


def _describe_layers(split: tuple[int, ...]) -> str:
    return f"{', '.join(map(str, split)) or 'evenly many'} layers"


def join_job(
    context: TrainerContext,
    device: torch.device,
    start: StartupInfo,
    mesh: DeviceMesh | None = None,
) -> tuple[World, list[StartupInfo]]:
    """Join the job's process group, or use the existing one; exchange starts with all ranks; and
    make the groups of the pipeline. Returns the starts of all ranks, in rank order.

    ``mesh``: the user's; None: it is made here. Raises the error of :func:`check_startup_info` on
    all ranks.
    """
    groups, joined = ProcessGroups(), False
    try:
        joined = join_process_group(context, device)
        control = groups.create_group(backend="gloo", group_desc="pipemorph control")
        # Without a secret from the host, the ranks trust all members of the process group.
        secret = b"" if context.secret else secrets.token_bytes(32)
        starts = exchange_startup_info(replace(start, secret=secret), control)
    except (InputError, PipelineError):
        groups.destroy_all(clean=True)
        if joined:
            # A script that corrects the error may make another pipeline, of other ranks.
            dist.destroy_process_group()
        raise
    except RuntimeError as error:
        if not start.refusal:
            raise
        # The other ranks did not take part in the exchange.
        raise InputError(start.refusal) from error
    world = World(
        coordinate=start.mesh.find_coordinate(context.rank),
        mesh=create_device_mesh(start.mesh, device) if mesh is None else mesh,
        owns_mesh=mesh is None,
        groups=groups,
        control=control,
        secret=context.secret or starts[0].secret,
    )
    placements = {held.placement for start in starts for held in start.tensors}
    world.create_hierarchies([COLUMN_DIMENSIONS, get_norm_dimensions(placements)])
    world.create_groups(
        [("pp",), DATA_DIMENSIONS, LOCKSTEP_DIMENSIONS, *_list_averaging_groups(placements)]
    )
    world.connect_first_stages(one_plan=start.rebalance)
    # If rank 0 failed now, its store would vanish while the others still use it.
    dist.barrier(control)
    return world, starts


def _list_averaging_groups(placements: Iterable[TensorPlacement]) -> Iterator[Iterable[Dimension]]:
    """Yield the dimensions over which tensors of any rank are averaged or equal, on all ranks in
    the same order."""
    for spread in sorted(placements):
        yield get_averaged_dimensions(spread)
        yield get_replicated_dimensions(spread)


def copy_first_replica(
    world: World,
    starts: Sequence[StartupInfo],
    modules: Mapping[int, nn.Module],
    wait: WaitForCollective,
) -> None:
    """Copy tensors that differ between replicas of this rank's stages from the first replica, and
    check the result. Each part of a distributed tensor is copied to the ranks that should have the
    same part. Collective over the ranks with the same stage and tensor coordinate.

    Raises :class:`PipelineError` if a received tensor differs from that of the first replica.
    """
    coordinate = world.coordinate
    if world.get_group(DATA_DIMENSIONS) is None:
        return
    mine = {_tensor_key(held): held for held in starts[coordinate.rank].tensors}
    differing = {
        key
        for rank in coordinate.mesh.find_group(coordinate, DATA_DIMENSIONS)
        for key in _find_differing_tensors(starts, rank)
    }
    for key, tensor in (
        pair for stage in modules for pair in _iterate_tensors(stage, modules[stage])
    ):
        names = get_replicated_dimensions(mine[key].placement)
        group = world.get_group(names)
        if key not in differing or group is None:
            continue
        first = coordinate.find_first_along(names)
        expected = next(
            held.fingerprint for held in starts[first].tensors if _tensor_key(held) == key
        )
        part = to_local(tensor)
        broadcast_tensor(part, first, group, wait)
        if compute_fingerprint(part) != expected:
            raise PipelineError(
                f"{coordinate.with_stage(key[0])}: {' '.join(key[1:])} differs from replica 0 right"
                " after it was received"
            )


def list_warnings(starts: Sequence[StartupInfo]) -> Iterator[str]:
    """Yield warnings about starts that can train together, a line each."""
    yield from _warn_replicas_differ(starts)
    yield from _warn_incomparable(starts)
    yield from _warn_repeated_matrix(starts)


def _warn_replicas_differ(starts: Sequence[StartupInfo]) -> Iterator[str]:
    """Warn of replicas that began with different values."""
    differing = {
        rank: found
        for rank in range(len(starts))
        if (found := _find_differing_tensors(starts, rank))
    }
    if not differing:
        return
    rank, keys = next(iter(differing.items()))
    others = len(differing) - 1
    more = f", and {_format_count(others, 'other rank')} likewise" if others else ""
    where = starts[0].mesh.find_coordinate(rank)
    yield (
        f"replicas began with different values: {where} in {len(keys)} of "
        f"{len(starts[rank].tensors)} tensors ({_format_names([name for *_, name in keys])}){more};"
        " all now have those of replica 0. Build a stage with the same seed on every replica to "
        "begin alike"
    )


def _warn_incomparable(starts: Sequence[StartupInfo]) -> Iterator[str]:
    """Warn of tensors that cannot be compared between replicas by their bytes."""
    mesh = starts[0].mesh
    firsts = [starts[mesh.find_rank(stage, 0)] for stage in range(mesh.sizes["pp"])]
    names = [h.name for start in firsts for h in start.tensors if h.fingerprint is None]
    if names and mesh.columns > 1:
        yield (
            f"{_format_count(len(names), 'tensor')} ({_format_names(names)}) cannot be compared "
            "between replicas (sparse, quantized or a tensor subclass); make sure that they begin "
            "equal"
        )


def _warn_repeated_matrix(starts: Sequence[StartupInfo]) -> Iterator[str]:
    """Warn of a matrix that two stages begin with, as a tied embedding that was split."""
    seen: dict[tuple[object, ...], tuple[int, str]] = {}
    pairs: list[tuple[int, str, int, str]] = []
    mesh = starts[0].mesh
    tied = {holder: tie for tie in starts[0].ties for holder in tie}
    for stage in range(mesh.stages):
        for held in starts[mesh.find_rank(stage, 0)].tensors:
            if held.matrix and held.stage == stage:
                what = (held.fingerprint, held.shape, held.dtype)
                first, name = seen.setdefault(what, (stage, held.name))
                tie = tied.get(Holder(name, first), ())
                if first != stage and Holder(held.name, stage) not in tie:
                    pairs.append((first, name, stage, held.name))
    if not pairs:
        return
    first, name, stage, other = pairs[0]
    more = f" (and {_format_count(len(pairs) - 1, 'other pair')})" if len(pairs) > 1 else ""
    yield (
        f"{name!r} of stage {first} and {other!r} of stage {stage} begin with the same values"
        f"{more}. Each stage trains its own. If they are one weight (an embedding and the output "
        f"layer), give Pipeline tied=[({name!r}, {first}), ({other!r}, {stage})]; if they are not, "
        "seed each stage differently"
    )


def _find_differing_tensors(starts: Sequence[StartupInfo], rank: int) -> list[TensorKey]:
    """List the keys of a rank's tensors whose values differ from those of replica 0."""
    coordinate = starts[0].mesh.find_coordinate(rank)
    first = {
        spread: starts[coordinate.find_first_along(get_replicated_dimensions(spread))].tensors
        for spread in {held.placement for held in starts[rank].tensors}
    }
    return [
        _tensor_key(mine)
        for index, mine in enumerate(starts[rank].tensors)
        if mine.fingerprint != first[mine.placement][index].fingerprint
    ]


def _find_form_difference(
    mine: Sequence[TensorDescription], first: Sequence[TensorDescription], other: str
) -> str:
    """Describe the first difference in name, shape or type between the tensors of a replica and
    those of ``other``; empty if there is none."""
    here, there = {_tensor_key(h): h for h in mine}, {_tensor_key(h): h for h in first}
    for key, held in here.items():
        what = f"{held.kind} {held.name!r}"
        if key not in there:
            return f"{what} ({held.form}), which {other} lacks"
        if held.form != there[key].form:
            return f"{what} as {held.form}, and {other} as {there[key].form}"
    for key, held in there.items():
        if key not in here:
            return f"no {held.kind} {held.name!r}, which {other} has ({held.form})"
    if list(here) != list(there):
        return f"its parameters and buffers in another order than {other}"
    return ""


TensorKey = tuple[int, str, str]
"""Stage, kind and name of a tensor."""


def _iterate_tensors(stage: int, module: nn.Module) -> Iterator[tuple[TensorKey, Tensor]]:
    for name, parameter in module.named_parameters():
        yield (stage, "parameter", name), parameter
    for name, buffer in module.named_buffers():
        yield (stage, "buffer", name), buffer


def _tensor_key(held: TensorDescription) -> TensorKey:
    return held.stage, held.kind, held.name


def _format_names(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:MOST_NAMES])
    return f"{shown} and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else shown


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
