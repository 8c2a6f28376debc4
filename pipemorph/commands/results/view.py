"""``pipemorph view DIR``: the page of a run that is over, as one HTML file."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import Any

from pipemorph.commands.output_file import write_output


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "view",
        help="show the page of a run that is over",
        description="Write the page of a run that is over, as run and serve --out leave it, as one"
        " HTML file that loads nothing, and print its address. Exit status: 0, or 2 for invalid"
        " input.",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of the run")
    parser.add_argument("--out", metavar="FILE", help="file to write (default: DIR/page.html)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    # Imported late: other subcommands do not need them.
    from pipemorph.local.results.stored_page import find_run_folder, read_page
    from pipemorph.views.live_page.document_cache import render_live_page

    folder = find_run_folder(args.folder)
    page = render_live_page(read_page(folder))
    out = folder.root / "page.html" if args.out is None else Path(args.out)
    write_output(page.encode(), str(out))
    address = out.absolute().as_uri()
    print(f"view: {address}", flush=True)
    if args.open:
        webbrowser.open(address)
    return 0
