"""A random number generator with equal results on every machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Rng:
    """A linear congruential generator with a fixed seed, so that plans are deterministic."""

    def __init__(self) -> None:
        self.state = 20250831

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % count

    def pick(self, choices: Sequence[T]) -> T:
        return choices[self.below(len(choices))]
