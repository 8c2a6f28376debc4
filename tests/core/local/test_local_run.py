"""``pipemorph run`` as its user meets it: how a run ends, and that no trace of it remains."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from local_support import DEADLINE, MARK, LocalRun
from waiting import until

from pipemorph.cli import main
from pipemorph.local.drain_requests import DrainRequests
from pipemorph.local.processes import memory_folder
from pipemorph.local.processes.hang_detector import HangDetector
from pipemorph.local.processes.rank_log import RankFileLog
from pipemorph.local.processes.ranks import RankProcess, RankSet, Reaper, _has_live_members
from pipemorph.local.progress import ProgressDisplay
from pipemorph.local.results.journal import RunJournal
from pipemorph.local.run import _LocalRankHost, run_job
from pipemorph.local.service import ControlService
from pipemorph.spec.mesh import Coordinate, MeshShape

Runs = Callable[..., LocalRun]
Refused = Callable[..., tuple[int, str]]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    """Makes runs; whatever they leave is killed at the end."""
    made: list[LocalRun] = []

    def make(ranks: dict[int, str] | None = None, **options: Any) -> LocalRun:
        made.append(LocalRun(tmp_path, ranks or {}, **options))
        return made[-1]

    yield make
    for run in made:
        if run.host is not None:
            run.host.kill()
            run.host.communicate(timeout=DEADLINE)
        for pid in run.processes():
            with contextlib.suppress(ProcessLookupError):  # The process was exiting.
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> Refused:
    """Calls the command in this process, for what starts no rank: its status and output."""

    def call(run: LocalRun, *extra: str) -> tuple[int, str]:
        said = io.StringIO()
        monkeypatch.chdir(run.folder)
        for name, value in run.env.items():
            monkeypatch.setenv(name, value)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                status = main(run.command(*extra)[3:])
            except SystemExit as ends:
                status = ends.code if isinstance(ends.code, int) else 1
        return status, said.getvalue()

    return call


def in_process(run: LocalRun, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Runs the job in this process: its status and output."""
    monkeypatch.chdir(run.folder)
    monkeypatch.setenv(MARK, run.mark)
    monkeypatch.setattr(tempfile, "tempdir", str(run.folder / "tmp"))
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", run.folder / "tmp")
    stream = io.StringIO()
    return run_job("job.yaml", Path("out"), stream=stream), stream.getvalue()


def ended(run: LocalRun) -> tuple[int, str]:
    output, _ = run.host.communicate(timeout=DEADLINE)
    return run.host.returncode, output


def assert_clean(run: LocalRun) -> None:
    assert run.processes() == []
    assert run.leftovers() == []


def grace_of(seconds: Any) -> dict[str, Any]:
    """Part of a spec: seconds that a rank may take to stop."""
    pod = {"containers": [{"name": "trainer"}], "terminationGracePeriodSeconds": seconds}
    return {"template": {"spec": pod}}


def test_a_completed_job(runs: Runs) -> None:
    run = runs(others="finish", executed=True)
    status, output = run.finish()
    assert status == 0, output
    assert "completed" in output
    report = run.report()
    assert report["completed"] is True
    assert report["iterations"] == [] and report["adaptations"] == []
    kinds = {each["type"]: each["reason"] for each in report["status"]["conditions"]}
    assert (kinds["Complete"], kinds["LinksHealthy"]) == ("AllRanksFinished", "NoReportsYet")
    assert report["status"]["training"]["state"] == "starting"
    assert [attempt["end"] for attempt in report["attempts"]] == ["completed"]
    assert (run.out / "logs" / "rank-3.log").read_text() == "rank 3 is here\n"
    assert (run.out / "timeline.json").exists()
    assert_clean(run)


def test_the_word_of_a_rank_is_one_line_of_the_host(runs: Runs) -> None:
    run = runs({1: "note"}, others="finish", stages=2)
    status, output = run.finish()
    assert status == 0, output
    assert output.splitlines().count("it keeps [2J no state completed: 5 of 5") == 1


