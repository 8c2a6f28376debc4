"""Builds what tests need besides the environment: ``make testbeds``.

    python tests/testbeds.py                  all that `make test-all` needs
    python tests/testbeds.py api browser      some of it
    python tests/testbeds.py --status         as JSON: what is ready; builds nothing
    TESTBEDS_INSTALL=1 make testbeds          also installs Debian packages, as root

It prints a plan, then builds what is missing. A repeated call goes on where the last one ended.
Exit status: 0 all is ready, 1 something failed, 2 Debian packages are missing, 3 the limit is over.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / folder) for folder in ("cluster", "support")]

from testbed import TestbedError, catalog, making  # noqa: E402

NICE = 5
"""Priority: low, so that the machine stays usable, but not the lowest, since others wait."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="testbeds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(catalog.testbeds()))
    parser.add_argument("--status", action="store_true", help="print JSON and build nothing")
    parser.add_argument("--limit", type=float, default=3600.0, metavar="SECONDS")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(catalog.testbeds()))
    if unknown:
        parser.error(
            f"found {', '.join(unknown)}; expected some of {', '.join(catalog.testbeds())}"
        )
    if arguments.status:
        names = arguments.names or [*catalog.testbeds()]
        reasons = {name: catalog.status(name) for name in names}
        found = {name: {"ready": not why, "why": why or "ready"} for name, why in reasons.items()}
        print(json.dumps(found, indent=2))
        return 0
    return build(arguments.names or catalog.default_names(), arguments.limit)


def build(names: list[str], limit: float) -> int:
    os.nice(max(0, NICE - os.nice(0)))
    # A step that is under way is then ended with all that it started.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    start = time.monotonic()

    def say(text: str) -> None:
        print(f"testbeds {time.monotonic() - start:5.0f} s  {text}", file=sys.stderr, flush=True)

    wanted = catalog.with_required(names)
    may_install = os.environ.get(making.INSTALL) == "1"
    try:
        for line in making.plan(wanted):
            say(line)
        result = making.make(wanted, may_install=may_install, limit=limit, say=say)
    except TestbedError as error:
        result = making.Result(making.FAILED, f"FAILED: {error}")
    except KeyboardInterrupt:
        result = making.Result(130, "interrupted; `make testbeds` goes on from here")
    red = result.status and sys.stderr.isatty()
    line = f"testbeds: {result.line}"
    print(f"\033[31m{line}\033[0m" if red else line, file=sys.stderr, flush=True)
    return result.status


if __name__ == "__main__":
    sys.exit(main())
