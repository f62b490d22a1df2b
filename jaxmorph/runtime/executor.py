"""Runs one rank's instructions for one step: each instruction becomes one item of the rank's queue.

The executor decides nothing: order, buffers and routes are the program's. Items run one after
another on the queue, so the buffers need no lock.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Sharding

from jaxmorph.program.instructions import (
    Buffer,
    BufferKind,
    Free,
    Instruction,
    Payload,
    RankProgram,
    Receive,
    Reduce,
    Run,
    Send,
    Transfer,
    Update,
    received_buffer,
    sent_buffer,
)
from jaxmorph.runtime.pacing import Pace
from jaxmorph.runtime.queue import DeviceQueue, Stamp
from jaxmorph.runtime.routes import Moved, Route, TransferIdentity
from jaxmorph.schedule.ops import Op, OpKind

Tree = Any


class StageMathematics(Protocol):
    """What the executor needs of a stage: its compiled programs, as `stage.build` makes them."""

    def forward(self, weights: Tree, x: jax.Array, targets: jax.Array | None = None) -> Any:
        """(output, stash)."""
        ...

    def backward_input(self, weights: Tree, stash: Tree, output_gradient: jax.Array) -> Any:
        """(input gradient or None, weight stash)."""
        ...

    def backward_weight_marked(self, weights: Tree, weight_stash: Tree, accumulators: Tree) -> Any:
        """(accumulators, an array that is ready when the program has run)."""
        ...

    def backward_marked(
        self, weights: Tree, stash: Tree, output_gradient: jax.Array, accumulators: Tree
    ) -> Any:
        """(input gradient or None, accumulators, an array that is ready when it has run)."""
        ...


class TiedReduction(Protocol):
    """What the executor needs for tied parameters (`jaxmorph.runtime.tied` makes it)."""

    def own_copy(self, accumulators: Tree, index: int) -> jax.Array:
        """The gradient of this rank's copy."""
        ...

    def combine(self, accumulators: Tree, index: int, peer: jax.Array | None) -> Tree:
        """The accumulators with the sum over both copies."""
        ...


@dataclass(frozen=True)
class StepInputs:
    """What one rank feeds into a step.

    Attributes:
        tokens: int32 [microbatches, microbatch size, sequence]; only the first stage reads them.
        targets: The same shape; only the last stage reads them. Negative targets don't count.
        loss_weight: The weight of each counted token's loss, e.g. one over their number.
    """

    tokens: np.ndarray | None
    targets: np.ndarray | None
    loss_weight: float


@dataclass(frozen=True)
class StepOutcome:
    """What one rank's step gave.

    Attributes:
        loss: Mean loss of the counted tokens on the last stage, 0 elsewhere.
        accumulators: Gradients, float32, of the stage's parameters.
        stamps: When each op and transfer ran; labels are `Op` and `Transfer`.
    """

    loss: float
    accumulators: Tree
    stamps: list[Stamp]


@dataclass
class _Step:
    """The step in progress; only the queue's items touch what changes."""

    program: RankProgram
    weights: Tree
    accumulators: Tree
    inputs: StepInputs
    loss_weight: jax.Array
    step: int
    epoch: int
    buffers: dict[Buffer, Any] = field(default_factory=dict)
    losses: list[jax.Array] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.program.rank == 0

    @property
    def is_last(self) -> bool:
        return self.program.rank == self.program.num_ranks - 1

    def identity(self, transfer: Transfer) -> TransferIdentity:
        return TransferIdentity(self.epoch, self.step, transfer)

    def buffer(self, kind: BufferKind, microbatch: int) -> Any:
        return self.buffers[Buffer(kind, microbatch)]

    def keep(self, kind: BufferKind, microbatch: int, value: Any) -> None:
        self.buffers[Buffer(kind, microbatch)] = value