@pytest.mark.full
def test_a_command_runs_in_place_of_a_module(runs: Runs) -> None:
    run = runs(others="finish")
    trainer = run.manifest()["spec"]["trainer"]
    del trainer["module"]
    script = "import sys; print(sys.argv[1:]); import runpy; runpy.run_module('fake_rank')"
    trainer["command"] = ["python", "-c", script, "--lr", "3e-4 $HOME"]
    run.spec["trainer"] = trainer
    run.__post_init__()
    status, output = run.finish()
    assert status == 0, output
    log = (run.out / "logs" / "rank-3.log").read_text()
    assert log == "['--lr', '3e-4 $HOME']\nrank 3 is here\n"
    assert_clean(run)


@pytest.mark.full
def test_a_command_is_looked_up_in_the_path_of_the_rank(runs: Runs) -> None:
    run = runs(others="finish", stages=2)
    trainer = run.manifest()["spec"]["trainer"]
    del trainer["module"]
    run.spec["trainer"] = trainer | {"command": ["env", "A=1", sys.executable, "-m", "fake_rank"]}
    run.__post_init__()
    status, output = run.finish()
    assert status == 0, output
    template = {
        "spec": {"containers": [{"name": "trainer", "env": [{"name": "PATH", "value": "/"}]}]}
    }
    run.spec["template"] = template
    run.__post_init__()
    status, output = run.finish("--force")
    assert status == 1, output
    assert "cannot run env: No such file or directory" in output and "Traceback" not in output


def test_the_environment_of_a_rank(runs: Runs) -> None:
    template = {
        "spec": {
            "containers": [
                {"name": "sidecar", "env": [{"name": "NOT_OURS", "value": "1"}]},
                {
                    "name": "trainer",
                    "env": [
                        {"name": "DATA", "value": "/data"},
                        {"name": "INDEX", "value": "$(DATA)/index"},
                        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
                    ],
                },
            ]
        }
    }
    run = runs(
        others="finish",
        spec={"template": template},
        env={"PET_RANK": "7", "MASTER_ADDR": "elsewhere", "PIPEMORPH_INGEST_URL": "http://x"},
    )
    run.spec["trainer"] = run.manifest()["spec"]["trainer"] | {"threads": 2}
    run.__post_init__()
    status, output = run.finish()
    assert status == 0, output
    assert "values need a cluster: NODE" in output
    ranks = [run.seen_by(rank) for rank in range(4)]
    for rank, seen in enumerate(ranks):
        env = seen["env"]
        assert (env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) == (str(rank), str(rank), "4")
        assert env["MASTER_ADDR"] == "127.0.0.1"
        assert env["PIPEMORPH_INGEST_URL"].startswith("http://127.0.0.1:")
        assert "PET_RANK" not in env and "NOT_OURS" not in env and "NODE" not in env
        assert (env["DATA"], env["INDEX"]) == ("/data", "/data/index")
        assert env["OMP_NUM_THREADS"] == "2"
        assert Path(env["PIPEMORPH_TRACE_DIR"]) == (run.out / "trace").resolve()
        assert seen["folder"] == "0o700"
        assert {mode for mode, _ in seen["files"].values()} == {"0o600"}
        assert seen["cwd"] == str(run.folder)
    assert len({seen["files"]["PIPEMORPH_SECRET_FILE"][1] for seen in ranks}) == 1
    assert len(bytes.fromhex(ranks[0]["files"]["PIPEMORPH_SECRET_FILE"][1])) >= 32


@pytest.mark.parametrize(
    ("action", "outcome", "last_line"),
    [
        pytest.param("die 3", "exited with code 3", "the last thing I did", marks=pytest.mark.full),
        ("crash", "was killed by SIGKILL", "about to crash"),
    ],
)
def test_a_rank_that_dies_ends_the_run(
    runs: Runs, action: str, outcome: str, last_line: str
) -> None:
    run = runs({2: action}, others="wait")
    status, output = run.finish()
    assert status == 1
    assert f"rank 2 (stage 2) {outcome}" in output
    assert last_line in output
    for peer in (0, 1, 3):
        assert f"stage {peer} was waiting for F of microbatch 3 of iteration 7" in output
    report = run.report()
    assert report["completed"] is False
    assert report["reason"] == f"rank 2 (stage 2) {outcome}"
    assert_clean(run)


