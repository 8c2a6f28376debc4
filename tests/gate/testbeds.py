"""The testbeds that parts need: built while the other parts run."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

COMMAND = Path(__file__).resolve().parents[1] / "testbeds.py"
ASK_EVERY = 15.0
"""Seconds between two checks of a build's progress."""


class TestbedBuild:
    """Builds the testbeds ``names`` that are not ready, in one process at its own priority.

    A context manager: at its end a build that still runs is stopped; a later one goes on where it
    was.
    """

    __test__ = False

    def __init__(self, names: Sequence[str], log: Path, say: Callable[[str], None]) -> None:
        self._log, self._say = log, say
        self._lock = threading.Lock()
        self._not_ready = {
            name: state["why"] for name, state in _status(names).items() if not state["ready"]
        }
        self._failed: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> TestbedBuild:
        if self._not_ready:
            missing = ", ".join(self._not_ready)
            self._say(f"testbeds: building {missing}; output in {self._log}")
            with self._log.open("wb") as log:
                command = [sys.executable, str(COMMAND), *self._not_ready]
                self._process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._thread.join()

    def building(self) -> list[str]:
        """Names of those that are not ready yet, and may become so."""
        with self._lock:
            return [name for name in self._not_ready if name not in self._failed]

    def why_failed(self, needs: Iterable[str]) -> str | None:
        """Reason why one of these cannot be had; None if all are ready or may become so."""
        with self._lock:
            return next(
                (f"testbed {n}: {self._failed[n]}" for n in needs if n in self._failed), None
            )

    def _watch(self) -> None:
        assert self._process is not None
        began = time.monotonic()
        while True:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(ASK_EVERY)
            ended = self._process.returncode
            states = _status(self.building())
            with self._lock:
                for name, state in states.items():
                    if state["ready"]:
                        del self._not_ready[name]
                        self._say(f"testbeds: {name} is ready")
                    elif ended is not None:
                        self._failed[name] = state["why"]
            if ended is not None:
                took = f"after {time.monotonic() - began:.0f} s"
                last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
                self._say(f"testbeds: {'built' if ended == 0 else f'FAILED: {last}'} {took}")
                return


def _status(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Output of ``testbeds.py --status``: for each name ``ready`` and ``why``."""
    if not names:
        return {}
    command = [sys.executable, str(COMMAND), "--status", *names]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return {name: found[name] for name in names}
