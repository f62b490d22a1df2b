"""The pieces of PTX that make up both copy kernels.

A kernel is one block of PTX that all its threads run. Tests assemble and interpret the text that a
GPU gets. Every instruction is in PTX 7.4 for sm_70 and later. Operands `$0`, `$1` ... are 64-bit
addresses. Registers are local to the block. Their names begin with `%`, as no function's name does:
ptxas 13.0 crashes on a register that is named like a kernel.

Why the signal becomes visible after the payload, by PTX's memory model:

1. Each thread's copies come before `barrier.sync` in program order, so they come before all that
   the CTA's first thread does next.
2. That thread's `fence.acq_rel.sys`, followed by its increment of the arrivals, releases them: a
   fence is cumulative, so it covers the whole CTA's copies.
3. The increments of all CTAs are one chain of read-modify-writes. The last CTA has read the
   others' increments, and its own `fence.acq_rel.sys` acquires what they released.
4. It writes the signal by `st.release.sys`. A host that reads the number with acquire semantics (on
   x86 any load has them) sees all bytes of all CTAs.

The scope is `sys` wherever the host or another device takes part. The arrivals wrap to 0 with the
last CTA, so the next launch finds the counter as it was.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmorph.pallas_kernels.control import NUMBER_AT
from jaxmorph.pallas_kernels.tuning import VECTOR_BYTES, Tiling

_WORDS_32 = "%thread, %cta, %tile, %vector, %byte, %number, %before"
_WORDS_64 = "%slot, %signal, %lane, %offset, %from, %to"


class Access(NamedTuple):
    """The instructions that load from one side and store to the other, without types."""

    load: str
    store: str


def block(lines: Sequence[str], loads: int) -> str:
    """Lines of PTX as one block with registers of its own.

    Args:
        loads: The vectors that a thread holds at a time.
    """
    declarations = (
        ".reg .pred %is;",
        f".reg .b32 {_WORDS_32}, %word<{4 * loads}>;",
        f".reg .b64 {_WORDS_64};",
    )
    return "\n".join(["{", *declarations, *lines, "}"])


def load_control(control: str, addresses: Sequence[tuple[str, int]]) -> list[str]:
    """Load the thread's indices, and the addresses and the number from the control words.

    Args:
        control: The operand with the control words' address.
        addresses: Each register, and the byte offset of its address in the control words.
    """
    return [
        "mov.u32 %thread, %tid.x;",
        "mov.u32 %cta, %ctaid.x;",
        *(f"ld.global.b64 {register}, [{control}+{at}];" for register, at in addresses),
        f"ld.global.b32 %number, [{control}+{NUMBER_AT}];",
    ]


def copy(tiling: Tiling, source: str, target: str, by: Access) -> list[str]:
    """Copy this thread's part of all bytes.

    Args:
        source: The register or operand with the source address, a multiple of 16.
        target: Likewise for the target.
    """
    tiles = _tiles(tiling, source, target, by) if tiling.num_tiles else []
    vectors = _vectors(tiling, source, target, by) if tiling.num_vectors else []
    return [*tiles, *vectors, *(_tail(tiling, source, target, by) if tiling.tail_bytes else [])]


def _tiles(tiling: Tiling, source: str, target: str, by: Access) -> list[str]:
    rows = [(row, row * tiling.row_bytes) for row in range(tiling.loads)]
    return [
        f"mul.wide.u32 %lane, %thread, {VECTOR_BYTES};",
        "mov.u32 %tile, %cta;",
        "TILE:",
        f"setp.ge.u32 %is, %tile, {tiling.num_tiles};",
        "@%is bra TILES_DONE;",
        f"mul.wide.u32 %offset, %tile, {tiling.tile_bytes};",
        "add.u64 %offset, %offset, %lane;",
        *_places(source, target),
        *(f"{by.load}.v4.b32 {_vector(row)}, [%from+{at}];" for row, at in rows),
        *(f"{by.store}.v4.b32 [%to+{at}], {_vector(row)};" for row, at in rows),
        f"add.u32 %tile, %tile, {tiling.ctas};",
        "bra TILE;",
        "TILES_DONE:",
    ]


def _vectors(tiling: Tiling, source: str, target: str, by: Access) -> list[str]:
    return [
        f"mad.lo.u32 %vector, %cta, {tiling.threads}, %thread;",
        "VECTOR:",
        f"setp.ge.u32 %is, %vector, {tiling.num_vectors};",
        "@%is bra VECTORS_DONE;",
        f"mul.wide.u32 %offset, %vector, {VECTOR_BYTES};",
        f"add.u64 %offset, %offset, {tiling.vectors_at};",
        *_places(source, target),
        f"{by.load}.v4.b32 {_vector(0)}, [%from];",
        f"{by.store}.v4.b32 [%to], {_vector(0)};",
        f"add.u32 %vector, %vector, {tiling.ctas * tiling.threads};",
        "bra VECTOR;",
        "VECTORS_DONE:",
    ]


def _tail(tiling: Tiling, source: str, target: str, by: Access) -> list[str]:
    return [
        f"mad.lo.u32 %byte, %cta, {tiling.threads}, %thread;",
        f"setp.ge.u32 %is, %byte, {tiling.tail_bytes};",
        "@%is bra TAIL_DONE;",
        "cvt.u64.u32 %offset, %byte;",
        f"add.u64 %offset, %offset, {tiling.tail_at};",
        *_places(source, target),
        f"{by.load}.u8 %byte, [%from];",
        f"{by.store}.u8 [%to], %byte;",
        "TAIL_DONE:",
    ]


def _places(source: str, target: str) -> list[str]:
    return [f"add.u64 %from, {source}, %offset;", f"add.u64 %to, {target}, %offset;"]


def _vector(row: int) -> str:
    return "{" + ", ".join(f"%word{4 * row + word}" for word in range(4)) + "}"


def last_arriver(arrivals: str, ctas: int, lines: Sequence[str]) -> list[str]:
    """Lines that one thread runs once the threads of all CTAs have reached them.

    Args:
        arrivals: The operand with the counter's address.
    """
    return [
        "barrier.sync 0;",
        "setp.ne.u32 %is, %thread, 0;",
        "@%is bra DONE;",
        "fence.acq_rel.sys;",
        f"atom.acq_rel.sys.global.inc.u32 %before, [{arrivals}], {ctas - 1};",
        f"setp.ne.u32 %is, %before, {ctas - 1};",
        "@%is bra DONE;",
        "fence.acq_rel.sys;",
        *lines,
        "DONE:",
    ]


def release_number(word: str) -> list[str]:
    """Write the number with release semantics.

    Args:
        word: The register with the target address; 0: write nothing.
    """
    return [f"setp.ne.u64 %is, {word}, 0;", f"@%is st.release.sys.global.u32 [{word}], %number;"]
