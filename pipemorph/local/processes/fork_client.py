"""The host's connection to :mod:`pipemorph.local.processes.fork_server`, which makes ranks in
milliseconds."""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

SERVER = Path(__file__).with_name("fork_server.py")
SPAWN = Path(__file__).with_name("spawn.py")
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
POLL_SECONDS = 0.05
IMPORT_SECONDS = 300.0
"""Time limit of the imports: torch on a slow, shared file system takes minutes."""
FORK_SECONDS = 30.0
CLOSE_SECONDS = 5.0


class ForkedProcess:
    """Rank that the fork server made, with the methods of :class:`subprocess.Popen` that are used
    for ranks. It is a child of this process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float) -> int:
        """Exit code of the rank, or minus its signal. Raises TimeoutExpired."""
        end = time.monotonic() + timeout
        while self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= end:
                raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout)
            else:
                time.sleep(0.005)
        return self.returncode


class ForkServerManager:
    """Holds a :class:`ForkServer` for ranks that run ``command``, and replaces one that has ended.
    A context manager. There is no server without ``modules`` to import, or if the command cannot
    run in a fork.

    ``note`` receives the reason why ranks are not forked. Call everything from the main thread.
    """

    def __init__(
        self,
        modules: Sequence[str],
        command: Sequence[str],
        env: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        self._modules, self._env, self._note = modules, env, note
        self._server: ForkServer | None = None
        self._refused = not modules or find_python_arguments(command, env) is None

    def __enter__(self) -> ForkServerManager:
        self._start_server()
        return self

    def __exit__(self, *_: Any) -> None:
        self._close_server()

    def wait_for_server(self, stop: Callable[[], bool]) -> ForkServer | None:
        """The server, once it can fork. None if ranks must be programs, or ``stop()`` returned
        True."""
        if self._server is not None and not self._server.is_alive and self._server.ready:
            self._note("the process that forks ranks has ended; starting another one")
            self._close_server()
            self._start_server()
        if self._server is None or self._server.ready:
            return self._server
        why = self._server.wait_ready(stop)
        if why is not None:
            modules = ", ".join(self._modules)
            self._note(f"ranks are not forked: {modules} cannot be imported: {why}")
            self._refused = True
            self._close_server()
        return self._server if self._server is not None and self._server.ready else None

    def _start_server(self) -> None:
        if not self._refused:
            self._server = ForkServer(self._modules, self._env)

    def _close_server(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None


class ForkServer:
    """Process that has imported ``modules`` in the environment ``env`` and forks ranks.

    Until :meth:`close`, this process is a child subreaper: orphans of the ranks become its
    children. Call it from the main thread: the kernel kills the server when the thread that started
    it exits.
    """

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        self._was_subreaper = is_subreaper()
        set_subreaper(True)
        self._socket, theirs = socket.socketpair()
        with theirs:
            host, number = str(os.getpid()), str(theirs.fileno())
            python = [sys.executable, str(SERVER), host, number, *modules]
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SPAWN), host, *python],
                stdin=subprocess.DEVNULL,
                stdout=2,  # Output of modules during their import.
                env=dict(env),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._received = b""
        self.ready = False
        """True once :meth:`fork_rank` can be called."""

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, stop: Callable[[], bool]) -> str | None:
        """Wait for the imports, until ``stop()``. Returns the reason why it cannot fork, or
        None."""
        end = time.monotonic() + IMPORT_SECONDS
        while not stop():
            try:
                answer = self._receive_answer(POLL_SECONDS)
            except TimeoutError:
                if time.monotonic() > end:
                    return f"its imports took more than {IMPORT_SECONDS:g} s"
                continue
            except OSError as error:
                return str(error)
            self.ready = "ready" in answer
            return answer.get("error")
        return None

    def fork_rank(
        self, arguments: Sequence[str], env: Mapping[str, str], output: int
    ) -> ForkedProcess:
        """Start ``python ARGUMENTS`` with the environment ``env`` and its output to the descriptor
        ``output``. Raises OSError."""
        body = json.dumps({"arguments": [*arguments], "env": dict(env)}).encode()
        sent = socket.send_fds(self._socket, [len(body).to_bytes(4, "big")], [output])
        self._socket.sendall((len(body).to_bytes(4, "big") + body)[sent:])
        try:
            answer = self._receive_answer(FORK_SECONDS)
        except TimeoutError:
            self._process.kill()  # A late answer must not be taken for that of a later request.
            raise
        if "error" in answer:
            raise OSError(answer["error"])
        return ForkedProcess(int(answer["pid"]))

    def close(self) -> None:
        """End the server. Ranks go on."""
        self._socket.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:  # It is still importing.
            self._process.kill()
            self._process.wait()
        set_subreaper(self._was_subreaper)

    def _receive_answer(self, seconds: float) -> dict[str, Any]:
        """The next answer. Raises TimeoutError, and OSError if the server has ended."""
        end = time.monotonic() + seconds
        while b"\n" not in self._received:
            if not select.select([self._socket], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"the process that forks ranks did not answer in {seconds:g} s")
            part = self._socket.recv(1 << 16)
            if not part:
                raise OSError("the process that forks ranks has ended")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def find_python_arguments(command: Sequence[str], env: Mapping[str, str]) -> list[str] | None:
    """Arguments for this Python of a command that can run in a fork: ``python -m MODULE …`` or
    ``python SCRIPT …``. None for any other command."""
    program, *arguments = command
    found = shutil.which(program, path=env.get("PATH", os.defpath))
    if sys.platform != "linux" or found is None or not _is_this_python(Path(found)):
        return None
    if arguments[:1] == ["-u"] and env.get("PYTHONUNBUFFERED"):
        del arguments[0]
    module = len(arguments) > 1 and arguments[0] == "-m"
    script = bool(arguments) and not arguments[0].startswith("-") and Path(arguments[0]).is_file()
    return arguments if module or script else None


def _is_this_python(program: Path) -> bool:
    # Compare folders too: the interpreters of two virtual environments may be links to one file.
    ours = Path(sys.executable)
    return program.parent.absolute() == ours.parent.absolute() and program.samefile(ours)


def is_subreaper() -> bool:
    """True if orphans among the descendants of this process become its children."""
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
    return bool(found.value)


def set_subreaper(on: bool) -> None:
    """Make this process a child subreaper, or not, see :func:`is_subreaper`."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on))
