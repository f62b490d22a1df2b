"""What a run leaves behind and what its user sees meanwhile."""

from jaxmorph.reporting.history import RunHistory
from jaxmorph.reporting.records import Event, RunHeader, RunSummary, StepRecord
from jaxmorph.reporting.run_directory import (
    RunDirectory,
    claim_run_directory,
    open_run_directory,
)
from jaxmorph.reporting.terminal import Reporter, open_reporter
from jaxmorph.reporting.text import describe_regime

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
