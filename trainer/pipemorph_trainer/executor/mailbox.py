"""Sends and receives the messages of a rank's stages.

Every wait has a deadline. Errors name the missing message, the iteration, the neighbour and the
link.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from time import monotonic, time
from typing import Any, TypeVar

from torch import Tensor

from pipemorph.planning import OpKind, Route
from pipemorph_trainer.errors import PeerLostError, PipelineError, WaitTimeoutError
from pipemorph_trainer.executor.waiting import Waiting
from pipemorph_trainer.links.link import LinkEnd
from pipemorph_trainer.links.poller import Poller
from pipemorph_trainer.profiling import profiling

Found = TypeVar("Found")

LONGEST_NAP = 0.25
"""Seconds after which a waiting stage looks at the agent and its neighbours again."""
QUIET_SECONDS = 0.002
"""Begin of a wait for a message in which news on control sockets do not wake the stage: the note of
a message comes before it, and would wake it once more."""


def name_call(iteration: int, evaluation: bool) -> str:
    """Name of a call of ``step`` or ``evaluate`` for messages."""
    return (
        f"the evaluation before iteration {iteration}" if evaluation else f"iteration {iteration}"
    )


class Mailbox:
    """The messages of a rank, to and from its neighbours. Main thread only.

    ``ends``: of all links to other ranks, which are attended during every wait. ``between``: called
    then, too, as between two ops.
    """

    def __init__(
        self,
        ends: Sequence[LinkEnd],
        *,
        poller: Poller,
        waiting: Waiting,
        deadline: float,
        between: Callable[[], None],
    ) -> None:
        self._ends, self._poller, self._waiting = ends, poller, waiting
        self._deadline, self._between = deadline, between
        self.call = "iteration 0"
        """What descriptions of waits name: an iteration or an evaluation."""

    def allow(self, deadline: float) -> None:
        """Set the longest wait for each message, received or sent, in seconds."""
        self._deadline = deadline
        for end in self._ends:
            end.allow(deadline)

    def message(self, end: LinkEnd, word: str, microbatch: int) -> str:
        return (
            f"{word} of microbatch {microbatch} of {self.call} from stage {end.peer_stage} on {end}"
        )

    def wait_for(self, end: LinkEnd, kind: OpKind, microbatch: int) -> tuple[float, float] | None:
        """Wait until the message of an op has arrived and may be used. Returns when the wait began
        and ended, wall clock; None without a wait."""
        word = "F" if kind is OpKind.F else "B"
        poller = self._poller
        # Before the first look, so that no arrival is missed between the look and the sleep.
        poller.awaited = True
        at = self.ready_at(end, word, microbatch)
        if at is not None and (at == 0.0 or at <= time()):
            poller.awaited = False
            return None
        began, since = time(), monotonic()
        self._waiting.begin(self.message, end, word, microbatch)
        deadline, loud, hears = since + self._deadline, since + QUIET_SECONDS, False
        while True:
            self.sleep(at, deadline, hears=hears)
            at, now = self.ready_at(end, word, microbatch), time()
            if at is not None and at <= now:
                break
            hears = at is not None or monotonic() >= loud
        poller.awaited = False
        self._waiting.end()
        return began, now

    def wait_for_any(
        self,
        look: Callable[[], tuple[Found | None, float]],
        what: Callable[[], str],
        *,
        stop: Callable[[], bool],
    ) -> tuple[Found | None, tuple[float, float] | None]:
        """Wait until ``look`` finds something, or until ``stop``, which is asked first: then None.
        Returns that and when the wait began and ended, wall clock; None without a wait. Call
        :meth:`listen` before.

        ``look``: what it has found; or None, and when to look again without an event, infinity for
        never. ``what``: describes what is awaited, in any thread.
        """
        if stop():
            return None, None
        began = time()
        found, at = look()
        if found is not None:
            return found, None
        deadline, hears = monotonic() + self._deadline, False
        self._waiting.begin(what)
        while found is None:
            self.sleep(at if at < inf else None, deadline, hears=hears)
            if stop():
                break
            found, at = look()
            hears = True
        self._waiting.end()
        return found, (began, time())

    def listen(self) -> None:
        """Have all arrivals end the next :meth:`sleep`, until :meth:`wait_for` is called."""
        self._poller.awaited = True

    def ready_at(self, end: LinkEnd, word: str, microbatch: int) -> float | None:
        """Time from which a message may be used; None if it has not arrived. Errors name it."""
        try:
            return end.incoming.ready_at(microbatch)
        except PipelineError as error:
            if not self._waiting:
                self._waiting.begin(self.message(end, word, microbatch))
            raise self._named(end, error) from error

    def _named(self, end: LinkEnd, error: PipelineError) -> PipelineError:
        """The error with the missing message; if the peer is gone, that is the reason."""
        if isinstance(error, WaitTimeoutError):
            return WaitTimeoutError(f"{self._waiting.describe()}; {error}")
        why = end.gone() if end.is_lost() else str(error)
        return PeerLostError(f"{self._waiting.describe()}; {why}")

    def sleep(self, at: float | None, deadline: float, *, hears: bool = True) -> None:
        """Wait for an event, or until ``at`` (wall clock, as in notes). Raises after ``deadline``
        (monotonic, so independent of clock corrections), or if a peer is lost. Without ``hears``,
        news on control sockets are no event, and it lasts at most :data:`QUIET_SECONDS`."""
        left = deadline - monotonic()
        if left <= 0:
            late = f"{self._waiting.describe()}; the deadline is {self._deadline:g} s"
            raise WaitTimeoutError(
                "; ".join([late, *filter(None, (e.trouble() for e in self._ends))])
            )
        nap = min(LONGEST_NAP if hears else QUIET_SECONDS, left)
        if self._poller.wait(min(nap, at - time()) if at is not None else nap, hears=hears):
            for each in self._ends:
                self._attend(each)
        for each in self._ends:
            if each.socket.lost is not None:
                self._check_lost(each, at)
        self._between()

    def _attend(self, end: LinkEnd) -> None:
        try:
            end.attend()
        except PipelineError as error:
            raise self._named(end, error) from error

    def _check_lost(self, end: LinkEnd, at: float | None) -> None:
        """Raise if a neighbour is gone, unless the message of this wait has arrived (``at``)."""
        self._poller.forget(end.socket.fileno())
        if at is None:
            raise PeerLostError(f"{self._waiting.describe()}; {end.gone()}")

    def _check_engine(self, end: LinkEnd) -> None:
        """Raise if the engine's link is dead: a stopped neighbour keeps its socket open.

        Not on the direct route, where its messages may still arrive.
        """
        if end.route is not Route.DELEGATED or end.engine_link is None:
            return
        if (why := end.engine_link.error) is not None:
            raise self._named(end, PipelineError(why))

    def send(self, end: LinkEnd, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        try:
            end.outgoing.send(microbatch, tensors)
            end.incoming.sent(microbatch + 1)
        except PipelineError as error:
            if not self._waiting:
                self._waiting.begin(end.taking(self.call, microbatch))
            raise self._named(end, error) from error

    def await_queue(self, end: LinkEnd, what: str, source: Any) -> Any:
        """Wait for an item in ``source``, a queue of the control socket, and take it."""
        if not source:
            end.socket.pump()
        if not source:
            self._waiting.begin(f"{what} for {self.call} on link {end.link}")
            deadline = monotonic() + self._deadline
            while not source:
                self._check_engine(end)
                self.sleep(None, deadline)
            self._waiting.end()
        return source.popleft()

    def wait_until_taken(self) -> None:
        """Wait until no neighbour can request a message again, since this rank then enters a
        collective in which it does not answer. Neighbours reach that point by themselves."""
        for end in self._ends:
            if end.all_taken():
                continue
            self._waiting.begin(
                f"stage {end.peer_stage} to begin the last op that uses {end.sends.letter} of "
                f"{self.call} on {end}"
            )
            deadline = monotonic() + self._deadline
            while not end.all_taken():
                self.sleep(None, deadline)
            self._waiting.end()
        if profiling():
            for end in self._ends:
                end.finish_sends()
