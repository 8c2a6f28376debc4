"""Jobs on this machine: each a ``pipemorph run`` in a process of its own, with a folder.

The process outlives this one, such as the kernel of a notebook. Its id and start time are in the
folder, so that any process of this machine sees whether the run is still there.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from subprocess import DEVNULL, Popen
from typing import Any

from pipemorph.checkpoints import delete_path
from pipemorph.errors import InputError, ObjectNotFoundError, one_line
from pipemorph.local.processes.environment import read_grace_seconds
from pipemorph.local.results.result_folder import LOCK, OUTPUTS, write_json
from pipemorph.local.results.status_file import read_report_file, record_early_end
from pipemorph.local.run import check_module_for_ranks
from pipemorph.manifest import load_job
from pipemorph.spec.job_spec import PipeMorphJob

MANIFEST, OUTPUT, PROCESS = "job.json", "output.log", "process"
"""Files of a job's folder besides those of a run: what was submitted, the run's output, its process
id, start time and machine. The first two may hold secrets: only their owner can read them."""
REPORT, STATUS = "report.json", "status.json"
END_SECONDS = 60.0
"""Time, besides the ranks' grace period, in which a run ends: it draws its timeline."""
POLL_SECONDS = 0.05
_NAME = re.compile(r"[a-z0-9][a-z0-9.-]*")

_started: list[Popen[bytes]] = []
"""Runs of this process, which reaps them."""


class LocalBackend:
    """Jobs on this machine, as by ``pipemorph run``. ``folder``: has a folder for each job, with
    its ``report.json``, ``timeline.png``, ``logs`` and ``output.log``."""

    def __init__(self, folder: str | Path = "runs") -> None:
        self.folder = Path(folder).absolute()

    def create_job(self, job: PipeMorphJob, document: Mapping[str, Any]) -> str:
        """Start a run in the current folder. Raises :class:`InputError` if its program is missing,
        or if there is a job of that name."""
        check_module_for_ranks(job)
        name = job.metadata.name
        read_grace_seconds(job)
        if job.spec.suspend:
            raise InputError(f"{name}: spec.suspend is true, and no run of this machine is resumed")
        root = self.folder / name
        try:
            root.mkdir(parents=True, exist_ok=True)
            if any((root / each).exists() for each in OUTPUTS):
                raise FileExistsError
            manifest = os.open(root / MANIFEST, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            raise InputError(
                f"{name}: {root} has a job of this name; delete that, or choose another name or"
                " folder"
            ) from None
        except OSError as error:
            raise InputError(f"{root}: cannot be used: {error.strerror}") from None
        with os.fdopen(manifest, "w") as file:
            json.dump(document, file)
        _start_run(root)
        return name

    def read_job(self, name: str) -> Mapping[str, Any]:
        root = self._find_job(name)
        end = time.monotonic() + END_SECONDS
        job: dict[str, Any] = json.loads((root / MANIFEST).read_text())
        while True:
            runs = _is_running(root)
            if (root / REPORT).exists():
                if not runs or time.monotonic() > end:
                    job = read_report_file(root / REPORT)
                    break
            elif runs:
                job |= _read_status(root)
                break
            else:
                job = record_early_end(job, _describe_early_end(root), root / MANIFEST)
                break
            time.sleep(POLL_SECONDS)  # It draws its timeline.
        job["metadata"]["namespace"] = ""  # On this machine it has no meaning.
        return job

    def list_jobs(self) -> list[Mapping[str, Any]]:
        found = sorted(self.folder.glob(f"*/{MANIFEST}"))
        return [self.read_job(each.parent.name) for each in found]

    def read_log(self, name: str, rank: int, follow: bool) -> Iterator[str]:
        """Lines of ``logs/rank-N.log``. Without ``follow`` an absent file has none."""
        root = self._find_job(name)
        ranks = load_job(root / MANIFEST).spec.parallelism.world_size
        if rank >= ranks:
            raise InputError(f"rank: is {rank}; {name} has {ranks} ranks, numbered from 0")
        return _iterate_lines(root, root / "logs" / f"rank-{rank}.log", follow)

    def delete_job(self, name: str) -> None:
        root = self._find_job(name)
        end = time.monotonic() + read_grace_seconds(load_job(root / MANIFEST)) + END_SECONDS
        process = _read_process(root)
        if process is not None and _is_running(root):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process["id"], signal.SIGTERM)
            while _is_running(root):
                if time.monotonic() > end:
                    raise InputError(f"{name}: process {process['id']} does not end; end it first")
                time.sleep(POLL_SECONDS)
        for each in (*OUTPUTS, LOCK, OUTPUT, PROCESS, MANIFEST):
            delete_path(root / each, lenient=True)
        with contextlib.suppress(OSError):  # It has other files.
            root.rmdir()

    def _find_job(self, name: str) -> Path:
        root = self.folder / name
        if not _NAME.fullmatch(name) or not (root / MANIFEST).exists():
            raise ObjectNotFoundError(f"{one_line(name)}: no job of this name in {self.folder}")
        return root


