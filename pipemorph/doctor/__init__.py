"""Inspects this host or pod: RDMA devices and their health, memory limits, NUMA nodes."""
