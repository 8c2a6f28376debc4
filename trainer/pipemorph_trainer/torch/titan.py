"""Adaptive schedule for torchtitan's own trainer."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from pipemorph.spec.mesh import DIMENSIONS
from pipemorph_trainer.torch.schedule import AdaptiveSchedule


def pipelining_fn(
    model: nn.Module,
    *,
    parallel_dims: Any,
    device: torch.device,
    adaptive: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[AdaptiveSchedule, list[nn.Module], bool, bool]:
    """Pipeline function for torchtitan's ``ModelSpec``: ``model_spec.pipelining_fn =
    pipelining_fn``.

    torchtitan splits, shards and checkpoints the model as usual (``pipeline_llm``); its schedule is
    then replaced. The schedule of its config sets the stages of a rank: 1F1B one, Interleaved1F1B
    two in turns, ZBVZeroBubble two there and back. Call ``trainer.pp_schedule.close()`` after
    ``trainer.train()``. Tested with torchtitan 0.3.

    ``adaptive``: keyword-only arguments of :class:`AdaptiveSchedule`, given by
    ``functools.partial(pipelining_fn, adaptive={…})``.
    """
    titan = importlib.import_module("torchtitan.distributed.pipeline_parallel")
    theirs, parts, has_first, has_last = titan.pipeline_llm(
        model, parallel_dims=parallel_dims, device=device, **options
    )
    d = parallel_dims
    sizes = (d.pp, d.dp_replicate, d.dp_shard, d.cp, d.tp)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=DIMENSIONS)
    return (
        AdaptiveSchedule.from_schedule(theirs, mesh=mesh, **(adaptive or {})),
        parts,
        has_first,
        has_last,
    )