@pytest.mark.full
@pytest.mark.parametrize(("action", "done"), [("finish 3", 3), ("leave", 0)])
def test_a_run_that_stops_early_is_not_complete(runs: Runs, action: str, done: int) -> None:
    run = runs(others=action, stages=2, spec={"failurePolicy": {"maxRestarts": 2}})
    status, output = run.finish()
    assert status == 1, output
    why = f"every rank finished after {done} of 5 iterations (spec.trainer.iterations); "
    assert output.count(why) == 1, output
    report = run.report()
    assert (report["completed"], report["end"]) == (False, "failed")
    assert report["reason"].startswith(why) and len(report["attempts"]) == 1
    assert_clean(run)


# At once, and only after the peers have had their second to say what they miss.
@pytest.mark.full
@pytest.mark.parametrize("seconds", [0, 1.5])
def test_the_rank_that_failed_is_named_and_not_the_one_that_lost_it(
    runs: Runs, seconds: float
) -> None:
    run = runs({1: f"after 2 {seconds}", 2: "lose 1"}, stages=3)
    status, output = run.finish()
    assert status == 1
    assert "rank 1 (stage 1) exited with code 3" in output, output
    assert "ValueError: what really happened" in output
    waits = output.split("what the ranks were waiting for:")[1]
    assert "rank 2 (stage 2) waited 0.0 s for F of microbatch 3 of iteration 7" in waits
    assert run.report()["reason"] == "rank 1 (stage 1) exited with code 3"
    assert_clean(run)


@pytest.mark.full
def test_results_that_cannot_be_written(runs: Runs) -> None:
    run = runs(others="finish")
    run.out.mkdir()
    (run.out / "report.json.partial").symlink_to("/dev/full")
    status, output = run.finish()
    assert status == 1
    assert "completed: 5 of 5 iterations (none reported)" in output
    assert "pipemorph run: out: No space left on device; results are missing" in output
    assert "Traceback" not in output
    assert_clean(run)


@pytest.mark.parametrize(
    ("action", "executed"),
    [
        pytest.param("parent", False, marks=pytest.mark.full),
        ("parent session", False),
        pytest.param("parent group", False, marks=pytest.mark.full),
        pytest.param("daemon", False, marks=pytest.mark.full),
        pytest.param("daemon", True, marks=pytest.mark.full),
    ],
)
def test_children_of_a_rank_end_with_it(runs: Runs, action: str, executed: bool) -> None:
    run = runs({1: action, 2: "die 1"}, stages=3, executed=executed)
    if executed:
        run.spec["trainer"] = run.manifest()["spec"]["trainer"] | {"preload": []}
        run.__post_init__()
    assert run.finish()[0] == 1
    assert_clean(run)


@pytest.mark.parametrize(
    "start",
    [
        "exec 2>&-",
        pytest.param("exec 0<&- 2>&-", marks=pytest.mark.full),
        pytest.param("trap '' CHLD", marks=pytest.mark.full),
        "exec >/dev/full",
    ],
)
def test_a_run_completes_however_its_streams_and_signals_were(runs: Runs, start: str) -> None:
    run = runs(others="finish", stages=2, executed=True)
    command = ["sh", "-c", f'{start}; exec "$@"', "sh", *run.command()]
    run.command = lambda *extra: command  # type: ignore[method-assign]
    status, output = run.finish()
    assert (status, run.report()["completed"]) == (0, True), output
    assert ("cannot be written: No space left" in output) is ("full" in start), output
    assert "Traceback" not in output
    assert_clean(run)


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (HangDetector, "finish_generation"),
        (_LocalRankHost, "agree_next_generation"),
        (_LocalRankHost, "start_ranks"),
        (RankProcess, "describe_exit"),
        (ControlService, "list_adaptations"),
    ],
)
def test_an_error_of_the_host_ends_the_run_in_one_line_with_its_report(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, where: type, what: str
) -> None:
    run = runs({1: "die 3"}, stages=2, spec={"failurePolicy": {"maxRestarts": 1}})
    run.spec["trainer"] = run.manifest()["spec"]["trainer"] | {"preload": []}
    run.__post_init__()

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError("bookkeeping")

    monkeypatch.setattr(where, what, fails)
    status, output = in_process(run, monkeypatch)
    assert status == 1
    (said,) = [line for line in output.splitlines() if "bookkeeping" in line]
    log = run.out / "logs" / "host.log"
    assert said.startswith(
        "the host of the run failed: KeyError: 'bookkeeping' (test_local_run.py:"
    )
    assert said.endswith("; its traceback is in out/logs/host.log")
    assert "raise KeyError" in log.read_text() and "Traceback" not in output
    report = run.report()
    assert (report["end"], report["reason"]) == ("failed", said)
    assert {each["end"] for each in report["attempts"]} == {"failed"}
    assert_clean(run)


