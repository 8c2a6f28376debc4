"""``python -m pipemorph_trainer.launcher [--generations] [--grace=SECONDS] -- COMMAND…``

Runs COMMAND once per rank of this pod, and ends when all ranks have ended. It needs the variables
that the operator sets in every pod: ``PIPEMORPH_POD_INDEX``, ``LOCAL_WORLD_SIZE`` (the ranks of a
pod), ``WORLD_SIZE`` and ``PIPEMORPH_JOB_FILE``. Each rank gets ``RANK``, ``LOCAL_RANK`` and its own
``PIPEMORPH_METRICS_PORT``. If the pod has several ranks, each line in its log begins with
``[rank N]``.

If a rank fails, the other ranks of the pod are stopped. With ``--generations`` the launcher reports
the failure to the ingest, and all pods of the job end their ranks and restart them together.
Without it, or if no generation follows, the exit code is that of the first rank that failed by
itself, or 70 if the job must not be started again. The pod's termination message names the rank. A
SIGTERM is passed on to the ranks, which have ``--grace`` seconds to end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import traceback
from collections.abc import Sequence

from pipemorph.argument_types import duration_type
from pipemorph.errors import InputError, one_line
from pipemorph.local.processes.supervision import AttemptOutcome, AttemptResult
from pipemorph_trainer.launcher.pod import Pod
from pipemorph_trainer.launcher.pod_rank_host import choose_exit_code, print_note, run_pod
from pipemorph_trainer.preflight import EXIT_UNFIT, TERMINATION_LOG

GRACE_SECONDS = 28.0
"""Less than the 30 s that Kubernetes gives a pod by default."""
MESSAGE_BYTES = 4096
"""Longest termination message that Kubernetes stores."""


def _write_termination_message(ending: AttemptResult) -> None:
    text = ending.format_lines()
    print_note(text)
    if ending.outcome is AttemptOutcome.FAILED and TERMINATION_LOG.exists():
        with contextlib.suppress(OSError):
            TERMINATION_LOG.write_bytes(f"{text}\n".encode()[:MESSAGE_BYTES])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="launcher", description=__doc__)
    parser.add_argument("--grace", type=duration_type, default=GRACE_SECONDS)
    parser.add_argument("--generations", action="store_true")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    try:
        pod = Pod.from_env(os.environ)
        ending = run_pod(pod, options.command, options.grace, generations=options.generations)
    except (InputError, OSError) as error:
        ending = AttemptResult(AttemptOutcome.FAILED, f"the pod's ranks cannot be started: {error}")
        _write_termination_message(ending)
        raise SystemExit(EXIT_UNFIT) from None
    except Exception as error:  # noqa: BLE001  # The ranks have ended; the pod reports why.
        traceback.print_exc()
        why = one_line(f"the launcher of the pod failed: {type(error).__name__}: {error}", 500)
        ending = AttemptResult(AttemptOutcome.FAILED, why)
    if ending.outcome is not AttemptOutcome.COMPLETED:
        _write_termination_message(ending)
    raise SystemExit(choose_exit_code(ending))


if __name__ == "__main__":
    main()
