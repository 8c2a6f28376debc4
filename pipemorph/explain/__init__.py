"""What a job saw, what was decided, what it was worth and what to do now, in a few plain lines."""

from pipemorph.explain.of_status import explain_job
from pipemorph.explain.story import MOST_LINES, Story

__all__ = ["MOST_LINES", "Story", "explain_job"]
