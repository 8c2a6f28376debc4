"""The operator's configuration: the same for all jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any


@dataclass(frozen=True)
class OperatorConfig:
    """``ca_pem``: CA of the ingest's certificate; empty for a public CA.
    ``trainer_image``: image of jobs without a pod template; empty to reject such jobs.
    ``network_policies``: whether each job gets a NetworkPolicy, which lets ``metrics_from`` (as in
    its ``from``; empty for anybody) read the ranks' metrics."""

    ingest_url: str
    ca_pem: str = ""
    trainer_image: str = ""
    trainer_pull_policy: str = ""
    network_policies: bool = False
    metrics_from: tuple[dict[str, Any], ...] = ()

    @property
    def authorities(self) -> frozenset[str]:
        """Fingerprints of the certificates in ``ca_pem``."""
        found = re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END", self.ca_pem, re.DOTALL)
        return frozenset(sha256("".join(each.split()).encode()).hexdigest()[:16] for each in found)
