"""``python -m pipemorph_trainer.launcher [--generations] [--grace=SECONDS] -- COMMAND…``

Runs COMMAND once per rank of this pod, and ends when all ranks have ended. It needs the variables
that the operator gives to every pod: ``PIPEMORPH_POD_INDEX``, ``LOCAL_WORLD_SIZE`` (the ranks of a
pod), ``WORLD_SIZE`` and ``PIPEMORPH_JOB_FILE``. Each rank gets ``RANK``, ``LOCAL_RANK`` and its own
``PIPEMORPH_METRICS_PORT``; of several ranks, the lines in the pod's log begin with
``[rank N]``.

If a rank fails, the others of the pod are stopped. With ``--generations`` the ingest is told so,
all pods of the job end their ranks, and start them again when it says so. Otherwise, or if no
further generation follows, the exit code is that of the rank that failed first by itself, or 70 if
the job must not be started again, and the pod's termination message names the rank. A SIGTERM is
passed on to the ranks, which have ``--grace`` seconds to end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import traceback
from collections.abc import Sequence

from pipemorph.arguments import duration
from pipemorph.errors import InputError, one_line
from pipemorph.local.processes.supervise import End, Ending
from pipemorph_trainer.launcher.pod import Pod
from pipemorph_trainer.launcher.site import exit_code, note, run
from pipemorph_trainer.preflight import EXIT_UNFIT, TERMINATION_LOG

GRACE_SECONDS = 28.0
"""Less than the 30 s that Kubernetes gives a pod by default."""
MESSAGE_BYTES = 4096
"""Kubernetes keeps that much of a termination message."""


def _tell(ending: Ending) -> None:
    text = ending.describe()
    note(text)
    if ending.end is End.FAILED and TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_bytes(f"{text}\n".encode()[:MESSAGE_BYTES])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="launcher", description=__doc__)
    parser.add_argument("--grace", type=duration, default=GRACE_SECONDS)
    parser.add_argument("--generations", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    try:
        pod = Pod.from_env(os.environ)
        ending = run(pod, options.command, options.grace, generations=options.generations)
    except (InputError, OSError) as error:
        ending = Ending(End.FAILED, f"the pod's ranks cannot be started: {error}")
        _tell(ending)
        raise SystemExit(EXIT_UNFIT) from None
    except Exception as error:  # noqa: BLE001  # The ranks have ended; the pod says why.
        traceback.print_exc()
        why = one_line(f"the launcher of the pod failed: {type(error).__name__}: {error}", 500)
        ending = Ending(End.FAILED, why)
    if ending.end is not End.COMPLETED:
        _tell(ending)
    raise SystemExit(exit_code(ending))


if __name__ == "__main__":
    main()