@dataclass(frozen=True)
class Executor:
    """Runs a rank's programs on its stage.

    Attributes:
        stage: The stage's compiled programs.
        placement: Where the stage keeps its arrays.
        queue: The rank's in-order queue.
        routes: How transfers travel, by the route's name.
        pace: How long ops last on a paced queue.
        transfer_timeout_s: How long a transfer may be waited for.
        tied: Sums the gradients of tied parameters; None where the stage holds none.
    """

    stage: StageMathematics
    placement: Sharding
    queue: DeviceQueue
    routes: Mapping[str, Route]
    pace: Pace
    transfer_timeout_s: float
    tied: TiedReduction | None = None

    def execute(
        self,
        program: RankProgram,
        weights: Tree,
        accumulators: Tree,
        inputs: StepInputs,
        *,
        step: int,
        epoch: int = 0,
    ) -> StepOutcome:
        """Run a step's ops and transfers, up to its update.

        Args:
            program: This rank's instructions.
            weights: What the stage's `prepare` made of its parameters.
            accumulators: Zeroed gradient accumulators; they are donated.
            inputs: Tokens and targets of all microbatches.
            step: The step's number; part of every message's identity.
            epoch: The life of the routes; part of every message's identity.

        Returns:
            The step's loss, gradients and timings, once everything has run.

        Raises:
            TransferMismatchError: If a message came that is not the one expected.
            TimeoutError: If a message didn't come in time.

        After an error the epoch is abandoned on every route: the ends may be out of step.
        """
        loss_weight = jax.device_put(np.float32(inputs.loss_weight), self.placement)
        state = _Step(program, weights, accumulators, inputs, loss_weight, step, epoch)
        try:
            for instruction in program.instructions:
                self._enqueue(instruction, state)
            stamps = self.queue.drain()
        except BaseException:
            for route in self.routes.values():
                route.abandon(epoch)
            raise
        loss_sum = sum(float(loss) for loss in state.losses)  # in microbatch order
        return StepOutcome(loss_sum * inputs.loss_weight, state.accumulators, stamps)

    def _enqueue(self, instruction: Instruction, state: _Step) -> None:
        match instruction:
            case Run(op):
                work = partial(self._run, op, state)
                self.queue.enqueue(op, work, self.pace.of(op.kind))
            case Send(transfer):
                self.queue.enqueue_transfer(transfer, partial(self._send, instruction, state))
            case Receive(transfer, route) if self.routes[route].holds_queue:
                self.queue.enqueue_transfer(transfer, partial(self._receive, instruction, state))
            case Receive():
                self._receive(instruction, state, time.monotonic())
            case Free(buffer):
                self.queue.enqueue(None, partial(state.buffers.pop, buffer))
            case Reduce(index, buffer):
                self.queue.enqueue(None, partial(self._reduce, index, buffer, state))
            case Update():  # the trainer's, once the scalars of all ranks are known
                pass

    def _send(self, send: Send, state: _Step, arrived_s: float) -> Moved:
        value = self._outgoing(send.transfer, state)
        return self.routes[send.route].post(state.identity(send.transfer), value, arrived_s)

    def _receive(self, receive: Receive, state: _Step, arrived_s: float) -> Moved:
        identity = state.identity(receive.transfer)
        deadline_s = time.monotonic() + self.transfer_timeout_s
        moved = self.routes[receive.route].take(identity, arrived_s, deadline_s)
        state.buffers[received_buffer(receive.transfer)] = moved.value
        return moved

    def _reduce(self, index: int, buffer: Buffer | None, state: _Step) -> None:
        peer = None if buffer is None else state.buffers[buffer]
        state.accumulators = self._tied.combine(state.accumulators, index, peer)

    def _outgoing(self, transfer: Transfer, state: _Step) -> jax.Array:
        if transfer.payload is Payload.TIED:
            return self._tied.own_copy(state.accumulators, transfer.microbatch)
        return state.buffers[sent_buffer(transfer)]

    @property
    def _tied(self) -> TiedReduction:
        if self.tied is None:
            raise ValueError("the program reduces a tied gradient, but this stage holds none")
        return self.tied

    def _run(self, op: Op, state: _Step) -> Any:
        match op.kind:
            case OpKind.F:
                return self._run_forward(op.microbatch, state)
            case OpKind.B:
                return self._run_backward_input(op.microbatch, state)
            case OpKind.W:
                return self._run_backward_weight(op.microbatch, state)
            case OpKind.BW:
                return self._run_backward(op.microbatch, state)

    def _run_forward(self, microbatch: int, state: _Step) -> Any:
        x = (
            self._from_host(state.inputs.tokens, microbatch)
            if state.is_first
            else state.buffer(BufferKind.INPUT, microbatch)
        )
        if state.is_last:
            targets = self._from_host(state.inputs.targets, microbatch)
            output, stash = self.stage.forward(state.weights, x, targets)
            state.losses.append(output)
        else:
            output, stash = self.stage.forward(state.weights, x)
            state.keep(BufferKind.OUTPUT, microbatch, output)
        state.keep(BufferKind.STASH, microbatch, stash)
        return output

    def _run_backward_input(self, microbatch: int, state: _Step) -> Any:
        stash = state.buffer(BufferKind.STASH, microbatch)
        gradient, weight_stash = self.stage.backward_input(
            state.weights, stash, self._output_gradient(microbatch, state)
        )
        if not state.is_first:
            state.keep(BufferKind.INPUT_GRADIENT, microbatch, gradient)
        state.keep(BufferKind.WEIGHT_STASH, microbatch, weight_stash)
        return weight_stash

    def _run_backward_weight(self, microbatch: int, state: _Step) -> Any:
        weight_stash = state.buffer(BufferKind.WEIGHT_STASH, microbatch)
        state.accumulators, done = self.stage.backward_weight_marked(
            state.weights, weight_stash, state.accumulators
        )
        return done

    def _run_backward(self, microbatch: int, state: _Step) -> Any:
        stash = state.buffer(BufferKind.STASH, microbatch)
        gradient, state.accumulators, done = self.stage.backward_marked(
            state.weights, stash, self._output_gradient(microbatch, state), state.accumulators
        )
        if not state.is_first:
            state.keep(BufferKind.INPUT_GRADIENT, microbatch, gradient)
        return done

    def _output_gradient(self, microbatch: int, state: _Step) -> jax.Array:
        if state.is_last:
            return state.loss_weight
        return state.buffer(BufferKind.OUTPUT_GRADIENT, microbatch)

    def _from_host(self, values: np.ndarray | None, microbatch: int) -> jax.Array:
        if values is None:
            raise ValueError(f"the stage reads microbatch {microbatch} from the host: none given")
        return jax.device_put(values[microbatch], self.placement)