@pytest.mark.parametrize(
    ("where", "what", "says"),
    [
        (RunJournal, "find_first_iteration", "Too many open files"),
        (DrainRequests, "exchange_messages", "Too many open files"),
        (ProgressDisplay, "_show_view", "Too many open files"),
        (ControlService, "list_adaptations", "the control loop did not answer"),
    ],
)
def test_an_error_in_following_a_run_is_reported_and_ends_nothing(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, where: type, what: str, says: str
) -> None:
    run = runs(others="finish", stages=2, spec={"failurePolicy": {"maxRestarts": 1}})

    def fails(*_: Any, **__: Any) -> None:
        raise TimeoutError if where is ControlService else OSError(24, says)

    monkeypatch.setattr(where, what, fails)
    status, output = in_process(run, monkeypatch)
    assert status == 0, output
    assert output.count(says) == 1
    assert run.report()["completed"] is True


@pytest.mark.parametrize(
    ("files", "status"),
    [
        (10, 1),
        pytest.param(8, 1, marks=pytest.mark.full),
        pytest.param(20, 0, marks=pytest.mark.full),
    ],
)
def test_a_run_without_a_free_descriptor_ends_in_one_line_with_its_report(
    runs: Runs, files: int, status: int
) -> None:
    restarts = {"failurePolicy": {"maxRestarts": 1}}
    run = runs({0: "recover"}, others="recover", stages=2, executed=True, spec=restarts)
    command = ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh", *run.command()]
    run.command = lambda *extra: command  # type: ignore[method-assign]
    ended_with, output = run.finish()
    assert ended_with == status and "Traceback" not in output, output
    assert output.count("Too many open files") == status, output
    assert run.report()["completed"] is (status == 0)
    assert_clean(run)


@pytest.mark.parametrize("step", [86400.0, -86400.0])
def test_durations_are_true_though_the_clock_is_set(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, step: float
) -> None:
    spec = {"failurePolicy": {"maxRestarts": 1}}
    run = runs({0: "recover"}, others="recover", stages=2, spec=spec)
    real, steps = time.time, iter(range(1_000_000))
    monkeypatch.setattr(time, "time", lambda: real() + step * next(steps))
    status, output = in_process(run, monkeypatch)
    assert status == 0, output
    report = run.report()
    times = [report["started_at"]]
    for attempt, recovery in zip(report["attempts"], [*report["recoveries"], None], strict=True):
        times += [attempt["started_at"]] + ([recovery["lost_at"]] if recovery else [])
        times += [attempt["ended_at"]]
    assert times == sorted(times) and times[-1] - times[0] < 2 * DEADLINE


def test_logs_that_are_gone_when_a_rank_fails_end_nothing(runs: Runs) -> None:
    spec = {"failurePolicy": {"maxRestarts": 1}}
    run = runs({0: "recover 5 unlog"}, others="recover", stages=2, spec=spec)
    status, output = run.finish()
    assert status == 0, output
    assert re.search(r"logs/rank-[01].log cannot be read: No such file or directory", output)
    assert run.report()["completed"] is True
    assert_clean(run)


@pytest.mark.parametrize("force", [True, False])
def test_a_folder_that_a_run_uses_is_refused_also_with_force(
    runs: Runs, refused: Refused, force: bool
) -> None:
    run = runs(others="wait", stages=2)
    host = run.start()
    status, output = refused(run, *["--force"] * force)
    assert (status, output.count("\n")) == (2, 1), output
    assert f"--out out is used by another run (process {host.pid} of " in output
    assert (run.out / "logs" / "rank-0.log").exists()
    host.send_signal(signal.SIGINT)
    assert ended(run)[0] == 130
    assert not (run.out / ".lock").exists()


