"""How users come to the page of a job in a cluster: where it is, and the token that they show.

The token is one that the API server has made for a service account of the job's namespace, for this
job's page alone: the audience says so, and it is good for nothing else.
"""

from __future__ import annotations

from urllib.parse import quote

from pipemorph.api.spec import API_GROUP

HEADER = "X-PipeMorph-Token"
"""Has the token. Not ``Authorization``, which the API server takes off what it passes on."""
VIEWER = "pipemorph-viewer"
"""The service account that is used by default; who may view a namespace may have tokens of it."""
PORT = "https"
"""Name of the ingest's port."""


def audience(namespace: str, job: str) -> str:
    """Of a token for the page of one job."""
    return f"{API_GROUP}/watch/{namespace}/{job}"


def path(namespace: str, job: str) -> str:
    """Of the page at the ingest; that of its documents is ``view`` below it."""
    return f"/v1/jobs/{quote(namespace)}/{quote(job)}/watch/"


def through_api_server(namespace: str, service: str) -> str:
    """Path at the API server below which it passes requests on to the ingest."""
    return f"/api/v1/namespaces/{quote(namespace)}/services/{proxied(service)}/proxy"


def proxied(service: str) -> str:
    """The ingest's Service as RBAC names it in ``services/proxy``."""
    return f"https:{service}:{PORT}"
