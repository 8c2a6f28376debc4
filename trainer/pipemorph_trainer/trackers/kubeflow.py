"""Tells Kubeflow Trainer the progress of its TrainJob (``status.trainerStatus``).

The controller sets three variables in a TrainJob's pods if its feature gate ``TrainJobStatus`` is
on (alpha, from v2.2): the URL to post to, the authority of its certificate, and a token, which
changes from time to time.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any

from pipemorph.errors import InputError, PipeMorphError, one_line
from pipemorph.http_client import HttpClient, NoAnswer, checked_url
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
        self._client = HttpClient(url, token, str(authority))
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
        try:
            url = checked_url(found[URL], URL, ("https",))
        except InputError as error:
            log.warning("no progress for the TrainJob: %s/PATH", error)
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
        where = f"{URL} {one_line(self._client.base)}"
        try:
            answer = self._client.ask(
                body=json.dumps(body).encode(), seconds=REQUEST_SECONDS, most_bytes=4096
            )
        except NoAnswer as error:
            raise PipeMorphError(f"{where}: {error}") from None
        if answer.status != HTTPStatus.OK:
            raise PipeMorphError(f"{where} answers {answer.status}: {answer.reason}; expected 200")