def test_leftovers_of_a_run_killed_with_all_its_processes_go_with_the_next(
    runs: Runs, refused: Refused
) -> None:
    restarts = {"failurePolicy": {"maxRestarts": 1}}
    run = runs(others="hang", stages=2, executed=True, spec=restarts)
    run.start()
    copies = Path(run.seen_by(0)["env"]["PIPEMORPH_KEPT_DIR"])
    before, pids = run.leftovers(), run.processes()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    ended(run)
    until(lambda: not run.processes(), "all gone")
    assert before and set(run.leftovers()) == set(before) and copies.exists()
    status, output = refused(run)
    assert (status, "holds an earlier run" in output) == (2, True)
    run.others = "finish"
    run.__post_init__()
    status, output = run.finish("--force")
    assert status == 0, output
    assert not copies.exists()
    assert_clean(run)


@pytest.mark.full
def test_children_of_a_rank_are_gone_when_its_ranks_are_killed(tmp_path: Path) -> None:
    """A process is not gone at once: this one has memory to give back."""
    large = "x = bytearray(b'x') * (300 << 20); print('there', flush=True); import time; "
    large += "time.sleep(300)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {large!r}])"
    reaper, log = Reaper(), tmp_path / "log"
    try:
        with RankSet(reaper, lambda rank, status: None) as ranks:
            position = MeshShape().find_coordinate(0)
            ranks.start_rank(position, [sys.executable, "-c", start], os.environ, RankFileLog(log))
            until(lambda: "there" in log.read_text(), "the rank's own process")
            ranks.kill_ranks()
            assert not _has_live_members({ranks.ranks[0].process.pid})
    finally:
        reaper.close()


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.full),
        pytest.param(signal.SIGHUP, marks=pytest.mark.full),
    ],
)
def test_an_interrupted_run_leaves_a_report_and_nothing_else(
    runs: Runs, number: signal.Signals
) -> None:
    run = runs(others="wait", spec={"checkpoint": {"directory": "ckpt", "every": 2}})
    saved = number is not signal.SIGHUP
    if saved:
        checkpoint = run.folder / "ckpt" / "iteration-00000002"
        checkpoint.mkdir(parents=True)
        (checkpoint / ".metadata").touch()
    host = run.start()
    host.send_signal(number)
    status, output = ended(run)
    assert status == 130, output
    assert f"{number.name}: stopping 4 ranks" in output
    assert "killed" not in output, "they stop by request"
    go_on = "to resume from the newest checkpoint in ckpt: pipemorph run job.yaml"
    assert (go_on in output) is saved, output
    assert run.report()["completed"] is False
    assert run.report()["end"] == "interrupted"
    assert_clean(run)


@pytest.mark.full
def test_a_second_ctrl_c_does_not_wait(runs: Runs) -> None:
    run = runs(others="stubborn", spec=grace_of(2 * round(DEADLINE)))
    host = run.start()
    assert host.stdout is not None
    host.send_signal(signal.SIGINT)
    said = ""
    while "stopping 4 ranks" not in said:
        said = host.stdout.readline()
        assert said, "the host ended before it said that it stops"
    host.send_signal(signal.SIGINT)
    output, _ = host.communicate(timeout=DEADLINE)  # Half of what one Ctrl-C gives them.
    assert host.returncode == 130
    assert "killed, as requested: rank 0 (stage 0), rank 1 (stage 1), " in output
    assert_clean(run)


@pytest.mark.full
def test_ctrl_c_at_a_terminal_reaches_the_host_alone(runs: Runs) -> None:
    """A terminal signals its whole foreground group; ranks must not be in it."""
    run = runs(others="wait")
    host = run.start()
    pids = [run.seen_by(rank)["pid"] for rank in range(4)]
    assert host.pid not in {os.getpgid(pid) for pid in pids}
    assert len({os.getsid(pid) for pid in pids}) == 4
    os.killpg(host.pid, signal.SIGINT)
    assert ended(run)[0] == 130
    assert_clean(run)


