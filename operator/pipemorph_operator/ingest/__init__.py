"""The ingest on a cluster: a process separate from the reconciler.

``auth`` authenticates the ranks of a job. ``job_store`` tracks the jobs, persists directives, and
holds jobs for the process that leads next. ``status`` writes the ingest's part of a job's status
and decides when.
"""
