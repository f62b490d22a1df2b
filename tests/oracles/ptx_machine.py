"""A small machine that runs the kernels' PTX, one instruction of one thread at a time.

It knows only the instructions that the kernels use. Threads and CTAs run in random order. Stores
enter a buffer and reach memory one by one, in any order. A barrier makes a thread's stores known to
its CTA, and a fence flushes all stores that the thread knows of. Loads run in program order, which
real GPUs don't guarantee: the machine does not show the effects of weaker loads.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_SENT_AT_TIMES = 0.1


class Memory:
    """Regions of bytes by address; an access outside of them, or not aligned, is an error."""

    def __init__(self, regions: Mapping[int, bytearray]) -> None:
        self.regions = dict(regions)
        self.written: list[tuple[int, int]] = []  # address and length
        self.on_write: Callable[[int], None] = lambda address: None

    def load(self, address: int, size: int) -> int:
        region, at = self._find(address, size)
        return int.from_bytes(region[at : at + size], "little")

    def store(self, address: int, size: int, value: int) -> None:
        region, at = self._find(address, size)
        region[at : at + size] = value.to_bytes(size, "little")
        self.written.append((address, size))
        self.on_write(address)

    def _find(self, address: int, size: int) -> tuple[bytearray, int]:
        if address % size:
            raise AssertionError(f"{address:#x} is no multiple of {size}")
        for base, region in self.regions.items():
            if base <= address and address + size <= base + len(region):
                return region, address - base
        raise AssertionError(f"{size} bytes at {address:#x} are in no region")


@dataclass(eq=False)
class Store:
    """A store that has not reached memory yet.

    Attributes:
        cta: The CTA whose threads all know of it since a barrier; None before.
        size: In bytes.
    """

    thread: Any
    cta: int | None
    address: int
    size: int
    value: int


class StoreBuffer:
    """The stores that have not reached memory yet; they do so in any order."""

    def __init__(self, memory: Memory, order: random.Random) -> None:
        self._memory, self._random = memory, order
        self._stores: list[Store] = []

    def add(self, store: Store) -> None:
        self._stores.append(store)

    def meet(self, cta: int) -> None:
        """Applies a barrier of a CTA: each thread knows of the others' stores."""
        for store in self._stores:
            if store.thread.cta == cta:
                store.cta = cta

    def send_known(self, thread: Any) -> None:
        """Flushes all stores that a thread knows of."""
        self._send([s for s in self._stores if s.thread is thread or s.cta == thread.cta])

    def send_some(self) -> None:
        """Flushes a few stores, now and then."""
        if self._random.random() < _SENT_AT_TIMES:
            self._send(self._random.sample(self._stores, min(5, len(self._stores))))

    def send_all(self) -> None:
        """Flushes all stores."""
        self._send(self._stores)

    def _send(self, stores: Sequence[Store]) -> None:
        sent = set(stores)
        for store in self._random.sample(stores, len(stores)):
            self._memory.store(store.address, store.size, store.value)
        self._stores = [store for store in self._stores if store not in sent]


_PARTS = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_LINE = re.compile(r"(?:@(?P<guard>%\w+) )?(?P<opcode>[\w.:]+)(?P<operands>[^;]*);")
_SIZES = {"u8": 1, "b32": 4, "u32": 4, "b64": 8, "u64": 8}
_MASKS = {kind: (1 << 8 * size) - 1 for kind, size in _SIZES.items()}
_COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "ge": lambda a, b: a >= b,
}


@dataclass(eq=False)
class _Thread:
    cta: int
    registers: dict[str, int]
    at: int = 0
    waits: bool = False


@dataclass(frozen=True)
class _Instruction:
    guard: str | None
    opcode: tuple[str, ...]
    operands: tuple[str, ...]


@dataclass
class _Block:
    """A CTA's threads, and how many of them wait at a barrier."""

    threads: list[_Thread] = field(default_factory=list)
    waiting: int = 0


