"""Starts the ranks of one host, and restarts them after every failure that allows it.

``pipemorph run`` and pods share the loop; each implements a :class:`RankHost`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from pipemorph.local.processes.fork_client import ForkServerManager
from pipemorph.local.processes.ranks import RankSet, Reaper
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult, Events, RankExited
from pipemorph.spec.layout import RankLayout
from pipemorph.views.explanation.explanation_text import format_count

Shared = TypeVar("Shared")


@dataclass(frozen=True)
class RankGeneration:
    """Generation of the ranks, one life of their processes. ``generation``: its number within the
    attempt; ``excluded_replicas``: replicas without which it runs; ``layout``: of the ranks."""

    attempt: int = 0
    generation: int = 0
    excluded_replicas: tuple[int, ...] = ()
    layout: RankLayout = field(default_factory=RankLayout)


class RankHost(Protocol[Shared]):
    """Host of ranks, which decides what follows each generation."""

    def choose_first_generation(self) -> RankGeneration | AttemptResult:
        """The first generation, or the result of a job that ended before."""

    def share_resources(self, life: RankGeneration) -> AbstractContextManager[Shared]:
        """Resources that the ranks of a generation share, such as their secret; released when the
        ranks are gone. Raises OSError if they cannot be made."""

    def start_ranks(self, ranks: RankSet, life: RankGeneration, shared: Shared) -> None:
        """Start all ranks of this host. Raises OSError if one cannot be started."""

    def watch_ranks(self, ranks: RankSet, life: RankGeneration) -> AttemptResult:
        """Wait until the ranks have ended. None is running on return."""

    def is_over(self) -> bool:
        """True if the job ends before its ranks have started."""

    def agree_next_generation(
        self, life: RankGeneration, ending: AttemptResult
    ) -> RankGeneration | AttemptResult:
        """The generation that follows one with this result, or the result of the job here."""


@dataclass(frozen=True)
class GenerationRunner(Generic[Shared]):
    """Runs the ranks of ``host`` to their end. Use it from the main thread."""

    host: RankHost[Shared]
    reaper: Reaper
    fork_servers: ForkServerManager
    events: Events

    def run_to_end(self) -> AttemptResult:
        """Run the ranks, with restarts after every failure that allows it. Returns their result."""
        following = self.host.choose_first_generation()
        while isinstance(following, RankGeneration):
            following = self.host.agree_next_generation(following, self._run_generation(following))
        return following

    def _run_generation(self, life: RankGeneration) -> AttemptResult:
        """Start all ranks and wait for their end."""
        with ExitStack() as stack:
            try:
                shared = stack.enter_context(self.host.share_resources(life))
            except OSError as error:
                return AttemptResult(AttemptOutcome.FAILED, str(error))
            server = self.fork_servers.wait_for_server(self.host.is_over)
            ranks = stack.enter_context(RankSet(self.reaper, self._report_rank_exit, server))
            try:
                self.host.start_ranks(ranks, life, shared)
            except OSError as error:
                count = len(ranks.ranks)
                started = f"only {format_count(count, 'rank')}" if count else "no rank"
                return AttemptResult(AttemptOutcome.FAILED, f"{started} could be started: {error}")
            return self.host.watch_ranks(ranks, life)

    def _report_rank_exit(self, rank: int, status: int) -> None:
        self.events.put(RankExited(rank, status))
