"""Private files for the ranks of one attempt: engine secret, ingest token, the job."""

from __future__ import annotations

import os
import secrets
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pipemorph.api.spec import PipeMorphJob
from pipemorph.local.processes.locked import TemporaryFolder

SECRET_BYTES = 32


@dataclass(frozen=True)
class PrivateFolder:
    """A folder of mode 0700 with files of mode 0600. Call :meth:`remove` at the end."""

    folder: TemporaryFolder

    @staticmethod
    def make(job: PipeMorphJob, token: str) -> PrivateFolder:
        """Create a folder with a new random secret. Raises OSError if it cannot be written."""
        folder = PrivateFolder(TemporaryFolder("run", Path(tempfile.gettempdir())))
        try:
            _write(folder.secret, secrets.token_bytes(SECRET_BYTES))
            _write(folder.token, token.encode())
            _write(folder.job, job.model_dump_json(by_alias=True, exclude_none=True).encode())
        except OSError:
            folder.remove()
            raise
        return folder

    @property
    def root(self) -> Path:
        return self.folder.root

    @property
    def secret(self) -> Path:
        return self.root / "secret"

    @property
    def token(self) -> Path:
        return self.root / "token"

    @property
    def job(self) -> Path:
        return self.root / "job.json"

    def remove(self) -> bool:
        return self.folder.remove()


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
