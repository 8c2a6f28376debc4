"""Imports of a rank, for the process that ranks are forked from. None may start a thread or a
device."""

import importlib

import torch

import pipemorph_trainer.pipeline

# Modules that torch imports late, each as slowly as torch itself: for an optimizer, a backward, a
# checkpoint, and inputs that are no plain tensors.
for name in (
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.checkpoint",
    "torch.distributed.pipelining.microbatch",
):
    importlib.import_module(name)

# Modules that scripts name, and that a checkpoint needs.
for name in ("executor.emulated_stage", "checkpoint.disk", "sync.scaler"):
    importlib.import_module(f"{pipemorph_trainer.__name__}.{name}")

if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
    raise RuntimeError("an import initialized CUDA, which a forked rank could not use")
