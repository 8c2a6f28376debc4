"""Explanation of a job in a few plain lines: observations, decisions, savings and advice."""

from pipemorph.views.explanation.explanation_text import MOST_LINES, Explanation
from pipemorph.views.explanation.job_explanation import explain_job

__all__ = ["MOST_LINES", "Explanation", "explain_job"]
