"""Guest, from outside: a QEMU process and the agent inside it."""

import base64
import itertools
import json
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testbed.errors import TestbedError
from testbed.processes import Process
from testbed.waiting import wait_for

from guests.kernel import Kernel

BOOT_DEADLINE = 240.0
# Torch, and what three processes with it and the files they came from need.
MEMORY_MIB = 2560


class GuestError(TestbedError):
    """A command in a guest failed; the message has its output."""


@dataclass(frozen=True)
class Done:
    rc: int
    out: str
    err: str


@dataclass(frozen=True)
class Nic:
    """End of a cable between two guests: a unix socket that one side listens on."""

    path: Path
    listens: bool
    mac: str


class Guest:
    """Boots on :meth:`start`; every method after that is carried out inside."""

    def __init__(self, name: str, directory: Path, kernel: Kernel, nics: Sequence[Nic]) -> None:
        self.name = name
        self._port = directory / f"{name}.agent"
        self._console = directory / f"{name}.console"
        self._monitor = directory / f"{name}.qmp"
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.Queue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._hello: queue.Queue[dict[str, Any]] = queue.Queue()
        self._answers[0] = self._hello
        command: list[str | Path] = [
            "qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2",
            "-m", str(MEMORY_MIB), "-nodefaults", "-no-reboot", "-display", "none",
            "-kernel", kernel.image, "-initrd", kernel.ramdisk,
            "-append", "console=ttyS0 panic=-1 loglevel=4 random.trust_cpu=on mitigations=off",
            "-serial", f"file:{self._console}",
            "-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap",
            "-device", "virtio-9p-pci,fsdev=root,mount_tag=host",
            "-device", "virtio-rng-pci",
            "-device", "virtio-serial-pci",
            "-chardev", f"socket,id=agent,path={self._port},server=on,wait=off",
            "-device", "virtserialport,chardev=agent,name=agent",
            "-qmp", f"unix:{self._monitor},server=on,wait=off",
        ]  # fmt: skip
        for number, nic in enumerate(nics):
            role = "on" if nic.listens else "off"
            command += [
                "-netdev",
                f"stream,id=n{number},server={role},addr.type=unix,addr.path={nic.path}",
                "-device", f"virtio-net-pci,netdev=n{number},mac={nic.mac}",
            ]  # fmt: skip
        self.process = Process(f"guest {name}", command, directory / f"{name}.qemu")

    def start(self) -> None:
        self.process.start()

    def wait_ready(self) -> None:
        """Wait for the agent's first word."""

        def connect() -> socket.socket | None:
            made = socket.socket(socket.AF_UNIX)
            try:
                made.connect(str(self._port))
            except OSError:
                made.close()
                return None
            return made

        self._socket = wait_for(f"QEMU of {self.name}", connect, 60, details=self._tails)
        threading.Thread(target=self._listen, daemon=True).start()
        end = time.monotonic() + BOOT_DEADLINE
        while True:
            try:
                self._hello.get(timeout=0.5)
                return
            except queue.Empty:
                if not self.process.running or time.monotonic() > end:
                    raise TestbedError(
                        f"guest {self.name} did not come up within {BOOT_DEADLINE} s; "
                        f"{self._tails()}"
                    ) from None

    def stop(self) -> None:
        # The guest has nothing to lose: its only disk is read-only.
        self.process.stop(grace=0)
        if self._socket is not None:
            self._socket.close()

    def monitor(self, command: str, **arguments: Any) -> Any:
        """Have QEMU itself do something: a command of its machine protocol (QMP)."""
        with socket.socket(socket.AF_UNIX) as s:
            s.settimeout(30)
            s.connect(str(self._monitor))
            with s.makefile("rw") as lines:
                lines.readline()  # its greeting
                for say in (
                    {"execute": "qmp_capabilities"},
                    {"execute": command, "arguments": arguments},
                ):
                    lines.write(json.dumps(say) + "\n")
                    lines.flush()
                    # Events of the machine come in between.
                    while "event" in (answer := json.loads(lines.readline())):
                        pass
                    if "error" in answer:
                        raise GuestError(f"QEMU of {self.name}, {say}: {answer['error']}")
        return answer["return"]

    def carrier(self, number: int, on: bool) -> None:
        """Set whether the guest's network card finds something at the other end of its cable.
        Without it no frame gets in or out."""
        self.monitor("set_link", name=f"n{number}", up=on)

    def _tails(self) -> str:
        text = self._console.read_text(errors="replace") if self._console.exists() else ""
        lines = text.splitlines()
        end = max(0, len(lines) - 25)
        # A kernel prints the reason of its panic first, before pages of registers.
        said = ("BUG:", "Oops", "Kernel panic")
        first = next((i for i, line in enumerate(lines) if any(s in line for s in said)), end)
        cause = lines[first : min(first + 8, end)]
        return "\n".join([self.process.log_end(), "its console:", *cause, *lines[end:]])

    def logs(self) -> str:
        return self._tails()

    def _listen(self) -> None:
        assert self._socket is not None
        pending = b""
        while True:
            try:
                data = self._socket.recv(1 << 16)
            except OSError:
                return
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                answer = json.loads(line)
                with self._lock:
                    found = self._answers.get(answer["number"])
                if found is not None:
                    found.put(answer)

    def _died(self) -> GuestError:
        return GuestError(
            f"guest {self.name} is no longer there: its machine ended, as after a kernel panic; "
            f"{self._tails()}"
        )

    def ask(self, op: str, patience: float = 30.0, **arguments: Any) -> dict[str, Any]:
        """Send one command to the agent and return its answer."""
        if self._socket is None:
            raise GuestError(f"guest {self.name} is not up")
        number = next(self._numbers)
        mine: queue.Queue[dict[str, Any]] = queue.Queue()
        with self._lock:
            self._answers[number] = mine
        request = {"number": number, "op": op, **arguments}
        # The agent keeps the deadline; this one is for a guest that hangs as a whole.
        end = time.monotonic() + patience + 30
        try:
            with self._lock:
                self._socket.sendall(json.dumps(request).encode() + b"\n")
            while True:
                try:
                    answer = mine.get(timeout=1.0)
                    break
                except queue.Empty:
                    if not self.process.running:
                        raise self._died() from None
                    if time.monotonic() > end:
                        raise GuestError(
                            f"guest {self.name} did not answer {op} {arguments} within "
                            f"{patience + 30} s; {self._tails()}"
                        ) from None
        except BrokenPipeError:
            raise self._died() from None
        finally:
            with self._lock:
                del self._answers[number]
        if "error" in answer:
            raise GuestError(f"guest {self.name}, {op} {arguments}: {answer['error']}")
        return answer

    def try_run(
        self, *argv: str, deadline: float = 60.0, env: Mapping[str, str] | None = None
    ) -> Done:
        """Run a program to its end, whatever its exit status."""
        answer = self.ask(
            "run", deadline, argv=[str(a) for a in argv], env=dict(env or {}), deadline=deadline
        )
        return Done(answer["rc"], answer["out"], answer["err"])

    def run(self, *argv: str, deadline: float = 60.0, env: Mapping[str, str] | None = None) -> str:
        """Run a program that must succeed; its output."""
        done = self.try_run(*argv, deadline=deadline, env=env)
        if done.rc != 0:
            raise GuestError(
                f"guest {self.name}: {' '.join(argv)} ended with {done.rc}: "
                f"{(done.err.strip() or done.out.strip())[-3000:]}"
            )
        return done.out

    def sh(self, script: str, deadline: float = 60.0) -> str:
        return self.run("sh", "-ec", script, deadline=deadline)

    def read(self, path: str) -> str:
        return base64.b64decode(self.ask("read", path=path)["text"]).decode()

    def thread_states(self, pid: int) -> list[str]:
        """The kernel's letter for each thread of a process."""
        # A process may end during the search.
        said = self.sh(f"cat /proc/{pid}/task/*/stat 2>/dev/null || :")
        return [line.rsplit(")", 1)[1].split()[0] for line in said.splitlines()]

    def queue_pairs(self) -> int:
        """Number of reliable connections that the kernel holds, for any process."""
        said = json.loads(self.run("rdma", "-j", "resource", "show", "qp"))
        return sum(pair["type"] == "RC" for pair in said)

    def sent_bytes(self, netdev: str) -> int:
        """Bytes sent, by the kernel's count of the network device."""
        return int(self.read(f"/sys/class/net/{netdev}/statistics/tx_bytes"))

    def spawn(self, *argv: str, env: Mapping[str, str] | None = None) -> "Task":
        answer = self.ask("spawn", argv=[str(a) for a in argv], env=dict(env or {}))
        return Task(self, answer["task"], " ".join(argv))

    def python(self, *argv: str, env: Mapping[str, str] | None = None) -> "Task":
        """Spawn this interpreter, which the guest sees over 9p."""
        return self.spawn(sys.executable, *argv, env=env)


