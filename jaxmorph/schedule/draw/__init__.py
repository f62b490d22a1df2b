"""Timelines as text, as pictures and as Chrome traces."""

from jaxmorph.schedule.draw.picture import save_gantt
from jaxmorph.schedule.draw.save import save_timelines
from jaxmorph.schedule.draw.text import gantt_text, styled_gantt
from jaxmorph.schedule.draw.trace import chrome_trace, read_chrome_trace

__all__ = [
    "chrome_trace",
    "gantt_text",
    "read_chrome_trace",
    "save_gantt",
    "save_timelines",
    "styled_gantt",
]
