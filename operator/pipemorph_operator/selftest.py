"""``helm test``: checks that the ingest is reachable over trusted TLS and requires a token."""

from __future__ import annotations

import argparse
import sys

from tenacity import Retrying

from pipemorph.arguments import duration
from pipemorph.http_client import HttpClient, NoAnswer, retries

ATTEMPT_SECONDS = 10.0
WAIT_SECONDS = 60.0
"""Right after an installation the ingest is still starting, and its Service takes a moment to
become reachable from every node."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="pipemorph-selftest", description=__doc__)
    parser.add_argument("--ingest-url", required=True)
    parser.add_argument("--ingest-ca", required=True)
    parser.add_argument(
        "--wait", type=duration, default=WAIT_SECONDS, help="seconds to wait for an answer"
    )
    options = parser.parse_args()
    client = HttpClient(options.ingest_url, authority=options.ingest_ca)
    path = "/v1/jobs/helm/test/directive"

    def check(error: BaseException, _: float) -> None:
        # A retry does not fix a certificate.
        if isinstance(error, NoAnswer) and error.untrusted:
            raise error

    tries = Retrying(**retries(seconds=options.wait, before=check))
    try:
        found = tries(client.ask, path, query={"attempt": "0"}, seconds=ATTEMPT_SECONDS).status
    except NoAnswer as error:
        sys.exit(f"{options.ingest_url} cannot be reached: {error}")
    if found != 401:
        sys.exit(f"{options.ingest_url} returned {found} to a request without token; expected 401")
    sys.stdout.write(f"{options.ingest_url} answers and requires a token\n")


if __name__ == "__main__":
    main()
