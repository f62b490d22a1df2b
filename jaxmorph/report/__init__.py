"""What a run leaves behind and what its user sees meanwhile."""

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
