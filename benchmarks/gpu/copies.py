"""One copy backend in one direction: are messages whole, how fast, and what do matmuls lose."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding

from benchmarks.gpu.child import ABSENT, Row
from benchmarks.gpu.copy_ends import Incoming, Message, Outgoing, Site, wait_until
from benchmarks.gpu.stage import is_small
from jaxmorph.copies.backends import PayloadShape, ReceiveBackend, SendBackend
from jaxmorph.copies.choosing import UnavailableBackend, copy_backends
from jaxmorph.pallas_kernels.mosaic import NoKernelsError
from jaxmorph.records import in_bytes
from jaxmorph.transport.names import WRAP

_TYPES = (jnp.bfloat16, jnp.float32, jnp.uint8)
_RAGGED = 1  # bytes more, of the type that can
_BURST, _SLOTS_UNDER_WAY = 4, 8
_SEED = 20
_WARM_UPS = 3
_KIB, _MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Sizes:
    """What is looked at, and how often.

    Attributes:
        case_bytes: The payloads of each type whose bytes are compared, about.
        num_small: Small messages among which torn ones are looked for.
        speed_bytes: The payloads that are timed, `num_behind` of them one behind another.
        num_calls: Messages of four bytes that are timed.
        busy_width: Of the products that a device is busy with when a copy is asked for.
        matmul_width: Of the bfloat16 matrices of the computation that copies may disturb.
        per_op: Products in one op, the unit of dispatch.
        ahead: Ops that have been dispatched and not run, as a step's are.
        message_bytes: Of the messages beside that computation.
        every_s: From one message to the next where they come as in training.
    """

    case_bytes: tuple[int, ...]
    num_small: int
    small_bytes: tuple[int, ...]
    speed_bytes: tuple[int, ...]
    num_behind: int
    repeats: int
    num_calls: int
    busy_width: int
    busy_products: int
    matmul_width: int
    per_op: int
    ops: int
    ahead: int
    message_bytes: int
    rounds: int
    every_s: float = 0.010


# A stage whose F, B and W take 10 ms each, as in the paper's figures, sends a message every 15 ms
# and receives one. One every 10 ms is half as many again; 16 MiB are the activations of 2,048
# tokens at a width of 4,096 in bfloat16.
LARGE = Sizes(
    case_bytes=(4, 4 * _KIB, _MIB, 64 * _MIB),
    num_small=1000,
    small_bytes=(4, 60, 1 * _KIB, 12 * _KIB + 4, 64 * _KIB, 256 * _KIB - 4),
    speed_bytes=(_MIB, 16 * _MIB, 64 * _MIB),
    num_behind=16, repeats=9, num_calls=200, busy_width=2048, busy_products=30,
    matmul_width=4096, per_op=8, ops=64, ahead=4, message_bytes=16 * _MIB, rounds=7,
)  # fmt: skip

# Enough to see that everything runs.
SMALL = Sizes(
    case_bytes=(4, 4 * _KIB),
    num_small=40,
    small_bytes=(4, 1 * _KIB, 12 * _KIB + 4),
    speed_bytes=(64 * _KIB,),
    num_behind=4, repeats=3, num_calls=5, busy_width=64, busy_products=2,
    matmul_width=64, per_op=2, ops=6, ahead=2, message_bytes=4 * _KIB, rounds=2,
)  # fmt: skip


def check_backend(direction: str, name: str, *, small: bool) -> Iterator[Row]:
    """Check and measure a backend."""
    placement = SingleDeviceSharding(jax.devices()[0])
    with closing(copy_backends(placement, lambda registry: None)) as available:
        backends = available.outgoing if direction == "into" else available.incoming
        backend = next((backend for backend in backends if backend.name == name), None)
        if backend is None:
            yield Row("backend", ABSENT, f"not for {jax.default_backend()}")
            return
        sizes, site = SMALL if is_small(small) else LARGE, Site(placement, available.memory)
        yield from backend_rows(Outgoing if direction == "into" else Incoming, backend, site, sizes)


def backend_rows(
    end: type[Outgoing | Incoming], backend: SendBackend | ReceiveBackend, site: Site, sizes: Sizes
) -> Iterator[Row]:
    """A backend's rows, each as soon as it is known.

    Raises:
        Exception: Whatever goes wrong, unless the backend is not for this machine.
    """
    try:
        end.try_it(backend, site)
    except Exception as error:
        # These say that it is not for this machine; anything else has gone wrong.
        if not isinstance(backend, UnavailableBackend) and not isinstance(
            error, ImportError | NoKernelsError
        ):
            raise
        yield Row("backend", ABSENT, " ".join(repr(error).split()))
        return
    open_end = partial(end, backend, site)
    yield from look_at_payloads(open_end, site.placement, sizes)
    yield _latency(open_end, site.placement, sizes)
    for num_bytes in sizes.speed_bytes:
        yield _speed(open_end, site.placement, num_bytes, sizes)
    yield from _slowdown(open_end, site.placement, sizes)


OpenEnd = Callable[..., Outgoing | Incoming]
"""Opens an end, given `slot_bytes`, `num_slots` and perhaps the `first` message's number."""


