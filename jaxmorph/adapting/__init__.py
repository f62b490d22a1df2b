"""How a run adapts to its links: from a step's timings to another plan in force on all ranks."""
