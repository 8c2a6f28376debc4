"""Configuration of the objects that the operator creates for jobs, the same for all jobs."""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Any


@dataclass(frozen=True)
class OperatorConfig:
    """Addresses, images and network rules in the objects of every job, from the command line.

    ``ca_pem``: CA of the ingest's certificate; empty for a public CA. ``trainer_image``: image of
    jobs without a pod template; empty to reject such jobs. ``network_policies``: True if each job
    gets a NetworkPolicy, which lets ``metrics_from`` (peers as in its ``from``; empty: all) read
    the ranks' metrics.
    """

    ingest_url: str
    ca_pem: str = ""
    trainer_image: str = ""
    trainer_pull_policy: str = ""
    network_policies: bool = False
    metrics_from: tuple[dict[str, Any], ...] = ()

    @property
    def ca_fingerprints(self) -> frozenset[str]:
        """Fingerprints of the certificates in ``ca_pem``."""
        found = re.findall(r"-----BEGIN CERTIFICATE-----(.*?)-----END", self.ca_pem, re.DOTALL)
        return frozenset(sha256("".join(each.split()).encode()).hexdigest()[:16] for each in found)
