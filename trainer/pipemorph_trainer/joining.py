"""Asks the ingest for this rank's job, where the launcher gave no job file.

``pipemorph serve`` hosts the control loop for ranks of torchrun, Slurm and others. The token says
which job it is.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

from pipemorph.errors import InputError, one_line
from pipemorph.manifest import MAX_BYTES

PATIENCE_SECONDS = 60.0
"""How long to try, as the host may start at the same time as the ranks."""
REQUEST_SECONDS = 10.0
PAUSE_SECONDS = 0.5


def ask_for_job(
    url: str,
    token_file: Path | None,
    authority: str | None,
    *,
    rank: int,
    world_size: int,
    attempt: int,
    patience: float = PATIENCE_SECONDS,
) -> str:
    """The PipeMorphJob as JSON. ``authority``: PEM file with that of the ingest's certificate;
    None: the system's.

    The host may start at the same time, and makes the token's file if there is none: both are
    waited for. Raises :class:`InputError` in one line that says what to set, if there is no token
    or no ingest at ``url`` for ``patience`` seconds, or if it refuses this rank.
    """
    if not url.startswith(("http://", "https://")):
        raise InputError(f"PIPEMORPH_INGEST_URL is {one_line(url)!r}; expected http(s)://HOST:PORT")
    if token_file is None:
        raise InputError(
            "PIPEMORPH_TOKEN_FILE is not set; the ingest at PIPEMORPH_INGEST_URL needs the token"
        )
    deadline = time.monotonic() + patience
    try:
        token = _token(token_file, deadline)
        trust = ssl.create_default_context(cafile=authority or None)
        query = {"rank": rank, "world_size": world_size, "attempt": attempt}
        request = urllib.request.Request(
            f"{url.rstrip('/')}/v1/job?{urllib.parse.urlencode(query)}",
            headers={"Authorization": f"Bearer {token}"},
        )
    except UnicodeDecodeError:
        raise InputError(f"PIPEMORPH_TOKEN_FILE: {token_file} is not text") from None
    except (OSError, ssl.SSLError) as error:
        file = error.filename if isinstance(error, OSError) and error.filename else authority
        raise InputError(
            f"PIPEMORPH_TOKEN_FILE or PIPEMORPH_CA_FILE: {file}: cannot be read: "
            f"{error.strerror or error}"
        ) from None
    # Without proxies: the agent, which reports there, uses none either.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
    )
    while True:
        try:
            with opener.open(request, timeout=REQUEST_SECONDS) as answer:
                body: bytes = answer.read(MAX_BYTES + 1)
                return body.decode()
        except urllib.error.HTTPError as error:
            raise InputError(_refusal(url, error)) from None
        except (OSError, http.client.HTTPException, ValueError) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise InputError(
                    f"the certificate of {one_line(url)} is not trusted "
                    f"({reason.verify_message}); set PIPEMORPH_CA_FILE to its authority"
                ) from None
            if time.monotonic() > deadline or isinstance(error, ValueError):
                raise InputError(
                    f"PIPEMORPH_INGEST_URL: no ingest answers at {one_line(url)} within "
                    f"{patience:.0f} s: {one_line(str(reason))}; start pipemorph serve there, or "
                    "unset the variable to train without it"
                ) from None
            time.sleep(PAUSE_SECONDS)


def _token(file: Path, deadline: float) -> str:
    """The token, once there is one. Raises :class:`OSError` if the file cannot be read."""
    while True:
        try:
            token = file.read_text().strip()
        except FileNotFoundError:
            if time.monotonic() > deadline:
                raise
        else:
            # The host makes the file before it writes it.
            if token or time.monotonic() > deadline:
                return token
        time.sleep(PAUSE_SECONDS)


def _refusal(url: str, error: urllib.error.HTTPError) -> str:
    try:
        told = str(json.loads(error.read(4096))["error"])
    except (ValueError, TypeError, KeyError, OSError):
        told = error.reason
    what = f"{one_line(url)} refuses this rank: {one_line(told)}"
    if error.code in (401, 403):
        return f"{what}; PIPEMORPH_TOKEN_FILE has to be the --token-file of pipemorph serve"
    if error.code == 404:
        return f"{what}; this ingest hands out no job, so set PIPEMORPH_JOB_FILE"
    return what
