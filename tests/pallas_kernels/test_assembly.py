"""The kernels' own instructions: run by a machine of the tests, and assembled where ptxas is."""

import random
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from oracles.ptx_machine import Machine, Memory

from jaxmorph.pallas_kernels import FROM_HOST, TO_HOST, CopyTuning, SlotControl, pack
from jaxmorph.pallas_kernels.kernels import from_host_assembly, to_host_assembly
from jaxmorph.pallas_kernels.tuning import Tiling, tile

pytestmark = pytest.mark.one_jax

PAYLOAD, CONTROL, ARRIVALS, ANSWER, SLOT, SIGNAL, ACKNOWLEDGEMENT = (
    0x7_0000_0000 + place * 0x1000_0000 for place in range(7)
)
WORDS = (ANSWER, SIGNAL, ACKNOWLEDGEMENT)
OPERANDS = {
    to_host_assembly: (PAYLOAD, CONTROL, ARRIVALS, ANSWER),
    from_host_assembly: (CONTROL, ARRIVALS, PAYLOAD, ANSWER),
}


@dataclass
class KernelRun:
    """What a kernel ran in."""

    tiling: Tiling
    memory: Memory
    machine: Machine

    def word(self, address: int) -> int:
        return self.memory.load(address, 4)

    def bytes_at(self, address: int) -> bytes:
        return bytes(self.memory.regions[address])


