"""Starts Python programs as forks of a process that has already imported what they import.

``pipemorph run`` needs about nine processor seconds only to import torch and the rest: once in the
process that forks its ranks, and less in the host and in the agent. A test session imports all of
it once, in the process of :mod:`prepared_server`, and :class:`PreparedProcess` forks that one where
:class:`subprocess.Popen` would execute a new Python. In a fork, :class:`subprocess.Popen` does the
same.

What a fork cannot show, other tests do with programs of their own: an installed console script, the
imports of a program, and the variables that are read at imports.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipemorph.local.processes.fork_client import SPAWN, is_subreaper, set_subreaper

SERVER = Path(__file__).with_name("prepared_server.py")
FORK_SECONDS = 100.0
"""Seconds for an answer of the server, which imports torch first, on a machine that may be busy.
Less than a test may take: one that is ended meanwhile leaves an answer to the next."""
CLOSE_SECONDS = 5.0
"""Seconds for it to end."""
STARTERS = ("pipemorph.cli", "pipemorph_trainer.launcher", "torch.distributed.run")
"""Modules that compute nothing themselves, but start programs that do."""
READ_AT_IMPORT = (
    "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "TORCH", "PYTORCH_", "CUDA_", "LD_", "GLIBC_",
    "MALLOC_", "PYTHON", "LC_", "LANG", "TZ",
)  # fmt: skip
"""Beginnings of the names of variables that a program may read before its first line."""
READ_LATER = (
    "TORCHELASTIC_", "TORCH_NCCL_", "TORCHINDUCTOR_CACHE_DIR", "PYTHONPATH", "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER", "PYTHONDONTWRITEBYTECODE",
)  # fmt: skip
"""Variables that a program reads later, or that the server can make up for in a fork. torch sets
the folder of its compiler's cache when it first compiles."""
THREADS = {"OMP_NUM_THREADS": "1"}
"""Threads of the server, as ranks have them. A program whose environment has none has them too."""
EXECUTE = "PIPEMORPH_TEST_EXECUTE"
"""Set it to have every program executed, to see whether a failure is one of forks only."""

_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
_signature = inspect.signature(_execute)


class Request:
    """A program to fork: ``arguments`` of Python, and how it begins."""

    def __init__(
        self, arguments: list[str], *, unbuffered: bool = False, dies_with_parent: bool = False
    ) -> None:
        self.arguments = arguments
        self.unbuffered = unbuffered
        self.dies_with_parent = dies_with_parent

    @property
    def is_starter(self) -> bool:
        return self.arguments[0] == "-m" and self.arguments[1] in STARTERS


