"""``helm test``: checks that the ingest is reachable over trusted TLS and requires a token."""

from __future__ import annotations

import argparse
import ssl
import sys
import time
import urllib.error
import urllib.request

ATTEMPT_SECONDS = 10.0
WAIT_SECONDS = 60.0
"""Right after an installation the ingest is still starting, and its Service takes a moment to
become reachable from every node."""
PAUSE_SECONDS = 1.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="pipemorph-selftest", description=__doc__)
    parser.add_argument("--ingest-url", required=True)
    parser.add_argument("--ingest-ca", required=True)
    parser.add_argument(
        "--wait", type=float, default=WAIT_SECONDS, help="seconds to wait for an answer"
    )
    options = parser.parse_args()
    trust = ssl.create_default_context(cafile=options.ingest_ca)
    url = f"{options.ingest_url}/v1/jobs/helm/test/directive?attempt=0"
    end = time.monotonic() + options.wait
    while True:
        try:
            found = _answer(url, trust)
            break
        except OSError as error:
            # A retry does not fix a certificate.
            untrusted = isinstance(getattr(error, "reason", None), ssl.SSLCertVerificationError)
            if untrusted or time.monotonic() >= end:
                sys.exit(f"{options.ingest_url} cannot be reached: {error}")
        time.sleep(PAUSE_SECONDS)
    if found != 401:
        sys.exit(f"{options.ingest_url} returned {found} to a request without token; expected 401")
    sys.stdout.write(f"{options.ingest_url} answers and requires a token\n")


def _answer(url: str, trust: ssl.SSLContext) -> int:
    """HTTP status of the response. Raises OSError if there is no response."""
    try:
        with urllib.request.urlopen(url, timeout=ATTEMPT_SECONDS, context=trust) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


if __name__ == "__main__":
    main()
