"""Whether a microbatch keeps as many bytes on the device as the plan counts on."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

from jaxmorph.byte_sizes import in_bytes
from jaxmorph.gpu_check.report import Row
from jaxmorph.gpu_check.settings import CheckSettings
from jaxmorph.gpu_check.stage_ops import StageOps, middle_stage
from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.stage_functions import total_bytes

_TOLERANCE = 0.02
_ROUNDING_BYTES = 1 << 16  # allocators and compilers round each of some dozen arrays up
_HELD = 2
_LOOKS, _LOOK_S = 10, 0.02


@dataclass(frozen=True)
class KeptBytes:
    """What one microbatch keeps, by three accounts.

    Attributes:
        planned: What planning counts on (`StashMemory`).
        compiled: What the compiled program puts out for it, by XLA's `memory_analysis`.
        held: What the device's allocator says is in use for it; None where it says nothing. It
            counts whole chunks, which may be much larger than what was asked for.
    """

    planned: int
    compiled: int
    held: float | None

    @property
    def agree(self) -> bool:
        """Whether the program puts out what is planned, and no less is held, but for rounding."""
        limit = _TOLERANCE * self.planned + _ROUNDING_BYTES
        holds_all = self.held is None or self.held >= self.planned - limit
        return holds_all and abs(self.compiled - self.planned) <= limit


@dataclass(frozen=True)
class MemoryReport:
    """What a stage's microbatches and programs take of the device's memory.

    Attributes:
        sizes: Of the stage, in words.
        temporary_bytes: What each program needs while it runs, by XLA's `memory_analysis`.
        peak_bytes: The most that was in use at once so far; None where the device does not say.
    """

    sizes: str
    after_forward: KeptBytes
    after_backward_input: KeptBytes
    temporary_bytes: dict[str, int]
    peak_bytes: int | None

    def rows(self) -> Iterator[Row]:
        """A row for each account, and for each program."""
        yield Row("stage", "bfloat16", self.sizes)
        kept = {"from F until B": self.after_forward, "from B until W": self.after_backward_input}
        for when, found in kept.items():
            held = "not told" if found.held is None else in_bytes(found.held)
            note = f"compiled {in_bytes(found.compiled)}, held {held}"
            yield Row(f"kept {when}", in_bytes(found.planned), note, found.agree)
        for name, count in self.temporary_bytes.items():
            yield Row(f"needed while {name} runs", in_bytes(count))
        peak = "not told" if self.peak_bytes is None else in_bytes(self.peak_bytes)
        yield Row("most in use at once", peak)


def measure_memory(settings: CheckSettings) -> MemoryReport:
    """What the stash takes, as planned, as compiled and as held."""
    stage = middle_stage(settings.stage, "bfloat16")
    programs, ops = stage.programs, StageOps(stage.model, stage.programs, settings.stage)
    held_forward, held_backward = _held_bytes(ops)
    compiled_forward, compiled_backward = _compiled_bytes(programs, ops)
    planned = programs.memory
    return MemoryReport(
        sizes=f"{settings.stage}; attention by {stage.attention}",
        after_forward=KeptBytes(planned.after_forward_bytes, compiled_forward, held_forward),
        after_backward_input=KeptBytes(
            planned.after_backward_input_bytes, compiled_backward, held_backward
        ),
        temporary_bytes={
            name: _analysis(programs, name).temp_size_in_bytes for name in ("F", "B", "W", "BW")
        },
        peak_bytes=_memory_stat("peak_bytes_in_use"),
    )


def _compiled_bytes(programs: StagePrograms, ops: StageOps) -> tuple[int, int]:
    """What F's and B's results take but for what they send; B's, with what it passes on."""
    output, stash = ops.forward()
    gradient, _ = ops.backward_input()
    passed_on = total_bytes(stash[position] for position in programs.passed_on)
    forward = _analysis(programs, "F").output_size_in_bytes
    backward = _analysis(programs, "B").output_size_in_bytes
    return forward - total_bytes([output]), backward - total_bytes([gradient]) + passed_on


def _analysis(programs: StagePrograms, name: str) -> Any:
    analysis = programs.compiled[name].memory_analysis()
    if analysis is None:
        raise RuntimeError(f"XLA has no memory analysis of {name} on this device")
    return analysis


def _held_bytes(ops: StageOps) -> tuple[float | None, float | None]:
    """What the allocator counts for a microbatch after F, and after B."""
    ops.settle()
    before = _in_use()
    stashes: list[Any] = [ops.forward()[1] for _ in range(_HELD)]
    after_forward = _in_use(stashes)
    weight_stashes = []
    while stashes:
        weight_stashes.append(ops.backward_input(stashes.pop())[1])
    after_backward = _in_use(weight_stashes)
    if before is None or after_forward is None or after_backward is None:
        return None, None
    return (after_forward - before) / _HELD, (after_backward - before) / _HELD


def _in_use(arrays: Any = ()) -> int | None:
    """The bytes in use once these arrays are there; what is let go may go a moment later."""
    jax.block_until_ready(arrays)
    if (least := _memory_stat("bytes_in_use")) is None:
        return None
    for _ in range(_LOOKS):
        time.sleep(_LOOK_S)
        least = min(least, _memory_stat("bytes_in_use") or 0)
    return least


def _memory_stat(name: str) -> int | None:
    return (jax.devices()[0].memory_stats() or {}).get(name)
