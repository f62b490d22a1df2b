"""What a run writes and shows: its directory, the terminal, figures and HTML pages.

Read `run_directory` and `terminal` first. `history` and `text` are what both show in words,
`answers` prints plans, `run_matrix`, `matrix_table` and `matrix_figure` are a comparison's results,
`draw` draws timelines, and `page` makes HTML pages.
"""

from jaxmorph.records import Event, RunHeader, RunSummary, StepRecord
from jaxmorph.report.history import RunHistory
from jaxmorph.report.run_directory import (
    RunDirectory,
    claim_run_directory,
    open_run_directory,
)
from jaxmorph.report.terminal import Reporter, open_reporter
from jaxmorph.report.text import describe_regime

__all__ = [
    "Event",
    "Reporter",
    "RunDirectory",
    "RunHeader",
    "RunHistory",
    "RunSummary",
    "StepRecord",
    "claim_run_directory",
    "describe_regime",
    "open_reporter",
    "open_run_directory",
]
