"""The process that :mod:`prepared_processes` forks programs from.

``python prepared_server.py PARENT SOCKET_FD`` imports what they need and then serves requests: each
is a JSON object with its length in 4 bytes before it, and the program's descriptors with them. The
answer is ``{"pid": …}`` or ``{"error": …}``.

A program is forked twice, and its first parent ends, so that it becomes a child of the process that
requested it. It has a server of its own, another fork, if it starts Python programs itself. It runs
at the bottom of the stack, as in :mod:`pipemorph.local.processes.fork_server`.
"""

import sys

import prepared_processes

if sys.path and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]  # Other programs have no such entry.

import atexit
import ctypes
import faulthandler
import fcntl
import gc
import importlib
import json
import multiprocessing.process
import os
import runpy
import signal
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipemorph.local.processes import fork_server
from pipemorph.local.processes.fork_client import SERVER as SERVER_OF_RANKS

MODULES = (
    "pipemorph_trainer.launcher.preload",
    "pipemorph_trainer.launcher.__main__",
    "pipemorph_trainer.agent.__main__",
    "pipemorph.cli",
    "pipemorph.commands.run",
    "pipemorph.commands.serve",
    "pipemorph.local",
    "pipemorph.local.served.serve",
    "pipemorph.views.pictures",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "numpy.random",
)
RUN = (
    "pipemorph_trainer.launcher.__main__", "pipemorph_trainer.agent.__main__", "pipemorph.cli",
    "torch.distributed.run",
)  # fmt: skip
"""Programs among them, which are imported again when they are run."""
FIRST_OWN_DESCRIPTOR = 500
"""Descriptors of a program are below."""
PATH = tuple(sys.path)
NAME = Path("/proc/self/comm").read_bytes().strip()
FOR_THE_PROGRAM = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGQUIT)
"""Signals to the process group, which a server leaves to the requesting process."""


def main(parent: int, channel: socket.socket) -> list[str]:
    """Serve requests until the requesting process has ended. Returns only in programs: their
    Python's arguments."""
    gc.disable()  # Collecting in forks would copy the pages that they share.
    for module in MODULES:
        importlib.import_module(module)
    for module in RUN:
        package, _, name = module.rpartition(".")
        del sys.modules[module]
        vars(sys.modules[package]).pop(name, None)
    fork_server._check_one_thread()
    gc.collect()
    gc.freeze()
    return serve(parent, channel)


def serve(parent: int, channel: socket.socket) -> list[str]:
    """See :func:`main`."""
    _die_with(parent)
    for number in FOR_THE_PROGRAM:
        signal.signal(number, signal.SIG_IGN)
    while received := _receive(channel):
        request, descriptors = received
        between = os.fork()
        if between == 0:
            first = os.getpid()
            if os.fork() > 0:
                os._exit(0)
            try:
                fork_server._await_parent_exit(first)
                return _become_program(channel, request, descriptors)
            except BaseException as error:  # noqa: BLE001 - sent to the requesting process
                fork_server._send_answer(channel, error=f"{type(error).__name__}: {error}")
                os._exit(1)
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(between, 0)
    os._exit(0)


def _become_program(
    channel: socket.socket, request: dict[str, Any], descriptors: list[int]
) -> list[str]:
    """Take on the program's place among the processes, its descriptors and its environment."""
    if os.getppid() != request["parent"]:
        raise OSError(f"{request['parent']} has ended, or takes no orphans: got {os.getppid()}")
    if request["new_session"]:
        os.setsid()
    if request["starts_others"]:
        own_program = start_server_here([channel.fileno(), *descriptors])
        if own_program is not None:
            return own_program
        prepared_processes.set_subreaper(True)
    if request["dies_with_parent"]:
        _die_with(request["parent"])
    for received, wanted in zip(descriptors, request["descriptors"], strict=True):
        os.dup2(received, wanted)
        os.close(received)
    for number in FOR_THE_PROGRAM:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.chdir(request["cwd"])
    multiprocessing.process.ORIGINAL_DIR = request["cwd"]  # type: ignore[attr-defined]
    ctypes.CDLL(None).prctl(fork_server.PR_SET_NAME, NAME)
    tempfile.tempdir = None  # The cached value is of another environment.
    env: dict[str, str] = request["env"]
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = [*filter(None, env.get("PYTHONPATH", "").split(":")), *PATH]
    sys.dont_write_bytecode = bool(env.get("PYTHONDONTWRITEBYTECODE"))
    _open_standard_streams(bool(request["unbuffered"] or env.get("PYTHONUNBUFFERED")))
    if env.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.modules["numpy.random"].seed()  # Python's own generator does so itself.
    gc.enable()
    fork_server._send_answer(channel, pid=os.getpid())
    channel.close()
    return list(request["arguments"])


