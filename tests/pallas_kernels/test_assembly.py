"""The kernels' own instructions: interpreted in tests, and assembled where ptxas is installed."""

import random
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from oracles.ptx_machine import Machine, Memory

from jaxmorph.pallas_kernels.control import SlotControl, pack
from jaxmorph.pallas_kernels.kernels import from_host_assembly, to_host_assembly
from jaxmorph.pallas_kernels.tuning import FROM_HOST, TO_HOST, CopyTuning, Tiling, tile

pytestmark = pytest.mark.one_jax

PAYLOAD, CONTROL, ARRIVALS, TICKET, SLOT, SIGNAL = (
    0x7_0000_0000 + place * 0x1000_0000 for place in range(6)
)
OPERANDS = {
    to_host_assembly: (PAYLOAD, CONTROL, ARRIVALS, TICKET),
    from_host_assembly: (CONTROL, PAYLOAD, TICKET),
}


@dataclass
class KernelRun:
    """A kernel with its memory."""

    tiling: Tiling
    memory: Memory
    machine: Machine

    def word(self, address: int) -> int:
        return self.memory.load(address, 4)

    def bytes_at(self, address: int) -> bytes:
        return bytes(self.memory.regions[address])


def prepare(assembly, tiling: Tiling, control: SlotControl, seed: int, text=None) -> KernelRun:
    """A kernel that has not run yet, with random bytes to copy."""
    source, target = (PAYLOAD, SLOT) if assembly is to_host_assembly else (SLOT, PAYLOAD)
    memory = Memory({
        source: bytearray(random.Random(seed).randbytes(tiling.num_bytes)),
        target: bytearray(tiling.num_bytes),
        CONTROL: bytearray(pack(control).tobytes()),
        **{word: bytearray(4) for word in (ARRIVALS, TICKET, SIGNAL)},
    })  # fmt: skip
    machine = Machine(
        text or assembly(tiling), OPERANDS[assembly], memory, tiling.ctas, tiling.threads, seed
    )
    return KernelRun(tiling, memory, machine)


TILE = 128 * 2 * 16  # two loads in each of 128 threads
WRAPPED = 0
SIZES = [
    (1, 1),
    (15, 3),
    (16, 1),
    (TILE + 48, 3),  # a tile, and vectors
    (3 * TILE + 2048 + 16 + 7, 2),  # tiles for two CTAs, vectors in two rows, single bytes
]
WHERE = SlotControl(SLOT, WRAPPED, SIGNAL)


def _tiling(num_bytes, ctas):
    return tile(num_bytes, CopyTuning(ctas, loads=2))


def _written(run, start):
    """Each byte that was written from `start` on, as often as it was."""
    return [
        byte
        for address, size in run.memory.written
        for byte in range(address - start, address - start + size)
        if 0 <= address - start < 0x1000_0000
    ]


@pytest.mark.parametrize(("num_bytes", "ctas"), SIZES)
def test_the_signal_comes_after_the_whole_payload(num_bytes, ctas):
    control = WHERE._replace(number=1 << 32)
    run = prepare(to_host_assembly, _tiling(num_bytes, ctas), control, seed=num_bytes)
    run.memory.store(SIGNAL, 4, 0xFFFFFFFF)
    sent, seen = run.bytes_at(PAYLOAD), []
    run.memory.on_write = lambda address: (
        seen.append((run.word(SIGNAL), run.bytes_at(SLOT))) if address == SIGNAL else None
    )
    run.machine.run()
    assert seen == [(WRAPPED, sent)]
    assert (run.word(TICKET), run.word(ARRIVALS)) == (WRAPPED, 0)
    assert sorted(_written(run, SLOT)) == list(range(num_bytes))


@pytest.mark.parametrize(("num_bytes", "ctas"), SIZES)
def test_a_slot_is_copied_once_and_only_read(num_bytes, ctas):
    run = prepare(from_host_assembly, _tiling(num_bytes, ctas), SlotControl(SLOT, 9), seed=2)
    sent = run.bytes_at(SLOT)
    run.machine.run()
    assert run.bytes_at(PAYLOAD) == run.bytes_at(SLOT) == sent
    assert sorted(_written(run, PAYLOAD)) == list(range(num_bytes))
    assert _written(run, SLOT) == []
    assert run.word(TICKET) == 9


def test_a_copy_without_a_signal_writes_none():
    run = prepare(to_host_assembly, _tiling(100, 1), SlotControl(SLOT, 9), seed=4)
    run.machine.run()
    assert run.bytes_at(SLOT) == run.bytes_at(PAYLOAD)
    assert (run.word(TICKET), run.word(SIGNAL)) == (9, 0)


