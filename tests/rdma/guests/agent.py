"""Runs inside a guest as its first process: takes commands over a virtio port, JSON line by line.

One boot serves many tests, so everything a test needs done is a command here:
  run     a program to its end                      → {rc, out, err}
  spawn   a program with its input and output open  → {task}
  tell    a line for a task's input
  hear    the next line of a task's output          → {line}, null at its end
  signal  a signal for a task
  reap    wait for a task's end                     → {rc, err}
  read    a file                                    → {text}
Answers carry the request's number and may come in any order.
"""

import base64
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

PORT = "agent"


class Task:
    """Program that was spawned."""

    def __init__(self, argv: list[str], env: dict[str, str]) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.errors: list[str] = []
        self.process = subprocess.Popen(
            argv,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        for read in (self._read_lines, self._read_errors):
            threading.Thread(target=read, daemon=True).start()

    def _read_lines(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line.rstrip("\n"))
        self.lines.put(None)

    def _read_errors(self) -> None:
        for line in self.process.stderr:
            self.errors.append(line)
            del self.errors[:-200]


class Agent:
    def __init__(self) -> None:
        self.tasks: dict[int, Task] = {}
        self.next_task = 1
        self.lock = threading.Lock()

    def op_run(
        self, argv: list[str], deadline: float, env: dict[str, str], stdin: str | None = None
    ) -> dict[str, Any]:
        try:
            done = subprocess.run(
                argv,
                env=os.environ | env,
                input=stdin,
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                text=True,
                timeout=deadline,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            out = error.stdout or b""
            text = out.decode(errors="replace") if isinstance(out, bytes) else out
            return {"rc": 124, "out": text, "err": f"did not end within {deadline} s"}
        return {"rc": done.returncode, "out": done.stdout, "err": done.stderr}

    def op_spawn(self, argv: list[str], env: dict[str, str]) -> dict[str, Any]:
        task = Task(argv, os.environ | env)
        with self.lock:
            number = self.next_task
            self.next_task += 1
            self.tasks[number] = task
        return {"task": number}

    def op_tell(self, task: int, line: str) -> dict[str, Any]:
        stdin = self.tasks[task].process.stdin
        stdin.write(line + "\n")
        stdin.flush()
        return {}

    def op_hear(self, task: int, deadline: float) -> dict[str, Any]:
        try:
            line = self.tasks[task].lines.get(timeout=deadline)
        except queue.Empty:
            tail = "".join(self.tasks[task].errors)
            return {"error": f"the task said nothing for {deadline} s; its errors: {tail}"}
        if line is None:
            self.tasks[task].lines.put(None)
            return {"line": None, "err": "".join(self.tasks[task].errors)}
        return {"line": line}

    def op_signal(self, task: int, signum: int) -> dict[str, Any]:
        process = self.tasks[task].process
        if process.poll() is None:
            os.killpg(process.pid, signum)
        return {}

    def op_reap(self, task: int, deadline: float) -> dict[str, Any]:
        found = self.tasks[task]
        try:
            rc = found.process.wait(deadline)
        except subprocess.TimeoutExpired:
            return {"error": f"task {task} did not end within {deadline} s"}
        with self.lock:
            del self.tasks[task]
        return {"rc": rc, "err": "".join(found.errors)}

    def op_read(self, path: str) -> dict[str, Any]:
        return {"text": base64.b64encode(Path(path).read_bytes()).decode()}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        number = request.pop("number")
        op = request.pop("op")
        try:
            return {"number": number, **getattr(self, f"op_{op}")(**request)}
        except Exception as error:  # noqa: BLE001 - every failure is the answer
            return {"number": number, "error": f"{type(error).__name__}: {error}"}


def _find_port() -> str:
    for folder in Path("/sys/class/virtio-ports").iterdir():
        if (folder / "name").read_text().strip() == PORT:
            return f"/dev/{folder.name}"
    raise SystemExit("guest: found no virtio port for the agent")


def main() -> None:
    os.environ.update(
        PATH="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        # The host's /tmp stays in sight: the tests themselves may lie there.
        HOME="/run",
        TMPDIR="/run",
        PYTHONDONTWRITEBYTECODE="1",
    )
    # As the first process it inherits orphans; none may stay as a zombie with a pid that a
    # test looks for. Tasks of ours are waited for by name.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    agent = Agent()
    write_lock = threading.Lock()
    # Unbuffered both ways: a line is a message.
    port = os.open(_find_port(), os.O_RDWR)

    def say(message: dict[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        with write_lock:
            while data:
                data = data[os.write(port, data) :]

    say({"number": 0, "hello": sys.version})
    pending = b""
    while True:
        data = os.read(port, 65536)
        if not data:
            continue
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            threading.Thread(
                target=lambda request=request: say(agent.answer(request)), daemon=True
            ).start()


if __name__ == "__main__":
    main()