def look_at_payloads(open_end: OpenEnd, placement: Sharding, sizes: Sizes) -> Iterator[Row]:
    """Copy payloads of several types and sizes one by one, then many small ones in bursts."""
    rng, payloads = np.random.default_rng(_SEED), _Payloads(placement, sizes)
    wrong: list[str] = []
    cases = [(jnp.dtype(each), size) for size in sizes.case_bytes for each in _TYPES]
    with closing(open_end(max(sizes.case_bytes) + _RAGGED, 2)) as end:
        for dtype, size in cases:
            num_bytes = size + (_RAGGED if dtype.itemsize == 1 else 0)
            (problem,) = end.look_at([payloads.slow(end, rng, dtype, num_bytes)])
            if problem:
                wrong.append(f"{dtype.name}, {in_bytes(num_bytes)}: {problem}")
        early = "" if end.num_early is None else f"{end.num_early} still being computed"
    whole = f"{len(cases) - len(wrong)} of {len(cases)}"
    yield Row("whole", whole, wrong[0] if wrong else early, not wrong)
    # Half of the small messages have numbers before the wrap.
    first, torn = WRAP - sizes.num_small // 2, []
    with closing(open_end(max(sizes.small_bytes), _BURST, first)) as end:
        kinds = [payloads.quick(end, rng, size) for size in sizes.small_bytes]
        number = 0
        while number < sizes.num_small:
            length = min(int(rng.integers(1, _BURST + 1)), sizes.num_small - number)
            burst = [kinds[rng.integers(len(kinds))]() for _ in range(length)]
            for at, problem in enumerate(end.look_at(burst)):
                if problem:
                    size = in_bytes(len(burst[at].expected))
                    torn.append(f"message {number + at}, {size}: {problem}")
            number += length
    note = torn[0] if torn else "their numbers wrap"
    yield Row("torn", f"{len(torn)} of {sizes.num_small}", note, not torn)


