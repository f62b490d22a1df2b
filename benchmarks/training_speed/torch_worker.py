# pyright: reportMissingImports=false
"""A process of torch: alone, or a rank of torch.distributed.pipelining."""

from benchmarks.training_speed.worker import Loop, WorkerOptions, serve


def make(options: WorkerOptions) -> Loop:
    """The loop."""
    import torch  # once it is confined

    from benchmarks.training_speed.torch_loops import OneProcessLoop, PipelineLoop

    torch.set_num_threads(len(options.own_cores))
    return PipelineLoop(options) if options.num_ranks > 1 else OneProcessLoop(options)


if __name__ == "__main__":
    serve(make)
