"""Imports the modules of ranks once, in a process from which it forks the ranks.

``python fork_server.py HOST_PID SOCKET_FD MODULE…`` imports the modules and then serves requests: a
stream of JSON objects, each with its length in 4 bytes before it, and the descriptor of the rank's
output with it. The first answer is ``{"ready": true}``, or ``{"error": …}`` and the end; the answer
to a request is the rank's process id.

A rank is forked twice, and its first parent ends, so that the rank becomes a child of the host,
which has to be a child subreaper. The host then waits for it and gets its exit status like that of
any child, even if this process is gone, and the kernel kills the rank when the host dies.

In the rank this process's own functions have returned: the program runs at the bottom of the stack
and ends as in a new Python process, with its exit code, ``atexit`` and shutdown. Only SIGQUIT
differs: it prints the stacks of all threads.
"""

# `python FILE` puts the folder of this file at the front, where a rank's imports would look.
import sys

if sys.path and sys.path[0] == __file__.rpartition("/")[0]:
    del sys.path[0]

import atexit
import ctypes
import faulthandler
import gc
import importlib
import importlib.machinery
import json
import os
import runpy
import select
import signal
import socket
import traceback
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_NAME = 1, 15


def main(host: int, channel: socket.socket, modules: list[str]) -> list[str]:
    """Serve requests until the host hangs up. Returns only in ranks: their Python's arguments."""
    gc.disable()  # Collecting in ranks would copy the pages that they share.
    try:
        for module in modules:
            importlib.import_module(module)
        _check_one_thread()
    except BaseException as error:  # noqa: BLE001 - a module may raise any; sent to the host
        last = traceback.extract_tb(error.__traceback__)[-1]
        why = "".join(traceback.format_exception_only(error)).strip()
        _send_answer(channel, error=f"{why} ({last.filename}:{last.lineno})")
        sys.exit(1)
    gc.collect()
    gc.freeze()
    _send_answer(channel, ready=True)
    while request := receive_request(channel):
        program, output = request
        sys.stdout.flush()
        sys.stderr.flush()
        try:
            between = os.fork()
        except OSError as error:
            _send_answer(channel, error=error.strerror)
            os.close(output)
            continue
        if between == 0:
            parent = os.getpid()
            try:
                if os.fork() > 0:
                    os._exit(0)
            except OSError as error:
                _send_answer(channel, error=error.strerror)
                os._exit(1)
            return _become_rank(host, parent, channel, program, output)
        os.close(output)
        os.waitpid(between, 0)
    os._exit(0)  # No cleanup of the imported modules.


def _check_one_thread() -> None:
    """Raise RuntimeError if a thread would be missing in ranks."""
    # Libraries that can be forked with their threads, such as OpenBLAS, end them before a fork.
    trial = os.fork()
    if trial == 0:
        os._exit(0)
    os.waitpid(trial, 0)
    if (threads := len([*Path("/proc/self/task").iterdir()])) > 1:
        raise RuntimeError(
            f"the modules started {threads - 1} threads, which a forked rank would not have"
        )


def _become_rank(
    host: int, parent: int, channel: socket.socket, program: dict[str, Any], output: int
) -> list[str]:
    """Become a rank: its session, output and environment. Returns its Python's arguments."""
    _await_parent_exit(parent)
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:
        os._exit(1)  # The host died before this process started.
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(program["env"])
    if "RANK" in os.environ:  # Shown by `ps` and `top`.
        ctypes.CDLL(None).prctl(PR_SET_NAME, f"rank-{os.environ['RANK']}".encode())
    if "numpy.random" in sys.modules:  # Python seeds its own generator.
        sys.modules["numpy.random"].seed()
    faulthandler.register(signal.SIGQUIT, all_threads=True)
    gc.enable()
    # Else extensions would report frozen objects as leaks at the shutdown.
    atexit.register(gc.unfreeze)
    _send_answer(channel, pid=os.getpid())
    channel.close()
    return list(program["arguments"])


def _await_parent_exit(parent: int) -> None:
    """Wait until this process has been handed on from its parent to the host, or to another process
    if the host is gone."""
    with suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent)
        select.select([descriptor], [], [])
        os.close(descriptor)


def receive_request(channel: socket.socket) -> tuple[dict[str, Any], int] | None:
    """The next request and its descriptor; None when the host has hung up."""
    data, descriptors, _, _ = socket.recv_fds(channel, 4, 1)
    if not data:
        return None
    size = int.from_bytes(data + _receive_exactly(channel, 4 - len(data)), "big")
    return json.loads(_receive_exactly(channel, size)), descriptors[0]


def _receive_exactly(channel: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = channel.recv(size)
        if not part:
            os._exit(0)
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _send_answer(channel: socket.socket, **what: Any) -> None:
    with suppress(OSError):  # The host is gone, and so are its ranks.
        channel.sendall(json.dumps(what).encode() + b"\n")


def prepare_main_module(arguments: list[str]) -> tuple[str, Any]:
    """A new ``__main__`` for ``python ARGUMENTS``, and the module's name or the script's code."""
    main_module = types.ModuleType("__main__")
    names = main_module.__dict__
    names["__builtins__"] = __builtins__
    if sys.version_info < (3, 14):
        names.update(__annotations__={})
    sys.modules["__main__"] = main_module
    sys.orig_argv[:] = [sys.executable, *arguments]
    if arguments[0] == "-m":
        if not sys.flags.safe_path:
            sys.path.insert(0, str(Path.cwd()))
        sys.argv[:] = ["-m", *arguments[2:]]
        return arguments[1], None
    script = arguments[0]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(script).resolve().parent))
    sys.argv[:] = arguments
    file = str(Path(script).absolute())  # As Python does: the program may change its folder.
    loader = importlib.machinery.SourceFileLoader("__main__", file)
    names.update(__file__=file, __loader__=loader, __cached__=None)
    return file, loader.source_to_code(loader.get_data(file), file)


if __name__ == "__main__":
    _channel = socket.socket(fileno=int(sys.argv[2]))
    name, code = prepare_main_module(main(int(sys.argv[1]), _channel, sys.argv[3:]))
    if code is None:
        runpy._run_module_as_main(name)  # type: ignore[attr-defined]
    else:
        exec(code, sys.modules["__main__"].__dict__)
