"""Writing kubeconfig files."""

import base64
from pathlib import Path
from typing import Any

import yaml


def write_kubeconfig(
    path: Path,
    *,
    server: str,
    authority: bytes,
    user: str,
    certificate: bytes | None = None,
    key: bytes | None = None,
    token: str | None = None,
) -> Path:
    """A kubeconfig that needs no other file, so that it can be mounted or moved."""
    credentials: dict[str, Any] = {}
    if certificate is not None and key is not None:
        credentials["client-certificate-data"] = base64.b64encode(certificate).decode()
        credentials["client-key-data"] = base64.b64encode(key).decode()
    if token is not None:
        credentials["token"] = token
    cluster = {"server": server, "certificate-authority-data": base64.b64encode(authority).decode()}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "testbed", "cluster": cluster}],
        "users": [{"name": user, "user": credentials}],
        "contexts": [{"name": "testbed", "context": {"cluster": "testbed", "user": user}}],
        "current-context": "testbed",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)  # it holds a key: readable by its owner from its first byte
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path
