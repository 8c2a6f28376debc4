"""Kinds, reports and errors of the split backward. Pure data."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pipemorph_trainer.errors import SplitError

Split = Literal["module", "graph", "fused"]
"""How a stage splits B and W.

``module``  weight gradients of ``nn.Linear`` run in W, all else in B; B frees activations.
``graph``   the autograd graph is cut between inputs and parameters; W frees activations.
``fused``   no split: B is the whole backward and W is empty.
"""

Mode = Literal["auto", "module", "graph", "fused"]
"""The user's choice: a :data:`Split`, or ``auto`` for the first one that passes."""

_NUMBER = re.compile(r"(?<![A-Za-z])\d+(?![A-Za-z])")
"""Numbers of layers, but not within the name of a class."""
REASONS_SHOWN = 3
"""Most reasons in :meth:`SplitReport.line`; ``record`` has all."""


class OrderError(SplitError):
    """An op was called out of microbatch order, or before the op that it depends on."""


@dataclass(frozen=True)
class OpTimes:
    """Least measured seconds per microbatch in the self-test.

    ``backward``: the unsplit backward of the same stage. For a fused stage ``backward_input`` is
    equal to it, and ``backward_weight`` is 0.
    """

    forward: float
    backward: float
    backward_input: float
    backward_weight: float

    @property
    def weight_fraction(self) -> float:
        """Share of the split backward that W can move: ``W / (B + W)``, 0 … 1."""
        total = self.backward_input + self.backward_weight
        return self.backward_weight / total if total > 0 else 0.0


@dataclass(frozen=True)
class Attempt:
    """One split that the self-test tried. ``reason``: why it was refused, or empty."""

    split: Split
    accepted: bool
    reason: str = ""
    times: OpTimes | None = None


@dataclass(frozen=True)
class OffloadAttempt:
    """Offload of one microbatch between its F and its B in the self-test.

    ``nbytes``: bytes moved; ``seconds``: the longer of the two copies, each the least measured
    time. ``reason``: why offload is not possible in training, or empty.
    """

    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class RecomputeAttempt:
    """Microbatches whose forward ran again before their backward in the self-test.

    ``input_bytes``: bytes of what is kept of one. ``reason``: why recomputation is not possible in
    training, or empty.
    """

    input_bytes: int = 0
    reason: str = ""


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
    """How a stage splits its backward, and why: the result of :meth:`StageRunner.self_test`, or
    what is known without it if the user chose a split."""

    split: Split
    reason: str
    """Why this split and not a preferred one. One line with modules and parameters."""
    tested: bool = True
    """Whether it was compared with an unsplit backward. If not, ``deferred`` follows from the
    modules, and nothing was measured."""
    attempts: tuple[Attempt, ...] = ()
    times: OpTimes | None = None
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Elements of each trainable parameter."""
    deferred: tuple[str, ...] = ()
    """Names of the parameters whose gradients W computes."""
    not_deferred: Mapping[str, str] = field(default_factory=dict)
    """Trainable parameters whose gradients B computes, each with the reason."""
    irreproducible: tuple[str, ...] = ()
    """Tensors for which two *unsplit* backwards differ; compared with a tolerance."""
    notes: tuple[str, ...] = ()
    fused_ratio: float | None = None
    """Time of an unsplit backward divided by that of B and W; None if too short to be measured, or
    without a split."""
    activation_bytes: int | None = None
    """Bytes that autograd keeps for one microbatch after its F, without parameters."""
    offload: OffloadAttempt | None = None
    """None if there is no host memory for it."""
    recompute: RecomputeAttempt | None = None
    """None if the job must not recompute."""

    @property
    def deferred_share(self) -> float:
        """Deferred elements divided by trainable ones, 0 … 1."""
        total = sum(self.sizes.values())
        return sum(self.sizes[name] for name in self.deferred) / total if total else 0.0

    def line(self) -> str:
        """The report in one line, for a log."""
        out = f"split backward: {self.split}, {self.reason}"
        if self.split != "fused" and self.not_deferred:
            out += f"; in B: {in_words(grouped(self.not_deferred, self.sizes))}"
        if self.irreproducible:
            out += f"; not reproducible even unsplit: {_listed(self.irreproducible)}"
        return "; ".join((out, *self.notes))

    def lines(self) -> list[str]:
        """The report for people, one fact per line."""
        out = [f"split backward: {self.split} ({self.reason})"]
        out += [
            f"  tried {attempt.split}: {'passed' if attempt.accepted else attempt.reason}"
            for attempt in self.attempts
        ]
        if (times := self.times) is not None:
            out.append(
                f"  F {times.forward * 1e3:.2f} ms, B {times.backward_input * 1e3:.2f} ms, "
                f"W {times.backward_weight * 1e3:.2f} ms; unsplit backward "
                f"{times.backward * 1e3:.2f} ms"
            )
        out += [f"  in B: {group}" for group in grouped(self.not_deferred, self.sizes)]
        if self.irreproducible:
            out.append(f"  not reproducible even unsplit: {_listed(self.irreproducible)}")
        if self.offload is not None:
            out.append(
                f"  no activations to host memory: {self.offload.reason}"
                if self.offload.reason
                else f"  activations to host memory: {self.offload.nbytes} bytes in "
                f"{self.offload.seconds * 1e3:.2f} ms one way"
            )
        if self.recompute is not None:
            out.append(
                f"  no recomputation: {self.recompute.reason}"
                if self.recompute.reason
                else f"  recomputation: keeps {self.recompute.input_bytes} bytes instead of"
                f" {self.activation_bytes} per microbatch"
            )
        out += [f"  note: {note}" for note in self.notes]
        return out

    def record(self) -> dict[str, Any]:
        """The report as data for JSON. Its size does not grow with the number of layers."""
        return {
            "split": self.split,
            "reason": self.reason,
            "tested": self.tested,
            "attempts": [
                {"split": each.split, "accepted": each.accepted, "reason": each.reason}
                for each in self.attempts
            ],
            "parameters": sum(self.sizes.values()),
            "deferred_share": round(self.deferred_share, 6),
            "not_deferred": [asdict(g) for g in grouped(self.not_deferred, self.sizes)],
            "not_reproducible": _listed(self.irreproducible),
            "notes": list(self.notes),
        }


def _listed(names: tuple[str, ...]) -> str:
    more = len(names) - 1
    return f"{names[0]} and {more} more" if more > 0 else "".join(names)
