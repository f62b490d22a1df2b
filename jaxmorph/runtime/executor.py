"""Runs one rank's instructions for one step: most become items of the rank's queue.

A delegated receive waits on the host instead, and so does a delegated send that finds no free slot;
later instructions are enqueued after that wait. Copies of stashes run beside the queue
(`host_copies`), and only an op that needs a copy waits for it. The executor decides nothing: the
program gives order, buffers and routes.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike

from jaxmorph.copies.host_memory import for_program
from jaxmorph.placement import ALONE, Place, Replica
from jaxmorph.program.dataflow import (
    last_uses,
    received_buffer,
    result_buffer,
    sent_buffer,
    weight_stashes,
)
from jaxmorph.program.instructions import (
    AwaitRoom,
    Buffer,
    BufferKind,
    Fetch,
    Instruction,
    Move,
    Offload,
    Payload,
    RankInstructions,
    Receive,
    Reduce,
    Run,
    Send,
    SendReceive,
    Transfer,
)
from jaxmorph.progress import StalledError, progress
from jaxmorph.runtime.direct import is_of_path
from jaxmorph.runtime.host_copies import AwayStash, HostCopies, wait_for
from jaxmorph.runtime.queue import DeviceQueue, Pace, Stamp, sleep_until
from jaxmorph.runtime.routes import Moved, PairRoute, Posting, Route, TransferIdentity
from jaxmorph.runtime.tied import TiedGradients
from jaxmorph.schedule.ops import Op, OpKind
from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.model import key_numbers
from jaxmorph.transport.names import PeerGoneError

Tree = Any
Chunks = tuple[Tree, ...]
"""One tree for each virtual stage of a rank, in the order of its chunks."""
_FIRST_EPOCH = 0  # a failover route replaces it by the link's own epoch


@dataclass(frozen=True)
class StepInputs:
    """One rank's data of a step: trees of arrays [microbatches, microbatch size, ...].

    Attributes:
        inputs: Only the first stage reads them; text is int32 [.., sequence]. None: not given.
        targets: Only the last stage reads them. None: not given.
        loss_weight: The weight of each counted loss, e.g. one over `count_targets`.
        extras: By name; only stages read them whose functions take any.
        first_microbatch: The first of these microbatches, as the instructions number it.
        evaluates: Whether only forwards run, without randomness.
        length_index: The step's length, as an index into `MicrobatchShapes.lengths`.
        replica: The replica that these microbatches of the step belong to.
    """

    inputs: Tree
    targets: Tree
    loss_weight: float
    extras: Mapping[str, Tree] = field(default_factory=dict)
    first_microbatch: int = 0
    evaluates: bool = False
    length_index: int = 0
    replica: Replica = ALONE

    def of_replica(self, replica: Replica) -> "StepInputs":
        """A replica's share of the whole step's data."""
        if replica.is_alone:
            return self
        whole = {"inputs": self.inputs, "targets": self.targets, "extras": self.extras}
        return replace(self, **jax.tree.map(replica.share, whole), replica=replica)


@dataclass(frozen=True)
class StepOutcome:
    """One rank's results of a step.

    Attributes:
        loss: Mean loss of the targets that count (0 except on the last stage), plus what the
            stage's auxiliary losses add, which evaluations leave out.
        accumulators: Gradients, float32, of each chunk's parameters.
        stamps: When each op and transfer ran on the queue; labels are `Op` and `Transfer`. Both
            transfers of a pair have the pair's times, unless an emulated link ends them at
            different times.
        arrivals: When each message received beside the queue was sent and arrived.
        copies: When stashes went to host memory and came back; labels are `CopyLabel`.
        aux: The stage's auxiliary losses by name, without weights: a mean over microbatches.
    """

    loss: float
    accumulators: Chunks
    stamps: list[Stamp]
    arrivals: list[Stamp] = field(default_factory=list)
    copies: list[Stamp] = field(default_factory=list)
    aux: Mapping[str, float] = field(default_factory=dict)


@dataclass
class _Step:
    """The step in progress.

    It needs no lock: items run one after another on the queue, and the host stores a message in
    `buffers` before it enqueues any item that reads it.
    """

    program: RankInstructions
    weights: Chunks
    accumulators: list[Tree]
    inputs: StepInputs
    loss_weight: jax.Array
    step: int
    buffers: dict[Buffer, Any] = field(default_factory=dict)
    losses: list[jax.Array] = field(default_factory=list)
    aux: dict[tuple[int, int], jax.Array] = field(default_factory=dict)
    aux_gradient: tuple[jax.Array, ...] = ()
    arrivals: list[Stamp] = field(default_factory=list)
    away: dict[Buffer, AwayStash] = field(default_factory=dict)
    pair_ends_s: dict[SendReceive, tuple[float, ...]] = field(default_factory=dict)

    def is_first(self, op: Op) -> bool:
        return Place(self.program.rank, op.chunk) == self.program.placement.first

    def is_last(self, op: Op) -> bool:
        return Place(self.program.rank, op.chunk) == self.program.placement.last

    def number_in_step(self, op: Op) -> int:
        """The number of the op's microbatch among the microbatches of all replicas."""
        before = self.inputs.replica.index
        return op.microbatch + (before and before * self.program.num_microbatches)

    def identity(self, transfer: Transfer) -> TransferIdentity:
        return TransferIdentity(_FIRST_EPOCH, self.step, transfer)

    def buffer(self, kind: BufferKind, op: Op) -> Any:
        return self.buffers[Buffer(kind, op.microbatch, op.chunk)]

    def keep(self, kind: BufferKind, op: Op, value: Any) -> None:
        self.buffers[Buffer(kind, op.microbatch, op.chunk)] = value

    def free(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            del self.buffers[buffer]

    def keep_result(self, op: Op, value: Any) -> None:
        """Keep the activations or the input gradient for the next virtual stage."""
        buffer = result_buffer(op, self.program.rank, self.program.placement)
        if buffer is not None:
            self.buffers[buffer] = value


@dataclass(frozen=True)
class Executor:
    """Runs a rank's instructions on its virtual stages.

    Attributes:
        chunks: The compiled programs of each virtual stage.
        placement: Where the stage keeps its arrays.
        routes: By the names that instructions use.
        pace: How long ops last on a paced queue.
        transfer_timeout_s: How long to wait for a transfer.
        tied: Sums the gradients of tied parameters; None where the stage holds none.
        copies: Moves stashes to host memory and back.
        seed: The seed of the keys of random models.
        first_layers: The number of each chunk's first layer.
        aux_weights: The weights of auxiliary losses, in the order of their names.
        send_takes_s: How long a delegated message occupies its sender's compute; None: not at all.
    """

    chunks: Sequence[StagePrograms]
    placement: Sharding
    queue: DeviceQueue
    routes: Mapping[str, Route]
    pace: Pace
    transfer_timeout_s: float
    tied: TiedGradients | None = None
    copies: HostCopies = field(default_factory=HostCopies)
    seed: int = 0
    first_layers: Sequence[int] = (0,)
    aux_weights: Mapping[str, float] = field(default_factory=dict)
    send_takes_s: Callable[[TransferIdentity], float] | None = None

    def execute(
        self,
        program: RankInstructions,
        weights: Chunks,
        accumulators: Chunks,
        inputs: StepInputs,
        *,
        step: int,
    ) -> StepOutcome:
        """Run a step's ops and transfers, but not its update.

        Args:
            weights: What each chunk's `prepare` made of its parameters. Evaluations take the
                parameters themselves of a chunk that `evaluates_apart`.
            accumulators: Each chunk's zeroed gradient accumulators; they are donated.
            step: The step's number, part of every message's identity.

        Raises:
            TransferMismatchError: If an unexpected message came.
            TimeoutError: If a message, or room for one, didn't come in time.
            PeerGoneError: If a rank at the other end of a delegated link is gone.
            StalledError: In place of one of these two, if this rank's own device has stalled.
        """
        loss_weight = jax.device_put(np.float32(inputs.loss_weight), self.placement)
        state = _Step(program, weights, list(accumulators), inputs, loss_weight, step)
        if self.aux_weights:
            share = np.float32(1 / (program.num_microbatches * inputs.replica.count))
            gradient = share * np.array([*self.aux_weights.values()], np.float32)
            state.aux_gradient = (jax.device_put(gradient, self.placement),)
        try:
            for instruction, freed in zip(program.instructions, last_uses(program), strict=True):
                progress.stamp(instruction)
                self._enqueue(instruction, state)
                if freed:
                    self.queue.enqueue(None, partial(state.free, freed))
            drained = self.queue.drain(max(self.transfer_timeout_s, progress.limit_s))
            stamps = [each for stamp in drained for each in _of_each_transfer(stamp, state)]
            progress.stamp("waits for copies of its messages")
            for route in self.routes.values():
                route.settle()
        except BaseException as error:
            cause = self._cause_of(error)
            for route in self.routes.values():  # the ends of a link may be out of step
                route.abandon(_FIRST_EPOCH)
            for away in state.away.values():
                away.cancel()
            self.queue.restart()
            if cause is not error:
                raise cause from error
            raise
        loss_sum = sum(float(loss) for loss in state.losses)  # in microbatch order
        aux = self._mean_aux(state)
        loss = loss_sum * inputs.loss_weight
        loss += sum(self.aux_weights[name] * aux[name] for name in aux) / inputs.replica.count
        copies = [of.result() for away in state.away.values() for of in (away.gone, away.back)]
        return StepOutcome(loss, tuple(state.accumulators), stamps, state.arrivals, copies, aux)

    def _mean_aux(self, state: _Step) -> dict[str, float]:
        """The stage's auxiliary losses: summed over its layers, a mean over microbatches."""
        if not state.aux:
            return {}
        total = np.sum([np.float64(state.aux[at]) for at in sorted(state.aux)], axis=0)
        means = total / state.program.num_microbatches
        return dict(zip(self.aux_weights, means.tolist(), strict=True))

    def _cause_of(self, error: BaseException) -> BaseException:
        """The cause of a step's error, where this rank knows it: a failed transfer, or a stall."""
        if isinstance(error, TimeoutError | PeerGoneError) and not isinstance(error, StalledError):
            stall = self.queue.stall(error, self.transfer_timeout_s)
            return error if stall is None else StalledError(stall)
        if isinstance(error, Exception) and is_of_path(error):
            return self.queue.cause_of(error)
        return error

    def _enqueue(self, instruction: Instruction, state: _Step) -> None:
        # `Update` is missing: the trainer updates once it has the scalars of all ranks.
        match instruction:
            case Run(op):
                self._await_stash(op, state)
                work = partial(self._run, op, state)
                self.queue.enqueue(op, work, self.pace.of(op))
            case Send() | Receive() | SendReceive():
                self._enqueue_move(instruction, state)
            case Offload(stash):
                state.away[stash] = AwayStash(stash)
                self.queue.enqueue_after(partial(self._offload, stash, state))
            case Fetch(stash, after):
                self.queue.enqueue_after(partial(self._fetch, stash, after, state))
            case AwaitRoom(stash):
                self.queue.enqueue_wait(partial(self._over_s, state.away[stash].gone))
            case Reduce(index, buffer):
                self.queue.enqueue(None, partial(self._reduce, index, buffer, state))

    def _enqueue_move(self, move: Move, state: _Step) -> None:
        match move:
            case Send():
                self._enqueue_send(move, state)
            case SendReceive():
                self.queue.enqueue_transfer(move, partial(self._send_and_receive, move, state))
            case Receive(transfer, route) if self.routes[route].holds_queue:
                self.queue.enqueue_transfer(transfer, partial(self._receive, move, state))
            case Receive(transfer):
                moved = self._receive(move, state, time.monotonic())
                state.arrivals.append(_arrival(transfer, moved))

    def _enqueue_send(self, send: Send, state: _Step) -> None:
        """Enqueue a message part by part, as timed items only where the route holds the queue."""
        route, transfer = self.routes[send.route], send.transfer
        deadline_s = time.monotonic() + self.transfer_timeout_s
        for posting in route.reserve(state.identity(transfer), deadline_s):
            work = partial(self._send, posting, transfer, state)
            if route.holds_queue:
                self.queue.enqueue_transfer(transfer, work)
            else:
                self.queue.enqueue(None, partial(work, time.monotonic()))
        if self.send_takes_s is not None and not route.holds_queue:
            sent_s: list[float] = []
            takes_s = partial(self.send_takes_s, state.identity(transfer))

            def wait() -> float:
                over_s = sent_s[0] + takes_s()
                sleep_until(over_s)
                return over_s

            self.queue.enqueue_after(sent_s.append)
            self.queue.enqueue_wait(wait)

    def _send(self, posting: Posting, transfer: Transfer, state: _Step, arrived_s: float) -> Moved:
        return posting(self._outgoing(transfer, state), arrived_s)

    def _receive(self, receive: Receive, state: _Step, arrived_s: float) -> Moved:
        identity = state.identity(receive.transfer)
        deadline_s = time.monotonic() + self.transfer_timeout_s
        moved = self.routes[receive.route].take(identity, arrived_s, deadline_s)
        state.buffers[received_buffer(receive.transfer, state.program.placement)] = moved.value
        return moved

    def _send_and_receive(self, pair: SendReceive, state: _Step, arrived_s: float) -> Moved:
        direct = cast(PairRoute, self.routes[pair.route])  # the only route whose two ends meet
        sent, received = map(state.identity, (pair.sent, pair.received))
        deadline_s = time.monotonic() + self.transfer_timeout_s
        value = self._outgoing(pair.sent, state)
        moved = direct.post_and_take(sent, value, received, arrived_s, deadline_s)
        state.buffers[received_buffer(pair.received, state.program.placement)] = moved.value
        state.pair_ends_s[pair] = moved.each_over_s
        return moved

    def _offload(self, stash: Buffer, state: _Step, made_s: float) -> None:
        self.copies.offload(state.away[stash], state.buffers.pop(stash), made_s)

    def _fetch(self, stash: Buffer, after: Buffer | None, state: _Step, free_s: float) -> None:
        place = None if after is None else state.away[after]
        self.copies.fetch(state.away[stash], place, free_s)

    def _await_stash(self, op: Op, state: _Step) -> None:
        """Make an op wait for the stash that it reads, if that was offloaded."""
        if not state.away or op.kind not in (OpKind.B, OpKind.BW):
            return
        away = state.away.get(Buffer(BufferKind.STASH, op.microbatch, op.chunk))
        if away is not None:
            self.queue.enqueue_wait(partial(self._keep_stash, away, state))

    def _keep_stash(self, away: AwayStash, state: _Step) -> float:
        back_s = self._over_s(away.back)
        state.buffers[away.stash] = away.take()
        return back_s

    def _over_s(self, copied: Future[Stamp]) -> float:
        """Wait for a copy; returns when it ended."""
        deadline_s = time.monotonic() + self.transfer_timeout_s
        return wait_for(copied, deadline_s, self.queue.raise_error).end_s

    def _reduce(self, index: int, buffer: Buffer | None, state: _Step) -> None:
        peer = None if buffer is None else state.buffers[buffer]
        combined = self._tied.combine(tuple(state.accumulators), index, peer)
        state.accumulators = list(combined)

    def _outgoing(self, transfer: Transfer, state: _Step) -> jax.Array:
        if transfer.payload is Payload.TIED:
            return self._tied.own_copy(tuple(state.accumulators), transfer.microbatch)
        return state.buffers[sent_buffer(transfer)]

    @property
    def _tied(self) -> TiedGradients:
        if self.tied is None:
            raise ValueError("the program reduces a tied gradient, but this stage holds none")
        return self.tied

    def _run(self, op: Op, state: _Step) -> Any:
        """Dispatch an op; returns a scalar that is ready when the op has run."""
        # The queue keeps what it gets until that is ready, and the host may be far ahead. If it got
        # the op's results, arrays that later items free would stay alive.
        match op.kind:
            case OpKind.F:
                return self._run_forward(op, state)
            case OpKind.B:
                return self._run_backward_input(op, state)
            case OpKind.W:
                return self._run_backward_weight(op, state)
            case OpKind.BW:
                return self._run_backward(op, state)

    def _run_forward(self, op: Op, state: _Step) -> Any:
        x = (
            self._from_host(state.inputs.inputs, op, state)
            if state.is_first(op)
            else state.buffer(BufferKind.INPUT, op)
        )
        is_last = state.is_last(op)
        targets = self._from_host(state.inputs.targets, op, state) if is_last else None
        output, stash, aux, done = self._forward(op, state, x, targets)
        if aux:
            (state.aux[op.chunk, op.microbatch],) = aux
        if is_last:
            state.losses.append(output)
        else:
            state.keep_result(op, output)
        state.keep(BufferKind.STASH, op, stash)
        return done

    def _forward(self, op: Op, state: _Step, x: Tree, targets: Tree) -> Any:
        """Dispatch the program of a forward; returns what `StagePrograms.forward` does."""
        chunk, weights = self.chunks[op.chunk], state.weights[op.chunk]
        functions, extras = chunk.functions, state.inputs.extras
        if state.inputs.evaluates and functions.evaluates_apart:
            every = self._from_host(extras, op, state) if functions.takes_extras else {}
            output, done = chunk.evaluate(weights, x, targets, every)
            return output, (), (), done
        read = functions.with_extras(extras)
        own = self._from_host(read, op, state) if read else ()
        if not functions.reads_keys:
            return chunk.forward(weights, x, targets, extras=own)
        first_layer = self.first_layers[op.chunk]
        numbers = key_numbers(self.seed, state.step, state.number_in_step(op), first_layer)
        return chunk.forward(weights, x, targets, numbers, own)

    def _run_backward_input(self, op: Op, state: _Step) -> Any:
        gradient, weight_stash, done = self.chunks[op.chunk].backward_input(
            state.weights[op.chunk],
            state.buffer(BufferKind.STASH, op),
            self._output_gradient(op, state),
            *state.aux_gradient,
        )
        state.keep_result(op, gradient)
        state.keep(BufferKind.WEIGHT_STASH, op, weight_stash)
        return done

    def _run_backward_weight(self, op: Op, state: _Step) -> Any:
        state.accumulators[op.chunk], done = self.chunks[op.chunk].backward_weight(
            state.weights[op.chunk],
            tuple(state.buffers[stash] for stash in weight_stashes(op)),
            state.accumulators[op.chunk],
        )
        return done

    def _run_backward(self, op: Op, state: _Step) -> Any:
        gradient, state.accumulators[op.chunk], done = self.chunks[op.chunk].backward(
            state.weights[op.chunk],
            state.buffer(BufferKind.STASH, op),
            self._output_gradient(op, state),
            state.accumulators[op.chunk],
            *state.aux_gradient,
        )
        state.keep_result(op, gradient)
        return done

    def _output_gradient(self, op: Op, state: _Step) -> ArrayLike:
        if state.is_last(op):
            return state.loss_weight
        return state.buffer(BufferKind.OUTPUT_GRADIENT, op)

    def _from_host(self, values: Tree, op: Op, state: _Step) -> Tree:
        if values is None:
            raise ValueError(f"{op} reads its microbatch from the host: none given")
        at = op.microbatch - state.inputs.first_microbatch
        return jax.tree.map(lambda array: for_program(array[at], self.placement), values)


def _of_each_transfer(stamp: Stamp, state: _Step) -> list[Stamp]:
    pair = stamp.label
    if not isinstance(pair, SendReceive):
        return [stamp]
    ends_s = state.pair_ends_s[pair] or (stamp.end_s, stamp.end_s)
    each = zip((pair.sent, pair.received), ends_s, strict=True)
    return [Stamp(label, stamp.start_s, max(stamp.start_s, end_s)) for label, end_s in each]


def _arrival(transfer: Transfer, moved: Moved) -> Stamp:
    """When a message was sent and when it arrived, as its route reports."""
    now_s = time.monotonic()
    come_s = now_s if moved.over_s is None else moved.over_s
    return Stamp(transfer, min(come_s, moved.peer_arrived_s or come_s), come_s)
