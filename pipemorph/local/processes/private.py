"""Private files for the ranks of one attempt: engine secret, ingest token, the job."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from pipemorph.api.spec import PipeMorphJob
from pipemorph.local.processes.locked import TemporaryFolder

SECRET_BYTES = 32


class PrivateFolder(TemporaryFolder):
    """A folder with files of mode 0600, among them a new random secret. Raises OSError if it cannot
    be written."""

    def __init__(self, job: PipeMorphJob, token: str) -> None:
        super().__init__("run", Path(tempfile.gettempdir()))
        self.secret, self.token = self.root / "secret", self.root / "token"
        self.job = self.root / "job.json"
        try:
            _write(self.secret, secrets.token_bytes(SECRET_BYTES))
            _write(self.token, token.encode())
            _write(self.job, job.model_dump_json(by_alias=True, exclude_none=True).encode())
        except OSError:
            self.remove()
            raise


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
