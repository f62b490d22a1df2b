"""The kernels' own instructions, run by the machine beside this: threads and CTAs in any order."""

import pytest
from kernel_runs import (
    ACKNOWLEDGEMENT,
    ANSWER,
    ARRIVALS,
    PAYLOAD,
    SIGNAL,
    SLOT,
    from_host_assembly,
    prepare,
    to_host_assembly,
)

from jaxmorph.pallas_kernels import CopyTuning, SlotControl
from jaxmorph.pallas_kernels.tiling import tile

pytestmark = pytest.mark.one_jax

TILE = 128 * 2 * 16  # two loads in each of 128 threads
WRAPPED = 0
SIZES = [
    (1, 1),
    (15, 3),
    (16, 1),
    (TILE + 48, 3),  # a tile, and vectors
    (3 * TILE + 2048 + 16 + 7, 2),  # tiles for two CTAs, vectors in two rows, single bytes
]
CONTROL = SlotControl(SLOT, WRAPPED, SIGNAL, ACKNOWLEDGEMENT, spin_us=5)


def _tiling(num_bytes, ctas):
    return tile(num_bytes, CopyTuning(ctas, loads=2))


@pytest.mark.parametrize(("num_bytes", "ctas"), SIZES)
def test_all_of_the_payload_is_in_the_slot_when_the_signal_is(num_bytes, ctas):
    control = CONTROL._replace(number=1 << 32)
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
    run = prepare(from_host_assembly, _tiling(num_bytes, ctas), CONTROL._replace(number=9), 2)
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
    run = prepare(from_host_assembly, _tiling(2 * TILE, 2), CONTROL._replace(number=9), seed=3)
    run.memory.store(SIGNAL, 4, signal)
    run.machine.run()
    assert [run.word(at) for at in (ANSWER, ACKNOWLEDGEMENT)] == [8, 0]
    assert run.memory.load(ARRIVALS, 8) == 0  # ready for the same call once more
    assert run.bytes_at(PAYLOAD) == bytes(2 * TILE)
    assert 5_000 <= run.machine.clock_ns < 25_000


def test_the_number_before_0_is_the_status_where_0_was_waited_for():
    run = prepare(from_host_assembly, _tiling(16, 1), CONTROL, seed=3)
    run.memory.store(SIGNAL, 4, 7)
    run.machine.run()
    assert run.word(ANSWER) == 0xFFFFFFFF


def test_a_signal_that_comes_in_time_is_enough():
    run = prepare(from_host_assembly, _tiling(16, 1), CONTROL._replace(number=9), seed=3)
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
    run = prepare(from_host_assembly, _tiling(2 * TILE, 2), CONTROL._replace(number=9), seed=3)
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
    run = prepare(to_host_assembly, tiling, CONTROL, seed=5, text=text)
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
