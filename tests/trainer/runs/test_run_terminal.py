"""The live line of ``pipemorph run`` on real terminals of two sizes, with real ranks. Emulated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from local_runs import command, manifest
from terminal import Terminal
from test_run import DELAY_MS, SLOW_FROM, SLOW_LINK

ITERATIONS = 24
SECONDS = 140.0


def has(pattern: str, text: str) -> bool:
    return re.search(pattern, text, re.MULTILINE) is not None


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rows", "columns"), [(24, 80), (50, 200)])
def test_the_live_line_shows_a_slow_link_below_what_happened(
    tmp_path: Path, rows: int, columns: int
) -> None:
    fault = {
        "link": SLOW_LINK, "fromIteration": SLOW_FROM, "toIteration": ITERATIONS,
        "delayMs": DELAY_MS,
    }  # fmt: skip
    trainer = {"module": "pipemorph_trainer.examples.emulated", "iterations": ITERATIONS}
    run = command(tmp_path, manifest(faults=[fault], trainer=trainer))
    with Terminal(run, rows, columns, {}) as terminal:
        screen = terminal.screen
        live = rf"^EMULATED  iteration \d+ of {ITERATIONS} .* slow link {SLOW_LINK} \+\d+"
        terminal.until(lambda shown: has(live, shown), SECONDS)
        status = terminal.ended(SECONDS)
    assert status == 0, screen
    whole = "\n".join(screen.whole)
    assert whole.startswith(
        "emulated: 4 stages, 12 microbatches, 24 iterations, policy pipemorph; E"
    )
    assert len(re.findall(r"^plan v1: ", whole, re.MULTILINE)) >= 1
    assert whole.count("plan v1: in effect since iteration") == 1
    # The live line is replaced, and its last text remains.
    assert len(re.findall(r"^EMULATED  iteration \d+ of ", whole, re.MULTILINE)) == 1
    assert has(r"^completed \(EMULATED\): 24 of 24 iterations, ", str(screen))
