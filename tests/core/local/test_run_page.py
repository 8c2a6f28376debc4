"""The live page of a run on a terminal: that of top, from the run's own state."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from run_records import FALLEN, RAILS, TRANSPORTS, emulated, job, record, sample

from pipemorph.control.observed.links import Health, LinkHealth
from pipemorph.control.record.history import Decision
from pipemorph.control.record.worth import Worth
from pipemorph.local.processes.supervise import End, Ending
from pipemorph.local.progress import Progress
from pipemorph.local.results.history import Journal, View
from pipemorph.local.results.report import Recovery
from pipemorph.local.status import RunStatus
from pipemorph.local.watch import Told
from pipemorph.planning import Route
from pipemorph.top.job import job_page
from pipemorph.top.page import plain
from pipemorph.top.seen import Seen
from pipemorph.wire import (
    ReductionHealth,
    Straggler,
    StragglersView,
    TransportsView,
)

NOW = 1_790_000_000.0
SLOW = LinkHealth(0, Health.SLOW, delay=0.0301, wire_time=0.0312, confidence=1.0, since=NOW - 65.0)
ADAPTED = View(
    links=(SLOW,),
    adaptations=(
        record(
            promised=0.5, measured=0.47, iteration_seconds_before=3.0, iteration_seconds_after=1.6
        ),
    ),
    plan_version=1,
    wanted_version=1,
    routes=(Route.DELEGATED,),
    transports=TransportsView(links=("shm",)),
    worth=Worth(64.0, 9.6),
)
TRAINS = Told("training", "", ())


def page(view: View, told: Told = TRAINS, *, of: Any = None, width: int | None = None) -> str:
    found = RunStatus(of or job()).job(
        view, told, [sample(i) for i in range(7, 12)],
        changes=len(view.adaptations), goodput=0.913, now=NOW,
    )  # fmt: skip
    return plain(job_page(found, Seen(), NOW, width=width))


def test_it_says_which_link_since_when_what_was_done_and_what_it_saved() -> None:
    assert (
        page(ADAPTED)
        == """j  Running  2 stages
iteration  12 of 40 (30%), 42.0 s left
speed      1.5 s per iteration, stages idle 12% of it; loss 2.2500
plan       v1 since iteration 6: warm-up 2-1 became 3-1, link 0 left to the engine
because    link 0 is slow
gain       promised 50%, measured 47%: 3 s per iteration became 1.6 s
worth      the plan changes saved 1 min 4 s (± 9.6 s), 0.036 rank-hours, against\
 the plan of the start
goodput    91.3% of the time that it had its place went into iterations
recoveries none

links      1 slow link since 14:12:15 UTC (1 min 5 s)

SLOW LINK              LATE BY         SINCE (UTC)           ONE-WAY TIME  ROUTE      TRANSPORT
link 0 (stage 0 to 1)  +30 ms forward  14:12:15 (1 min 5 s)       31.2 ms  delegated  shm
delegated: the transfer engine carries it beside compute; direct: torch

rails      no RDMA port was reported
to do      check the network between the hosts of the slow link: pipemorph fabric check, or\
 pipemorph bench between two of them
