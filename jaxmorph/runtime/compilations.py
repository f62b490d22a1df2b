"""Counts the programs that this process compiles: a change of schedule must compile none."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_secs: float, **details: str | int) -> None:
        del duration_secs, details
        if event == _EVENT:
            self.count += 1
