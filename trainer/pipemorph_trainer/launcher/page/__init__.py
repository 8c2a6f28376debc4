"""Live page of a job, served by the launcher of the pod with rank 0: ``gate`` lets in who has the
token, and starts ``process``, which makes the page."""