class Task:
    """A program in a guest, spoken to line by line."""

    def __init__(self, guest: Guest, number: int, name: str) -> None:
        self.guest, self.number, self.name = guest, number, name
        self._rc: int | None = None

    def tell(self, message: Any) -> None:
        self.guest.ask("tell", task=self.number, line=json.dumps(message))

    def hear(self, deadline: float = 60.0) -> Any:
        """Read the next line, as JSON. Raises if the program ended or sent {"failed": ...}."""
        answer = self.guest.ask("hear", deadline, task=self.number, deadline=deadline)
        if answer["line"] is None:
            raise GuestError(f"guest {self.guest.name}: {self.name} ended; {answer['err'][-4000:]}")
        said = json.loads(answer["line"])
        if isinstance(said, dict) and "failed" in said:
            raise GuestError(f"guest {self.guest.name}: {self.name}:\n{said['failed']}")
        return said

    def ask(self, message: Any, deadline: float = 60.0) -> Any:
        self.tell(message)
        return self.hear(deadline)

    def signal(self, number: signal.Signals) -> None:
        if self._rc is None:
            self.guest.ask("signal", task=self.number, signum=int(number))

    def reap(self, deadline: float = 60.0) -> int:
        """Wait for its end; how it ended, as of subprocess."""
        if self._rc is None:
            answer = self.guest.ask("reap", deadline, task=self.number, deadline=deadline)
            self._rc = int(answer["rc"])
        return self._rc

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        self.reap()
