"""Executes a command that the kernel kills when the host dies for any reason.

``python -I -S spawn.py HOST_PID COMMAND ARG…`` runs without site packages, so that it takes a few
milliseconds. A function between fork and exec would be unsafe in a host with threads.
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
    try:
        # Search the PATH of the rank, which its pod template may set.
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
