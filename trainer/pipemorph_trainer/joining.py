"""Asks the ingest for this rank's job, where the launcher gave no job file.

``pipemorph serve`` hosts the control loop for ranks of torchrun, Slurm and others. The token says
which job it is.
"""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from tenacity import Retrying

from pipemorph.errors import InputError, one_line
from pipemorph.http_client import Answer, HttpClient, NoAnswer, NoToken, checked_url, retries
from pipemorph.manifest import MAX_BYTES

PATIENCE_SECONDS = 60.0
"""How long to try, as the host may start at the same time as the ranks."""
REQUEST_SECONDS = 10.0


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
    base = checked_url(url, "PIPEMORPH_INGEST_URL")
    if token_file is None:
        raise InputError(
            "PIPEMORPH_TOKEN_FILE is not set; the ingest at PIPEMORPH_INGEST_URL needs the token"
        )
    client = HttpClient(base, token_file, authority)
    query = {"rank": str(rank), "world_size": str(world_size), "attempt": str(attempt)}

    def check(error: BaseException, _: float) -> None:
        if isinstance(error, NoAnswer) and error.untrusted:
            raise error

    try:
        answer = Retrying(**retries(seconds=patience, before=check))(
            client.ask, "/v1/job", query=query, seconds=REQUEST_SECONDS, most_bytes=MAX_BYTES
        )
        if answer.status != HTTPStatus.OK:
            raise InputError(_refusal(url, answer))
        return answer.body.decode()
    except NoToken as error:
        raise InputError(f"PIPEMORPH_TOKEN_FILE: {error}") from None
    except (NoAnswer, UnicodeDecodeError) as error:
        if isinstance(error, NoAnswer) and error.untrusted:
            raise InputError(
                f"PIPEMORPH_INGEST_URL {one_line(url)}: {error}; set PIPEMORPH_CA_FILE to the "
                "authority of its certificate"
            ) from None
        raise InputError(
            f"PIPEMORPH_INGEST_URL: no ingest answers at {one_line(url)} within {patience:.0f} s: "
            f"{one_line(str(error))}; start pipemorph serve there, or unset the variable to train "
            "without it"
        ) from None


def _refusal(url: str, answer: Answer) -> str:
    what = f"{one_line(url)} refuses this rank: {answer.reason}"
    if answer.status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return f"{what}; PIPEMORPH_TOKEN_FILE has to be the --token-file of pipemorph serve"
    if answer.status == HTTPStatus.NOT_FOUND:
        return f"{what}; this ingest hands out no job, so set PIPEMORPH_JOB_FILE"
    return what
