"""Forks the ranks of training jobs in a guest, from a process that has imported torch.

    python training_launcher.py

On an emulated processor the import takes the better part of a minute, so it is done once.
Commands are JSON lines on stdin, answers JSON lines on stdout, as in worker.py. Each names a
rank; `launch` makes one, `ended` asks for its exit status (null while it runs), and everything
else is passed on to it.
"""

import json
import os
import selectors
import sys
import traceback
from typing import Any, NoReturn

import torch

import pipemorph_trainer.pipeline  # noqa: F401 - what the ranks would spend the time on


class Launcher:
    """Ranks by name, and the pipes to and from them."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.commands: dict[str, int] = {}
        self.waiting = selectors.DefaultSelector()

    def launch(self, number: int, name: str, arguments: dict[str, Any]) -> None:
        commands_read, commands = os.pipe()
        answers, answers_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(answers_write, 1)
            _be_a_rank(number, commands_read, arguments)
        os.close(commands_read)
        os.close(answers_write)
        self.pids[name], self.commands[name] = pid, commands
        self.waiting.register(answers, selectors.EVENT_READ, Lines(answers))

    def ended(self, name: str) -> int | None:
        done = os.waitid(os.P_PID, self.pids[name], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if done is None:
            return None
        return done.si_status if done.si_code == os.CLD_EXITED else -done.si_status

    def obey(self, line: bytes) -> None:
        request = json.loads(line)
        number, name = request["number"], request["arguments"].pop("name")
        if request["op"] == "launch":
            self.launch(number, name, request["arguments"])
        elif request["op"] == "ended":
            say(number, self.ended(name))
        else:
            os.write(self.commands[name], json.dumps(request).encode() + b"\n")

    def serve(self) -> None:
        orders = Lines(0)
        self.waiting.register(0, selectors.EVENT_READ, orders)
        while True:
            for key, _ in self.waiting.select():
                lines: Lines = key.data
                for line in lines.read():
                    if lines is orders:
                        self.obey(line)
                    else:
                        os.write(1, line + b"\n")
                if lines.ended and lines is orders:
                    return
                if lines.ended:
                    self.waiting.unregister(lines.file)


class Lines:
    """Whole lines from a file that others write now and then."""

    def __init__(self, file: int) -> None:
        self.file = file
        self.ended = False
        self._pending = b""

    def read(self) -> list[bytes]:
        data = os.read(self.file, 1 << 16)
        self.ended = not data
        *lines, self._pending = (self._pending + data).split(b"\n")
        return lines


def say(number: int, result: Any) -> None:
    os.write(1, json.dumps({"number": number, "result": result}).encode() + b"\n")


def _be_a_rank(number: int, commands: int, arguments: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        import training_rank

        status = training_rank.run(number, commands, arguments)
    except BaseException:  # noqa: BLE001 - a fork must never go on in its parent's code
        traceback.print_exc()
    finally:
        # No interpreter shutdown: a rank left alone must not hang in a process group's end.
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    say(0, "ready")
    Launcher().serve()
