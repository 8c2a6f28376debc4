"""``pipemorph view DIR [DIR2]``: the page of a run that is over, or of two, as one HTML file."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipemorph.commands.output_file import write_output

if TYPE_CHECKING:
    from pipemorph.local.results.result_folder import ResultFolder
    from pipemorph.views.live_page.page_document import PageDocument
    from pipemorph.views.live_page.run_comparison import RunComparison


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "view",
        help="show the page of a run that is over, or compare two runs",
        description="Write the page of a run that is over, as run and serve --out leave it, as one"
        " HTML file that loads nothing, and print its address. With a second run: both on one"
        " scale, and say which was faster, since when and why. Exit status: 0, or 2 for invalid"
        " input.",
    )
    parser.add_argument("folder", metavar="DIR", help="folder of the run")
    parser.add_argument("other", metavar="DIR2", nargs="?", help="folder of a run to compare with")
    parser.add_argument(
        "--out",
        metavar="FILE",
        help="file to write (default: DIR/page.html, or DIR/comparison.html)",
    )
    parser.add_argument("--open", action="store_true", help="open the page in the browser")


def run(args: argparse.Namespace) -> int:
    # Imported late: other subcommands do not need them.
    from pipemorph.local.results.stored_page import find_run_folder, read_page
    from pipemorph.terminal import make_table, render_parts
    from pipemorph.views.live_page.document_cache import render_live_page
    from pipemorph.views.live_page.run_comparison import render_comparison

    folder = find_run_folder(args.folder)
    page = read_page(folder)
    if args.other is None:
        text, name = render_live_page(page), "page.html"
    else:
        compared = _compare_runs(folder.root, page, find_run_folder(args.other))
        text, name = render_comparison(compared), "comparison.html"
        rows = make_table(["", ""], compared.build_rows())
        write_output(render_parts(rows).encode(), None)
    out = folder.root / name if args.out is None else Path(args.out)
    write_output(text.encode(), str(out))
    address = out.absolute().as_uri()
    print(f"view: {address}", flush=True)
    if args.open:
        webbrowser.open(address)
    return 0


def _compare_runs(root: Path, page: PageDocument, other: ResultFolder) -> RunComparison:
    """Comparison of two runs, named by their folders."""
    from pipemorph.local.results.stored_page import read_page
    from pipemorph.views.live_page.run_comparison import RunComparison

    names = root.resolve().name, other.root.resolve().name
    if names[0] == names[1]:
        names = str(root), str(other.root)
    return RunComparison.from_pages(names, (page, read_page(other)))
