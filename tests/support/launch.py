"""Starts the ranks of a small job as local processes and collects what they return.

Processes are forked from a server that has imported torch once, so a test with four ranks
starts in a fraction of a second. Every wait has a deadline; a rank that does not end in time
is killed and the test reports the last output of all of them.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pipemorph_trainer.context import TrainerContext

_context = multiprocessing.get_context("forkserver")
# With what torch imports late, each as slow as itself: at a backward, for an optimizer, for a
# checkpoint and for inputs that are no plain tensors.
_context.set_forkserver_preload(
    [
        "torch",
        "torch.fx.experimental.symbolic_shapes",
        "torch._dynamo",
        "torch.distributed.checkpoint",
        "torch.distributed.pipelining.microbatch",
        "pipemorph_trainer.pipeline",
    ]
)
# The server would end by itself. The wait makes its and the ranks' time count as the tests'.
atexit.register(multiprocessing.forkserver._forkserver._stop)  # type: ignore[attr-defined]


class Missing(NamedTuple):
    """Message that a rank reported: one that did not come, or that its neighbour did not take."""

    kind: str
    microbatch: int
    iteration: int
    stage: int
    """Stage of the neighbour."""
    link: int
    taken: bool
    """True if the neighbour was to take it."""


_WHAT = r"(F|B) of microbatch (\d+) of iteration (\d+)"
_WHERE = r"on link (\d+) \((?:direct, gloo|delegated, \w+)\)"
_TO_COME = re.compile(rf"waited [\d.]+ s for {_WHAT} from stage (\d+) {_WHERE}")
_TO_TAKE = re.compile(rf"waited [\d.]+ s for stage (\d+) to take {_WHAT} {_WHERE}")


def missing_in(text: str) -> Missing:
    """Message that a rank was missing. Raises AssertionError if the text names no message."""
    if found := _TO_COME.search(text):
        kind, *numbers = found.groups()
        return Missing(kind, *map(int, numbers), False)  # type: ignore[call-arg, arg-type]
    found = _TO_TAKE.search(text)
    assert found is not None, f"no message is named:\n{text[-2000:]}"
    stage, kind, microbatch, iteration, link = found.groups()
    return Missing(kind, int(microbatch), int(iteration), int(stage), int(link), True)


@dataclass(frozen=True)
class RankResult:
    """Result of a rank. ``error`` is its last exception as text, ``output`` its stdio."""

    rank: int
    exitcode: int | None
    value: Any
    error: str
    output: str
    seconds: float


_held: list[socket.socket] = []


def free_port() -> int:
    """Port that is reserved while this process lives. A store may have it: it requests to share the
    port, and it alone listens. It listens at all addresses, so it is held at all of them: a foreign
    listener at another address of this machine would be in its way."""
    holder = socket.socket()
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind(("", 0))
    _held.append(holder)
    return int(holder.getsockname()[1])


def ended(pid: int) -> bool:
    """True if a process has ended. If its parent is gone, it may stay a zombie, as in a container
    whose first process reaps none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


