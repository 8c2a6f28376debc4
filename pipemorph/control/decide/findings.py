"""What a decision found, as values. :mod:`pipemorph.control.decide.reasons` writes the sentences.

Times in seconds; stages in rising order.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.control.memory_limits import Excess


@dataclass(frozen=True)
class NoPlan:
    """The planner has no answer."""

    why: str


@dataclass(frozen=True)
class MustNotRun:
    """The plan that was chosen fails the last check."""

    why: str | Excess


@dataclass(frozen=True)
class MustNotStay:
    """The current plan holds more than there is room for: the best other one comes, at any cost."""

    excess: Excess


@dataclass(frozen=True)
class AtBaseline:
    """The current plan is the one for links that are well."""


@dataclass(frozen=True)
class TooLittle:
    """The best other plan saves a fraction ``gain`` of an iteration of ``seconds``, and ``least``
    is what it takes."""

    seconds: float
    gain: float
    least: float


@dataclass(frozen=True)
class Saves:
    """What the best other plan saves over the iterations left, and what the change ``cost`` before,
    or, where there was none (not ``cost_seen``), is taken to cost."""

    seconds: float
    iterations: int
    cost: float
    cost_seen: bool

    @property
    def net(self) -> float:
        return self.seconds - self.cost

    @property
    def pays(self) -> bool:
        return self.seconds > self.cost


@dataclass(frozen=True)
class OffloadWeighed:
    """Offload on some stages: what it costs per microbatch, there and back, and what an iteration
    saves by it. None: there is no plan without."""

    stages: tuple[int, ...]
    copies: float
    saves: float | None


@dataclass(frozen=True)
class FusedWeighed:
    """Fused backwards on some stages, and what an iteration saves by them."""

    stages: tuple[int, ...]
    saves: float


@dataclass(frozen=True)
class MemoryBinds:
    """``activationMemory`` is what limits the plans on some stages, to ``least`` to ``most``
    microbatches."""

    stages: tuple[int, ...]
    least: int
    most: int


Finding = (
    NoPlan
    | MustNotRun
    | MustNotStay
    | AtBaseline
    | TooLittle
    | Saves
    | OffloadWeighed
    | FusedWeighed
    | MemoryBinds
)
