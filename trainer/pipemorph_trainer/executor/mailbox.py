"""Messages of a rank's stages: sends them and waits for them.

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
from pipemorph_trainer.executor.microbatch_costs import NO_COSTS
from pipemorph_trainer.executor.waiting import CurrentWait
from pipemorph_trainer.profiling import profiling
from pipemorph_trainer.transport.link import LinkEnd
from pipemorph_trainer.transport.poller import Poller

Found = TypeVar("Found")

LONGEST_SLEEP_SECONDS = 0.25
"""Seconds after which a waiting stage checks the agent and its neighbours again."""
QUIET_SECONDS = 0.002
"""First seconds of a wait in which control sockets do not wake the stage: the note of a message
arrives before the message, and would wake it twice."""


def name_call(iteration: int, evaluation: bool) -> str:
    """Return the name of a call of ``step`` or ``evaluate`` for messages."""
    return (
        f"the evaluation before iteration {iteration}" if evaluation else f"iteration {iteration}"
    )


class Mailbox:
    """Messages of a rank, to and from its neighbours. Main thread only.

    ``ends``: those of all links to other ranks, which every wait serves. ``between``: called in
    every wait, as between two ops.
    """

    def __init__(
        self,
        ends: Sequence[LinkEnd],
        *,
        poller: Poller,
        waiting: CurrentWait,
        deadline: float,
        between: Callable[[], None],
    ) -> None:
        self._ends, self._poller, self._waiting = ends, poller, waiting
        self._deadline, self._between = deadline, between
        self.call = "iteration 0"
        self.work = NO_COSTS
        """Work of the call, whose order names the microbatch of each message."""
        """Name of the iteration or evaluation, in descriptions of waits."""

    def set_deadline(self, deadline: float) -> None:
        """Set the longest wait for each message, received or sent, in seconds."""
        self._deadline = deadline
        for end in self._ends:
            end.set_deadline(deadline)

    def describe_message(self, end: LinkEnd, word: str, microbatch: int) -> str:
        """Describe a message; ``word``: F or B."""
        microbatch = self.work.order[microbatch] if self.work.order else microbatch
        return (
            f"{word} of microbatch {microbatch} of {self.call} from stage {end.peer_stage} on {end}"
        )

    def wait_for_message(
        self, end: LinkEnd, kind: OpKind, microbatch: int
    ) -> tuple[float, float] | None:
        """Wait until the message of an op has arrived and may be used. Returns start and end of the
        wait, wall-clock seconds; None without a wait."""
        word = "F" if kind is OpKind.F else "B"
        poller = self._poller
        # Before the first check, so that no arrival is missed between the check and the sleep.
        poller.awaited = True
        at = self.ready_at(end, word, microbatch)
        if at is not None and (at == 0.0 or at <= time()):
            poller.awaited = False
            return None
        began, since = time(), monotonic()
        self._waiting.begin_wait(self.describe_message, end, word, microbatch)
        deadline, loud, watch_input = since + self._deadline, since + QUIET_SECONDS, False
        while True:
            self.wait_for_event(at, deadline, watch_input=watch_input)
            at, now = self.ready_at(end, word, microbatch), time()
            if at is not None and at <= now:
                break
            watch_input = at is not None or monotonic() >= loud
        poller.awaited = False
        self._waiting.end_wait()
        return began, now

    def wait_for_ready(
        self,
        look: Callable[[], tuple[Found | None, float]],
        what: Callable[[], str],
        *,
        stop: Callable[[], bool],
    ) -> tuple[Found | None, tuple[float, float] | None]:
        """Wait until ``look`` finds something, or until ``stop()``, which is called first: then
        None. Returns that, and start and end of the wait, wall-clock seconds; None without a wait.
        Call :meth:`wake_on_arrivals` before.

        ``look``: returns what it found, or None and the time to call it again without an event;
        infinity: never. ``what``: describes what is awaited, in any thread.
        """
        if stop():
            return None, None
        began = time()
        found, at = look()
        if found is not None:
            return found, None
        deadline, watch_input = monotonic() + self._deadline, False
        self._waiting.begin_wait(what)
        while found is None:
            self.wait_for_event(at if at < inf else None, deadline, watch_input=watch_input)
            if stop():
                break
            found, at = look()
            watch_input = True
        self._waiting.end_wait()
        return found, (began, time())

    def wake_on_arrivals(self) -> None:
        """Let every arrival end the next :meth:`wait_for_event`, until :meth:`wait_for_message`."""
        self._poller.awaited = True

    def ready_at(self, end: LinkEnd, word: str, microbatch: int) -> float | None:
        """Return when a message may be used; None before its arrival. Errors name it."""
        try:
            return end.incoming.ready_at(microbatch)
        except PipelineError as error:
            if not self._waiting:
                self._waiting.begin_wait(self.describe_message(end, word, microbatch))
            raise self._name_missing_message(end, error) from error

    def _name_missing_message(self, end: LinkEnd, error: PipelineError) -> PipelineError:
        """Return the error with the missing message; if the peer is gone, that is the reason."""
        if isinstance(error, WaitTimeoutError):
            return WaitTimeoutError(f"{self._waiting.describe_wait()}; {error}")
        why = end.describe_loss() if end.is_peer_lost() else str(error)
        return PeerLostError(f"{self._waiting.describe_wait()}; {why}")

    def wait_for_event(
        self, at: float | None, deadline: float, *, watch_input: bool = True
    ) -> None:
        """Wait for an event, or until ``at`` (wall clock, as in notes). Raises after ``deadline``
        (monotonic, so independent of clock corrections), or if a peer is lost. Without
        ``watch_input``, control sockets end no wait, which lasts at most :data:`QUIET_SECONDS`."""
        remaining = deadline - monotonic()
        if remaining <= 0:
            late = f"{self._waiting.describe_wait()}; the deadline is {self._deadline:g} s"
            raise WaitTimeoutError(
                "; ".join([late, *filter(None, (e.describe_engine_error() for e in self._ends))])
            )
        nap = min(LONGEST_SLEEP_SECONDS if watch_input else QUIET_SECONDS, remaining)
        if self._poller.wait(
            min(nap, at - time()) if at is not None else nap, watch_input=watch_input
        ):
            for each in self._ends:
                self._attend_link(each)
        for each in self._ends:
            if each.socket.lost is not None:
                self._check_lost(each, at)
        self._between()

    def _attend_link(self, end: LinkEnd) -> None:
        try:
            end.handle_control_messages()
        except PipelineError as error:
            raise self._name_missing_message(end, error) from error

    def _check_lost(self, end: LinkEnd, at: float | None) -> None:
        """Raise if a neighbour is gone, unless the awaited message has arrived (``at`` is set)."""
        self._poller.stop_watching(end.socket.fileno())
        if at is None:
            raise PeerLostError(f"{self._waiting.describe_wait()}; {end.describe_loss()}")

    def _check_engine(self, end: LinkEnd) -> None:
        """Raise if the engine's link is dead: a stopped neighbour keeps its socket open.

        Not on the direct route, where its messages may still arrive.
        """
        if end.route is not Route.DELEGATED or end.engine_link is None:
            return
        if (why := end.engine_link.error) is not None:
            raise self._name_missing_message(end, PipelineError(why))

    def send(self, end: LinkEnd, microbatch: int, tensors: Sequence[Tensor | None] | None) -> None:
        """Send the message of a microbatch; ``tensors``: None for an empty one."""
        try:
            end.outgoing.send(microbatch, tensors)
            end.incoming.record_sent(microbatch + 1)
        except PipelineError as error:
            if not self._waiting:
                self._waiting.begin_wait(end.describe_send_wait(self.call, microbatch))
            raise self._name_missing_message(end, error) from error

    def await_queue(self, end: LinkEnd, what: str, source: Any) -> Any:
        """Wait for an item in ``source``, a queue of the control socket, and remove it."""
        if not source:
            end.socket.read_arrived()
        if not source:
            self._waiting.begin_wait(f"{what} for {self.call} on link {end.link}")
            deadline = monotonic() + self._deadline
            while not source:
                self._check_engine(end)
                self.wait_for_event(None, deadline)
            self._waiting.end_wait()
        return source.popleft()

    def wait_until_sends_taken(self) -> None:
        """Wait until no neighbour can request a message again, since this rank does not answer in
        the collective that follows. Neighbours reach that point by themselves."""
        for end in self._ends:
            if end.all_consumed():
                continue
            self._waiting.begin_wait(
                f"stage {end.peer_stage} to begin the last op that uses {end.sends.letter} of "
                f"{self.call} on {end}"
            )
            deadline = monotonic() + self._deadline
            while not end.all_consumed():
                self.wait_for_event(None, deadline)
            self._waiting.end_wait()
        if profiling():
            for end in self._ends:
                end.finish_sends()
