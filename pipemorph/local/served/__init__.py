"""``pipemorph serve``: hosts the control loop of ranks that another launcher starts."""
