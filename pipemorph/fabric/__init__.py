"""``pipemorph fabric check``: what the RDMA ports of hosts carry between them, by verbs."""