@pytest.mark.parametrize(
    "parent", ["parent session", pytest.param("parent", marks=pytest.mark.full)]
)
def test_ranks_and_secrets_go_when_the_host_is_killed(runs: Runs, parent: str) -> None:
    run = runs({1: parent, 2: "stubborn"}, executed=True)
    host = run.start()
    assert len(run.processes()) >= 6
    assert run.leftovers()
    host.kill()
    host.communicate(timeout=DEADLINE)
    until(lambda: not run.processes(), lambda: f"ranks gone, remaining: {run.processes()}")
    until(lambda: not run.leftovers(), lambda: f"secrets gone, remaining: {run.leftovers()}")


@pytest.mark.full
def test_ranks_go_with_the_host_even_without_its_warden(runs: Runs) -> None:
    """The kernel kills them: also where both are killed at once."""
    run = runs(others="stubborn", executed=True)
    host = run.start()
    ranks = {run.seen_by(rank)["pid"] for rank in range(4)}
    others = set(run.processes()) - ranks - {host.pid}
    assert len(others) == 2, "the reaper, and the process that forks ranks"
    for other in others:
        os.kill(other, signal.SIGKILL)
    host.kill()
    host.communicate(timeout=DEADLINE)
    until(lambda: not run.processes(), lambda: f"ranks gone, remaining: {run.processes()}")


def test_a_machine_that_cannot_start_all_ranks(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run = runs(others="wait", env={})
    start = RankSet.start_rank

    def limited(self: RankSet, position: Coordinate, *rest: Any) -> None:
        if position.rank == 2:
            raise OSError("Resource temporarily unavailable")
        start(self, position, *rest)

    monkeypatch.setattr(RankSet, "start_rank", limited)
    status, output = in_process(run, monkeypatch)
    assert status == 1
    assert "only 2 ranks could be started: Resource" in output
    assert run.report()["completed"] is False
    assert run.processes() == [] and run.leftovers() == []


@pytest.mark.full
def test_a_job_whose_time_is_over(runs: Runs) -> None:
    run = runs(others="wait", spec={"activeDeadlineSeconds": 2})
    status, output = run.finish()
    assert status == 1
    assert "spec.activeDeadlineSeconds" in output
    assert run.report()["end"] == "deadline"
    assert_clean(run)


def test_a_restart_is_a_new_attempt_with_a_new_secret(runs: Runs) -> None:
    run = runs({2: "recover"}, others="recover", spec={"failurePolicy": {"maxRestarts": 2}})
    status, output = run.finish()
    assert status == 0, output
    assert "restart 1 of at most 2, from the beginning" in output
    attempts = run.report()["attempts"]
    assert [(a["number"], a["end"]) for a in attempts] == [(0, "failed"), (1, "completed")]
    first, second = run.seen_by(0, 0), run.seen_by(0, 1)
    secret = "PIPEMORPH_SECRET_FILE"
    assert first["files"][secret] != second["files"][secret]
    # The port nearly always differs from the one before, and is equal for all.
    assert len({run.seen_by(rank, 1)["env"]["MASTER_PORT"] for rank in range(4)}) == 1
    assert second["env"]["PIPEMORPH_ATTEMPT"] == "1"
    assert (run.out / "logs" / "rank-0.log").read_text().count("rank 0 is here") == 2
    assert_clean(run)


@pytest.mark.full
def test_a_rank_that_had_to_be_killed_does_not_end_the_next_attempt(runs: Runs) -> None:
    restarts = {"failurePolicy": {"maxRestarts": 1}}
    run = runs({0: "recover", 1: "cling"}, stages=2, spec=grace_of(1) | restarts)
    status, output = run.finish()
    assert "did not stop within 1 s: rank 1 (stage 1)" in output
    assert status == 0, output
    attempts = run.report()["attempts"]
    assert [(a["number"], a["end"]) for a in attempts] == [(0, "failed"), (1, "completed")]
    assert_clean(run)


@pytest.mark.full
@pytest.mark.parametrize(("code", "most", "attempts"), [(5, 1, 2), (2, 5, 1)])
def test_restarts_are_limited_and_none_follows_unusable_input(
    runs: Runs, code: int, most: int, attempts: int
) -> None:
    run = runs({1: f"die {code}"}, stages=2, spec={"failurePolicy": {"maxRestarts": most}})
    status, output = run.finish()
    assert (status, len(run.report()["attempts"])) == (1, attempts)
    assert output.count(f"rank 1 (stage 1) exited with code {code}") == attempts
    assert_clean(run)


@pytest.mark.full
def test_an_interrupt_during_a_restart_ends_the_run(runs: Runs) -> None:
    run = runs({1: "die 5"}, spec={"failurePolicy": {"maxRestarts": 1000}})
    host = run.start()
    until(lambda: run.all_here(1), "a second attempt")
    host.send_signal(signal.SIGINT)
    assert ended(run)[0] == 130
    assert_clean(run)


def test_a_suspended_job_is_not_started(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    run, stream = runs(spec={"suspend": True}), io.StringIO()
    monkeypatch.chdir(run.folder)
    assert run_job("job.yaml", Path("out"), stream=stream) == 1
    assert stream.getvalue() == "fake is suspended (spec.suspend: true); not started\n"
    assert not run.out.exists()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"colour": "red"}, "spec.colour"),
        ({"trainer": {"module": "no_such_module", "iterations": 1}}, "no_such_module"),
        (grace_of("long"), "terminationGracePeriodSeconds: is 'long'"),
    ],
)
def test_bad_input_starts_nothing(
    runs: Runs, refused: Refused, spec: dict[str, Any], says: str
) -> None:
    run = runs(spec=spec)
    status, output = refused(run)
    assert status == 2
    assert output.count("\n") == 1, output
    assert says in output
    assert not run.out.exists()
    assert not (run.folder / "meeting").exists()


