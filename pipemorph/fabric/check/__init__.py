"""``pipemorph fabric check``: what carries between the RDMA ports of hosts, measured by verbs."""
