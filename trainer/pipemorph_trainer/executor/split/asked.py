"""A split chosen by the user: checked against the stage's modules, without a test run."""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.graph_split import GraphSplit
from pipemorph_trainer.executor.split.linears import find_layers
from pipemorph_trainer.executor.split.module_split import ModuleSplit
from pipemorph_trainer.executor.split.report import Split, SplitReport
from pipemorph_trainer.executor.split.self_test import graph_refusal, nothing_to_defer, trainable
from pipemorph_trainer.executor.split.splitters import Splitter
from pipemorph_trainer.executor.torch_private import missing


def asked_for(split: Split, stage: nn.Module) -> tuple[Splitter, SplitReport]:
    """The splitter of the chosen split, and its report without a run of the stage.

    Raises :class:`SplitError` with the reason if the split is not possible for the stage's modules.
    """
    sizes = trainable(stage)
    report = SplitReport(split, "as given, without a self-test", tested=False, sizes=sizes)
    if split == "fused":
        return Splitter(), report
    if split == "graph":
        _refuse_if(split, graph_refusal(stage))
        # Which parameters are below several nodes is only known from a graph.
        return GraphSplit(stage), replace(report, deferred=tuple(sizes))
    if why := missing():
        _refuse_if(split, f"this version of torch is not supported: {why}")
    layers, refused = find_layers(stage)
    if not layers:
        _refuse_if(split, nothing_to_defer(sizes, refused))
    waiting = {name for layer in layers for name in layer.expected()}
    deferred = tuple(name for name in sizes if name in waiting)
    # What compiled code defers besides is only known when it runs.
    unknown = {name for layer in layers for name, _ in layer.parameters()} - waiting
    refused |= dict.fromkeys(sorted(unknown), "in compiled code, whose graph is not known yet")
    return ModuleSplit(layers), replace(report, deferred=deferred, not_deferred=refused)


def _refuse_if(split: Split, why: str) -> None:
    if why:
        raise SplitError(f"split {split!r} is not possible: {why}")
