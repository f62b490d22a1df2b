"""Counts how many programs this process compiles, so that a run can show that a morph compiles none."""

import jax

_EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event: str, duration_s: float, **details: object) -> None:
        del duration_s, details
        if event == _EVENT:
            self.count += 1
