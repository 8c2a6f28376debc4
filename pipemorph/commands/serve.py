"""``pipemorph serve JOB [-- COMMAND…]``: the control loop for ranks that torchrun or Slurm
starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pipemorph.argument_types import port_type
from pipemorph.commands.run import add_run_arguments
from pipemorph.errors import InputError
from pipemorph.log_level import read_log_level


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="host the control loop of a job that another launcher starts",
        usage="%(prog)s (JOB | --observe) [options] [-- COMMAND ...]",
        description="Host the control loop of the PipeMorphJob of JOB for ranks that torchrun, "
        "Slurm or another launcher starts. With a COMMAND, such as torchrun --nproc-per-node 2 "
        "train.py, start it with the ranks' variables, forward signals to it, and end with it. "
        "Exit status: that of COMMAND unless it is 0; 0 completed, 1 not completed, 2 invalid "
        "input, 130 interrupted.",
    )
    parser.add_argument("job", metavar="JOB", nargs="?", help="PipeMorphJob manifest, YAML or JSON")
    parser.add_argument(
        "--observe",
        action="store_true",
        help="in place of JOB: follow a job that PipeMorph does not run, whose ranks call "
        "pipemorph_trainer.observe(); nothing is changed",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        help="address for rank 0's agent and ranks (default with COMMAND: a free port of "
        "127.0.0.1; 0.0.0.0:0 if ranks are on other machines)",
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="the ranks' token; made, with mode 0600, if there is no such file (default with "
        "COMMAND: in a folder that is removed at the end; in the current one if ranks are on "
        "other machines)",
    )
    parser.add_argument(
        "--secret-file",
        metavar="FILE",
        help="the secret that ranks share; made like the token (default: the token's file with "
        ".secret added)",
    )
    parser.add_argument(
        "--tls-cert",
        metavar="FILE",
        help="certificate, PEM; needed off loopback (default with COMMAND: one that openssl makes)",
    )
    parser.add_argument("--tls-key", metavar="FILE", help="its key, PEM")
    parser.add_argument("--out", metavar="DIR", help="folder for report.json (default: no report)")
    add_run_arguments(parser, port_type)
    parser.add_argument(
        "--metrics",
        metavar="HOST:PORT",
        help="serve metrics of the job for Prometheus at this address, /metrics, over plain HTTP "
        "and without a token; needs prometheus-client",
    )
    parser.add_argument(
        "--env-file",
        metavar="FILE",
        help="write the ranks' variables to FILE, for a shell to read with '.'",
    )


def run(args: argparse.Namespace) -> int:
    # Imported late: other subcommands do not need the server.
    from pipemorph.local.served.serve import serve_job
    from pipemorph.local.served.served_run import ServeOptions

    if args.observe == (args.job is not None):
        raise InputError(
            "--observe: does not go with JOB; the ranks report what is observed"
            if args.observe
            else "JOB is missing; name a PipeMorphJob manifest, or give --observe for a job that"
            " PipeMorph does not run"
        )
    for name in ("token_file", "secret_file", "tls_cert", "tls_key", "out", "env_file"):
        if getattr(args, name) == "":
            # pathlib would take it as the current folder.
            raise InputError(f"--{name.replace('_', '-')} is empty; name a file or folder")
    if not args.launch:
        for name in ("listen", "token_file"):
            if getattr(args, name) is None:
                raise InputError(
                    f"--{name.replace('_', '-')} is missing; give it, or the command that starts "
                    "the ranks after --"
                )
    read_log_level()  # Reject an invalid PIPEMORPH_LOG now.
    options = ServeOptions(
        listen=args.listen or "127.0.0.1:0",
        token_file=_optional_path(args.token_file),
        secret_file=_optional_path(
            args.secret_file or (args.token_file and f"{args.token_file}.secret")
        ),
        tls_cert=_optional_path(args.tls_cert),
        tls_key=_optional_path(args.tls_key),
        out=_optional_path(args.out),
        force=args.force,
        env_file=_optional_path(args.env_file),
        command=tuple(args.launch),
        watch=args.watch,
        metrics=args.metrics,
    )
    if args.observe:
        from pipemorph.diagnose.analysis.idle_time import attribute_idle_time
        from pipemorph.local.served.observe import serve_observed

        return serve_observed(options, attribute_idle_time)
    return serve_job(args.job, options)


def _optional_path(text: str | None) -> Path | None:
    return None if text is None else Path(text)