@pytest.mark.parametrize("missing", ["barrier.sync 0;", "fence.acq_rel.sys;"])
def test_without_its_order_a_payload_is_torn(missing):
    """The tests above can fail: the machine tears what nothing keeps together."""
    tiling = _tiling(2 * TILE, 2)
    text = to_host_assembly(tiling).replace(missing + "\n", "")
    run = prepare(to_host_assembly, tiling, WHERE, seed=5, text=text)
    seen = []
    run.memory.on_write = lambda address: (
        seen.append(run.bytes_at(SLOT) == run.bytes_at(PAYLOAD)) if address == SIGNAL else None
    )
    run.machine.run()
    assert seen == [False]


ORDERING = ("barrier", "fence", "atom", "red.", "st.release", "ld.acquire")


def test_the_ordering_instructions_come_in_this_order():
    lines = to_host_assembly(_tiling(TILE + 17, 2)).splitlines()
    plain = [line.removeprefix("@%is ") for line in lines]
    assert [line.split()[0] for line in plain if line.startswith(ORDERING)] == [
        "barrier.sync", "fence.acq_rel.sys;", "atom.acq_rel.sys.global.inc.u32",
        "fence.acq_rel.sys;", "st.release.sys.global.u32",
    ]  # fmt: skip
    copies = [at for at, line in enumerate(lines) if ".v4." in line or ".u8" in line]
    assert len(copies) == 2 * (2 + 1 + 1)
    assert copies[-1] < lines.index("barrier.sync 0;")


ASSEMBLED_SIZES = [1, 16, 17, 8 << 10, (8 << 10) + 16, (8 << 10) + 31, (64 << 20) + 2048 + 5]
TUNINGS = [TO_HOST, FROM_HOST, CopyTuning(1), CopyTuning(32, 128, 32), CopyTuning(64, 1024, 4)]
HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"


def _assembler(folder: Path) -> Path | None:
    """ptxas from the path, or from the wheel `nvidia-cuda-nvcc`, made executable."""
    if found := shutil.which("ptxas"):
        return Path(found)
    try:
        files = metadata.files("nvidia-cuda-nvcc") or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "ptxas":
            copy = Path(shutil.copy(file.locate(), folder))
            copy.chmod(0o700)
            return copy
    return None


@pytest.fixture(scope="module")
def assemble(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ptxas")
    assembler = _assembler(folder)
    if assembler is None:
        pytest.skip("no ptxas on the path, and no wheel nvidia-cuda-nvcc: `make ptxas`")

    def run(source):
        (folder / "kernels.ptx").write_text(source)
        command = [assembler, "-v", "-arch=sm_90a", "kernels.ptx", "-o", "kernels.cubin"]
        return subprocess.run(command, cwd=folder, capture_output=True, text=True)

    return run


def _entry(name, assembly, threads):
    """A PTX entry whose body is the block and whose parameters are its operands."""
    body = assembly
    for index in range(4):
        body = body.replace(f"${index}", f"%operand{index}")
    parameters = ", ".join(f".param .u64 {name}_{index}" for index in range(4))
    loads = [f"ld.param.u64 %operand{index}, [{name}_{index}];" for index in range(4)]
    head = f".visible .entry {name}({parameters})\n.maxntid {threads}, 1, 1\n"
    return head + "\n".join(["{", ".reg .b64 %operand<4>;", *loads, body, "ret;", "}", ""])


def test_both_kernels_assemble_and_spill_no_register(assemble):
    entries = [
        _entry(f"kernel_{which}_{size}_{at}", assembly(tile(size, tuning)), tuning.threads)
        for which, assembly in enumerate((to_host_assembly, from_host_assembly))
        for size in ASSEMBLED_SIZES
        for at, tuning in enumerate(TUNINGS)
    ]
    # ptxas 13.0 crashes on a register that is named like a function.
    entries.append(_entry("thread", to_host_assembly(tile(16, TO_HOST)), TO_HOST.threads))
    done = assemble(HEAD + "".join(entries))
    assert done.returncode == 0, done.stderr
    output = done.stdout + done.stderr
    assert output.count("0 bytes spill stores, 0 bytes spill loads") == len(entries)


def test_the_assembler_refuses_wrong_instructions(assemble):
    text = to_host_assembly(tile(16, TO_HOST)).replace("st.release.sys", "st.release")
    assert assemble(HEAD + _entry("kernel", text, 128)).returncode != 0
