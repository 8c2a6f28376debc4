"""Cleans up after a host that was killed: a small process that briefly outlives it.

``python -I -S reaper.py``, started by the host with a pipe as its standard input. Each line, in
JSON, adds to or removes from the list of things to clean up. When the pipe closes, the reaper kills
or deletes what is on the list. A host that exits normally empties the list first.

``["watch", PGID]``, ``["forget", PGID]``: a process group.
``["delete", PATH]``, ``["keep", PATH]``: a folder with secrets. Processes whose environment
names it are killed: programs that ranks have started in other sessions.
"""

import json
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Exit only when the pipe closes.
    groups: set[int] = set()
    folders: set[str] = set()
    for line in sys.stdin:
        verb, what = json.loads(line)
        if verb == "watch":
            groups.add(what)
        elif verb == "forget":
            groups.discard(what)
        elif verb == "delete":
            folders.add(what)
        elif verb == "keep":
            folders.discard(what)
    for group in groups:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environ = (process / "environ").read_bytes()
            if any(os.fsencode(folder) in environ for folder in folders):
                os.kill(int(process.name), signal.SIGKILL)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
