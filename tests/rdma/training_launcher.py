"""Forks programs in a guest from a process that has imported torch.

    python training_launcher.py

On an emulated processor the import takes the better part of a minute, so it is done once. Commands
are JSON lines on stdin, answers JSON lines on stdout, as in worker.py. Each names a program;
`launch` makes one, of the module in this folder that `module` names, `ended` requests its exit
status (null while it runs), `wait` is answered with that when there is one, and everything else is
passed on to it. Commands that a program has not answered when it ends, and those that come later,
are answered with an error.
"""

import importlib
import json
import os
import selectors
import sys
import traceback
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
import torch.fx.experimental.symbolic_shapes  # at the first backward, and as slow as torch itself

import pipemorph_trainer.pipeline  # noqa: F401 - what the ranks would spend the time on


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


class Program:
    """A fork of this process, and the pipes to and from it."""

    def __init__(self, pid: int, commands: int, answers: int) -> None:
        self.pid, self.commands = pid, commands
        self.answers = Lines(answers)
        # The numbers of the requests that it has not answered, and of those for its end.
        self.unanswered: set[int] = set()
        self.awaited: set[int] = set()

    def status(self, *, wait: bool = False) -> int | None:
        """Exit status as of subprocess; None while it runs."""
        # Stays unreaped, so that no other process gets its number.
        how = os.WEXITED | os.WNOWAIT | (0 if wait else os.WNOHANG)
        done = os.waitid(os.P_PID, self.pid, how)
        if done is None:
            return None
        return done.si_status if done.si_code == os.CLD_EXITED else -done.si_status

    def wait(self, number: int) -> None:
        self.awaited.add(number)
        if self.answers.ended:
            self.bury()

    def pass_on(self, request: dict[str, Any]) -> None:
        self.unanswered.add(request["number"])
        try:
            os.write(self.commands, json.dumps(request).encode() + b"\n")
        except BrokenPipeError:
            self.bury()

    def hear(self) -> Iterator[bytes]:
        """Read its answer; answer for a program that has ended."""
        for line in self.answers.read():
            self.unanswered.discard(json.loads(line)["number"])
            yield line
        if self.answers.ended:
            self.bury()

    def bury(self) -> None:
        """Answer for a program whose pipes are closed, which the kernel does as it ends: one that
        closes them itself would be waited for here."""
        status = self.status(wait=True)
        for number in sorted(self.unanswered):
            say(number, error=f"the program has ended with {status}")
        for number in self.awaited:
            say(number, result=status)
        self.unanswered.clear()
        self.awaited.clear()


class Launcher:
    """Programs by name."""

    def __init__(self) -> None:
        self.programs: dict[str, Program] = {}
        self.waiting = selectors.DefaultSelector()

    def launch(self, number: int, name: str, module: str, arguments: dict[str, Any]) -> None:
        commands_read, commands = os.pipe()
        answers, answers_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.dup2(answers_write, 1)
            os.close(answers_write)
            _become(module, number, commands_read, arguments)
        os.close(commands_read)
        os.close(answers_write)
        program = self.programs[name] = Program(pid, commands, answers)
        program.unanswered.add(number)
        self.waiting.register(answers, selectors.EVENT_READ, program)

    def obey(self, line: bytes) -> None:
        request = json.loads(line)
        number, arguments = request["number"], request["arguments"]
        name = arguments.pop("name")
        if request["op"] == "launch":
            self.launch(number, name, arguments.pop("module"), arguments)
        elif request["op"] == "ended":
            say(number, result=self.programs[name].status())
        elif request["op"] == "wait":
            self.programs[name].wait(number)
        else:
            self.programs[name].pass_on(request)

    def serve(self) -> None:
        orders = Lines(0)
        self.waiting.register(0, selectors.EVENT_READ, None)
        while not orders.ended:
            for key, _ in self.waiting.select():
                program: Program | None = key.data
                if program is None:
                    for line in orders.read():
                        self.obey(line)
                    continue
                for line in program.hear():
                    os.write(1, line + b"\n")
                if program.answers.ended:
                    self.waiting.unregister(program.answers.file)


def say(number: int, **said: Any) -> None:
    os.write(1, json.dumps({"number": number, **said}).encode() + b"\n")


def _become(module: str, number: int, commands: int, arguments: dict[str, Any]) -> NoReturn:
    status = 1
    try:
        status = importlib.import_module(module).run(number, commands, arguments)
    except BaseException:  # noqa: BLE001 - a fork must never go on in its parent's code
        traceback.print_exc()
    finally:
        # No interpreter shutdown: a lone rank must not hang in a process group's end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    say(0, result=os.getpid())
    Launcher().serve()