class Machine:
    """Runs one kernel.

    Args:
        text: The block of PTX.
        operands: The values of `$0`, `$1` ...
        threads: In each CTA.
        seed: Of the order in which threads run.
    """

    def __init__(
        self, text: str, operands: Sequence[int], memory: Memory, ctas: int, threads: int, seed: int
    ) -> None:
        self._program, self._labels = _parsed(text)
        self._memory, self._random = memory, random.Random(seed)
        self._stores = StoreBuffer(memory, self._random)
        addresses = {f"${index}": value for index, value in enumerate(operands)}
        self._blocks = [_Block() for _ in range(ctas)]
        for cta, block in enumerate(self._blocks):
            for thread in range(threads):
                known = {**addresses, "%tid.x": thread, "%ctaid.x": cta}
                block.threads.append(_Thread(cta, known))

    def run(self) -> None:
        """Runs all threads to the end of the kernel and flushes all stores."""
        running = [thread for block in self._blocks for thread in block.threads]
        while running:
            at = self._random.randrange(len(running))
            if running[at].waits:
                running = self._without_waiting(running)
                continue
            self._burst(running[at])
            if running[at].at >= len(self._program):
                running[at] = running[-1]
                running.pop()
            self._stores.send_some()
        self._stores.send_all()

    def _without_waiting(self, running: list[_Thread]) -> list[_Thread]:
        if all(thread.waits for thread in running):
            raise AssertionError("all threads wait at a barrier that others have passed by")
        return self._random.sample(running, len(running))

    def _burst(self, thread: _Thread) -> None:
        for _ in range(self._random.choice((1, 10, 100))):
            if thread.waits or thread.at >= len(self._program):
                return
            instruction = self._program[thread.at]
            thread.at += 1
            if instruction.guard is None or thread.registers[instruction.guard]:
                do = getattr(self, f"_do_{instruction.opcode[0]}")
                do(thread, instruction.opcode[1:], instruction.operands)

    def _value(self, thread: _Thread, operand: str) -> int:
        found = thread.registers.get(operand)
        return int(operand) if found is None else found

    def _sources(self, thread: _Thread, operands: Sequence[str]) -> list[int]:
        return [self._value(thread, operand) for operand in operands[1:]]

    def _address(self, thread: _Thread, operand: str) -> int:
        base, _, offset = operand.strip("[]").partition("+")
        return self._value(thread, base) + int(offset or 0)

    def _set(self, thread: _Thread, register: str, kind: str, value: int) -> None:
        thread.registers[register] = value & _MASKS[kind]

    def _do_mov(self, thread, opcode, operands):
        self._set(thread, operands[0], opcode[-1], self._value(thread, operands[1]))

    def _do_cvt(self, thread, opcode, operands):
        self._set(thread, operands[0], opcode[0], self._value(thread, operands[1]))

    def _do_add(self, thread, opcode, operands):
        self._set(thread, operands[0], opcode[-1], sum(self._sources(thread, operands)))

    def _do_mul(self, thread, opcode, operands):
        assert opcode == ("wide", "u32")
        first, second = self._sources(thread, operands)
        self._set(thread, operands[0], "u64", first * second)

    def _do_mad(self, thread, opcode, operands):
        assert opcode == ("lo", "u32")
        first, second, third = self._sources(thread, operands)
        self._set(thread, operands[0], "u32", first * second + third)

    def _do_setp(self, thread, opcode, operands):
        thread.registers[operands[0]] = _COMPARE[opcode[0]](*self._sources(thread, operands))

    def _do_bra(self, thread, opcode, operands):
        thread.at = self._labels[operands[0]]

    def _do_ld(self, thread, opcode, operands):
        address, kind = self._address(thread, operands[1]), opcode[-1]
        for register, place in _words(operands[0], opcode, address):
            self._set(thread, register, kind, self._memory.load(place, _SIZES[kind]))

    def _do_st(self, thread, opcode, operands):
        address, kind = self._address(thread, operands[0]), opcode[-1]
        if "release" in opcode:
            self._stores.send_known(thread)
        for register, place in _words(operands[1], opcode, address):
            value = self._value(thread, register) & _MASKS[kind]
            self._stores.add(Store(thread, None, place, _SIZES[kind], value))
        if "release" in opcode:
            self._stores.send_known(thread)

    def _do_fence(self, thread, opcode, operands):
        self._stores.send_known(thread)

    def _do_atom(self, thread, opcode, operands):
        address, value = self._address(thread, operands[1]), self._value(thread, operands[2])
        before = self._memory.load(address, 4)
        assert opcode[-2] == "inc"
        self._memory.store(address, 4, 0 if before >= value else before + 1)
        self._set(thread, operands[0], "u32", before)

    def _do_barrier(self, thread, opcode, operands):
        block = self._blocks[thread.cta]
        thread.waits, block.waiting = True, block.waiting + 1
        if block.waiting < len(block.threads):
            return
        for other in block.threads:
            other.waits = False
        block.waiting = 0
        self._stores.meet(thread.cta)


def _words(operand: str, opcode: tuple[str, ...], address: int) -> Iterator[tuple[str, int]]:
    """The registers of one access, each with the address of its part."""
    names, size = [name.strip() for name in operand.strip("{}").split(",")], _SIZES[opcode[-1]]
    assert len(names) == (4 if "v4" in opcode else 1)
    assert not address % (size * len(names)), f"{address:#x} is not aligned"
    return ((name, address + size * index) for index, name in enumerate(names))


def _parsed(text: str) -> tuple[list[_Instruction], dict[str, int]]:
    program: list[_Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if line in "{}" or line.startswith(".reg"):
            continue
        if line.endswith(":"):
            labels[line[:-1]] = len(program)
            continue
        match = _LINE.fullmatch(line)
        assert match, line
        opcode = tuple(match["opcode"].replace("::", ".").split("."))
        operands = tuple(_PARTS.findall(match["operands"]))
        program.append(_Instruction(match["guard"], opcode, operands))
    return program, labels
