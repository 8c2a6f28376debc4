"""``helm test``: the ingest is reachable over trusted TLS and turns a stranger away."""

from __future__ import annotations

import argparse
import ssl
import sys
import urllib.error
import urllib.request

SECONDS = 10.0


def main() -> None:
    parser = argparse.ArgumentParser(prog="pipemorph-selftest", description=__doc__)
    parser.add_argument("--ingest-url", required=True)
    parser.add_argument("--ingest-ca", required=True)
    options = parser.parse_args()
    trust = ssl.create_default_context(cafile=options.ingest_ca)
    url = f"{options.ingest_url}/v1/jobs/helm/test/directive?attempt=0"
    try:
        with urllib.request.urlopen(url, timeout=SECONDS, context=trust) as answer:
            found = answer.status
    except urllib.error.HTTPError as error:
        found = error.code
    except OSError as error:
        sys.exit(f"{options.ingest_url} cannot be reached: {error}")
    if found != 401:
        sys.exit(f"{options.ingest_url} answered {found} to a caller without token, expected 401")
    sys.stdout.write(f"{options.ingest_url} answers and asks for a token\n")


if __name__ == "__main__":
    main()
