"""A deadline is a length of time: corrections of the machine's clock neither end nor stretch it."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

from pipemorph.planning import OpKind
from pipemorph_trainer.errors import WaitTimeoutError
from pipemorph_trainer.executor import mailbox
from pipemorph_trainer.executor.mailbox import Mailbox
from pipemorph_trainer.executor.waiting import CurrentWait

DEADLINE = 5.0


class Clocks:
    """Clocks of a machine whose wall clock is set ``step`` seconds on at every wait."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: float) -> None:
        self.wall, self.monotonic, self._step = 1e9, 100.0, step
        monkeypatch.setattr(mailbox, "time", lambda: self.wall)
        monkeypatch.setattr(mailbox, "monotonic", lambda: self.monotonic)
        self.waits = 0
        self.watched: list[bool] = []
        self.awaited = False

    def wait(self, seconds: float, *, watch_input: bool) -> bool:
        self.waits += 1
        self.watched.append(watch_input)
        assert self.waits < 1000, "a wait that does not end"
        self.monotonic += seconds
        self.wall += seconds + self._step
        return True


class Coming:
    """Message that is here after a number of waits."""

    def __init__(self, clocks: Clocks, waits: int) -> None:
        self._clocks, self._waits = clocks, waits

    def ready_at(self, microbatch: int) -> float | None:
        return 0.0 if self._clocks.waits >= self._waits else None


def stage_1(clocks: Clocks, incoming: Any) -> tuple[Mailbox, Any]:
    socket = SimpleNamespace(lost=None, read_arrived=lambda: None)
    end = SimpleNamespace(
        link=0, peer_rank=0, peer_stage=0, socket=socket, incoming=incoming,
        handle_control_messages=lambda: None, route=None, engine_link=None,
        all_consumed=lambda: incoming.ready_at(0) is not None, sends=SimpleNamespace(letter="B"),
        describe_engine_error=lambda: "a data connection is lost",
    )  # fmt: skip
    made = Mailbox(
        [end],  # type: ignore[list-item]
        poller=clocks,  # type: ignore[arg-type]
        waiting=CurrentWait("rank 1 (stage 1)"),
        deadline=DEADLINE,
        between=lambda: None,
    )
    return made, end


@pytest.mark.parametrize("step", [300.0, -300.0])
def test_a_clock_that_is_set_ends_no_wait(step: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch, step)
    mail, end = stage_1(clocks, Coming(clocks, 3))
    mail.wait_for_message(end, OpKind.F, 0)
    assert clocks.waits == 3
    mail, end = stage_1(clocks, Coming(clocks, 6))
    mail.wait_until_sends_taken()
    assert clocks.waits == 6
    source: deque[str] = deque()
    monkeypatch.setattr(end, "handle_control_messages", lambda: source.append("token"))
    assert mail.await_queue(end, "stage 0 to begin", source) == "token"


@pytest.mark.parametrize("step", [0.0, -1e6])
def test_a_deadline_comes_whatever_the_clock_says(
    step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = Clocks(monkeypatch, step)
    mail, end = stage_1(clocks, Coming(clocks, 10**9))
    with pytest.raises(
        WaitTimeoutError, match=r"F of microbatch 2 .* the deadline is 5 s; a data "
    ):
        mail.wait_for_message(end, OpKind.F, 2)
    assert clocks.waits <= DEADLINE / mailbox.LONGEST_SLEEP_SECONDS + 1


def test_an_arrival_wakes_only_the_stage_that_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch, 0.0)
    coming = Coming(clocks, 2)
    looked: list[bool] = []
    look = coming.ready_at
    monkeypatch.setattr(coming, "ready_at", lambda m: (looked.append(clocks.awaited), look(m))[1])
    mail, end = stage_1(clocks, coming)
    for waited in (True, False):
        assert (mail.wait_for_message(end, OpKind.F, 0) is not None) == waited
        assert all(looked), "what comes after a look has to wake"
        assert not clocks.awaited, "the stage runs an op"
    mail.wake_on_arrivals()
    assert clocks.awaited


def test_a_wait_that_ends_early_goes_on_without_notes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait goes on for a while: the note of the message comes before it."""
    clocks = Clocks(monkeypatch, 0.0)
    mail, end = stage_1(clocks, Coming(clocks, 5))

    def early(seconds: float, *, watch_input: bool) -> bool:
        clocks.waits += 1
        clocks.watched.append(watch_input)
        clocks.monotonic += mailbox.QUIET_SECONDS / 2
        return False

    monkeypatch.setattr(clocks, "wait", early)
    mail.wait_for_message(end, OpKind.F, 0)
    assert clocks.watched == [False, False, True, True, True]
