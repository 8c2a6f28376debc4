"""What is shown of a run while it goes on."""

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

from pipemorph.control.record.history import Decision
from pipemorph.local.logs import collected_logs
from pipemorph.local.progress import (
    Progress,
    headline,
    links_phrase,
    rails_phrase,
    stragglers_phrase,
)
from pipemorph.local.results.history import Journal, View
from pipemorph.wire import (
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


def show(stream: io.StringIO, view: View, samples: list[IterationSample], **kind: Any) -> str:
    journal = Journal(view=view, _unseen=samples)
    progress = Progress(stream, kind.get("job", job()), journal, clock=lambda: 0.0)
    progress.update()
    progress.close()
    return stream.getvalue()


def test_a_plain_line_has_it_all() -> None:
    links = (LinkState(0, Health.SLOW, delay=0.0301),)
    doubtful = LinkState(0, Health.SLOW, delay=0.0, in_doubt=True)
    assert links_phrase((doubtful,)) == "in doubt: link 0"
    assert links_phrase((doubtful, *links)) == "slow link 0 +30 ms"
    shown = show(io.StringIO(), View(links=links), [sample(11, plan_version=3)])
    assert shown == (
        "iteration 11 of 40 (30%, 42.0 s left)  loss 2.2500  1.500 s/it  slow link 0 +30 ms"
        "  plan v3  bubble 12%\n"
    )


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_shown_and_told_once(loss: float) -> None:
    samples = [sample(i).model_copy(update={"loss": loss if i > 4 else 1.0}) for i in range(3, 9)]
    shown = show(io.StringIO(), View(), samples)
    assert shown.count(f"iteration 5: the loss is {loss}; the job goes on\n") == 1
    assert f"  loss {loss}  " in shown
    (sent,) = {sample.model_dump(mode="json")["loss"] for sample in samples[2:]}
    assert sent == {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(loss)]
    back = IterationSample.model_validate_json(samples[2].body())
    assert back.diverged and str(back.loss) == str(loss) and not samples[0].diverged


FORGED = "a\x1b[2J\x1b]0;owned\x07\r\ncompleted: 12 of 12\nplan v9\u202e\u2066\x9b31m\x85b\u2028c"


def test_what_ranks_and_reports_say_is_one_line_without_control(caplog: Any) -> None:
    decision = Decision(at=1.0, iteration=5, kind="adapt", reason="x", line=FORGED, plan_version=1)
    event = replace(HAPPENED, text=FORGED)
    for view in (View(message=FORGED), View(events=(event,)), View(decisions=(decision,))):
        (line,) = show(io.StringIO(), view, []).removesuffix("\n").split("\n")
        assert line == "a [2J ]0;owned completed: 12 of 12 plan v9 31m b c"
    stream = io.StringIO()
    progress = Progress(stream, job(), Journal())
    with collected_logs(progress):
        logging.getLogger("pipemorph.x").warning("says %s", FORGED)
    progress.note(f"its last lines:\n  {FORGED.splitlines()[0]}\r x\u2029y")
    logged, head, last = stream.getvalue().removesuffix("\n").split("\n")
    assert logged.startswith("pipemorph.x: says a [2J") and logged.endswith(" b c")
    assert (head, last) == ("its last lines:", "  a [2J ]0;owned   x y")


def test_the_time_left_is_that_of_the_newest_iterations() -> None:
    """Of their median: a single late one says little of the next ones."""
    taken = [9.0] * 28 + [1.0, 1.0, 20.0, 1.0, 1.0]
    samples = [sample(i).model_copy(update={"seconds": each}) for i, each in enumerate(taken)]
    assert " (82%, 7.0 s left) " in show(io.StringIO(), View(), samples)


def test_the_last_iteration_leaves_no_time() -> None:
    assert show(io.StringIO(), View(), [sample(39)]).startswith("iteration 39 of 40 (100%)  loss")


def test_plain_lines_of_a_fast_job_are_thinned_but_the_last_is_there() -> None:
    journal, stream, now = Journal(), io.StringIO(), 0.0
    progress = Progress(stream, job(), journal, clock=lambda: now)
    for index in range(40):
        journal._unseen.append(sample(index))
        now = index * 0.1
        progress.update()
    progress.close()
    lines = stream.getvalue().splitlines()
    assert len(lines) <= 10
    assert lines[0].startswith("iteration 0 ") and lines[-1].startswith("iteration 39 ")


def test_a_terminal_has_one_live_line_and_events_above_it() -> None:
    decision = Decision(
        at=1.0,
        iteration=5,
        kind="adapt",
        reason="link 0 is slow; and more",
        line="plan v1: link 0 is slow",
        plan_version=1,
    )
    view = View(decisions=(decision,), adaptations=(record(),))
    stream = Terminal()
    journal = Journal(_unseen=[sample(4)])
    progress = Progress(stream, job(), journal)
    progress.update()
    journal.view = view
    progress.update()
    progress.update()
    progress.close()
    shown = stream.getvalue()
    assert shown.count("plan v1: link 0 is slow\n") == 1
    assert shown.count("plan v1: in effect since iteration 6\n") == 1
    assert shown.count("\n") == 3
    assert "\r\x1b[2Kplan v1: link" in shown, "the live line is erased before an event"


def test_a_fallback_is_told_once_and_stays_on_the_line() -> None:
    view = View(rails=RAILS, transports=TRANSPORTS, events=(HAPPENED,))
    stream = io.StringIO()
    progress = Progress(stream, job(), Journal(view=view, _unseen=[sample(4)]), clock=lambda: 0.0)
    progress.update()
    progress.update()
    progress.close()
    happened, line = stream.getvalue().splitlines()
    assert happened == HAPPENED.text
    assert "  link 2 fell back to tcp, 1 sick RDMA port  plan v0  bubble" in line


@pytest.mark.parametrize(
    ("error", "ends"),
    [(errno.EPIPE, True), (errno.ENOSPC, False), (errno.EIO, False), (errno.EDQUOT, False)],
)
def test_an_output_that_nobody_reads_ends_the_run_and_a_full_one_is_told_once(
    error: int, ends: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(error, os.strerror(error))

    stopped: list[bool] = []
    progress = Progress(Full(), job(), Journal(), on_closed=lambda: stopped.append(True))
    progress.note("one")
    progress.note("two")
    assert stopped == [True] * ends
    said = f"pipemorph run: standard output cannot be written: {os.strerror(error)}; "
    assert capsys.readouterr().err == ("" if ends else f"{said}the job goes on without it\n")


def test_what_fails_beside_the_job_is_told_once_and_ends_nothing() -> None:
    stream = io.StringIO()
    progress = Progress(stream, job(), Journal())
    for error in (OSError(24, "Too many open files"), KeyError("x"), OSError(24, "Too many open")):
        for _ in range(3):
            progress.attempt("nothing is shown", lambda error=error: (_ for _ in ()).throw(error))
    assert stream.getvalue().splitlines() == [
        "nothing is shown: OSError(24, 'Too many open files')",
        "nothing is shown: KeyError('x')",
        "nothing is shown: OSError(24, 'Too many open')",
    ]


def test_nothing_is_said_of_rails_that_are_not_there() -> None:
    assert rails_phrase(RailsView(), TransportsView()) == ""
    many = tuple(replace(FALLEN, link=i) for i in range(5))
    assert rails_phrase(RailsView(), TransportsView(fallen=many)) == (
        "link 0 fell back to tcp, link 1 fell back to tcp, link 2 fell back to tcp, "
        "2 more fell back"
    )


def test_the_headline_counts_each_dimension_of_the_mesh_that_has_one() -> None:
    parallelism = job().spec.parallelism.model_copy(update={"tensor": 4})
    spec = job().spec.model_copy(update={"parallelism": parallelism})
    assert ", tensor 4, " in headline(job().model_copy(update={"spec": spec}))
    assert not {"shard", "context", "tensor"} & set(headline(job()).split())


def test_emulation_is_never_silent() -> None:
    assert "EMULATED" in headline(emulated())
    assert "256 KB in place of 16 MB" in headline(emulated())
    assert show(io.StringIO(), View(), [sample(0)], job=emulated()).startswith("EMULATED ")
    assert "EMULATED" not in headline(job())


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
    assert links_phrase(links) == phrase


def test_a_slow_stage_is_shown_with_the_layers_it_should_have() -> None:
    slow = Straggler(stage=1, column=3, seconds=0.015, usual=0.01)
    found = StragglersView(known=True, count=2, slowest=(slow,), paces=(0.01,) * 4)
    assert stragglers_phrase(StragglersView(known=True), 16) == ""
    assert stragglers_phrase(found) == "slow stage 1 x1.5 and 1 more"
    assert stragglers_phrase(found, 16) == "slow stage 1 x1.5 (-17% with 3 layers) and 1 more"


def test_a_terminal_gets_characters_of_its_encoding() -> None:
    class Ascii(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    written = io.BytesIO()
    stream = Ascii(written, encoding="ascii")
    progress = Progress(stream, job(), Journal(_unseen=[sample(4)]))
    progress.update()
    progress.note("stage 1 has 3 \u2192 2 layers")
    progress.close()
    assert "stage 1 has 3 ? 2 layers" in written.getvalue().decode("ascii")
