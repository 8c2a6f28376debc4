"""Status of a run in its folder: ``status.json`` while the ranks train, ``report.json`` afterwards.

The status has the fields of a report that explanations need, as of now, with the newest iterations.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError, one_line
from pipemorph.local.processes.locked_folder import is_locked
from pipemorph.local.results.result_folder import LOCK, ResultFolder, write_json
from pipemorph.views.explanation.job_explanation import EARLY_END
from pipemorph.views.live_page.page_builder import WatchedJob, to_report
from pipemorph.views.status.conditions import format_time
from pipemorph.yaml_json import display_name, parse_single_document, read_text

log = logging.getLogger("pipemorph.status")

STATUS_SECONDS = 2.0
"""Time between two updates of the file."""
MOST_SAMPLES = 256
"""Newest iterations in the file."""
MOST_ERRORS = 10
"""Most different errors that are logged."""
MOST_BYTES = 1 << 30
"""Largest report: it lists every iteration."""


class StatusFile:
    """Context manager that writes a run's ``status.json`` in a thread of its own, since the control
    loop may answer late. ``collect``: returns the state of the job."""

    def __init__(self, folder: ResultFolder, collect: Callable[[], WatchedJob]) -> None:
        self._path, self._collect = folder.status, collect
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._write_until_end, name="status", daemon=True)

    def __enter__(self) -> StatusFile:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._ended.set()
        self._thread.join()

    def _write_until_end(self) -> None:
        logged = set[str]()
        while True:
            try:
                self._write_status()
            except Exception as error:  # noqa: BLE001  # Whatever it is, the job goes on.
                text = one_line(f"{error!r}", 300)
                if text not in logged and len(logged) < MOST_ERRORS:
                    logged.add(text)
                    log.warning("status.json is not written: %s", text)
            if self._ended.wait(STATUS_SECONDS):
                return

    def _write_status(self) -> None:
        known = self._collect()
        report = to_report(replace(known, samples=known.samples[-MOST_SAMPLES:]))
        # The template may hold secrets, in variables of its pods.
        left_out = {"spec": {"template"}}
        fields = report.model_dump(mode="json", by_alias=True, exclude=left_out)
        fields["status"] = known.status.model_dump(mode="json", by_alias=True, exclude_none=True)
        write_json(self._path, fields)


def read_run_folder(root: Path) -> dict[str, Any]:
    """Report of a run in its folder; while it runs, its status. Raises :class:`InputError`."""
    folder = ResultFolder(root)
    if folder.status.exists() and not folder.report.exists():
        with suppress(InputError):  # The report has just replaced it.
            return _complete_status(root, read_report_file(folder.status))
    if not folder.report.exists():
        raise InputError(
            f"{display_name(root)}: has neither report.json nor status.json, which a run has from"
            " its first seconds on; name the --out folder of pipemorph run or serve"
        )
    return read_report_file(folder.report)


def read_report_file(path: str | Path) -> dict[str, Any]:
    """Content of a run's report, or of a file with what kubectl prints. Raises
    :class:`InputError`."""
    text = read_text(path, MOST_BYTES)
    try:
        # JSON first: a report may have hundreds of thousands of lines.
        content = json.loads(text)
    except (ValueError, RecursionError):
        try:
            content = parse_single_document(text)
        except InputError as error:
            raise InputError(f"{display_name(path)}: {error}") from None
    if not isinstance(content, dict):
        raise InputError(f"{display_name(path)}: expected a run's report.json or a PipeMorphJob")
    return content


def _complete_status(root: Path, content: Mapping[str, Any]) -> dict[str, Any]:
    """Content of a folder's ``status.json``, in which a run is Failed if its host has ended."""
    if not _is_abandoned(root):
        return dict(content)
    why = "its host has ended, with this status; ranks of another launcher may train on"
    return record_early_end(content, why, ResultFolder(root).status)


def record_early_end(content: Mapping[str, Any], why: str, newest: Path) -> dict[str, Any]:
    """Job or status of a run that ended without a report, with the reason. ``newest``: file that it
    wrote last."""
    at = datetime.fromtimestamp(newest.stat().st_mtime, UTC)
    failed = {
        "type": "Failed", "status": "True", "reason": EARLY_END, "message": why,
        "lastTransitionTime": format_time(at),
    }  # fmt: skip
    status = content.get("status") or {}
    conditions = [*status.get("conditions", []), failed]
    return {**content, "status": {**status, "state": "Failed", "conditions": conditions}}


def _is_abandoned(root: Path) -> bool:
    """True if no process holds the folder's lock. False where that is unknown: an unreadable
    folder, or a file system without locks."""
    try:
        return not is_locked(root / LOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
