"""Imports what a rank needs, for the process that ranks are forked from. Nothing here may start a
thread or a device."""

import importlib

import torch

import pipemorph_trainer.pipeline

# What torch imports late, each as slow as itself: for an optimizer, at a backward, for a checkpoint
# and for inputs that are no plain tensors.
for name in (
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining.microbatch",
):
    importlib.import_module(name)

# What scripts name, and what a checkpoint needs.
for name in ("executor.stages.emulated", "state.checkpoint", "state.scaler"):
    importlib.import_module(f"{pipemorph_trainer.__name__}.{name}")

if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
    raise RuntimeError("an import initialized CUDA, which a forked rank could not use")
