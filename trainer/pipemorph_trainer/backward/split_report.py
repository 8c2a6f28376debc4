"""Report of a stage: the deferred part of its backward, and why the rest was not deferred."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from pipemorph_trainer.autograd_internals import find_missing_features, is_compiled
from pipemorph_trainer.backward.compiled.backends import explain_whole_backward
from pipemorph_trainer.backward.function_patches import list_foreign_replacements
from pipemorph_trainer.backward.microbatch_state import DeferringBackward
from pipemorph_trainer.errors import SplitError

Split = Literal["deferred", "fused"]
"""Way in which a stage runs B and W. ``deferred``: W computes weight gradients that B skips;
``fused``: B is the whole backward, and W is empty."""

Mode = Literal["auto", "fused", "verify"]
"""Choice of the user. ``auto``: gradients that can wait for W do; ``fused``: none does; ``verify``:
as ``auto``, and each gradient that waits is compared with that of the original op."""

_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])")
"""Numbers of layers, but not within the name of a class."""
REASONS_SHOWN = 3
"""Maximum number of reasons in :meth:`SplitReport.format_line`; ``to_record`` has all."""


class OpOrderError(SplitError):
    """Call of an op out of microbatch order, or before the op that it depends on."""


@dataclass(frozen=True)
class ReasonGroup:
    """Tensors that are not deferred for the same reason. Different numbers in the reason, such as
    those of layers, are ``*``. ``parameters``: elements of the tensors; ``example``: the first
    name."""

    reason: str
    tensors: int
    parameters: int
    example: str

    def __str__(self) -> str:
        if self.tensors == 1:
            return f"{self.reason} ({self.example})"
        return f"{self.reason} ({self.tensors} tensors, such as {self.example})"


def group_by_reason(why: Mapping[str, str], sizes: Mapping[str, int]) -> list[ReasonGroup]:
    """Group tensors by reason, the most parameters first."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in why.items():
        by_reason.setdefault(_NUMBER.sub("*", reason), []).append(name)
    groups = [
        ReasonGroup(
            reason=why[names[0]] if len({why[name] for name in names}) == 1 else general,
            tensors=len(names),
            parameters=sum(sizes.get(name, 0) for name in names),
            example=names[0],
        )
        for general, names in by_reason.items()
    ]
    return sorted(groups, key=lambda group: -group.parameters)


def describe_groups(groups: Iterable[ReasonGroup]) -> str:
    """Describe the first :data:`REASONS_SHOWN` groups, and the number of others."""
    listed = [str(group) for group in groups]
    more = len(listed) - REASONS_SHOWN
    shown = "; ".join(listed[:REASONS_SHOWN])
    return f"{shown}; and {more} more reasons" if more > 0 else shown


@dataclass(frozen=True)
class SplitReport:
    """Split of a stage's backward, as measured so far."""

    split: Split
    reason: str
    """Reason in one line."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Elements of each trainable parameter."""
    deferred: tuple[str, ...] = ()
    """Names of the parameters whose gradients W has computed."""
    not_deferred: Mapping[str, str] = field(default_factory=dict)
    """Reason for each trainable parameter whose gradients B computes."""
    notes: tuple[str, ...] = ()

    @property
    def deferred_share(self) -> float:
        """Deferred elements divided by trainable ones, 0 … 1."""
        total = sum(self.sizes.values())
        return sum(self.sizes.get(name, 0) for name in self.deferred) / total if total else 0.0

    def with_reason(self, reason: str) -> SplitReport:
        return replace(self, reason=reason)

    def format_line(self) -> str:
        """Format the report as one line, for a log."""
        out = f"split backward: {self.reason}"
        if self.not_deferred:
            out += f"; in B: {describe_groups(group_by_reason(self.not_deferred, self.sizes))}"
        return "; ".join((out, *self.notes))

    def format_lines(self) -> list[str]:
        """Format the report for people, one fact per line."""
        out = [f"split backward: {self.reason}"]
        out += [f"  in B: {group}" for group in group_by_reason(self.not_deferred, self.sizes)]
        out += [f"  note: {note}" for note in self.notes]
        return out

    def to_record(self) -> dict[str, Any]:
        """Return the report as data for JSON. Its size is independent of the number of layers."""
        return {
            "split": self.split,
            "reason": self.reason,
            "parameters": sum(self.sizes.values()),
            "deferred_share": round(self.deferred_share, 6),
            "not_deferred": [asdict(g) for g in group_by_reason(self.not_deferred, self.sizes)],
            "notes": list(self.notes),
        }


_BARE = frozenset(("Mm", "Bmm", "Mv", "Dot", "T", "Transpose", "Permute", "Unsqueeze", "Expand"))
"""Ops through which a weight enters a product such as x @ w."""


def build_split_report(
    stage: nn.Module, mode: Mode, splitter: DeferringBackward | None
) -> SplitReport:
    """Return the report of a stage. ``splitter``: the one that has run; None: whole backwards."""
    sizes = {name: p.numel() for name, p in stage.named_parameters() if p.requires_grad}
    if splitter is None:
        unsupported = f"this version of torch is not supported: {find_missing_features()}"
        return SplitReport(
            "fused", f"fused, {'as given' if mode == 'fused' else unsupported}", sizes
        )
    collector = splitter.collector
    why_not = {
        name: why
        for name, why in _explain_parameters(stage, splitter.seen).items()
        if name in sizes
    }
    why_not |= collector.computed_in_b | collector.list_excluded()
    report = SplitReport(
        "deferred" if splitter.deferred else "fused",
        "",
        sizes,
        tuple(name for name in sizes if name in splitter.deferred),
        {name: why_not.get(name, "") for name in sizes if name not in splitter.deferred},
        tuple(_collect_notes(mode, splitter)),
    )
    reason = f"defers {report.deferred_share:.0%} of the trainable parameters"
    if not report.deferred:
        reason = "fused, no gradient can wait for W" if sizes else "fused, nothing is trained"
    return report.with_reason(reason)


def _collect_notes(mode: Mode, splitter: DeferringBackward) -> list[str]:
    notes = [f"{each}; its weight gradients stay in B" for each in list_foreign_replacements()]
    if splitter.collector.tolerance:
        notes.append(
            "compiled code rounds elsewhere when it is cut: its gradients may differ by"
            f" {splitter.collector.tolerance:g} of their largest element"
        )
    if mode == "verify":
        different = list(splitter.collector.different.values())
        notes.append(
            f"{splitter.collector.compared} gradients were compared with those of the original ops,"
            f" {'all are equal' if not different else 'not all are equal'}"
        )
        notes += different
    return notes


def _explain_parameters(stage: nn.Module, seen: dict[str, str]) -> dict[str, str]:
    """Explain why each parameter's gradient cannot wait, as far as its module and the op that uses
    it show."""
    found: dict[str, str] = {}
    whole: list[tuple[str, str]] = []
    for prefix, module in stage.named_modules():
        if is_compiled(module):
            whole.append((prefix, explain_whole_backward(module) or "in a graph that has not run"))
        inside = next((why for name, why in whole if _is_inside(prefix, name)), "")
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


def _is_inside(name: str, parent: str) -> bool:
    return not parent or name == parent or name.startswith(parent + ".")
