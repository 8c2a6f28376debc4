"""Starts the ranks of one host, and starts them again after every failure that allows it.

The same loop under ``pipemorph run`` and in a pod: the :class:`Site` says what of it differs.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pipemorph.api.layout import RankLayout
from pipemorph.explain.story import plural
from pipemorph.local.processes.forks import Forks
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervise import End, Ending, Events, RankExited

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class Life:
    """One life of the ranks. ``generation``: its number within the attempt. ``left_out``: replicas
    without which it runs. ``layout``: of the ranks."""

    attempt: int = 0
    generation: int = 0
    left_out: tuple[int, ...] = ()
    layout: RankLayout = field(default_factory=RankLayout)


class Site(Protocol[Shared]):
    """A host of ranks, and how the next generation is agreed on there."""

    def first(self) -> Life | Ending:
        """The life to begin with, or how the job ended before."""

    def shared(self, life: Life) -> AbstractContextManager[Shared]:
        """What the ranks of one life share, such as their secret, until they are gone. Raises
        OSError if it cannot be had."""

    def start(self, ranks: RankSet, life: Life, shared: Shared) -> None:
        """Start all ranks of this host. Raises OSError if one cannot be started."""

    def watch(self, ranks: RankSet, life: Life) -> Ending:
        """Wait until the ranks have ended. None is running on return."""

    def is_over(self) -> bool:
        """Whether the job ends before its ranks have started."""

    def agree(self, life: Life, ending: Ending) -> Life | Ending:
        """The life that follows on one that ended so, or how the job ended here."""


@dataclass(frozen=True)
class Generations(Generic[Shared]):
    """Runs the ranks of ``site`` to their end. Use it from the main thread."""

    site: Site[Shared]
    reaper: Reaper
    forks: Forks
    events: Events

    def to_the_end(self) -> Ending:
        """Start the ranks, again after every failure that allows it. Returns how they ended."""
        following = self.site.first()
        while isinstance(following, Life):
            following = self.site.agree(following, self._live(following))
        return following

    def _live(self, life: Life) -> Ending:
        """Start all ranks and wait for their end."""
        with ExitStack() as stack:
            try:
                shared = stack.enter_context(self.site.shared(life))
            except OSError as error:
                return Ending(End.FAILED, str(error))
            server = self.forks.server(self.site.is_over)
            ranks = stack.enter_context(RankSet(self.reaper, self._rank_exited, server))
            try:
                self.site.start(ranks, life, shared)
            except OSError as error:
                count = len(ranks.ranks)
                started = f"only {plural(count, 'rank')}" if count else "no rank"
                return Ending(End.FAILED, f"{started} could be started: {error}")
            return self.site.watch(ranks, life)

    def _rank_exited(self, rank: int, status: int) -> None:
        self.events.put(RankExited(rank, status))