class _Payloads:
    """Random payloads, and their computation on the device; what compiles is compiled by then."""

    def __init__(self, placement: Sharding, sizes: Sizes) -> None:
        self._placement = placement
        self._one = jax.device_put(np.eye(sizes.busy_width, dtype=np.float32), placement)
        self._products = sizes.busy_products
        self._turn = jax.jit(self._busy)
        self._bits = jax.jit(_with_zero, static_argnums=2)
        self._flip = jax.jit(jnp.bitwise_xor)

    def _busy(self, one: jax.Array) -> jax.Array:
        """1, after many products of the identity with itself."""
        return jax.lax.fori_loop(0, self._products, lambda _, turned: turned @ one, one)[0, 0]

    def slow(
        self, end: Outgoing | Incoming, rng: np.random.Generator, dtype: jnp.dtype, num_bytes: int
    ) -> Message:
        """A payload of a type, which the device takes a while to compute."""
        contents = _random_bits(rng, dtype.itemsize, num_bytes)
        placed = jax.device_put(contents, self._placement)

        def compute() -> jax.Array:
            return self._bits(placed, self._turn(self._one), dtype)

        jax.block_until_ready(compute())
        program = end.compile(PayloadShape(contents.shape, dtype))
        return Message(program, contents.view(np.uint8), contents.size, compute)

    def quick(
        self, end: Outgoing | Incoming, rng: np.random.Generator, num_bytes: int
    ) -> Callable[[], Message]:
        """Makes messages of a length: others each time, computed when they are asked for."""
        contents = _random_bits(rng, 4, num_bytes)
        placed = jax.device_put(contents, self._placement)
        program = end.compile(PayloadShape(contents.shape, jnp.dtype(jnp.uint32)))

        def message() -> Message:
            word = np.uint32(rng.integers(WRAP))
            expected = (contents ^ word).view(np.uint8)
            flipped = partial(self._flip, placed, word)
            return Message(program, expected, contents.size, flipped)

        return message


