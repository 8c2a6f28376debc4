"""The report of a stage: what of its backward was deferred, and why the rest was not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from pipemorph_trainer.errors import SplitError
from pipemorph_trainer.executor.split.calls import taken
from pipemorph_trainer.executor.split.compiled.backends import whole_why
from pipemorph_trainer.executor.split.flight import Deferring
from pipemorph_trainer.executor.torch_private import compiled, missing

Split = Literal["deferred", "fused"]
"""How a stage runs B and W: ``deferred``: W computes weight gradients that B leaves to it; or
``fused``: B is the whole backward, and W is empty."""

Mode = Literal["auto", "fused", "verify"]
"""The user's choice: ``auto``: what can wait for W does; ``fused``: nothing does; ``verify``: as
``auto``, and each gradient that waits is compared with that of the original op."""

_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])")
"""Numbers of layers, but not within the name of a class."""
REASONS_SHOWN = 3
"""Most reasons in :meth:`SplitReport.line`; ``record`` has all."""


class OrderError(SplitError):
    """An op was called out of microbatch order, or before the op that it depends on."""


@dataclass(frozen=True)
class Group:
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


def grouped(why: Mapping[str, str], sizes: Mapping[str, int]) -> list[Group]:
    """Group tensors by reason, the most parameters first."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in why.items():
        by_reason.setdefault(_NUMBER.sub("*", reason), []).append(name)
    groups = [
        Group(
            reason=why[names[0]] if len({why[name] for name in names}) == 1 else general,
            tensors=len(names),
            parameters=sum(sizes.get(name, 0) for name in names),
            example=names[0],
        )
        for general, names in by_reason.items()
    ]
    return sorted(groups, key=lambda group: -group.parameters)


def in_words(groups: Iterable[Group]) -> str:
    """Text with the first :data:`REASONS_SHOWN` groups and the number of others."""
    listed = [str(group) for group in groups]
    more = len(listed) - REASONS_SHOWN
    shown = "; ".join(listed[:REASONS_SHOWN])
    return f"{shown}; and {more} more reasons" if more > 0 else shown


@dataclass(frozen=True)
class SplitReport:
    """How a stage splits its backward, as measured so far."""

    split: Split
    reason: str
    """One line."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Elements of each trainable parameter."""
    deferred: tuple[str, ...] = ()
    """Names of the parameters whose gradients W has computed."""
    not_deferred: Mapping[str, str] = field(default_factory=dict)
    """Trainable parameters whose gradients B computes, each with the reason."""
    notes: tuple[str, ...] = ()

    @property
    def deferred_share(self) -> float:
        """Deferred elements divided by trainable ones, 0 … 1."""
        total = sum(self.sizes.values())
        return sum(self.sizes.get(name, 0) for name in self.deferred) / total if total else 0.0

    def because(self, reason: str) -> SplitReport:
        return replace(self, reason=reason)

    def line(self) -> str:
        """The report in one line, for a log."""
        out = f"split backward: {self.reason}"
        if self.not_deferred:
            out += f"; in B: {in_words(grouped(self.not_deferred, self.sizes))}"
        return "; ".join((out, *self.notes))

    def lines(self) -> list[str]:
        """The report for people, one fact per line."""
        out = [f"split backward: {self.reason}"]
        out += [f"  in B: {group}" for group in grouped(self.not_deferred, self.sizes)]
        out += [f"  note: {note}" for note in self.notes]
        return out

    def record(self) -> dict[str, Any]:
        """The report as data for JSON. Its size does not grow with the number of layers."""
        return {
            "split": self.split,
            "reason": self.reason,
            "parameters": sum(self.sizes.values()),
            "deferred_share": round(self.deferred_share, 6),
            "not_deferred": [asdict(g) for g in grouped(self.not_deferred, self.sizes)],
            "notes": list(self.notes),
        }


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
