"""``pipemorph.client`` on this machine: real runs of ranks that follow a script."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_support import DEADLINE, LocalRun
from notebooks import CLIENT_NOTEBOOK, run_cells
from prepared_processes import PreparedProcess
from waiting import until

from pipemorph.client import (
    JobClient,
    JobDeadlineError,
    JobFailedError,
    JobSnapshot,
    LocalBackend,
)
from pipemorph.client import local_backend as backend
from pipemorph.errors import InputError, ObjectNotFoundError
from pipemorph.spec.job_spec import PipeMorphJob

Submit = Callable[..., str]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobClient]:
    """Client of a folder, with the ranks' module in the current one; ends all runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(backend, "Popen", PreparedProcess)
    made = JobClient(LocalBackend("runs"))
    yield made
    for each in (tmp_path / "runs").glob(f"*/{backend.PROCESS}"):
        made.delete_job(each.parent.name)


@pytest.fixture
def submit(client: JobClient, tmp_path: Path) -> Submit:
    """Submits a job of fake ranks, by default as a mapping; returns its name."""

    def start(others: str = "finish", *, form: Callable[..., Any] = dict, **spec: Any) -> str:
        manifest = LocalRun(tmp_path, {}, others, stages=2, spec=spec).manifest()
        return client.submit_job(form(manifest))

    return start


def write_manifest(job: dict[str, Any]) -> Path:
    path = Path("a job.json")
    path.write_text(json.dumps(job))
    return path


@pytest.mark.parametrize("form", [dict, PipeMorphJob.model_validate, write_manifest])
def test_a_job_is_submitted_awaited_and_deleted(
    client: JobClient, submit: Submit, form: Callable[..., Any]
) -> None:
    name = submit(form=form)
    assert name == "fake"
    states = [job.state for job in client.watch_job(name, timeout=DEADLINE, polling_interval=0.02)]
    assert states[-1] == "Complete" and states[0] != "Complete"
    job = client.wait_for_job_status(name)
    assert (job.name, job.iterations, job.is_over) == ("fake", 5, True)
    assert job.conditions["Complete"].reason == "AllRanksFinished"
    assert job.explain().splitlines()[0].split()[:3] == ["outcome", "fake", "is"]
    assert [each.name for each in client.list_jobs()] == ["fake"]
    root = Path("runs/fake")
    assert (root / "timeline.json").exists()
    for secret in (backend.MANIFEST, backend.OUTPUT):
        assert (root / secret).stat().st_mode & 0o077 == 0
    (root / "notes.txt").write_text("of the user")
    client.delete_job(name)
    assert [each.name for each in root.iterdir()] == ["notes.txt"]
    assert client.list_jobs() == []
    with pytest.raises(ObjectNotFoundError, match="fake: no job of this name in"):
        client.get_job(name)


def test_status_and_logs_of_a_running_job_in_an_event_loop(
    client: JobClient, submit: Submit, tmp_path: Path
) -> None:
    """The cells of a notebook run within an event loop."""
    name = submit("hang")
    job = client.wait_for_job_status(name, {"Starting"}, timeout=DEADLINE)
    assert not job.is_over
    meeting = tmp_path / "meeting" / "0"
    until(lambda: len(list(meeting.glob("rank-*"))) == 2, "both ranks")

    async def read_in_cell() -> JobSnapshot:
        return client.get_job(name)

    def has_report() -> bool:
        return "LinksHealthy" in asyncio.run(read_in_cell()).conditions

    until(has_report, "the status of the live page")
    assert list(client.get_job_logs(name, rank=1)) == ["rank 1 is here"]
    with pytest.raises(InputError, match="rank: is 2; fake has 2 ranks, numbered from 0"):
        client.get_job_logs(name, rank=2)
    with pytest.raises(JobDeadlineError) as late:
        client.wait_for_job_status(name, timeout=0.0)
    assert str(late.value).startswith(
        "fake: is Starting after 0 s; expected Complete; no iteration"
    )
    assert isinstance(late.value, TimeoutError) and late.value.snapshot.state == "Starting"
    with pytest.raises(InputError, match="has a job of this name; delete that, or choose"):
        submit("hang")
    process = json.loads(Path("runs/fake", backend.PROCESS).read_text())["id"]
    lines = client.get_job_logs(name, follow=True)
    assert next(lines) == "rank 0 is here"
    client.delete_job(name)
    assert list(lines) == []
    assert not Path("runs/fake").exists() and not Path(f"/proc/{process}/exe").exists()


