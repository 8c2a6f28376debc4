"""Reports progress of a TrainJob to Kubeflow Trainer (``status.trainerStatus``).

If its feature gate ``TrainJobStatus`` is on (alpha, from v2.2), the controller sets three variables
in a TrainJob's pods: the URL to post to, the authority of its certificate, and a token file, which
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
from pipemorph.http_client import HttpClient, NoResponseError, validate_url
from pipemorph_trainer.trackers.finished_iteration import FinishedIteration

log = logging.getLogger("pipemorph.trackers")

URL = "KUBEFLOW_TRAINER_SERVER_URL"
AUTHORITY = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
POST_SECONDS = 5.0
"""Least time between two posts, each of which is a write of the API server."""
RETRY_SECONDS = 60.0
"""Least time to the next post after a failed one."""
REQUEST_SECONDS = 5.0
RECENT_ITERATIONS = 16
"""Number of newest iterations whose median gives the remaining time."""
MOST_REMAINING_SECONDS = 2**31 - 1
"""Largest remaining time, seconds: the field has 32 bits."""


class TrainJobStatus:
    """Listener that posts progress, remaining time and figures. ``clock``: monotonic, seconds.

    Raises :class:`~pipemorph.errors.PipeMorphError` with a single line if a post fails.
    """

    def __init__(
        self, url: str, authority: Path, token: Path, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = HttpClient(url, token, str(authority))
        self._clock = clock
        self._next = -math.inf
        self._seconds: deque[float] = deque(maxlen=RECENT_ITERATIONS)

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> TrainJobStatus | None:
        """Create the listener that the environment describes; None if the controller requests no
        progress, or, with a warning, if its variables cannot be used."""
        found = {name: environ.get(name, "") for name in (URL, AUTHORITY, TOKEN)}
        if not all(found.values()):
            return None
        try:
            url = validate_url(found[URL], URL, ("https",))
        except InputError as error:
            log.warning("no progress for the TrainJob: %s/PATH", error)
            return None
        return TrainJobStatus(url, Path(found[AUTHORITY]), Path(found[TOKEN]))

    def __call__(self, finished: FinishedIteration) -> None:
        self._seconds.append(finished.seconds)
        now, done = self._clock(), finished.index + 1
        if now < self._next and done != finished.total:
            return
        self._next = now + RETRY_SECONDS
        self._post_status(self.make_status(finished, datetime.now(UTC)))
        self._next = now + POST_SECONDS

    def make_status(self, finished: FinishedIteration, at: datetime) -> dict[str, Any]:
        """Make the body of a post. Without a total it has no progress and no remaining time."""
        status: dict[str, Any] = {
            "metrics": [
                {"name": name, "value": f"{value:.6g}"}
                for name, value in {"iteration": finished.index, **finished.figures()}.items()
            ],
            "lastUpdatedTime": at.strftime("%Y-%m-%dT%H:%M:%SZ"),
        }
        if finished.total:
            remaining = max(0, finished.total - finished.index - 1)
            status["progressPercentage"] = 100 * (finished.total - remaining) // finished.total
            seconds = math.ceil(remaining * median(self._seconds or [finished.seconds]))
            status["estimatedRemainingSeconds"] = min(MOST_REMAINING_SECONDS, seconds)
        return {"trainerStatus": status}

    def _post_status(self, body: Mapping[str, Any]) -> None:
        where = f"{URL} {one_line(self._client.base)}"
        try:
            answer = self._client.request_blocking(
                body=json.dumps(body).encode(), seconds=REQUEST_SECONDS, most_bytes=4096
            )
        except NoResponseError as error:
            raise PipeMorphError(f"{where}: {error}") from None
        if answer.status != HTTPStatus.OK:
            raise PipeMorphError(f"{where} answers {answer.status}: {answer.reason}; expected 200")
