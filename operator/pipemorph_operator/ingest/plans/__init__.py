"""The plan of each job, in an object of its own."""
