"""The process of the plain loop."""

from benchmarks.training_speed.worker import Loop, WorkerOptions, serve


def make(options: WorkerOptions) -> Loop:
    """The loop, compiled."""
    from benchmarks.training_speed.plain_jax import PlainLoop  # and JAX, once it is confined

    return PlainLoop(options.workload)


if __name__ == "__main__":
    serve(make)