def test_a_job_that_fails_is_an_error_with_its_reason(client: JobClient, submit: Submit) -> None:
    name = submit("die 3", failurePolicy={"maxRestarts": 0})
    with pytest.raises(
        JobFailedError, match=r"is Failed after .* expected Complete; Failed is True"
    ):
        client.wait_for_job_status(name, timeout=DEADLINE)
    assert "the last thing I did" in list(client.get_job_logs(name, rank=1, follow=True))


def test_a_run_that_is_killed_has_failed(client: JobClient, submit: Submit, tmp_path: Path) -> None:
    name = submit("hang")
    until(lambda: len(list((tmp_path / "meeting/0").glob("rank-*"))) == 2, "both ranks")
    process = json.loads(Path("runs/fake", backend.PROCESS).read_text())["id"]
    os.kill(process, signal.SIGKILL)
    with pytest.raises(JobFailedError) as failed:
        client.wait_for_job_status(name, timeout=DEADLINE)
    assert failed.value.snapshot.conditions["Failed"].reason == "EndedWithoutReport"
    # A process of another job may have its id by now.
    started = json.loads(Path("runs/fake", backend.PROCESS).read_text())
    Path("runs/fake", backend.PROCESS).write_text(json.dumps(started | {"id": os.getpid()}))
    client.delete_job(name)
    assert client.list_jobs() == []


def test_a_run_of_another_machine_is_refused(client: JobClient, submit: Submit) -> None:
    name = submit()
    client.wait_for_job_status(name, timeout=DEADLINE)
    file = Path("runs/fake", backend.PROCESS)
    file.write_text(json.dumps(json.loads(file.read_text()) | {"machine": "elsewhere"}))
    assert client.get_job(name).state == "Complete"
    Path("runs/fake/report.json").unlink()
    with pytest.raises(InputError, match="its job runs on elsewhere; read it there"):
        client.get_job(name)
    file.unlink()
    Path("runs/fake", backend.OUTPUT).unlink()
    assert client.get_job(name).state == "Starting"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"parallelism": {"stages": "two"}}, 'job: spec.parallelism.stages: is "two"; expected an'),
        ({"trainer": {"module": "absent", "iterations": 1}}, "no module absent"),
        ({"suspend": True}, "fake: spec.suspend is true"),
    ],
)
def test_invalid_jobs_start_nothing(
    client: JobClient, submit: Submit, change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(InputError, match=expected):
        submit(**change)
    assert client.list_jobs() == []


def test_invalid_calls_are_refused(client: JobClient, submit: Submit) -> None:
    with pytest.raises(InputError, match=r"absent.yaml: cannot be read: No such file"):
        client.submit_job("absent.yaml")
    with pytest.raises(InputError, match="job: is no plain data: Object of type set"):
        client.submit_job({"spec": {1}})
    Path("list.yaml").write_text("[1]\n")
    with pytest.raises(
        InputError, match=r"list.yaml: is \[1\]; expected the fields of a PipeMorph"
    ):
        client.submit_job(Path("list.yaml"))
    with pytest.raises(InputError, match=r"\.\./x: no job of this name"):
        client.get_job("../x")
    with pytest.raises(
        InputError, match="status: has Done; expected states or conditions: Pending"
    ):
        client.wait_for_job_status("fake", {"Done"})
    with pytest.raises(InputError, match="status: is empty"):
        client.wait_for_job_status("fake", ())
    with pytest.raises(InputError, match="rank: is -1; expected at least 0"):
        client.get_job_logs("fake", rank=-1)


def test_the_notebook_runs_a_job_on_this_machine(
    client: JobClient, capsys: pytest.CaptureFixture[str]
) -> None:
    """Emulated stages run; whether the plan changes depends on the load of the machine."""
    names: dict[str, Any] = {}
    assert run_cells(CLIENT_NOTEBOOK, names) == 6
    shown = capsys.readouterr().out
    assert "<job notebook: Starting, iteration 0 of 30, slow links: none" in shown
    assert "outcome  notebook is Complete" in shown and "30 of 30 iterations" in shown
    assert "changes of plan saved" in shown
    assert names["finished"].conditions["Complete"].status == "True"
    assert not Path("runs/notebook").exists()
