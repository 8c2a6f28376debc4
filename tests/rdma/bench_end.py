"""End of `pipemorph bench link` in a guest; training_launcher.py forks it.

The command line is parsed by the command itself. Where that starts an interpreter for the end, the
fork is the end, because it has torch already. What it says goes to files, since the end that
listens has to be read while it runs.
"""

import json
import os
import subprocess
import sys
from typing import Any

from pipemorph import cli
from pipemorph.commands import bench
from pipemorph_trainer.bench import link


def _in_place(command: list[str], **_: Any) -> "subprocess.CompletedProcess[str]":
    assert command[:3] == [sys.executable, "-m", link.__name__], command
    sys.argv = command[2:]
    return subprocess.CompletedProcess(command, link.main())


class _Processes:
    """Replacement of :mod:`subprocess`."""

    run = staticmethod(_in_place)


def run(number: int, commands: int, arguments: dict[str, Any]) -> int:
    """`arguments`: argv after `pipemorph bench link`, more environment, and files for out and err.
    Returns the exit status."""
    # Stays open: the launcher takes the end of this pipe for the end of the program.
    answers = os.dup(1)
    for name, standard in (("out", 1), ("err", 2)):
        file = os.open(arguments[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, standard)
        os.close(file)
    # Reported after the files of its output exist.
    os.write(answers, json.dumps({"number": number, "result": os.getpid()}).encode() + b"\n")
    os.environ |= arguments["env"]
    bench.subprocess = _Processes  # type: ignore[attr-defined, assignment]
    return cli.main(["bench", "link", *arguments["argv"]])
