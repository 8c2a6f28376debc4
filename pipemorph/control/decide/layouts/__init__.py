"""Which layout of its ranks and layers a job should have, and when it changes to another one."""
