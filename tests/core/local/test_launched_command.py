"""``pipemorph serve JOB -- COMMAND``: what the command gets, and how both end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launch import ended
from served import DEADLINE, manifest

from pipemorph.cli import main
from pipemorph.local.served.serve import JoinTracker
from pipemorph_trainer.context import request_job

READY = "trap 'echo got it; exit 7' TERM; touch ready; while :; do sleep 0.05; done"


@pytest.fixture(autouse=True)
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A manifest in the current folder. Private folders are made in it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    file = tmp_path / "job.json"
    file.write_text(json.dumps(manifest()))
    return file


def serve(*arguments: str) -> int:
    return main(["serve", "job.json", *arguments])


def start(folder: Path, *arguments: str, before: str = "exec") -> subprocess.Popen[str]:
    """Start serve as the process of a shell."""
    line = [sys.executable, "-m", "pipemorph.cli", "serve", "job.json", *arguments]
    return subprocess.Popen(
        ["bash", "-c", f'{before} "$@"', "bash", *line], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def wait_for(file: Path, process: subprocess.Popen[str] | None = None) -> str:
    """Content of a file, once it is there."""
    until = time.monotonic() + DEADLINE
    while not file.exists():
        assert time.monotonic() < until and (process is None or process.poll() is None), file
        time.sleep(0.02)
    return file.read_text()


def private_folders(folder: Path) -> list[Path]:
    return list(folder.glob("pipemorph-serve-*"))


def test_command_gets_addresses_and_secrets_and_gives_its_exit_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = 'env > given; stat -c %a "$PIPEMORPH_TOKEN_FILE" "$PIPEMORPH_SECRET_FILE"; exit 3'
    assert serve("--out", "out", "--", "sh", "-c", program) == 3
    given = dict(line.split("=", 1) for line in (tmp_path / "given").read_text().splitlines())
    assert given["PIPEMORPH_INGEST_URL"].startswith("http://127.0.0.1:")
    assert given["PIPEMORPH_TRACE_DIR"] == str(tmp_path / "out" / "trace")
    assert "PIPEMORPH_CA_FILE" not in given
    *_, last = lines = capfd.readouterr().out.splitlines()
    assert lines.count("600") == 2
    assert last == "0 of 12 iterations; sh exited with code 3"
    assert json.loads((tmp_path / "out" / "report.json").read_text())["end"] == "failed"
    assert private_folders(tmp_path) == []


def test_an_observed_job_needs_no_manifest(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--observe", "--", "sh", "-c", "env > given; exit 3"]) == 3
    given = (tmp_path / "given").read_text()
    assert "PIPEMORPH_INGEST_URL=http://127.0.0.1:" in given and "SECRET_FILE" not in given
    *_, last = capfd.readouterr().out.splitlines()
    assert last == "failed: no step was observed; sh exited with code 3"
    assert private_folders(tmp_path) == []


def test_the_reason_of_a_rank_is_the_last_line(capfd: pytest.CaptureFixture[str]) -> None:
    extra = {"timestamp": "1", "rank": "1"}
    error = json.dumps({"message": {"message": "InputError: no data", "extraInfo": extra}})
    program = f"echo '{error}' > $TORCHELASTIC_ERROR_FILE; kill -9 $$"
    assert serve("--", "sh", "-c", program) == 128 + signal.SIGKILL
    *_, last = capfd.readouterr().out.splitlines()
    assert last == "0 of 12 iterations; sh was killed by SIGKILL: rank 1: InputError: no data"


def test_a_command_that_trains_nothing_is_no_success(capfd: pytest.CaptureFixture[str]) -> None:
    assert serve("--", "true") == 1
    assert "true exited with code 0; no rank has reported" in capfd.readouterr().out


def test_a_deadline_ends_the_command(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.json").write_text(json.dumps(manifest(activeDeadlineSeconds=1)))
    assert serve("--", "sh", "-c", READY) == 1
    shown = capfd.readouterr().out
    assert "got it" in shown and shown.splitlines()[-1].startswith("not over within 1 s")


def test_an_error_of_the_host_ends_the_command_and_is_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> list[str]:
        wait_for(tmp_path / "ready")
        raise KeyError("bookkeeping")

    monkeypatch.setattr(JoinTracker, "take_announcements", fails)
    assert serve("--", "bash", "-c", READY) == 1
    shown = capfd.readouterr().out
    assert "got it" in shown
    assert shown.splitlines()[-1].startswith("the host of the run failed: KeyError")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_signals_are_forwarded(tmp_path: Path, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    program = READY.replace(" TERM;", f" {name};")
    process = start(tmp_path, "--", "bash", "-c", program)
    wait_for(tmp_path / "ready", process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 7
    assert "got it" in output
    last = f"stopped by SIG{name}; 0 of 12 iterations; bash exited with code 7"
    assert output.splitlines()[-1] == last


def test_it_works_in_the_background_of_a_script(tmp_path: Path) -> None:
    """bash has what a script starts with ``&`` ignore SIGINT."""
    script = '"$@" & until [ -e ready ]; do sleep 0.05; done; kill -TERM $!; wait $!; exit $? #'
    process = start(tmp_path, "--", "bash", "-c", READY, before=script)
    output, _ = process.communicate(timeout=DEADLINE)
    assert (process.returncode, "got it" in output) == (7, True)


def test_nothing_is_left_of_a_host_that_was_killed(tmp_path: Path) -> None:
    """torchrun starts its ranks in other sessions."""
    program = "setsid sh -c 'echo $$ > rank; exec sleep 600' & echo $$ > command; wait"
    process = start(tmp_path, "--", "sh", "-c", program)
    wait_for(tmp_path / "rank", process)
    process.kill()
    process.communicate(timeout=DEADLINE)
    until = time.monotonic() + DEADLINE
    pids = [int(wait_for(tmp_path / name)) for name in ("rank", "command")]
    while not all(map(ended, pids)) or private_folders(tmp_path):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_other_machines_get_a_certificate_and_a_file_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is in the current one, which the machines share."""
    monkeypatch.setenv("TMPDIR", "/tmp")
    listen = ("--listen", "0.0.0.0:0", "--env-file", "env")
    process = start(tmp_path, *listen, "--", "bash", "-c", READY)
    wait_for(tmp_path / "ready", process)
    shell = subprocess.run(
        ["bash", "-c", ". ./env; env"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    given = dict(line.split("=", 1) for line in shell.stdout.splitlines() if "=" in line)
    assert "127.0.0.1" not in given["PIPEMORPH_INGEST_URL"]
    (folder,) = private_folders(tmp_path)
    assert folder.stat().st_mode & 0o777 == 0o700
    served = request_job(
        given["PIPEMORPH_INGEST_URL"], Path(given["PIPEMORPH_TOKEN_FILE"]),
        given["PIPEMORPH_CA_FILE"], rank=0, world_size=2, attempt=0,
    )  # fmt: skip
    assert json.loads(served)["metadata"]["name"] == "served"
    process.terminate()
    process.communicate(timeout=DEADLINE)
    assert private_folders(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--", "no-such-program"], "is no program on this machine's PATH"),
        (["--", "python", "-u", "x.py"], 'there is no script "x.py" in'),
        (["--", "torchrun", "--nproc-per-node", "2", "x.py", "a.py"], 'there is no script "x.py"'),
        (["--", "torchrun", "-m", "no.train"], 'is "no.train"; no module no in the Python path'),
        (["--"], "--listen is missing; give it, or the command that starts the ranks after --"),
        (["--listen", "0.0.0.0:0", "--", "true"], "openssl cannot make a certificate for"),
        (["--env-file", "none/env", "--", "true"], "--env-file none/env cannot be written"),
    ],
    ids=str,
)
def test_what_cannot_start_is_refused_before_anything_is_started(
    arguments: list[str],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, status in (("torchrun", 0), ("openssl", 1), ("true", 0)):
        (programs / name).write_text(f"#!/bin/sh\necho {name} >> started\nexit {status}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    assert serve(*arguments) == 2
    captured = capfd.readouterr()
    assert (captured.out, len(captured.err.splitlines())) == ("", 1)
    assert why in captured.err
    started = tmp_path / "started"
    assert not started.exists() or started.read_text() == "openssl\n"
    assert private_folders(tmp_path) == []


def test_a_host_for_each_task_of_srun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    assert serve("--", "true") == 2
    assert "put srun after it: pipemorph serve JOB --listen 0.0.0.0:0 --" in capfd.readouterr().err
