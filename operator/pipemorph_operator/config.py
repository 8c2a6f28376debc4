"""What an installation gives the operator: the same for all jobs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorConfig:
    """``ca_pem``: what the ranks trust the ingest's certificate by; empty for public ones.
    ``trainer_image``: image of jobs without a pod template; empty if such jobs are refused."""

    ingest_url: str
    ca_pem: str = ""
    trainer_image: str = ""
    trainer_pull_policy: str = ""