def _start_run(root: Path) -> None:
    """Start the run of a folder's manifest, in the background."""
    _started[:] = [each for each in _started if each.poll() is None]
    command = [sys.executable, "-m", "pipemorph.cli", "run", str(root / MANIFEST)]
    output = os.open(root / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
    try:
        run = Popen(
            [*command, "--out", str(root), "--watch"], stdin=DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(output)
    _started.append(run)
    started = {"id": run.pid, "at": _read_start_time(run.pid), "machine": socket.gethostname()}
    write_json(root / PROCESS, started)


def _is_running(root: Path) -> bool:
    """True until the run has ended. Raises :class:`InputError` on another machine than its."""
    process = _read_process(root)
    if process is None:
        return (root / MANIFEST).exists()  # It starts.
    if process["machine"] != socket.gethostname():
        if (root / REPORT).exists():
            return False
        raise InputError(f"{root}: its job runs on {process['machine']}; read it there")
    for each in _started:
        each.poll()  # Reap it.
    return process["at"] is not None and process["at"] == _read_start_time(process["id"])


def _read_process(root: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads((root / PROCESS).read_text())
        return found
    except FileNotFoundError:
        return None


def _read_start_time(process: int) -> str | None:
    """Start time of a process, in clock ticks after the boot; None if it has ended."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if stat[0] in "ZX" else stat[19]


def _read_output(root: Path) -> str:
    try:
        return (root / OUTPUT).read_text(errors="replace")
    except OSError:
        return ""


def _read_status(root: Path) -> dict[str, Any]:
    """Status and history of a running job."""
    try:
        found = read_report_file(root / STATUS)
    except InputError:  # It starts, or a report has just replaced it.
        return {"status": {"state": "Starting"}}
    return {name: each for name, each in found.items() if name not in ("spec", "metadata")}


def _describe_early_end(root: Path) -> str:
    """Reason why a run ended without a report: the last line of its output."""
    lines = _read_output(root).strip().splitlines()
    return one_line(lines[-1], 1000) if lines else "the run was killed before it printed anything"


def _iterate_lines(root: Path, path: Path, follow: bool) -> Iterator[str]:
    """Lines of a file, with ``follow`` until the run has ended."""
    rest, position = b"", 0
    while True:
        ends = not follow or not _is_running(root)
        try:
            with path.open("rb") as file:
                file.seek(position)
                content = file.read()
        except FileNotFoundError:
            content = b""
        position += len(content)
        *lines, rest = (rest + content).split(b"\n")
        if ends and rest:
            lines.append(rest)
        for line in lines:
            yield line.decode(errors="replace").rstrip("\r")
        if ends:
            return
        time.sleep(POLL_SECONDS)
