"""What this host or pod has for a job: RDMA devices and their health, memory limits, GPUs."""
