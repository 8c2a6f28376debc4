"""What the links of all jobs tell about the network below them. Pure: no Kubernetes, no clock."""
