"""Findings of a decision, as data. :mod:`pipemorph.control.decide.reasons` turns them into text.

Times are in seconds; stages are in ascending order.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipemorph.control.memory_limits import Excess


@dataclass(frozen=True)
class NoPlan:
    """The planner found no plan, for the reason ``why``."""

    why: str


@dataclass(frozen=True)
class MustNotRun:
    """The chosen plan fails the final check."""

    why: str | Excess


@dataclass(frozen=True)
class MustNotStay:
    """The current plan exceeds a memory limit: the best other plan replaces it, at any cost."""

    excess: Excess


@dataclass(frozen=True)
class AtBaseline:
    """The current plan is already the one for healthy links."""


@dataclass(frozen=True)
class TooLittle:
    """The best other plan saves too little: a fraction ``gain`` of an iteration of ``seconds``,
    which is less than the required ``least``."""

    seconds: float
    gain: float
    least: float


@dataclass(frozen=True)
class Passing:
    """Op times vary: with one of ``count`` readings of them, the best other plan saves only a
    fraction ``gain`` of an iteration, which is less than the required ``least``."""

    gain: float
    count: int
    least: float


@dataclass(frozen=True)
class Saves:
    """Seconds that the best other plan saves over the remaining ``iterations``, and the ``cost`` of
    the change: measured at earlier changes if ``cost_seen``, else assumed. ``iterations`` is None
    where no end is known: then ``seconds`` are of one iteration, and any pay in the long run."""

    seconds: float
    iterations: int | None
    cost: float
    cost_seen: bool

    @property
    def net(self) -> float:
        return self.seconds - self.cost

    @property
    def pays(self) -> bool:
        return self.seconds > (0.0 if self.iterations is None else self.cost)


@dataclass(frozen=True)
class NotConfirmed:
    """Measured iterations do not confirm what a change is based on. ``expected``: predicted time of
    an iteration of the current plan, overhead included; ``gain``: seconds that the change would
    save; ``measured``: median of the ``iterations`` in this state, None if there are too few."""

    expected: float
    gain: float
    iterations: int
    measured: float | None


@dataclass(frozen=True)
class GoesBack:
    """The last change did not bring its promise: the plan before it returns, unless it would be
    slower (``slower``)."""

    slower: bool


@dataclass(frozen=True)
class OffloadWeighed:
    """Offload on some stages. ``copies``: time per microbatch, both ways; ``saves``: time saved per
    iteration, None if there is no plan without offload."""

    stages: tuple[int, ...]
    copies: float
    saves: float | None


@dataclass(frozen=True)
class RecomputeWeighed:
    """Recomputation on some stages. ``forwards``: number of forwards that run again in an
    iteration; ``saves``: time saved per iteration, None if there is no plan without."""

    stages: tuple[int, ...]
    forwards: int
    saves: float | None


@dataclass(frozen=True)
class FusedWeighed:
    """Fused backwards on some stages. ``saves``: time saved per iteration."""

    stages: tuple[int, ...]
    saves: float


@dataclass(frozen=True)
class MemoryBinds:
    """``activationMemory`` limits the plans on some stages, to between ``least`` and ``most``
    microbatches."""

    stages: tuple[int, ...]
    least: int
    most: int


@dataclass(frozen=True)
class OwnPlans:
    """Replicas of the chosen plan that have one of their own, each with its delayed links: pairs of
    link and delay."""

    rows: tuple[tuple[tuple[int, ...], tuple[tuple[int, float], ...]], ...]


Finding = (
    NoPlan
    | MustNotRun
    | MustNotStay
    | AtBaseline
    | TooLittle
    | Passing
    | Saves
    | NotConfirmed
    | GoesBack
    | OffloadWeighed
    | RecomputeWeighed
    | FusedWeighed
    | MemoryBinds
    | OwnPlans
)
