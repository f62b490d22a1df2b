"""A run as a page, section by section."""

from jaxmorph.reporting.page.changes import find_changes
from jaxmorph.reporting.page.decisions import decisions_section
from jaxmorph.reporting.page.elements import element
from jaxmorph.reporting.page.frame import page
from jaxmorph.reporting.page.links import links_section
from jaxmorph.reporting.page.recoveries import recoveries, recoveries_section
from jaxmorph.reporting.page.run_files import RunFiles
from jaxmorph.reporting.page.steps import steps_section
from jaxmorph.reporting.page.summary import summary_section
from jaxmorph.reporting.page.tables import folded
from jaxmorph.reporting.page.timelines import timelines_section


def run_page(files: RunFiles) -> str:
    """The page of a run.

    Args:
        files: What the run directory says.

    Returns:
        A whole HTML document.
    """
    changes = find_changes(files.steps, files.events)
    failures = recoveries(files.events)
    settings = element(
        "section",
        element("h2", "Configuration"),
        folded("config.yaml", element("pre", files.config_text, tabindex=0)),
        id="configuration",
    )
    sections = [
        summary_section(files),
        steps_section(files.steps, changes) if files.steps else None,
        links_section(files.steps, changes) if files.steps else None,
        recoveries_section(failures) if failures else None,
        timelines_section(files, changes),
        decisions_section(files.events, changes),
        settings,
    ]
    contents = [
        *((("Step time", "steps"), ("Links", "links")) if files.steps else ()),
        *([("Failures", "failures")] if failures else []),
        ("Timelines", "timelines"),
        ("Decisions", "decisions"),
        ("Configuration", "configuration"),
    ]
    return page(f"Run {files.path.resolve().name}", sections, contents)
