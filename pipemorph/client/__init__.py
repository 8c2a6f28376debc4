"""Python client of jobs: submit, wait, watch, logs, status and deletion, by the same calls for jobs
on this machine and on a cluster. For notebooks and scripts that do not train themselves."""

from pipemorph.client.cluster_backend import ClusterBackend
from pipemorph.client.job_client import JobClient, JobDeadlineError, JobFailedError
from pipemorph.client.job_snapshot import JobSnapshot
from pipemorph.client.local_backend import LocalBackend

__all__ = [
    "ClusterBackend",
    "JobClient",
    "JobDeadlineError",
    "JobFailedError",
    "JobSnapshot",
    "LocalBackend",
]
