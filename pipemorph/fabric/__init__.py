"""``pipemorph fabric check``: measures connections between the RDMA ports of hosts by verbs."""
