"""How many files a reader has to open to follow a report until it is a directive."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from plant_support import Plant, settle, spec

import pipemorph
from pipemorph.control import JobController
from pipemorph.wire import LinkHealthReport

ROOT = Path(pipemorph.__file__).parent
MOST_FILES = 25


def test_a_report_becomes_a_directive_in_few_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the host, without sockets: parsed, observed, decided on, planned for, issued, encoded."""
    taken, files, walk = JobController.report, set[str](), set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and (path := Path(frame.f_code.co_filename)).is_relative_to(ROOT):
            files.add(str(path.relative_to(ROOT)))

    def report(self: JobController, sent: LinkHealthReport, now: float) -> Any:
        body, before = sent.model_dump_json(), sys.getprofile()
        files.clear()
        sys.setprofile(note)
        try:
            answer = taken(self, LinkHealthReport.model_validate_json(body), now)
            settle(self, now)
            if (directive := self.directive()) is not None:
                directive.model_dump_json()
        finally:
            sys.setprofile(before)
        if directive is not None and not walk:
            walk.update(files)
        return answer

    monkeypatch.setattr(JobController, "report", report)
    plant = Plant(spec(4, 24))
    plant.run(6)
    plant.delays[1] = 0.040
    plant.run(6)
    assert {"control/controller.py", "control/decision.py", "planning/planner.py"} <= walk
    assert len(walk) <= MOST_FILES, sorted(walk)
