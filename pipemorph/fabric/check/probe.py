"""Runs :mod:`pipemorph.fabric.check.verbs_probe` with a Python that has pyverbs."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipemorph.errors import InputError, PipeMorphError, one_line

PROGRAM = Path(__file__).with_name("verbs_probe.py")
DISTRIBUTION_PYTHON = "/usr/bin/python3"
START_SECONDS = 60.0
ANSWER_SECONDS = 60.0
"""More than a request may take: a device gives up a write after a few seconds."""


class ProbeFailed(PipeMorphError):
    """A request that this host could not carry out."""


class Probe:
    """A running probe program. Raises :class:`InputError` if no Python here has pyverbs."""

    def __init__(self, pythons: Sequence[str] = (sys.executable, DISTRIBUTION_PYTHON)) -> None:
        found = dict.fromkeys(pythons)
        why = []
        for python in found:
            try:
                self._start(python)
                return
            except ProbeFailed as error:
                why.append(f"{python}: {error}")
        raise InputError(
            "no Python here has pyverbs; install the distribution's (Debian and Ubuntu: apt-get "
            f"install python3-pyverbs; Fedora: python3-pyverbs): {'; '.join(why)}"
        )

    def _start(self, python: str) -> None:
        try:
            # -I: the folder of the program and PYTHONPATH have nothing that it needs.
            self._process = subprocess.Popen(
                [python, "-I", str(PROGRAM)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,  # Ctrl-C is for the command, which ends the probe.
            )
        except OSError as error:
            raise ProbeFailed(f"cannot be run: {error.strerror}") from None
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name="probe", daemon=True).start()
        try:
            self._hear(START_SECONDS)
        except ProbeFailed:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        lines = self._lines
        for line in self._process.stdout:
            lines.put(line)
        lines.put(None)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Carry out a request. Raises :class:`ProbeFailed`."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except (OSError, ValueError):  # ValueError: it was ended here
            raise ProbeFailed("the probe has ended") from None
        return self._hear(ANSWER_SECONDS)

    def _hear(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            self.close()
            raise ProbeFailed(f"the probe did not answer within {seconds:g} s") from None
        if line is None:
            raise ProbeFailed(f"the probe ended with status {self._process.wait()}")
        try:
            found = json.loads(line)
        except ValueError:
            raise ProbeFailed(f"the probe said {one_line(line)!r}") from None
        if "error" in found:
            raise ProbeFailed(one_line(str(found["error"])))
        return dict(found)

    def close(self) -> None:
        """End the program, and with it its queue pairs."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:  # what was not written to a program that ended
                    continue