def prepare(assembly, tiling: Tiling, control: SlotControl, seed: int, text=None) -> KernelRun:
    """A kernel that has not run yet, with random bytes where it copies from."""
    source, target = (PAYLOAD, SLOT) if assembly is to_host_assembly else (SLOT, PAYLOAD)
    memory = Memory({
        source: bytearray(random.Random(seed).randbytes(tiling.num_bytes)),
        target: bytearray(tiling.num_bytes),
        CONTROL: bytearray(pack(control).tobytes()),
        ARRIVALS: bytearray(8),
        **{word: bytearray(4) for word in WORDS},
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
WHERE = SlotControl(SLOT, WRAPPED, SIGNAL, ACKNOWLEDGEMENT, spin_us=5)


def _tiling(num_bytes, ctas):
    return tile(num_bytes, CopyTuning(ctas, loads=2))


@pytest.mark.parametrize(("num_bytes", "ctas"), SIZES)
def test_all_of_the_payload_is_in_the_slot_when_the_signal_is(num_bytes, ctas):
    control = WHERE._replace(number=1 << 32)
    run = prepare(to_host_assembly, _tiling(num_bytes, ctas), control, seed=num_bytes)
    run.memory.store(SIGNAL, 4, 0xFFFFFFFF)
    sent, seen = run.bytes_at(PAYLOAD), []
    run.memory.on_write = lambda address: (
        seen.append((run.word(SIGNAL), run.bytes_at(SLOT))) if address == SIGNAL else None
    )
    run.machine.run()
    assert seen == [(WRAPPED, sent)]
    assert (run.word(ANSWER), run.memory.load(ARRIVALS, 8)) == (WRAPPED, 0)
    assert run.word(ACKNOWLEDGEMENT) == 0
    written_once = [
        byte
        for address, size in run.memory.written
        for byte in range(address - SLOT, address - SLOT + size)
        if SLOT <= address < SIGNAL
    ]
    assert sorted(written_once) == list(range(num_bytes))


@pytest.mark.parametrize(("num_bytes", "ctas"), SIZES)
def test_the_slot_has_been_read_when_it_is_acknowledged(num_bytes, ctas):
    run = prepare(from_host_assembly, _tiling(num_bytes, ctas), WHERE._replace(number=9), 2)
    run.memory.store(SIGNAL, 4, 9)
    sent = run.bytes_at(SLOT)

    def reuse(address):
        if address == ACKNOWLEDGEMENT:
            run.memory.regions[SLOT][:] = bytes(num_bytes)

    run.memory.on_write = reuse
    run.machine.run()
    assert run.bytes_at(PAYLOAD) == sent
    assert [run.word(at) for at in (ANSWER, ACKNOWLEDGEMENT)] == [9, 9]
    assert run.memory.load(ARRIVALS, 8) == 0


@pytest.mark.parametrize("signal", [8, 10, 0xFFFFFFFF])
def test_another_messages_signal_ends_in_time_and_acknowledges_nothing(signal):
    run = prepare(from_host_assembly, _tiling(2 * TILE, 2), WHERE._replace(number=9), seed=3)
    run.memory.store(SIGNAL, 4, signal)
    run.machine.run()
    assert [run.word(at) for at in (ANSWER, ACKNOWLEDGEMENT)] == [8, 0]
    assert run.memory.load(ARRIVALS, 8) == 0  # ready for the same call once more
    assert run.bytes_at(PAYLOAD) == bytes(2 * TILE)
    assert 5_000 <= run.machine.clock_ns < 25_000


def test_the_number_before_0_is_the_status_where_0_was_waited_for():
    run = prepare(from_host_assembly, _tiling(16, 1), WHERE, seed=3)
    run.memory.store(SIGNAL, 4, 7)
    run.machine.run()
    assert run.word(ANSWER) == 0xFFFFFFFF


def test_a_signal_that_comes_in_time_is_enough():
    run = prepare(from_host_assembly, _tiling(16, 1), WHERE._replace(number=9), seed=3)
    look = run.memory.load

    def load(address, size):
        if address == SIGNAL and run.machine.clock_ns > 3_000:
            run.memory.store(SIGNAL, 4, 9)
        return look(address, size)

    run.memory.load = load
    run.machine.run()
    assert run.word(ANSWER) == 9
    assert run.bytes_at(PAYLOAD) == run.bytes_at(SLOT)


def test_one_cta_that_gives_up_is_enough_for_not_ready():
    run = prepare(from_host_assembly, _tiling(2 * TILE, 2), WHERE._replace(number=9), seed=3)
    failed = []

    def come_late(address):
        if address == ARRIVALS + 4 and not failed:
            failed.append(address)
            run.memory.store(SIGNAL, 4, 9)

    run.memory.on_write = come_late
    run.machine.run()
    assert failed
    assert [run.word(at) for at in (ANSWER, ACKNOWLEDGEMENT)] == [8, 0]


def test_words_that_the_slot_does_not_have_are_left_alone():
    bare = SlotControl(SLOT, 9)
    sent = prepare(to_host_assembly, _tiling(100, 1), bare, seed=4)
    sent.machine.run()
    assert sent.bytes_at(SLOT) == sent.bytes_at(PAYLOAD)
    taken = prepare(from_host_assembly, _tiling(100, 1), bare, seed=4)
    taken.machine.run()
    assert taken.bytes_at(SLOT) == taken.bytes_at(PAYLOAD)
    assert (sent.word(ANSWER), taken.word(ANSWER)) == (9, 9)


@pytest.mark.parametrize("missing", ["barrier.sync 0;", "fence.acq_rel.sys;"])
def test_without_its_order_a_payload_is_torn_when_it_is_signalled(missing):
    """That the tests above can fail: the machine does tear what nothing keeps together."""
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


def _ordering_of(text):
    lines = [line.removeprefix("@%is ") for line in text.splitlines()]
    return [line.split()[0] for line in lines if line.startswith(ORDERING)]


def test_each_kernel_has_all_that_orders_it_in_this_order():
    tiling = _tiling(TILE + 17, 2)
    arrive = ["barrier.sync", "fence.acq_rel.sys;", "atom.acq_rel.sys.global.inc.u32",
              "fence.acq_rel.sys;"]  # fmt: skip
    assert _ordering_of(to_host_assembly(tiling)) == [*arrive, "st.release.sys.global.u32"]
    assert _ordering_of(from_host_assembly(tiling)) == [
        "ld.acquire.sys.global.u32", "red.relaxed.gpu.global.or.b32", "barrier.red.or.pred",
        *arrive, "atom.relaxed.gpu.global.exch.b32", "st.release.sys.global.u32",
    ]  # fmt: skip


@pytest.mark.parametrize("assembly", [to_host_assembly, from_host_assembly])
def test_all_copies_come_before_the_arrival_and_the_signal_is_told_last(assembly):
    lines = assembly(_tiling(TILE + 17, 2)).splitlines()
    copies = [at for at, line in enumerate(lines) if ".v4." in line or ".u8" in line]
    assert len(copies) == 2 * (2 + 1 + 1)
    assert copies[-1] < lines.index("barrier.sync 0;")
    releases = [at for at, line in enumerate(lines) if "st.release.sys" in line]
    assert releases > [lines.index("barrier.sync 0;")]


ASSEMBLED_SIZES = [1, 16, 17, 8 << 10, (8 << 10) + 16, (8 << 10) + 31, (64 << 20) + 2048 + 5]
TUNINGS = [TO_HOST, FROM_HOST, CopyTuning(1), CopyTuning(32, 128, 32), CopyTuning(64, 1024, 4)]
HEAD = ".version 8.0\n.target sm_90a\n.address_size 64\n"


def _assembler(folder: Path) -> Path | None:
    """Found on the path, or made executable from the wheel `nvidia-cuda-nvcc`."""
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
    """A kernel with the block for its body, and its operands for parameters."""
    body = assembly
    for index in range(4):
        body = body.replace(f"${index}", f"%operand{index}")
    parameters = ", ".join(f".param .u64 {name}_{index}" for index in range(4))
    loads = [f"ld.param.u64 %operand{index}, [{name}_{index}];" for index in range(4)]
    head = f".visible .entry {name}({parameters})\n.maxntid {threads}, 1, 1\n"
    return head + "\n".join(["{", ".reg .b64 %operand<4>;", *loads, body, "ret;", "}", ""])


def test_both_kernels_assemble_for_every_size_and_tuning_and_spill_no_register(assemble):
    entries = [
        _entry(f"kernel_{which}_{size}_{at}", assembly(tile(size, tuning)), tuning.threads)
        for which, assembly in enumerate((to_host_assembly, from_host_assembly))
        for size in ASSEMBLED_SIZES
        for at, tuning in enumerate(TUNINGS)
    ]
    # ptxas 13.0 crashes on a register that is called like a function.
    entries.append(_entry("thread", to_host_assembly(tile(16, TO_HOST)), TO_HOST.threads))
    done = assemble(HEAD + "".join(entries))
    assert done.returncode == 0, done.stderr
    said = done.stdout + done.stderr
    assert said.count("0 bytes spill stores, 0 bytes spill loads") == len(entries)


def test_the_assembler_does_object_to_what_is_wrong(assemble):
    text = to_host_assembly(tile(16, TO_HOST)).replace("st.release.sys", "st.release")
    assert assemble(HEAD + _entry("kernel", text, 128)).returncode != 0
