"""Pages of jobs for users who look: the ``desk`` answers them, a ``process`` of its own, in which
``worker`` runs, makes the pages; what both tell each other is in ``messages``."""
