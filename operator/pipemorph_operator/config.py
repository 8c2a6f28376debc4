"""The operator's configuration: the same for all jobs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorConfig:
    """``ca_pem``: CA of the ingest's certificate; empty for a public CA.
    ``trainer_image``: image of jobs without a pod template; empty to reject such jobs."""

    ingest_url: str
    ca_pem: str = ""
    trainer_image: str = ""
    trainer_pull_policy: str = ""
