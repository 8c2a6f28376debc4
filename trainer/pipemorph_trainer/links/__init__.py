"""The links to neighbouring stages: how ranks meet, and what each end of a link has."""