class Server:
    """The connection of a process to its child that forks more children for it."""

    def __init__(self, channel: socket.socket, pid: int) -> None:
        self.pid = pid
        self._channel = channel
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._received = b""

    @property
    def usable(self) -> bool:
        """True in the process of the server's owner, and not in one that was forked from it."""
        return os.getpid() == self._owner

    def fork(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> int:
        """The process id of a new child, which gets the descriptors. Raises OSError."""
        body = json.dumps(request).encode()
        with self._lock, _subreaper_here():
            try:
                socket.send_fds(self._channel, [len(body).to_bytes(4, "big")], descriptors)
                self._channel.sendall(body)
                answer = self._answer()
            except BaseException:
                self.kill()  # The late answer would pass for that to the next request.
                raise
        if "error" in answer:
            raise OSError(answer["error"])
        return int(answer["pid"])

    def kill(self) -> None:
        """End it at once. The next process to be forked gets another one."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self.close()
        _servers.remove(self)

    def close(self) -> None:
        """End it, and wait, so that its processor time is counted as that of this process."""
        if not self.usable:
            return
        self._channel.close()
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            watched = os.pidfd_open(self.pid)
            # A child that this process has forked may still hold its end of the channel.
            if not select.select([watched], [], [], CLOSE_SECONDS)[0]:
                os.kill(self.pid, signal.SIGKILL)
            os.close(watched)
            os.waitpid(self.pid, 0)

    def _answer(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            if not select.select([self._channel], [], [], FORK_SECONDS)[0]:
                raise OSError(f"{SERVER.name} did not answer in {FORK_SECONDS:g} s")
            part = self._channel.recv(1 << 16)
            if not part:
                raise OSError(f"{SERVER.name} has ended; its standard error says why")
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)


_servers: list[Server] = []
"""The last one is that of this process, once it has one."""


class _Fork:
    here = False
    """True if this process is itself a fork of the session's server."""


def forks_in(folder: Path) -> list[int]:
    """The process ids of all forks of prepared servers that run in a folder. The environment that
    the system shows of them is that of the server."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # The server has ended.
            command = (entry / "cmdline").read_bytes().split(b"\0")
            if os.fsencode(SERVER) in command and (entry / "cwd").readlink() == folder.resolve():
                found.append(int(entry.name))
    return found


def server() -> Server | None:
    """Server of this process, if it has one."""
    return _servers[-1] if _servers and _servers[-1].usable else None


def server_pid() -> int | None:
    """The process id of that server, whose processor time is not that of an ended child."""
    own = server()
    return None if own is None else own.pid


class PreparedProcess(subprocess.Popen[Any]):
    """A :class:`subprocess.Popen` that forks the prepared server if the command is a program of
    this Python, and else executes it."""

    def _execute_child(self, *given: Any) -> None:
        if server() is None and _to_fork(_bound(self, given)) is not None:
            _servers.append(_start())
        _fork_or_execute(self, *given)


def run(
    command: Sequence[str | Path],
    *,
    timeout: float,
    check: bool = False,
    capture_output: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """:func:`subprocess.run` with a :class:`PreparedProcess`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with PreparedProcess(command, **options) as process:
        try:
            output, errors = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(command, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def fork_instead_of_executing(own: Server) -> None:
    """Let :class:`subprocess.Popen` fork ``own`` in this process from now on, where that is
    equivalent."""
    _servers.append(own)
    _Fork.here = True
    subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]


def _start() -> Server:
    """The session's server, which ends with this process."""
    ours, theirs = socket.socketpair()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with theirs:
        # Executed, whatever Popen does here.
        process = subprocess.Popen(
            [sys.executable, str(SERVER), str(os.getpid()), str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            cwd="/",
            env=env | THREADS,
            pass_fds=[theirs.fileno()],
        )
    started = Server(ours, process.pid)
    atexit.register(started.close)
    return started


def _fork_or_execute(self: Any, *given: Any) -> None:
    call = _bound(self, given)
    own, request = server(), _to_fork(call)
    if own is None or request is None:
        _execute(self, *given)
        return
    standard = [(call["p2cread"], 0), (call["c2pwrite"], 1), (call["errwrite"], 2)]
    passed = sorted(call["pass_fds"])
    env = _environment(call)
    self.pid = own.fork(
        {
            "arguments": request.arguments,
            "unbuffered": request.unbuffered,
            "dies_with_parent": request.dies_with_parent,
            "starts_others": not _Fork.here or request.is_starter or env.get("RANK") == "0",
            "parent": os.getpid(),
            "env": env,
            "cwd": str(Path(call["cwd"] or ".").absolute()),
            "new_session": call["start_new_session"],
            "descriptors": [0, 1, 2, *passed],
            "ignored": [number for number in signal.Signals if _is_ignored(number)],
        },
        [*(end if end != -1 else inherited for end, inherited in standard), *passed],
    )
    self._child_created = True
    self._close_pipe_fds(
        *(call[n] for n in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
    )


def _to_fork(call: Mapping[str, Any]) -> Request | None:
    """Request to fork what :class:`subprocess.Popen` would start; None if it must be executed."""
    if isinstance(call["args"], (str, bytes, os.PathLike)) or not call["close_fds"]:
        return None
    if os.environ.get(EXECUTE) or call["preexec_fn"] or call["shell"] or call["executable"]:
        return None
    owner = ("gid", "uid", "umask", "process_group")
    if call["gids"] is not None or any(call[name] not in (None, -1) for name in owner):
        return None
    command = [os.fsdecode(argument) for argument in call["args"]]
    spawned = [sys.executable, "-I", "-S", str(SPAWN), str(os.getpid())]
    dies_with_parent = command[: len(spawned)] == spawned
    if dies_with_parent:
        del command[: len(spawned)]
    if command[:1] != [sys.executable] or len(command) < 2:
        return None
    del command[0]
    unbuffered = command[0] == "-u"
    if unbuffered:
        del command[0]
    script = Path(call["cwd"] or ".", command[0] if command else "-")
    module = len(command) > 1 and command[0] == "-m"
    if not (module or (script.suffix == ".py" and script.is_file())):
        return None
    request = Request(command, unbuffered=unbuffered, dies_with_parent=dies_with_parent)
    return request if _imports_the_same(request, _environment(call)) else None


def _imports_the_same(request: Request, env: Mapping[str, str]) -> bool:
    """True if an environment has those values of the server's that are read at imports."""
    requested = {**env, **THREADS} if request.is_starter else {**THREADS, **env}
    return _read_at_import(requested) == _read_at_import({**_ENVIRON, **THREADS})


def _read_at_import(env: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in env.items()
        if name.startswith(READ_AT_IMPORT) and not name.startswith(READ_LATER)
    }


_ENVIRON = dict(os.environ)
"""Environment when this process, or the server that forked it, was started."""


def _environment(call: Mapping[str, Any]) -> dict[str, str]:
    found = os.environ if call["env"] is None else call["env"]
    return {os.fsdecode(name): os.fsdecode(value) for name, value in found.items()}


def _bound(self: Any, given: Sequence[Any]) -> dict[str, Any]:
    """The arguments of a call by their names, which differ little between versions of Python."""
    return {
        name.removeprefix("unused_"): value
        for name, value in _signature.bind(self, *given).arguments.items()
    }


def _is_ignored(number: signal.Signals) -> bool:
    ignored = signal.getsignal(number) is signal.SIG_IGN
    return ignored and number not in (signal.SIGPIPE, signal.SIGXFSZ)


@contextlib.contextmanager
def _subreaper_here() -> Iterator[None]:
    """Orphans become children of this process meanwhile: forks lose their first parent."""
    before = is_subreaper()
    set_subreaper(True)
    try:
        yield
    finally:
        set_subreaper(before)
