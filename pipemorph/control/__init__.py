"""The control loop: what a job reports, what it should do."""