def start_server_here(descriptors: list[int]) -> list[str] | None:
    """Fork a server for this process, without these descriptors. Returns None here, and the
    arguments of their Python in the programs that are forked from it."""
    ours, theirs = map(_moved, socket.socketpair())
    program = os.getpid()
    child = os.fork()
    if child == 0:
        ours.close()
        os.chdir("/")
        for descriptor in descriptors:
            os.close(descriptor)
        ctypes.CDLL(None).prctl(fork_server.PR_SET_NAME, NAME)
        return serve(program, theirs)
    theirs.close()
    own = prepared_processes.Server(ours, child)
    prepared_processes.fork_instead_of_executing(own)
    atexit.register(own.close)
    return None


def serve_ranks(arguments: list[str]) -> list[str]:
    """Be the process from which a host forks its ranks. Returns in ranks: their arguments, and in
    the agent of a job: its own."""
    sys.argv[:] = arguments
    _, host, descriptor, *modules = arguments
    rank = fork_server.main(int(host), socket.socket(fileno=int(descriptor)), modules)
    agent = start_server_here([]) if os.environ.get("RANK") == "0" else None
    return rank if agent is None else agent


def run(arguments: list[str]) -> None:
    """Run ``python ARGUMENTS`` and end this process as Python would."""
    name, code = fork_server.prepare_main_module(arguments)
    status = 0
    try:
        if code is None:
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as end:
        if isinstance(end.code, int):
            status = end.code & 255
        elif end.code is not None:
            print(end.code, file=sys.stderr)
            status = 1
    except BaseException as error:  # noqa: BLE001 - shown, as by Python
        own = error.__traceback__
        sys.excepthook(type(error), error, own.tb_next if own is not None else None)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit.unregister(gc.unfreeze)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    if status < 0:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status)


def _open_standard_streams(unbuffered: bool) -> None:
    """Open them anew: what they are has changed. They stay the same objects, which are defaults of
    functions."""
    for stream, mode in ((sys.stdin, "rb"), (sys.stdout, "wb"), (sys.stderr, "wb")):
        writes = mode == "wb"
        descriptor = stream.fileno()
        raw = open(  # noqa: SIM115 - for as long as the program runs
            descriptor, mode, 0 if unbuffered and writes else -1, closefd=False
        )
        stream.__init__(  # type: ignore[misc]
            raw,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=writes and (descriptor == 2 or os.isatty(descriptor)),
            write_through=writes and unbuffered,
        )


def _die_with(parent: int) -> None:
    ctypes.CDLL(None).prctl(fork_server.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)  # The child died before.


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next request and its descriptors, or None at the end of the requests."""
    data, descriptors, _, _ = socket.recv_fds(channel, 4, 64)
    if not data:
        return None
    size = int.from_bytes(data + fork_server._receive_exactly(channel, 4 - len(data)), "big")
    moved = [_move(descriptor) for descriptor in descriptors]
    return json.loads(fork_server._receive_exactly(channel, size)), moved


def _moved(end: socket.socket) -> socket.socket:
    return socket.socket(fileno=_move(end.detach()))


def _move(descriptor: int) -> int:
    high = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_DESCRIPTOR)
    os.close(descriptor)
    return high


if __name__ == "__main__":
    _channel = _moved(socket.socket(fileno=int(sys.argv[2])))
    _arguments = main(int(sys.argv[1]), _channel)
    if _arguments[0] == str(SERVER_OF_RANKS):
        _arguments = serve_ranks(_arguments)
    run(_arguments)
