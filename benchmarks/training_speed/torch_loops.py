# pyright: reportMissingImports=false
"""The training loops in torch: one process, and torch.distributed.pipelining."""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

from benchmarks.training_speed.torch_model import make_stage, mean_loss
from benchmarks.training_speed.worker import WorkerOptions
from benchmarks.training_speed.workload import Workload


def make_optimizer(module: nn.Module, workload: Workload) -> torch.optim.Optimizer:
    """AdamW with decay of matrices alone."""
    parameters = [*module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": workload.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (workload.beta1, workload.beta2)
    return torch.optim.AdamW(groups, lr=workload.learning_rate, betas=betas, eps=workload.epsilon)


class OneProcessLoop:
    """Microbatch after microbatch, gradients accumulated, as the pipeline's ranks do it."""

    def __init__(self, options: WorkerOptions) -> None:
        self._workload = options.workload
        params = np.load(options.params)
        self._module = make_stage(options.workload, params, stage=0, num_stages=1)
        self._optimizer = make_optimizer(self._module, options.workload)

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> float:
        """Train on a batch; the loss."""
        self._optimizer.zero_grad()
        loss = 0.0
        for inputs, expected in zip(_tensor(tokens), _tensor(targets), strict=True):
            part = mean_loss(self._module(inputs), expected) / self._workload.microbatches
            part.backward()
            loss += part.item()
        nn.utils.clip_grad_norm_(self._module.parameters(), self._workload.clip_norm)
        self._optimizer.step()
        return loss

    def finish(self, losses: list[float]) -> list[float]:
        """Everything is done by then."""
        return losses

    def close(self) -> None:
        """Nothing was started."""


class PipelineLoop:
    """A rank of torch.distributed.pipelining over Gloo, with one stage."""

    def __init__(self, options: WorkerOptions) -> None:
        self._workload, self._rank = options.workload, options.rank
        self._is_last = options.rank == options.num_ranks - 1
        dist.init_process_group(
            "gloo",
            init_method=options.meeting.resolve().as_uri(),
            rank=self._rank,
            world_size=options.num_ranks,
        )
        params = np.load(options.params)
        self._module = make_stage(options.workload, params, self._rank, options.num_ranks)
        self._optimizer = make_optimizer(self._module, options.workload)
        stage = PipelineStage(
            self._module, self._rank, options.num_ranks, device=torch.device("cpu")
        )
        count = self._workload.microbatches
        self._schedule: Any = (
            Schedule1F1B(stage, count, loss_fn=mean_loss)
            if options.variant == "1F1B"
            else ScheduleInterleavedZeroBubble([stage], count, loss_fn=mean_loss)
        )

    def step(self, tokens: np.ndarray, targets: np.ndarray) -> float | None:
        """Train on a batch; the loss, on the last rank."""
        self._optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if self._is_last:
            self._schedule.step(target=_tensor(targets).flatten(0, 1), losses=losses)
        else:
            self._schedule.step(_tensor(tokens).flatten(0, 1))
        self._clip()
        self._optimizer.step()
        return torch.stack(losses).mean().item() if losses else None

    def finish(self, losses: list[float | None]) -> list[float]:
        """Everything is done by then."""
        return [loss for loss in losses if loss is not None]

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _clip(self) -> None:
        """Clip by the norm over all stages."""
        parameters = [*self._module.parameters()]
        gradients = [p.grad for p in parameters if p.grad is not None]
        squares = nn.utils.get_total_norm(gradients).square()
        dist.all_reduce(squares)
        nn.utils.clip_grads_with_norm_(parameters, self._workload.clip_norm, squares.sqrt())


def _tensor(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values).long()
