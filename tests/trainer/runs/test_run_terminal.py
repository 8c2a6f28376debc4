"""The live page of ``pipemorph run`` on real terminals of two sizes, with real ranks. Emulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from local_runs import command, manifest
from terminal import Screen, Terminal
from test_run import DELAY_MS, SLOW_FROM, SLOW_LINK

ITERATIONS = 24
SECONDS = 140.0
NAMED = rf"link {SLOW_LINK} \(stage {SLOW_LINK} to {SLOW_LINK + 1}\)"
SLOW = rf"^{NAMED} +\+\d+ ms (forward|backward) .*\d\d:\d\d:\d\d"
TITLE = "emulated  {}  4 stages  EMULATED"


def has(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.MULTILINE) is not None


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rows", "columns", "environment"), [(24, 80, {"NO_COLOR": "1"}), (50, 200, {})]
)
def test_who_looks_sees_which_link_is_slow_what_was_done_and_what_it_saved(
    tmp_path: Path, rows: int, columns: int, environment: dict[str, str]
) -> None:
    fault = {
        "link": SLOW_LINK, "fromIteration": SLOW_FROM, "toIteration": ITERATIONS,
        "delayMs": DELAY_MS,
    }  # fmt: skip
    trainer = {"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS}
    run = command(tmp_path, manifest(faults=[fault], trainer=trainer))
    with Terminal(run, rows, columns, environment) as terminal:
        screen = terminal.screen
        terminal.until(lambda shown: "the ranks start" in shown, SECONDS)
        # The page as it is between two iterations, whole: its last line is there.
        told = terminal.until(
            lambda shown: has(SLOW, shown) and "worth      the plan changes saved" in shown
            and has(r"^to do ", shown), SECONDS,
        )  # fmt: skip
        for expected in (
            rf"^{TITLE.format('Running')}$",
            rf"^iteration  \d+ of {ITERATIONS} \(\d+%\), [\d.]+ s left$",
            r"^speed      [\d.]+ s per iteration, stages idle \d+% of it",
            r"^plan       v\d+ since iteration \d+: ",
            r"^gain       promised \d+%, measured ",
            r"^links      \d+ slow links?,?( the first)? since \d\d:\d\d:\d\d UTC",
            r"^to do      check the network between the hosts of the slow link",
        ):
            assert has(expected, told), f"no {expected} in\n{told}"
        assert not screen.cursor_shown
        status = terminal.ended(SECONDS)
    assert status == 0, screen
    whole = "\n".join(screen.whole)
    assert whole.startswith(
        "emulated: 4 stages, 12 microbatches, 24 iterations, policy pipemorph; E"
    )
    # What is left for whoever reads it later, with whole names of files, may be longer.
    last = next(i for i, line in enumerate(screen.whole) if line.startswith("completed"))
    page = screen.whole[:last]
    assert [line for line in screen.wrapped if line in page] == [], "longer than it is wide"
    # Above the page, once each: what happened. The page itself is there once, as it was last.
    assert len(re.findall(r"^plan v1: ", whole, re.MULTILINE)) >= 1
    assert whole.count("plan v1: in effect since iteration") == 1
    assert whole.count(TITLE.format("Complete")) == 1 and whole.count(TITLE.format("Running")) == 0
    assert whole.count("worth  ") == 1
    assert has(SLOW, str(screen))
    assert has(r"^completed \(EMULATED\): 24 of 24 iterations, ", str(screen))
    assert screen.cursor_shown
    assert bool(screen.colours) is ("NO_COLOR" not in environment)


def test_the_screen_of_the_tests() -> None:
    screen = Screen(3, 5)
    for sent in (b"ab\r\ncd\x1b[", b"1A\r\x1b[2Kx\x1b[1;31my\x1b[0m\r\n\xe2\x96", b"\x81\x1b[?25l"):
        screen.feed(sent)
    assert (str(screen), screen.colours, screen.cursor_shown) == ("xy\n▁d", {31}, False)
    screen.feed(b"\r\nabcdefg\r\nz")
    assert (screen.scrolled, str(screen)) == (["xy", "▁d"], "abcde\nfg\nz")
    assert screen.wrapped == ["abcde"]
    with pytest.raises(ValueError, match="no such sequence: ESC\\[3J"):
        screen.feed(b"\x1b[3J")