def _random_bits(rng: np.random.Generator, item_bytes: int, num_bytes: int) -> np.ndarray:
    """At least one unsigned integer."""
    size = max(num_bytes // item_bytes, 1) * item_bytes
    return np.frombuffer(rng.bytes(size), f"u{item_bytes}")


def _with_zero(bits: jax.Array, one: jax.Array, dtype: Any) -> jax.Array:
    """The same bits as another type, but not before `one` is known."""
    return jax.lax.bitcast_convert_type(bits ^ (one - 1).astype(bits.dtype), dtype)


def _ready_message(end: Outgoing | Incoming, placement: Sharding, num_bytes: int) -> Message:
    """A message whose payload has been computed."""
    contents = _random_bits(np.random.default_rng(0), 4, num_bytes)
    program = end.compile(PayloadShape(contents.shape, jnp.dtype(jnp.uint32)))
    value = jax.block_until_ready(jax.device_put(contents, placement))
    return Message(program, contents.view(np.uint8), contents.size, lambda: value)


def _latency(open_end: OpenEnd, placement: Sharding, sizes: Sizes) -> Row:
    """How long messages of four bytes take while the device has nothing else to do."""
    with closing(open_end(4, 2)) as end:
        message = _ready_message(end, placement, 4)
        times = [end.time_s(message) for _ in range(sizes.num_calls + _WARM_UPS)]
    call_us, over_us = (1e6 * median(each) for each in zip(*times[_WARM_UPS:], strict=True))
    figures = {"call_us": call_us, "over_us": over_us}
    return Row(
        "a call", f"{call_us:.0f} us", f"4 bytes are over after {over_us:.0f} us", None, figures
    )


def _speed(open_end: OpenEnd, placement: Sharding, num_bytes: int, sizes: Sizes) -> Row:
    """The rate of messages one behind another, and the time of one alone.

    In a row, the host's part of a call overlaps with copies, as on a busy link.
    """
    alone_s, behind_s, count = [], [], sizes.num_behind
    with closing(open_end(num_bytes, _SLOTS_UNDER_WAY)) as end:
        message = _ready_message(end, placement, num_bytes)
        for _ in range(sizes.repeats + _WARM_UPS):
            began_s = time.perf_counter()
            for number in range(count):
                what = f"no room for message {number}"
                wait_until(lambda: end.begin(message), Site.patience_s, what)
            end.drain()
            behind_s.append(time.perf_counter() - began_s)
            alone_s.append(end.time_s(message)[1])
    rate = count * num_bytes / median(behind_s[_WARM_UPS:]) / 1e9
    alone_ms = 1e3 * median(alone_s[_WARM_UPS:])
    figures = {"gb_per_s": rate, "alone_ms": alone_ms}
    return Row(
        in_bytes(num_bytes), f"{rate:.1f} GB/s", f"one alone {alone_ms:.3f} ms", None, figures
    )


def _slowdown(open_end: OpenEnd, placement: Sharding, sizes: Sizes) -> Iterator[Row]:
    """How much slower matmuls are beside messages: the figure that decides between backends.

    Messages are begun between two dispatches by the thread that dispatches, as a rank's are. As in
    training, one that leaves holds what an op before it computes; flat out, what is there already.
    """
    matmuls = _Matmuls(placement, sizes)
    with closing(open_end(sizes.message_bytes, _SLOTS_UNDER_WAY)) as end:
        message = _ready_message(end, placement, sizes.message_bytes)
        op_s = min(matmuls.time_s() for _ in range(_WARM_UPS)) / sizes.ops
        every = min(max(round(sizes.every_s / op_s), 1), sizes.ops)
        count = 0

        def as_in_training(number: int, payload: jax.Array) -> None:
            nonlocal count
            if number % every == every - 1:
                count += end.begin(replace(message, on_device=lambda: payload))

        def flat_out(number: int, payload: jax.Array) -> None:
            nonlocal count
            until_s = time.perf_counter() + op_s  # or no op would follow
            while end.begin(message) and time.perf_counter() < until_s:
                count += 1

        found = {}
        for beside in (as_in_training, flat_out):
            shares, beside_s = [], 1.0
            for _ in range(sizes.rounds + 1):
                count, before_s = 0, matmuls.time_s()
                beside_s = matmuls.time_s(beside)
                end.drain()
                shares.append(2 * beside_s / (before_s + matmuls.time_s()) - 1)
            found[beside] = median(shares[1:]), count, count * sizes.message_bytes / beside_s / 1e9
    share, number, _ = found[as_in_training]
    figures = {"slowdown": share, "op_ms": 1e3 * op_s, "platform": jax.default_backend()}
    size = in_bytes(sizes.message_bytes)
    note = f"beside {number} messages of {size}, one every {1e3 * sizes.every_s:.0f} ms"
    yield Row("matmuls slower by", f"{share:+.1%}", note, None, figures)
    share, _, rate = found[flat_out]
    note = f"beside all messages that fit, {rate:.1f} GB/s"
    yield Row("matmuls slower by", f"{share:+.1%}", note, None, {"slowdown_flat_out": share})


class _Matmuls:
    """Ops that a device computes one after another."""

    def __init__(self, placement: Sharding, sizes: Sizes) -> None:
        self._sizes, width = sizes, sizes.matmul_width
        # Scaled so that products neither grow nor vanish.
        weights = np.random.default_rng(0).standard_normal((2, width, width), np.float32)
        scaled = (weights / np.sqrt(width)).astype(jnp.bfloat16)
        self._x, self._w = jax.device_put(list(scaled), placement)
        self._op = jax.jit(self._products)

    def _products(self, x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The last product, and a payload of it, as the words that messages here consist of."""
        for _ in range(self._sizes.per_op):
            x = x @ w
        pairs = x.reshape(-1)[: self._sizes.message_bytes // 2].reshape(-1, 2)
        return x, jax.lax.bitcast_convert_type(pairs, jnp.uint32)

    def time_s(self, beside: Callable[[int, jax.Array], None] | None = None) -> float:
        """Seconds of all ops, a few of them dispatched ahead.

        Args:
            beside: What is done after each dispatch, given its number and what it computes to send.
        """
        x, ahead = self._x, deque[jax.Array]()
        began_s = time.perf_counter()
        for number in range(self._sizes.ops):
            x, payload = self._op(x, self._w)
            ahead.append(x)
            if beside is not None:
                beside(number, payload)
            if len(ahead) > self._sizes.ahead:
                jax.block_until_ready(ahead.popleft())
        jax.block_until_ready(x)
        return time.perf_counter() - began_s
