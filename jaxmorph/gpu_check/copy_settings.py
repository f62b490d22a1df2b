"""What is looked at of copies between device and slots, and how often."""

from dataclasses import dataclass

MOST_SLOWDOWN = 0.02
"""Of computation, by the messages of training."""

LEAST_SHARE = 0.9
"""Of the copy engine's own rate, from `BARELY_BYTES` on."""

BARELY_BYTES = 16 << 20
"""With less, what a call costs counts for more than the bus."""


@dataclass(frozen=True)
class MatmulSettings:
    """The computation that copies may disturb, and the messages beside it.

    Attributes:
        width: Of its square bfloat16 matrices.
        per_op: Products in one op, which is what is dispatched at a time.
        ahead: Ops that have been dispatched and not run, as a step's are.
        every_s: From one message to the next where they come as in training.
        rounds: How often each kind of timing is taken.
    """

    width: int
    per_op: int
    ops: int
    ahead: int
    message_bytes: int
    every_s: float
    rounds: int


@dataclass(frozen=True)
class CopySettings:
    """What is looked at of each way of copying.

    Attributes:
        registered_bytes: Of the slots that are registered with the driver.
        case_bytes: The payloads of each type whose bytes are compared, about.
        num_small: Small messages among which torn ones are looked for.
        speed_bytes: The payloads that are timed.
        num_behind: How many of them come one behind another.
        repeats: How often each is timed.
        num_calls: Messages of four bytes that are timed.
        busy_width: Of the products that a device is busy with when a copy is asked for.
        spin_us: For how long a kernel waits for a signal that doesn't come.
        patience_s: For how long any one message is waited for.
        child_s: For how long a process may run, for each way that it looks at.
        part_s: For how long all that look at one direction may.
        is_isolated: Whether kernels, and the copy engine, get processes of their own.
    """

    registered_bytes: int
    case_bytes: tuple[int, ...]
    num_small: int
    small_bytes: tuple[int, ...]
    speed_bytes: tuple[int, ...]
    num_behind: int
    repeats: int
    num_calls: int
    busy_width: int
    busy_products: int
    matmuls: MatmulSettings
    spin_us: int
    patience_s: float
    child_s: float
    part_s: float
    is_isolated: bool


_KIB, _MIB = 1 << 10, 1 << 20

COPIES_ON_GPU = CopySettings(
    registered_bytes=256 * _MIB,
    case_bytes=(4, 4 * _KIB, _MIB, 64 * _MIB),
    num_small=1000,
    small_bytes=(4, 60, 1 * _KIB, 12 * _KIB + 4, 64 * _KIB, 256 * _KIB - 4),
    speed_bytes=(_MIB, 16 * _MIB, 64 * _MIB),
    num_behind=16,
    repeats=9,
    num_calls=200,
    busy_width=2048,
    busy_products=30,
    # A stage of the paper's figures whose F, B and W take 10 ms each sends two messages for each
    # microbatch, and receives two: one every 15 ms in each direction. This is half as many again.
    # 16 MiB are the activations of 2,048 tokens at a width of 4,096, in bfloat16.
    matmuls=MatmulSettings(
        width=4096, per_op=8, ops=64, ahead=4, message_bytes=16 * _MIB, every_s=0.010, rounds=7
    ),
    spin_us=2000,
    patience_s=15.0,
    child_s=75.0,
    part_s=200.0,
    is_isolated=True,  # what goes wrong in a kernel ends all work of its process on the device
)
"""A process takes about 25 s, most of it to start, to compile, and to compare bytes."""

COPIES_ON_CPU = CopySettings(
    registered_bytes=1 * _MIB,
    case_bytes=(4, 4 * _KIB),
    num_small=40,
    small_bytes=(4, 1 * _KIB, 12 * _KIB + 4),
    speed_bytes=(64 * _KIB,),
    num_behind=4,
    repeats=3,
    num_calls=5,
    busy_width=64,
    busy_products=2,
    matmuls=MatmulSettings(
        width=64, per_op=2, ops=6, ahead=2, message_bytes=4 * _KIB, every_s=0.010, rounds=2
    ),
    spin_us=2000,
    patience_s=15.0,
    child_s=60.0,
    part_s=120.0,
    is_isolated=False,
)
"""Enough to see that everything runs."""