""".replace("\\\n", "")
    )


def test_a_job_whose_links_are_well() -> None:
    links = (LinkHealth(0, Health.HEALTHY),)
    shown = page(View(links=links), of=emulated())
    assert "j  Running  2 stages  EMULATED\n" in shown
    assert "links      1 link, none slow, since 14:13:20 UTC (0 s)\n" in shown
    assert "nothing is known yet of the 1 link" in page(View())
    two = (*links, LinkHealth(1, Health.UNKNOWN))
    three = job(parallelism={"stages": 3})
    assert "nothing is known yet of 1 of the 2 links" in page(View(links=two), of=three)


def lost(**fields: Any) -> Recovery:
    ending = Ending(End.FAILED, "rank 2 (stage 1) was killed by SIGKILL", at=NOW - 20)
    return Recovery(ending, 0, 1, "generation", 9, **fields)


def test_ranks_that_start_again_and_have() -> None:
    again = lost()
    shown = page(View(), Told("recovering", again.ending.reason, [again]))
    assert shown.startswith("j  Restarting  2 stages\nwhy        Recovering: rank 2 (stage 1) was")
    shown = page(View(), Told("training", "", [lost(went_on_with=9, seconds=2.31)]))
    assert (
        "recoveries ranks were started again 1 time; the last at 14:13:00 UTC (20 s ago): rank 2"
        " (stage 1) was killed by SIGKILL; 2.3 s until the next iteration was done, 0 iterations"
        " repeated\n" in shown
    )


@pytest.mark.parametrize("state", ["failed", "deadline", "interrupted"])
def test_a_run_that_ended_early_says_why(state: str) -> None:
    shown = page(View(), Told(state, "rank 2 raised RuntimeError: x", ()))
    told = f"j  Failed  2 stages\nwhy        {state.capitalize()}: rank 2 raised RuntimeError: x\n"
    assert shown.startswith(told)
    assert page(View(), Told("completed", "", ())).startswith("j  Complete  2 stages\niteration")


def test_what_else_is_wrong() -> None:
    slow = Straggler(stage=1, column=0, seconds=0.015, usual=0.01)
    late = ReductionHealth(1, 0, "", slow=True, seconds=0.2, normal=0.1, exposed=0.1, bytes=0)
    view = View(
        rails=RAILS,
        transports=TRANSPORTS,
        stragglers=StragglersView(known=True, count=1, slowest=(slow,)),
        reductions=(late,),
    )
    shown = page(view, of=job(parallelism={"stages": 4}))
    assert (
        "rails      1 of 2 RDMA ports sick: mlx5_0 port 1 of stage 1 is DOWN; fell back: link"
        in (shown)
    )
    assert FALLEN.trouble in shown
    assert re.search("\nstages     stage 1 computes 1.5 times as long as its peers, since", shown)
    assert re.search(r"\ngradients .*\(\+100 ms\) slow, since", shown)


def test_slow_links_are_named_for_who_explains_the_job() -> None:
    links = tuple(replace(SLOW, link=i, delay=0.01 * (7 - i)) for i in range(7))
    found = RunStatus(job(parallelism={"stages": 8})).job(
        View(links=links), TRAINS, [sample(1)], changes=0, goodput=None, now=NOW
    )
    assert found.status is not None
    (told,) = [each.message for each in found.status.conditions if each.type == "LinksHealthy"]
    assert told.startswith("link 0 (+70 ms forward), link 1 (+60 ms forward), ")
    assert told.endswith("link 4 (+30 ms forward) and 2 more slow")


def test_a_condition_remembers_since_when() -> None:
    status, well = RunStatus(job()), (LinkHealth(0, Health.HEALTHY),)
    for at, links in ((0, ()), (5, well), (9, well)):
        found = status.job(
            View(links=links), TRAINS, [sample(1)], changes=0, goodput=None, now=NOW + at
        )
    shown = plain(job_page(found, Seen(), NOW + 9))
    assert "none slow, since 14:13:25 UTC (4 s)" in shown


# --- on a terminal ----------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("LINES", "24")
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def decision(number: int) -> Decision:
    return Decision(
        at=float(number), iteration=5, kind="adapt", reason=f"{number}", line=f"plan v{number}: why"
    )


def words(shown: str) -> str:
    """What was written, without colours and moves of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_what_happens_is_told_above_the_page(terminal: Terminal) -> None:
    pytest.importorskip("rich")
    journal = Journal(view=ADAPTED, _unseen=[sample(10, plan_version=1)])
    progress = Progress(terminal, job(), journal)
    progress.update()
    assert "\x1b[1;31mlink 0 (stage 0 to 1)" in terminal.getvalue()
    journal.view = View(decisions=(decision(1),))
    progress.update()
    progress.update()
    progress.close()
    progress.note("completed")
    shown = words(terminal.getvalue())
    assert shown.count("plan v1: why\n") == 1
    assert shown.index("link 0 (stage 0 to 1)") < shown.index("plan v1: why")
    assert shown.index("plan v1: why") < shown.rindex("j  Running  2 stages")
    assert shown.endswith("rails      no RDMA port was reported\ncompleted\n")
    assert terminal.getvalue().rindex("\x1b[?25h") > terminal.getvalue().rindex("\x1b[?25l")


def test_without_colours(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("NO_COLOR", "1")
    Progress(terminal, job(), Journal(view=ADAPTED, _unseen=[sample(10)])).update()
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]m", terminal.getvalue())
    assert "link 0 (stage 0 to 1)" in terminal.getvalue()


def test_a_small_terminal_has_what_matters(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reason has been told above."""
    pytest.importorskip("rich")
    monkeypatch.setenv("LINES", "20")
    (change,) = ADAPTED.adaptations
    view = replace(ADAPTED, adaptations=(change.model_copy(update={"reason": "x " * 99}),))
    Progress(terminal, job(), Journal(view=view, _unseen=[sample(10)])).update()
    shown = words(terminal.getvalue())
    assert "because" not in shown and "link 0 (stage 0 to 1)" in shown
    assert shown.count("\n") < 20


def test_before_the_first_iteration(terminal: Terminal) -> None:
    pytest.importorskip("rich")
    progress = Progress(terminal, job(), Journal())
    progress.tell = lambda: Told("starting", "", ())
    progress.update()
    assert words(terminal.getvalue()) == "j  the ranks start"


def test_a_terminal_that_is_gone_stops_the_run(terminal: Terminal) -> None:
    pytest.importorskip("rich")
    stopped: list[bool] = []

    class Gone(Terminal):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = Progress(Gone(), job(), Journal(), on_closed=lambda: stopped.append(True))
    progress.note("one")
    progress.update()
    progress.close()
    assert stopped == [True]


def test_a_slow_stage_is_shown_with_the_layers_that_it_holds() -> None:
    """After layers have moved, the stages hold other numbers of them."""
    spec = job().model_dump(by_alias=True, exclude_unset=True, mode="json")
    spec["spec"]["parallelism"] |= {"stages": 2, "layers": 8}
    status = RunStatus(type(job()).model_validate(spec))
    slow = Straggler(stage=1, column=0, seconds=0.02, usual=0.01)
    view = View(stragglers=StragglersView(known=True, count=1, slowest=(slow,), paces=(0.01, 0.02)))
    status.held = (6, 2)
    found = status.job(view, TRAINS, [sample(7)], changes=0, goodput=None, now=NOW).status
    (told,) = [each.message for each in found.conditions if each.type == "StagesEven"]
    assert "with 7, 1 layers" in told
