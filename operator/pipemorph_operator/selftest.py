"""``helm test``: checks that the ingest is reachable over trusted TLS and requires a token."""

from __future__ import annotations

import argparse
import sys

from tenacity import Retrying

from pipemorph.argument_types import duration_type
from pipemorph.http_client import HttpClient, NoResponseError, make_retry_options

ATTEMPT_SECONDS = 10.0
WAIT_SECONDS = 60.0
"""Default time to wait. After an installation the ingest is still starting, and its Service takes a
moment to become reachable from every node."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="pipemorph-selftest", description=__doc__)
    parser.add_argument("--ingest-url", required=True)
    parser.add_argument("--ingest-ca", required=True)
    parser.add_argument(
        "--wait", type=duration_type, default=WAIT_SECONDS, help="seconds to wait for an answer"
    )
    options = parser.parse_args()
    client = HttpClient(options.ingest_url, authority=options.ingest_ca)
    path = "/v1/jobs/helm/test/directive"

    def reject_untrusted(error: BaseException, _: float) -> None:
        # A retry cannot fix a certificate.
        if isinstance(error, NoResponseError) and error.untrusted:
            raise error

    tries = Retrying(**make_retry_options(seconds=options.wait, before=reject_untrusted))
    try:
        found = tries(
            client.request_blocking, path, query={"attempt": "0"}, seconds=ATTEMPT_SECONDS
        ).status
    except NoResponseError as error:
        sys.exit(f"{options.ingest_url} cannot be reached: {error}")
    if found != 401:
        sys.exit(f"{options.ingest_url} returned {found} to a request without token; expected 401")
    sys.stdout.write(f"{options.ingest_url} answers and requires a token\n")


if __name__ == "__main__":
    main()
