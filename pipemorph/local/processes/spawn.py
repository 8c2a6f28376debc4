"""Runs a command that the kernel kills when the host dies, however it dies.

``python -I -S spawn.py HOST_PID COMMAND ARG…``, as a script and without site packages, so
that it costs a few milliseconds. A function run between fork and exec would do the same,
but is not safe in a host with threads.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    host, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != host:
        sys.exit("the host died before this process started")
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
