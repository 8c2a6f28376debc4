"""Pictures of a diagnosis: a page of timelines and tables, and Chrome traces of the timelines."""
