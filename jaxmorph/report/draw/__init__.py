"""Timelines as text (`text`), as Gantt charts (`gantt`) and as Chrome traces (`trace`)."""
