"""Timelines as text (`text`), as Gantt charts (`gantt`) and as Chrome traces (`trace`)."""

from jaxmorph.report.draw.save import save_timelines
from jaxmorph.report.draw.text import gantt_text, styled_gantt
from jaxmorph.report.draw.trace import chrome_trace, read_chrome_trace

__all__ = [
    "chrome_trace",
    "gantt_text",
    "read_chrome_trace",
    "save_timelines",
    "styled_gantt",
]
