"""Views of a job: explanation, status, live page and pictures."""
