"""Compiles equal programs once in a process that builds equal stages several times."""

import jax

_ONE_DEVICE = "mhlo.num_partitions = 1 : i32"
_CALLS_BACK = "callback"
_COMPILED = "/jax/core/compile/backend_compile_duration"


def compile_alike_once():
    """Make this process compile equal programs only once.

    Programs are alike if their text, arguments and results are equal. Left out are programs of
    several devices, whose text doesn't show which ranks they join, and programs with callbacks,
    whose text doesn't show the function.
    """
    compile_anew, known = jax.stages.Lowered.compile, {}

    def compile_or_reuse(self, **options):
        text = self.as_text()
        if _ONE_DEVICE not in text or _CALLS_BACK in text:
            return compile_anew(self, **options)
        like = (text, repr(self.in_avals), self.in_tree, self.out_tree, repr(options))
        if like in known:
            # Counters of compilations must count it too.
            jax.monitoring.record_event_duration_secs(_COMPILED, 0.0)
        else:
            known[like] = compile_anew(self, **options)
        return known[like]

    jax.stages.Lowered.compile = compile_or_reuse  # pyright: ignore[reportAttributeAccessIssue]
