"""Live page of a job, served by the launcher of the pod with rank 0: ``gateway`` admits viewers
with the token, and starts ``page_process``, which makes the page."""
