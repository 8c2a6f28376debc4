"""``status.json`` of a run that trains, and what ``explain`` and ``top`` read of folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until
from watched_jobs import watched

from pipemorph.cli import main
from pipemorph.local.results import status_file
from pipemorph.local.results.result_folder import ResultFolder
from pipemorph.local.results.status_file import StatusFile
from pipemorph.views.live_page.page_builder import WatchedJob


def test_a_run_is_shown_while_it_trains_and_after_its_host_was_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with ResultFolder.claim_folder(out, force=False) as folder:
        with StatusFile(folder, lambda: watched(4, 8, "slow")[0]):
            until(folder.status.exists, "no status")
        assert main(["explain", str(out)]) == 0
        explained = capsys.readouterr().out
        assert main(["top", str(out)]) == 0
        shown = capsys.readouterr().out
        status = folder.status.read_text()
    assert " is Running; 4 stages" in explained and " since iteration 1" in explained
    assert shown.splitlines()[1].split()[1:3] == ["job-of-4", "Running"]
    assert shown.endswith(explained)
    # The lock is free, and there is no report: the host was killed.
    folder.status.write_text(status)
    assert main(["explain", str(out)]) == 0
    explained = capsys.readouterr().out
    assert " is Failed (EndedWithoutReport: its host has ended" in explained
    assert "start the job again" not in explained


def test_an_error_is_logged_once_and_the_template_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(status_file, "STATUS_SECONDS", 0.001)
    calls = []

    def collect() -> WatchedJob:
        calls.append(1)
        if len(calls) < 4:
            raise TimeoutError
        return replace(known, job=known.job.model_copy(update={"spec": spec}))

    known = watched(4, 8, "slow")[0]
    pod = {"containers": [{"name": "trainer", "env": [{"name": "KEY", "value": "secret"}]}]}
    spec = known.job.spec.model_copy(update={"template": {"spec": pod}})
    with ResultFolder.claim_folder(tmp_path, force=True) as folder:
        with StatusFile(folder, collect):
            until(folder.status.exists, "no status")
        assert "secret" not in folder.status.read_text()
    assert caplog.messages == ["status.json is not written: TimeoutError()"]


def test_runs_of_a_folder_are_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ResultFolder.claim_folder(tmp_path / "first", force=False) as folder:
        with StatusFile(folder, lambda: watched(4, 8)[0]):
            until(folder.status.exists, "no status")
        (tmp_path / "second").mkdir()
        (tmp_path / "second/report.json").write_text("[]")
        (tmp_path / "none").mkdir()
        assert main(["top", str(tmp_path)]) == 0
    heading, row, note = capsys.readouterr().out.splitlines()
    assert (heading.split()[0], row.split()[:2]) == ("NAME", ["first", "Running"])
    assert note.startswith("! second: kind: is ") and "expected a run's report" in note
    assert main(["top", str(tmp_path / "none")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "has neither report.json nor status.json" in line
