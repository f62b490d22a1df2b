"""The pieces of PTX that both copy kernels are made of.

A kernel is one block of PTX in which all its threads run, so that what is assembled, interpreted
and read is what a GPU would get. Every instruction is in PTX 7.4 for sm_70 and later. Operands
`$0`, `$1` ... are 64-bit addresses. Registers are local to the block, and begin with `%` as no
function's name does: ptxas 13.0 crashes on a register that is called like a kernel.

How a word that says "all is there" comes after the bytes it speaks of, by PTX's memory model:

1. Each thread's copies come before `barrier.sync` in its program, which orders them before what the
   CTA's first thread does next.
2. That thread's `fence.acq_rel.sys`, with its increment of the arrivals behind it, releases them: a
   fence is cumulative, so it covers the whole CTA's.
3. The increments of all CTAs are one chain of read-modify-writes. Who comes last has read from all
   before it, and its own `fence.acq_rel.sys` acquires what they released.
4. It writes the word by `st.release.sys`. Whoever reads the number there, and acquires by that
   (on x86 any load does), sees all the bytes of all CTAs.

The scope is `sys` wherever the host or another device takes part. The arrivals wrap to 0 with the
last of them, so the counter is as it was before, for the next launch.
"""

from collections.abc import Sequence
from typing import NamedTuple

from jaxmorph.pallas_kernels.control import NUMBER_AT
from jaxmorph.pallas_kernels.tuning import VECTOR_BYTES, Tiling

# The second word of the arrivals: set while a launch runs in which a CTA has given up waiting.
FAILED_AT = 4

_WORDS_32 = (
    "%thread, %cta, %tile, %vector, %byte, %number, %spin, %seen, %late, %before, %failed, %status"
)
_WORDS_64 = "%slot, %signal, %acknowledgement, %lane, %offset, %from, %to, %start, %now, %limit"


class Access(NamedTuple):
    """The instructions that load from the one side and store to the other, without types."""

    load: str
    store: str


def block(lines: Sequence[str], loads: int) -> str:
    """Lines of PTX as one block with registers of its own.

    Args:
        loads: Vectors that a thread holds at a time.
    """
    declarations = (
        ".reg .pred %is, %all;",
        f".reg .b32 {_WORDS_32}, %word<{4 * loads}>;",
        f".reg .b64 {_WORDS_64};",
    )
    return "\n".join(["{", *declarations, *lines, "}"])


def who_and_what(control: str, addresses: Sequence[tuple[str, int]]) -> list[str]:
    """Which thread this is, and what the control words say.

    Args:
        control: The operand that is their address.
        addresses: Registers for the addresses among them, and where those are.
    """
    return [
        "mov.u32 %thread, %tid.x;",
        "mov.u32 %cta, %ctaid.x;",
        *(f"ld.global.b64 {register}, [{control}+{at}];" for register, at in addresses),
        f"ld.global.b32 %number, [{control}+{NUMBER_AT}];",
    ]


def copy(tiling: Tiling, source: str, target: str, by: Access) -> list[str]:
    """Copy all bytes: this thread's part of them.

    Args:
        source: The register or operand with the address to copy from, a multiple of 16.
        target: That to copy to, likewise.
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
    """What one thread does once the threads of all CTAs have come this far.

    Args:
        arrivals: The operand that is the counter's address.
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


def tell(word: str) -> list[str]:
    """Release the number into a word of the slot, if the slot has one.

    Args:
        word: The register with the word's address; 0: there is none.
    """
    return [f"setp.ne.u64 %is, {word}, 0;", f"@%is st.release.sys.global.u32 [{word}], %number;"]