class Ranks:
    """Running ranks. ``entry(context, *args)`` runs on each; its value is pickled back."""

    def __init__(
        self,
        world: int,
        entry: Callable[..., Any],
        *args: Any,
        environ: Mapping[str, str] | None = None,
        context: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pipemorph-test-")
        self._began = time.monotonic()
        port = free_port()
        self.processes = []
        for rank in range(world):
            seat = {
                "rank": rank,
                "world_size": world,
                "local_rank": rank,
                "master_addr": "127.0.0.1",
                "master_port": port,
                **(context or {}),
            }
            process = _context.Process(
                target=_child,
                args=(seat, entry, args, str(self._file(rank)), dict(environ or {})),
                daemon=True,
            )
            process.start()
            self.processes.append(process)

    def _file(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}"

    def signal(self, rank: int, number: int) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, number)

    def wait_for_output(self, rank: int, text: str, timeout: float = 60.0) -> None:
        """Wait until a rank has printed ``text``."""
        deadline = time.monotonic() + timeout
        file = self._file(rank).with_suffix(".out")
        while time.monotonic() < deadline and self.processes[rank].exitcode is None:
            if file.exists() and text in file.read_text(errors="replace"):
                return
            self.processes[rank].join(0.02)
        said = file.read_text(errors="replace") if file.exists() else ""
        raise AssertionError(f"rank {rank} did not print {text!r} in {timeout:.0f} s:\n{said}")

    def wait_for_end(self, ranks: Sequence[int], timeout: float = 80.0) -> None:
        """Wait until these ranks have ended. Raises AssertionError naming those that have not."""
        deadline = time.monotonic() + timeout
        for rank in ranks:
            self.processes[rank].join(max(0.0, deadline - time.monotonic()))
        remaining = [rank for rank in ranks if self.processes[rank].exitcode is None]
        assert not remaining, f"ranks {remaining} have not ended within {timeout:.0f} s"

    def wait(self, timeout: float = 100.0) -> list[RankResult]:
        """Wait for all to end. Those still running after ``timeout`` are killed, and have
        exit code None."""
        deadline = self._began + timeout
        ended: dict[int, float] = {}
        while len(ended) < len(self.processes) and time.monotonic() < deadline:
            for rank, process in enumerate(self.processes):
                if rank not in ended and process.exitcode is not None:
                    ended[rank] = time.monotonic() - self._began
            waiting = [p.sentinel for p in self.processes if p.exitcode is None]
            if waiting:
                remaining = max(0.0, deadline - time.monotonic())
                multiprocessing.connection.wait(waiting, remaining)
        results = []
        for rank, process in enumerate(self.processes):
            code = process.exitcode
            if code is None:
                # Says where it hangs, on its stderr.
                self.signal(rank, signal.SIGUSR1)
                process.join(0.3)
                process.kill()
                process.join(5)
            results.append(self._result(rank, code, ended.get(rank, timeout)))
        self._folder.cleanup()
        return results

    def _result(self, rank: int, code: int | None, seconds: float) -> RankResult:
        value, error, output = None, "", ""
        with contextlib.suppress(FileNotFoundError, EOFError):
            value, error = pickle.loads(self._file(rank).with_suffix(".result").read_bytes())
        with contextlib.suppress(FileNotFoundError):
            output = self._file(rank).with_suffix(".out").read_text(errors="replace")
        return RankResult(rank, code, value, error, output, seconds)


def run_ranks(world: int, entry: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Run ranks that must all succeed and return their values, rank by rank."""
    timeout = kwargs.pop("timeout", 100.0)
    results = Ranks(world, entry, *args, **kwargs).wait(timeout)
    failed = [r for r in results if r.exitcode != 0]
    if failed:
        outputs = "\n".join(
            f"--- rank {r.rank}: exit {r.exitcode} after {r.seconds:.1f} s\n"
            f"{r.error}{r.output[-3000:]}"
            for r in failed
        )
        raise AssertionError(f"{len(failed)} of {world} ranks failed\n{outputs}")
    return [r.value for r in results]


def _child(
    seat: dict[str, Any],
    entry: Callable[..., Any],
    args: tuple[Any, ...],
    file: str,
    environ: dict[str, str],
) -> None:
    import torch

    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environ})
    out = os.open(f"{file}.out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()  # where it was, should a library crash
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    value, error = None, ""
    try:
        value = entry(TrainerContext(**seat), *args)
    except BaseException:  # noqa: BLE001 - reported to the parent, whatever it is
        error = traceback.format_exc()
    Path(f"{file}.tmp").write_bytes(pickle.dumps((value, error)))
    Path(f"{file}.tmp").rename(f"{file}.result")
    sys.stdout.flush()
    sys.stderr.flush()
    # Skips interpreter shutdown: a lone rank must not hang in a process group's end.
    os._exit(1 if error else 0)
