"""A real Kubernetes on one machine, for tests: see docs/testbeds.md.

`Cluster` is what a test holds. Its control plane is built once from the pinned Go modules in
`tests/cluster/tools`, or is the user's own.
"""

from testbed.api import ApiClient, ApiError
from testbed.cluster import Cluster
from testbed.errors import TestbedError
from testbed.waiting import NotYet, wait_for

__all__ = ["ApiClient", "ApiError", "Cluster", "NotYet", "TestbedError", "wait_for"]
