"""The dispatch loop of one stage: runs ops when their messages are here."""
