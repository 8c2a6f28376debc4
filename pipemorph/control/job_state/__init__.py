"""State of a job at its host, from its agent's reports."""
