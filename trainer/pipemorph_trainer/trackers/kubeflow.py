"""Tells Kubeflow Trainer the progress of its TrainJob (``status.trainerStatus``).

The controller sets three variables in a TrainJob's pods if its feature gate ``TrainJobStatus`` is
on (alpha, from v2.2): the URL to post to, the authority of its certificate, and a token, which
changes from time to time.
"""

from __future__ import annotations

import http.client
import json
import logging
import math
import ssl
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from pipemorph.errors import PipeMorphError, one_line
from pipemorph_trainer.trackers.finished import FinishedIteration

log = logging.getLogger("pipemorph.trackers")

URL = "KUBEFLOW_TRAINER_SERVER_URL"
AUTHORITY = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
EVERY_SECONDS = 5.0
"""Least time between two posts: each is a write of the API server."""
AGAIN_SECONDS = 60.0
"""The same after one that failed."""
REQUEST_SECONDS = 5.0
RECENT = 16
"""Newest iterations, whose median tells the time that is left."""
MOST_LEFT = 2**31 - 1
"""Seconds: the field has 32 bits."""


class TrainJobStatus:
    """A listener that posts progress, time left and figures. ``clock``: monotonic, seconds.

    Raises :class:`~pipemorph.errors.PipeMorphError` in one line if a post fails.
    """

    def __init__(
        self, url: str, authority: Path, token: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._url, self._authority, self._token = urllib.parse.urlsplit(url), authority, token
        self._clock = clock
        self._next = -math.inf
        self._seconds: deque[float] = deque(maxlen=RECENT)

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> TrainJobStatus | None:
        """That of the environment; None if the controller does not want to be told, or, with a
        warning, if what it has set cannot be used."""
        found = {name: environ.get(name, "") for name in (URL, AUTHORITY, TOKEN)}
        if not all(found.values()):
            return None
        url = found[URL]
        try:
            parts = urllib.parse.urlsplit(url)
            usable = parts.scheme == "https" and bool(parts.hostname) and parts.port != 0
        except ValueError:
            usable = False
        if not usable:
            log.warning(
                "no progress for the TrainJob: %s is %r; expected https://HOST:PORT/PATH",
                URL, one_line(url),
            )  # fmt: skip
            return None
        return TrainJobStatus(url, Path(found[AUTHORITY]), Path(found[TOKEN]))

    def __call__(self, finished: FinishedIteration) -> None:
        self._seconds.append(finished.seconds)
        now, done = self._clock(), finished.index + 1
        if now < self._next and done != finished.total:
            return
        self._next = now + AGAIN_SECONDS
        self._post(self.status(finished, datetime.now(UTC)))
        self._next = now + EVERY_SECONDS

    def status(self, finished: FinishedIteration, at: datetime) -> dict[str, Any]:
        """The body of a post. Without a total nothing is said of progress and time left."""
        status: dict[str, Any] = {
            "metrics": [
                {"name": name, "value": f"{value:.6g}"}
                for name, value in {"iteration": finished.index, **finished.figures()}.items()
            ],
            "lastUpdatedTime": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if finished.total:
            left = max(0, finished.total - finished.index - 1)
            status["progressPercentage"] = 100 * (finished.total - left) // finished.total
            seconds = math.ceil(left * median(self._seconds or [finished.seconds]))
            status["estimatedRemainingSeconds"] = min(MOST_LEFT, seconds)
        return {"trainerStatus": status}

    def _post(self, body: Mapping[str, Any]) -> None:
        url = self._url
        try:
            token = self._token.read_text().strip()
            if not (token.isascii() and token.isprintable()):
                # http.client would name it.
                raise ValueError(f"{self._token} is no token")
            trust = ssl.create_default_context(cafile=str(self._authority))
            # Neither proxies nor redirects: the token is for this server.
            line = http.client.HTTPSConnection(
                url.hostname or "", url.port, timeout=REQUEST_SECONDS, context=trust
            )
            try:
                headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
                target = url._replace(scheme="", netloc="", fragment="").geturl() or "/"
                line.request("POST", target, json.dumps(body), headers)
                answer = line.getresponse()
                told = answer.read(4096)
            finally:
                line.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            why = f"{type(error).__name__}: {error}"
            raise PipeMorphError(f"{URL} {one_line(url.geturl())}: {one_line(why)}") from None
        if answer.status != http.HTTPStatus.OK:
            why = one_line(told.decode(errors="replace"))
            raise PipeMorphError(
                f"{URL} {one_line(url.geturl())} answers {answer.status}: {why}; expected 200"
            )
