"""Subcommands of ``pipemorph``: ``add_parser(subparsers)`` and ``run(args) -> int`` each."""
