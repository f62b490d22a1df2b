"""A run or a comparison as one HTML page, without scripts or anything from the network.

Read `run_page` with `templates/run.html`, or `comparison_page` with `templates/comparison.html`.
`files` reads the directory, `changes` and `decisions` group its events, `timelines` and `charts`
draw, and `html` renders templates and charts.
"""

from pathlib import Path

from jaxmorph.errors import UserError

REPORT = "report.html"


def write_report(directory: Path, out: Path | None = None) -> Path:
    """Write the HTML report of a run or a comparison, finished or not; returns the file's path.

    Args:
        directory: A directory of `jaxmorph train` or `jaxmorph compare`.
        out: The file; None: `report.html` in the directory.

    Raises:
        UserError: It is no directory of a run or a comparison, or the file can't be written.
    """
    # Imported here, so that `REPORT` can be imported without Matplotlib and Jinja.
    from jaxmorph.report.page.comparison_page import comparison_page
    from jaxmorph.report.page.files import is_comparison, read_comparison_files, read_run_files
    from jaxmorph.report.page.run_page import run_page

    path = directory / REPORT if out is None else out
    if path.is_dir():
        raise UserError(f"report: --out: got the directory {path}, expected a file")
    text = (
        comparison_page(read_comparison_files(directory))
        if is_comparison(directory)
        else run_page(read_run_files(directory))
    )
    written = path.with_name(f"{path.name}.new")
    try:
        written.write_text(text, encoding="utf-8", errors="replace")
        written.replace(path)
    except OSError as error:
        raise UserError(f"report: cannot write {path}: {error.strerror or error}") from error
    return path
