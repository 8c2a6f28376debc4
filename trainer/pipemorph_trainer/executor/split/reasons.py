"""Makes the report of a stage: what was deferred, and why the rest was not."""

from __future__ import annotations

import torch
from torch import nn

from pipemorph_trainer.executor.split.calls import taken
from pipemorph_trainer.executor.split.compiled.backends import whole_why
from pipemorph_trainer.executor.split.flight import Deferring
from pipemorph_trainer.executor.split.report import Mode, SplitReport
from pipemorph_trainer.executor.torch_private import compiled, missing

_BARE = frozenset(("Mm", "Bmm", "Mv", "Dot", "T", "Transpose", "Permute", "Unsqueeze", "Expand"))
"""Ops through which a weight goes into a product such as x @ w."""


def report_of(stage: nn.Module, mode: Mode, splitter: Deferring | None) -> SplitReport:
    """The report of a stage. ``splitter``: with what has run; None: whole backwards."""
    sizes = {name: p.numel() for name, p in stage.named_parameters() if p.requires_grad}
    if splitter is None:
        unsupported = f"this version of torch is not supported: {missing()}"
        return SplitReport(
            "fused", f"fused, {'as given' if mode == 'fused' else unsupported}", sizes
        )
    sink = splitter.sink
    why_not = {name: why for name, why in _kinds(stage, splitter.seen).items() if name in sizes}
    why_not |= sink.whole | sink.excluded()
    report = SplitReport(
        "deferred" if splitter.deferred else "fused",
        "",
        sizes,
        tuple(name for name in sizes if name in splitter.deferred),
        {name: why_not.get(name, "") for name in sizes if name not in splitter.deferred},
        tuple(_notes(mode, splitter)),
    )
    reason = f"defers {report.deferred_share:.0%} of the trainable parameters"
    if not report.deferred:
        reason = "fused, no gradient can wait for W" if sizes else "fused, nothing is trained"
    return report.because(reason)


def _notes(mode: Mode, splitter: Deferring) -> list[str]:
    notes = [f"{each}; its weight gradients stay in B" for each in taken()]
    if splitter.sink.tolerance:
        notes.append(
            "compiled code rounds elsewhere when it is cut: its gradients may differ by"
            f" {splitter.sink.tolerance:g} of their largest element"
        )
    if mode == "verify":
        different = list(splitter.sink.different.values())
        notes.append(
            f"{splitter.sink.compared} gradients were compared with those of the original ops,"
            f" {'all are equal' if not different else 'not all are equal'}"
        )
        notes += different
    return notes


def _kinds(stage: nn.Module, seen: dict[str, str]) -> dict[str, str]:
    """Why the gradient of each parameter is not one that can wait, as far as its module and the op
    that uses it tell."""
    found: dict[str, str] = {}
    whole: list[tuple[str, str]] = []
    for prefix, module in stage.named_modules():
        if compiled(module):
            whole.append((prefix, whole_why(module) or "in a graph that has not run"))
        inside = next((why for name, why in whole if _inside(prefix, name)), "")
        kind = type(module).__name__
        for own, _ in module.named_parameters(recurse=False):
            name = f"{prefix}.{own}" if prefix else own
            op = seen.get(name, "")
            if inside:
                why = f"compiled, {inside}"
            elif isinstance(module, torch.jit.ScriptModule):
                why = "of a ScriptModule"
            elif isinstance(module, nn.RNNBase):
                why = f"of a recurrent layer ({kind})"
            elif op in _BARE:
                why = f"of a {kind}, in a product such as x @ w"
            else:
                why = f"of a {kind}{(op and f', in {op}') or ', without a gradient so far'}"
            found[name] = why
    return found


def _inside(name: str, parent: str) -> bool:
    return not parent or name == parent or name.startswith(parent + ".")
