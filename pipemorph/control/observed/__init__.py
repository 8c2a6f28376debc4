"""What the host of a job knows of it: the states of its agent's reports."""
