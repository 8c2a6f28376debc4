"""The page of a job that runs: what it does now, what it would do under the plan of the start.

``document`` is what the page is told, ``build`` makes it from what a host knows of a job,
``documents`` renders it; hosts serve both.
"""
