"""``pipemorph top``: the jobs of a cluster, and one of them, as text that follows their status."""