def test_an_unknown_log_level_starts_nothing(runs: Runs, refused: Refused) -> None:
    run = runs(env={"PIPEMORPH_LOG": "loud"})
    status, output = refused(run)
    assert status == 2
    assert output == (
        "pipemorph run: PIPEMORPH_LOG is 'loud'; expected one of DEBUG, INFO, WARNING, ERROR\n"
    )
    assert not run.out.exists()


@pytest.mark.full
def test_an_earlier_run_is_not_overwritten_unasked(runs: Runs) -> None:
    run = runs(others="finish")
    assert run.finish()[0] == 0
    (run.out / "notes.txt").write_text("mine")
    (run.out / "logs" / "rank-9.log").write_text("of the earlier run")
    before = (run.out / "report.json").read_text()

    status, output = run.finish()
    assert status == 2
    assert output.count("\n") == 1 and "--force" in output
    assert (run.out / "report.json").read_text() == before

    assert run.finish("--force")[0] == 0
    assert (run.out / "report.json").read_text() != before
    assert (run.out / "notes.txt").read_text() == "mine"
    assert not (run.out / "logs" / "rank-9.log").exists()


@pytest.mark.parametrize(
    ("out", "why"), [("out", ""), ("x" * 300, "File name too long")], ids=["a file", "too long"]
)
def test_an_out_folder_that_cannot_be_made(
    runs: Runs, refused: Refused, out: str, why: str
) -> None:
    run = runs(others="finish")
    run.out.write_text("a file")
    status, output = refused(run, "--out", out)
    assert status == 2
    assert output.count("\n") == 1 and f"cannot be used: {why}" in output


@pytest.mark.full
def test_a_reader_that_goes_away_ends_the_run(runs: Runs) -> None:
    """``| head``: the end would not be seen, but the report is there."""
    run = runs({1: "die 3"}, others="wait", spec={"failurePolicy": {"maxRestarts": 1000}})
    host = run.start()
    host.stdout.close()
    host.wait(DEADLINE)
    assert host.returncode != 0
    assert run.report()["completed"] is False
    assert_clean(run)


@pytest.mark.full
def test_nohup_is_heeded(runs: Runs) -> None:
    run = runs(others="wait")
    with_nohup = ["nohup", *run.command()]
    run.command = lambda *extra: with_nohup  # type: ignore[method-assign]
    host = run.start()
    host.send_signal(signal.SIGHUP)
    host.send_signal(signal.SIGTERM)
    status, output = ended(run)
    assert status == 130
    assert "SIGTERM: stopping" in output and "SIGHUP" not in output
    assert_clean(run)
