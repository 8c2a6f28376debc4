"""Output of a run while it goes on."""

from __future__ import annotations

import errno
import io
import logging
import math
import os
from dataclasses import replace
from typing import Any

import pytest
from run_records import FALLEN, HAPPENED, RAILS, TRANSPORTS, emulated, job, record, sample

from pipemorph.control.history.job_history import DecisionRecord
from pipemorph.local.log_collector import collect_logs
from pipemorph.local.progress import (
    ProgressDisplay,
    describe_links,
    describe_rails,
    describe_stragglers,
    format_job_headline,
)
from pipemorph.local.results.journal import RunJournal, RunView
from pipemorph.protocol import (
    Health,
    IterationSample,
    LinkState,
    RailsView,
    Straggler,
    StragglersView,
    TransportsView,
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(stream: io.StringIO, view: RunView, samples: list[IterationSample], **kind: Any) -> str:
    journal = RunJournal(view=view, _unseen=samples)
    progress = ProgressDisplay(stream, kind.get("job", job()), journal, clock=lambda: 0.0)
    progress.show_changes()
    progress.close()
    return stream.getvalue()


def test_a_plain_line_has_it_all() -> None:
    links = (LinkState(0, Health.SLOW, delay=0.0301),)
    doubtful = LinkState(0, Health.SLOW, delay=0.0, in_doubt=True)
    assert describe_links((doubtful,)) == "in doubt: link 0"
    assert describe_links((doubtful, *links)) == "slow link 0 +30 ms"
    shown = show(io.StringIO(), RunView(links=links), [sample(11, plan_version=3)])
    assert shown == (
        "iteration 11 of 40 (30%, 42.0 s left)  loss 2.2500  1.500 s/it  slow link 0 +30 ms"
        "  plan v3  bubble 12%\n"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_shown_and_reported_once(loss: float) -> None:
    samples = [sample(i).model_copy(update={"loss": loss if i > 4 else 1.0}) for i in range(3, 9)]
    shown = show(io.StringIO(), RunView(), samples)
    assert shown.count(f"iteration 5: the loss is {loss}; the job goes on\n") == 1
    assert f"  loss {loss}  " in shown
    (sent,) = {sample.model_dump(mode="json")["loss"] for sample in samples[2:]}
    assert sent == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(loss)]
    back = IterationSample.model_validate_json(samples[2].to_json())
    assert back.diverged and str(back.loss) == str(loss) and not samples[0].diverged


FORGED = "a\x1b[2J\x1b]0;owned\x07\r\ncompleted: 12 of 12\nplan v9\u202e\u2066\x9b31m\x85b\u2028c"


def test_text_of_ranks_and_reports_is_one_line_without_control(caplog: Any) -> None:
    decision = DecisionRecord(
        at=1.0, iteration=5, kind="adapt", reason="x", line=FORGED, plan_version=1
    )
    event = replace(HAPPENED, text=FORGED)
    for view in (RunView(message=FORGED), RunView(events=(event,)), RunView(decisions=(decision,))):
        (line,) = show(io.StringIO(), view, []).removesuffix("\n").split("\n")
        assert line == "a [2J ]0;owned completed: 12 of 12 plan v9 31m b c"
    stream = io.StringIO()
    progress = ProgressDisplay(stream, job(), RunJournal())
    with collect_logs(progress):
        logging.getLogger("pipemorph.x").warning("says %s", FORGED)
    progress.print_note(f"its last lines:\n  {FORGED.splitlines()[0]}\r x\u2029y")
    logged, head, last = stream.getvalue().removesuffix("\n").split("\n")
    assert logged.startswith("pipemorph.x: says a [2J") and logged.endswith(" b c")
    assert (head, last) == ("its last lines:", "  a [2J ]0;owned   x y")


def test_the_remaining_time_is_that_of_the_newest_iterations() -> None:
    """The time comes from their median: a single late one predicts little."""
    taken = [9.0] * 28 + [1.0, 1.0, 20.0, 1.0, 1.0]
    samples = [sample(i).model_copy(update={"seconds": each}) for i, each in enumerate(taken)]
    assert " (82%, 7.0 s left) " in show(io.StringIO(), RunView(), samples)


def test_the_last_iteration_leaves_no_time() -> None:
    assert show(io.StringIO(), RunView(), [sample(39)]).startswith(
        "iteration 39 of 40 (100%)  loss"
    )


def test_plain_lines_of_a_fast_job_are_thinned_but_the_last_is_there() -> None:
    journal, stream, now = RunJournal(), io.StringIO(), 0.0
    progress = ProgressDisplay(stream, job(), journal, clock=lambda: now)
    for index in range(40):
        journal._unseen.append(sample(index))
        now = index * 0.1
        progress.show_changes()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 10
    assert lines[0].startswith("iteration 0 ") and lines[-1].startswith("iteration 39 ")


def test_a_terminal_has_one_live_line_and_events_above_it() -> None:
    decision = DecisionRecord(
        at=1.0,
        iteration=5,
        kind="adapt",
        reason="link 0 is slow; and more",
        line="plan v1: link 0 is slow",
        plan_version=1,
    )
    view = RunView(decisions=(decision,), adaptations=(record(),))
    stream = Terminal()
    journal = RunJournal(_unseen=[sample(4)])
    progress = ProgressDisplay(stream, job(), journal)
    progress.show_changes()
    journal.view = view
    progress.show_changes()
    progress.show_changes()
    progress.close()
    shown = stream.getvalue()
    assert shown.count("plan v1: link 0 is slow\n") == 1
    assert shown.count("plan v1: in effect since iteration 6\n") == 1
    assert shown.count("\n") == 3
    assert "\r\x1b[2Kplan v1: link" in shown, "the live line is erased before an event"


def test_a_reason_to_keep_a_plan_is_printed_once_for_each_plan() -> None:
    """Figures do not count; after a change of the plan it is printed again."""

    def keep(at: float, link: int, saved: str) -> DecisionRecord:
        reason = f"link {link} is late; the best other plan saves {saved}, less than minGain 5%"
        return DecisionRecord(
            at=at, iteration=int(at), kind="keep", reason=reason, line=f"no change: {reason}"
        )

    changed = DecisionRecord(
        at=4.0, iteration=4, kind="adapt", reason="x", line="plan v1: x", plan_version=1
    )
    decisions = (
        keep(1.0, 2, "1.3%"), keep(2.0, 2, "2%"), keep(3.0, 1, "1.3%"), changed,
        keep(5.0, 2, "1.5%"), keep(6.0, 2, "1.5%"),
    )  # fmt: skip
    shown = show(io.StringIO(), RunView(decisions=decisions), []).splitlines()
    wanted = [decisions[i].line for i in (0, 2, 3, 4)]
    assert shown == wanted


def test_a_fallback_is_reported_once_and_stays_on_the_line() -> None:
    view = RunView(rails=RAILS, transports=TRANSPORTS, events=(HAPPENED,))
    stream = io.StringIO()
    progress = ProgressDisplay(
        stream, job(), RunJournal(view=view, _unseen=[sample(4)]), clock=lambda: 0.0
    )
    progress.show_changes()
    progress.show_changes()
    progress.close()
    happened, line = stream.getvalue().splitlines()
    assert happened == HAPPENED.text
    assert "  link 2 fell back to tcp, 1 unhealthy RDMA port  plan v0  bubble" in line


@pytest.mark.parametrize(
    ("error", "ends"),
    [(errno.EPIPE, True), (errno.ENOSPC, False), (errno.EIO, False), (errno.EDQUOT, False)],
)
def test_a_closed_output_ends_the_run_and_a_full_one_is_reported_once(
    error: int, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(error, os.strerror(error))

    stopped: list[bool] = []
    progress = ProgressDisplay(Full(), job(), RunJournal(), on_closed=lambda: stopped.append(True))
    progress.print_note("one")
    progress.print_note("two")
    assert stopped == [True] * ends
    said = f"pipemorph run: standard output cannot be written: {os.strerror(error)}; "
    assert capsys.readouterr().err == ("" if ends else f"{said}the job goes on without it\n")


def test_failures_outside_the_job_are_reported_once_and_end_nothing() -> None:
    stream = io.StringIO()
    progress = ProgressDisplay(stream, job(), RunJournal())
    for error in (OSError(24, "Too many open files"), KeyError("x"), OSError(24, "Too many open")):
        for _ in range(3):
            progress.run_guarded(
                "nothing is shown", lambda error=error: (_ for _ in ()).throw(error)
            )
    assert stream.getvalue().splitlines() == [
        "nothing is shown: OSError(24, 'Too many open files')",
        "nothing is shown: KeyError('x')",
        "nothing is shown: OSError(24, 'Too many open')",
    ]


def test_absent_rails_are_not_mentioned() -> None:
    assert describe_rails(RailsView(), TransportsView()) == ""
    many = tuple(replace(FALLEN, link=i) for i in range(5))
    assert describe_rails(RailsView(), TransportsView(fallen=many)) == (
        "link 0 fell back to tcp, link 1 fell back to tcp, link 2 fell back to tcp, "
        "2 more fell back"
    )


def test_the_headline_counts_each_dimension_of_the_mesh_that_has_one() -> None:
    parallelism = job().spec.parallelism.model_copy(update={"tensor": 4})
    spec = job().spec.model_copy(update={"parallelism": parallelism})
    assert ", tensor 4, " in format_job_headline(job().model_copy(update={"spec": spec}))
    assert not {"shard", "context", "tensor"} & set(format_job_headline(job()).split())


def test_emulation_is_never_silent() -> None:
    assert "EMULATED" in format_job_headline(emulated())
    assert "256 KB in place of 16 MB" in format_job_headline(emulated())
    assert show(io.StringIO(), RunView(), [sample(0)], job=emulated()).startswith("EMULATED ")
    assert "EMULATED" not in format_job_headline(job())


@pytest.mark.parametrize(
    ("links", "phrase"),
    [
        ((), ""),
        ((LinkState(0, Health.HEALTHY), LinkState(1, Health.HEALTHY)), "links healthy"),
        ((LinkState(0, Health.HEALTHY), LinkState(1, Health.UNKNOWN)), "links: 1 of 2 unknown"),
        (
            tuple(LinkState(i, Health.SLOW, delay=i / 100) for i in range(1, 6)),
            "slow links 5 +50 ms, 4 +40 ms, 3 +30 ms and 2 more",
        ),
    ],
)
def test_links_in_words(links: tuple[LinkState, ...], phrase: str) -> None:
    assert describe_links(links) == phrase


def test_a_slow_stage_is_shown_with_the_layers_it_should_have() -> None:
    slow = Straggler(stage=1, column=3, seconds=0.015, usual=0.01)
    found = StragglersView(known=True, count=2, slowest=(slow,), paces=(0.01,) * 4)
    assert describe_stragglers(StragglersView(known=True), 16) == ""
    assert describe_stragglers(found) == "slow stage 1 x1.5 and 1 more"
    assert describe_stragglers(found, 16) == "slow stage 1 x1.5 (-17% with 3 layers) and 1 more"


def test_a_terminal_gets_characters_of_its_encoding() -> None:
    class Ascii(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    written = io.BytesIO()
    stream = Ascii(written, encoding="ascii")
    progress = ProgressDisplay(stream, job(), RunJournal(_unseen=[sample(4)]))
    progress.show_changes()
    progress.print_note("stage 1 has 3 \u2192 2 layers")
    progress.close()
    assert "stage 1 has 3 ? 2 layers" in written.getvalue().decode("ascii")
