"""What the split backward tells its callers: kinds, reports and errors. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Split = Literal["module", "graph", "fused"]
"""How a stage runs B and W apart.

``module``  weight gradients of ``nn.Linear`` run in W, all else in B; B frees activations.
``graph``   the autograd graph is cut between inputs and parameters; W frees activations.
``fused``   not at all: B is the whole backward and W is empty.
"""

Mode = Literal["auto", "module", "graph", "fused"]
"""What a user may ask for: a :data:`Split`, or ``auto`` for the first that passes."""


class SplitError(RuntimeError):
    """A stage cannot do what was asked of it; the message names the module or parameter."""


class OrderError(SplitError):
    """An op came out of microbatch order, or before the op it depends on."""


@dataclass(frozen=True)
class OpTimes:
    """Seconds per microbatch, the least of those measured in the self-test.

    ``backward`` is the unsplit backward of the same stage. For a fused stage
    ``backward_input`` equals it and ``backward_weight`` is 0.
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
    """One split the self-test tried. ``reason`` names what refused it, or is empty."""

    split: Split
    accepted: bool
    reason: str = ""
    times: OpTimes | None = None


@dataclass(frozen=True)
class OffloadAttempt:
    """One microbatch sent to host memory and back between its F and its B, in the self-test.

    ``nbytes``: bytes that moved; ``seconds``: the longer of the two copies, each the least of
    those measured. ``reason`` says why it may not be done in training, or is empty.
    """

    nbytes: int = 0
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class SplitReport:
    """Outcome of :meth:`StageRunner.self_test`."""

    split: Split
    reason: str
    """Why this split and not one preferred to it; one line, names modules and parameters."""
    attempts: tuple[Attempt, ...]
    times: OpTimes
    deferred: tuple[str, ...] = ()
    """Names of the parameters whose gradient is computed in W."""
    not_deferred: Mapping[str, str] = field(default_factory=dict)
    """Trainable parameters whose gradient is computed in B, each with the reason."""
    irreproducible: tuple[str, ...] = ()
    """Tensors for which two *unsplit* backwards differ; compared by tolerance only."""
    notes: tuple[str, ...] = ()
    activation_bytes: int | None = None
    """Bytes autograd holds for one microbatch after its F, parameters left out."""
    deferred_bytes: int | None = None
    """Bytes still held after B, until W: activations and gradients W needs."""
    offload: OffloadAttempt | None = None
    """None where no host memory was given to try it with."""

    def lines(self) -> list[str]:
        """The report for people, one fact per line."""
        times = self.times
        out = [f"split backward: {self.split} ({self.reason})"]
        out += [
            f"  tried {attempt.split}: {'passed' if attempt.accepted else attempt.reason}"
            for attempt in self.attempts
        ]
        out.append(
            f"  F {times.forward * 1e3:.2f} ms, B {times.backward_input * 1e3:.2f} ms, "
            f"W {times.backward_weight * 1e3:.2f} ms; unsplit backward "
            f"{times.backward * 1e3:.2f} ms"
        )
        out += [f"  in B: {name}: {why}" for name, why in self.not_deferred.items()]
        out += [f"  not reproducible even unsplit: {name}" for name in self.irreproducible]
        if self.offload is not None:
            out.append(
                f"  no activations to host memory: {self.offload.reason}"
                if self.offload.reason
                else f"  activations to host memory: {self.offload.nbytes} bytes in "
                f"{self.offload.seconds * 1e3:.2f} ms one way"
            )
        out += [f"  note: {note}" for note in self.notes]
        return out
