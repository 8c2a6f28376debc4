"""Child processes that never outlive the test run."""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from pathlib import Path
from queue import SimpleQueue
from threading import Thread

from testbed.errors import TestbedError
from testbed.waiting import patience, wait_for

PR_SET_PDEATHSIG = 1
# Looked up before the fork: between fork and exec only system calls are safe.
_PRCTL = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Let the kernel kill this process when the one that started it is gone, however it went."""
    if _PRCTL is not None:
        _PRCTL(PR_SET_PDEATHSIG, signal.SIGKILL)


class _Starter:
    """Starts all programs in one thread that ends with this process: the kernel takes the thread
    that starts a program for its parent, and kills the program when that thread ends."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[
            tuple[Callable[[], subprocess.Popen[bytes]], Future[subprocess.Popen[bytes]]]
        ] = SimpleQueue()
        Thread(target=self._work, name="starter", daemon=True).start()

    def start(self, program: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
        """:raises OSError: as ``program`` does."""
        done: Future[subprocess.Popen[bytes]] = Future()
        self._requests.put((program, done))
        return done.result()

    def _work(self) -> None:
        while True:
            program, done = self._requests.get()
            try:
                done.set_result(program())
            except Exception as error:  # noqa: BLE001  # the caller gets it
                done.set_exception(error)


@cache
def _starter(_of: int) -> _Starter:
    """The one of this process, given its number: a thread does not come along in a fork."""
    return _Starter()


class Process:
    """Program of the testbed, in a process group of its own, with its output in a file."""

    def __init__(
        self,
        name: str,
        command: Sequence[str | Path],
        log: Path,
        *,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self.command = [str(part) for part in command]
        self.log = log
        self._environment = dict(os.environ) | dict(environment or {})
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        if self._child is None:
            raise TestbedError(f"{self.name} is not started")
        return self._child.pid

    @property
    def running(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def returncode(self) -> int | None:
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        if self.running:
            raise TestbedError(f"{self.name} is already running as process {self.pid}")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._child = _starter(os.getpid()).start(
                lambda: subprocess.Popen(
                    self.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._environment,
                    start_new_session=True,
                    # A single system call, resolved beforehand.
                    preexec_fn=die_with_parent,  # noqa: PLW1509
                )
            )

    def stop(self, grace: float = 10.0) -> None:
        """End the process and its group: politely, then after `grace` seconds by SIGKILL."""
        child, self._child = self._child, None
        if child is None:
            return
        if child.poll() is None and grace > 0:
            self._signal_group(child.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                child.wait(grace)
        # Done after a polite end, too: the program's children must end as well.
        self._signal_group(child.pid, signal.SIGKILL)
        child.wait()

    @staticmethod
    def _signal_group(group: int, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(group, number)

    def log_end(self, lines: int = 15) -> str:
        """The last lines of the output, as an error message shows them."""
        if not self.log.exists():
            return f"{self.name} wrote nothing"
        text = self.log.read_text(errors="replace").splitlines()[-lines:]
        return f"the end of {self.log}:\n" + "\n".join(f"  {line}" for line in text)

    def wait_until(self, what: str, check: Callable[[], object | None], deadline: float) -> None:
        """Wait for `check`, but not any longer than the process lives."""

        def alive_and_ready() -> object | None:
            if not self.running:
                raise TestbedError(
                    f"{self.name} ended with exit status {self.returncode} before {what}; "
                    f"{self.log_end()}"
                )
            return check()

        wait_for(f"{what} ({self.name})", alive_and_ready, deadline, details=self.log_end)


def run(
    command: Sequence[str | Path],
    *,
    input: str | None = None,
    environment: Mapping[str, str] | None = None,
    deadline: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its output, whatever its exit status.

    It is given `deadline` seconds, times `patience`.
    """
    words = [str(part) for part in command]
    allowed = deadline * patience()
    try:
        return subprocess.run(
            words,
            input=input,
            # No input given must not mean this terminal.
            stdin=subprocess.DEVNULL if input is None else None,
            capture_output=True,
            text=True,
            env=dict(os.environ) | dict(environment or {}),
            timeout=allowed,
            check=False,
        )
    except FileNotFoundError as error:
        raise TestbedError(f"found no program {words[0]}: install it") from error
    except subprocess.TimeoutExpired as error:
        raise TestbedError(f"{' '.join(words)} did not end within {allowed:.0f} s") from error


def output(
    command: Sequence[str | Path],
    *,
    input: str | None = None,
    environment: Mapping[str, str] | None = None,
    deadline: float = 60.0,
) -> str:
    """Run a program that must succeed and return its standard output."""
    done = run(command, input=input, environment=environment, deadline=deadline)
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-2000:]
        raise TestbedError(
            f"{' '.join(done.args)} ended with exit status {done.returncode}: {said}"
        )
    return done.stdout
