"""What every data plane must do, whatever carries its bytes; subclasses say how to make one."""

import ctypes
import threading
import time

import pytest
from exchanges import (
    BACK,
    BEHIND,
    BESIDE,
    CLOCK_ERROR_S,
    FLUSH_S,
    NEAR_THE_WRAP,
    PATIENCE_S,
    SECRET,
    THERE,
    Keeper,
    await_clock,
    content,
    emulate,
    in_thread,
    link,
    receive,
    reserve_all,
    send,
    soon,
    spec,
)

from jaxmorph.transport.link_emulator import LinkEmulator
from jaxmorph.transport.names import ChannelName, PeerGoneError, TransportError
from jaxmorph.transport.plane import TransportSettings


class Conformance:
    """Tests of two ranks' planes; `make_plane(rank, outgoing, incoming, settings)` is a fixture."""

    @pytest.fixture
    def joined(self, make_plane):
        """Makes two ranks' planes with channels of the given specs, and connects them."""

        def join(*specs, **settings):
            settings = TransportSettings(**{"first_sequence": NEAR_THE_WRAP, **settings})
            planes = []
            for rank in (0, 1):
                outgoing = [each for each in specs if each.name.source == rank]
                incoming = [each for each in specs if each.name.destination == rank]
                planes.append(make_plane(rank, outgoing, incoming, settings))
            planes[0].connect({1: planes[1].addresses()}, SECRET)
            planes[1].connect({0: planes[0].addresses()}, SECRET)
            return planes

        return join

    def test_messages_arrive_in_order_and_whole_across_the_wrap_of_their_numbers(self, joined):
        first, second = joined(spec())
        for number in range(10):
            sent = send(first, THERE, number, 100 + number)
            slot = receive(second, THERE, number, 100 + number)
            assert sent == slot.sequence == (NEAR_THE_WRAP + number) % 2**32

    @pytest.mark.parametrize("checksum", [True, False])
    def test_messages_of_all_sizes_arrive_as_they_were_sent(self, joined, checksum):
        sizes = [0, 1, 15_000, 16_385, 65_536, 65_537, 1_000_000, 3_500_000, 1]
        first, second = joined(
            spec(slot_bytes=3_500_000, num_slots=2), chunk_bytes=65_536, checksum=checksum
        )
        sender = in_thread(
            lambda: [send(first, THERE, number, size) for number, size in enumerate(sizes)]
        )
        for number, size in enumerate(sizes):
            receive(second, THERE, number, size)
        sender.join()

    def test_many_small_messages_are_all_there(self, joined):
        first, second = joined(spec(num_slots=8))
        sender = in_thread(lambda: [send(first, THERE, number, 50) for number in range(500)])
        for number in range(500):
            receive(second, THERE, number, 50)
        sender.join()

    def test_both_directions_and_several_channels_at_once(self, joined):
        names = [THERE, BACK, ChannelName(2, 0, 1), ChannelName(1, 1, 0, 7)]
        planes = joined(*(spec(name, 200_000, 2) for name in names))
        threads = []
        for each in names:

            def sending(name=each):
                for number in range(12):
                    send(planes[name.source], name, number, 200_000 - number)

            def receiving(name=each):
                for number in range(12):
                    receive(planes[name.destination], name, number, 200_000 - number)

            threads += [in_thread(sending), in_thread(receiving)]
        for thread in threads:
            thread.join()

    def test_a_sender_without_a_free_slot_waits_until_its_deadline(self, joined):
        first, second = joined(spec(num_slots=2))
        # Two are landed and not taken, two more fill the sender's own slots.
        for number in range(4):
            send(first, THERE, number, 10)
        began_s = time.monotonic()
        with pytest.raises(TimeoutError, match=r"channel 1\.0 0>1"):
            first.reserve(THERE, soon(0.2))
        assert 0.2 <= time.monotonic() - began_s < 5
        receive(second, THERE, 0, 10)
        send(first, THERE, 4, 10)
        for number in range(1, 5):
            receive(second, THERE, number, 10)

    def test_a_receiver_waits_until_its_deadline(self, joined):
        first, second = joined(spec())
        with pytest.raises(TimeoutError, match=r"channel 1\.0 0>1"):
            second.take(THERE, soon(0.1))
        send(first, THERE, 0, 10)
        receive(second, THERE, 0, 10)

    def test_a_slot_is_the_receivers_until_it_is_released(self, joined):
        first, second = joined(spec(num_slots=2))
        for number in range(4):
            send(first, THERE, number, 500)
        held = [second.take(THERE, soon()) for _ in range(2)]
        with pytest.raises(TimeoutError):
            second.take(THERE, soon(0.2))
        for number, slot in enumerate(held):
            assert (slot.payload == content(number, 500)).all()
        with pytest.raises(ValueError, match="read-only"):
            held[0].payload[0] = 1
        held[1].release()  # out of order: nothing is free before the first is released, too
        held[0].release()
        for number in (2, 3):
            receive(second, THERE, number, 500)
        with pytest.raises(TransportError, match="released already"):
            held[0].release()

    def test_messages_reserved_together_may_be_completed_in_any_order(self, joined):
        first, second = joined(spec())
        slots = [first.reserve(THERE, soon()) for _ in range(3)]
        for number in (2, 0, 1):
            slots[number].payload[:20] = content(number, 20)
            slots[number].post(20, (0, number, 20))
        slots[1].complete()
        slots[2].complete()
        with pytest.raises(TimeoutError):
            second.take(THERE, soon(0.1))
        slots[0].complete()
        for number in range(3):
            receive(second, THERE, number, 20)

    def test_a_signal_written_into_memory_needs_no_doorbell(self, joined):
        first, second = joined(spec())
        slot = first.reserve(THERE, soon())
        slot.payload[:20] = content(7, 20)
        address = slot.signal_address
        slot.post(20, (0, 7, 20))
        _write_word(address, slot.sequence + 1)
        receive(second, THERE, 7, 20)

    def test_a_payload_that_comes_by_itself_was_posted_when_it_came(self, joined):
        """Its link is not to be charged for what the sender's device took to compute it."""
        first, second = joined(spec())
        await_clock(second)
        slot = first.reserve(THERE, soon())
        slot.payload[:20] = content(7, 20)
        address = slot.signal_address
        slot.post(20, (0, 7, 20))
        with pytest.raises(TimeoutError):
            second.take(THERE, soon(0.3))
        written_s = time.monotonic()
        _write_word(address, slot.sequence + 1)
        landed = receive(second, THERE, 7, 20)
        assert written_s - CLOCK_ERROR_S <= landed.posted_s <= landed.landed_s + CLOCK_ERROR_S

    def test_an_announced_message_that_is_withdrawn_arrives_empty(self, joined):
        first, second = joined(spec())
        slot = first.reserve(THERE, soon())
        slot.post(20, (0, 7, 20))
        slot.withdraw()
        taken = second.take(THERE, soon())
        assert (len(taken.payload), taken.tag[:3]) == (0, (0, 7, 20))

    def test_a_message_that_is_there_is_not_withdrawn(self, joined):
        first, second = joined(spec())
        slot = first.reserve(THERE, soon())
        slot.payload[:20] = content(7, 20)
        slot.post(20, (0, 7, 20))
        _write_word(slot.signal_address, slot.sequence + 1)
        slot.withdraw()
        receive(second, THERE, 7, 20)

    def test_a_keeper_knows_the_memory_of_slots_until_it_goes(self, joined):
        first, second = joined(spec())
        keepers = [Keeper(), Keeper()]
        for plane, keeper in zip((first, second), keepers, strict=True):
            plane.tell_of_memory(keeper)
        slot = first.reserve(THERE, soon())
        assert keepers[0].has(slot.address, 1000)
        assert keepers[0].has(slot.signal_address, 4)
        slot.post(0, ())
        slot.complete()
        taken = second.take(THERE, soon())
        assert keepers[1].has(taken.payload.ctypes.data, 1000)
        taken.release()
        before = len(keepers[0].known)
        first.grow(THERE, 8)
        assert len(keepers[0].known) == before
        held = [first.reserve(THERE, soon()) for _ in range(8)]
        assert all(keepers[0].has(slot.address, 1000) for slot in held)
        for plane, keeper in zip((first, second), keepers, strict=True):
            plane.close(flush=False)
            assert keeper.known == {}

    def test_the_payloads_address_is_its_memorys(self, joined):
        first, second = joined(spec())
        slot = first.reserve(THERE, soon())
        assert slot.address == slot.payload.ctypes.data
        _write_word(slot.address, 0x04030201)
        slot.post(4, ())
        slot.complete()
        taken = second.take(THERE, soon())
        assert bytes(taken.payload) == b"\1\2\3\4"

    def test_messages_say_when_they_were_posted_and_landed(self, joined):
        first, second = joined(spec())
        await_clock(second)
        before_s = time.monotonic()
        send(first, THERE, 0, 10)
        slot = receive(second, THERE, 0, 10)
        assert before_s <= slot.landed_s <= time.monotonic()
        assert before_s - CLOCK_ERROR_S <= slot.posted_s <= slot.landed_s + CLOCK_ERROR_S

    def test_too_long_a_message_and_a_bad_tag_are_refused(self, joined):
        first, _ = joined(spec())
        slot = first.reserve(THERE, soon())
        with pytest.raises(ValueError, match="got a message of 1001 bytes, expected at most 1000"):
            slot.post(1001, ())
        with pytest.raises(ValueError, match="expected 8 words of 32 bits"):
            slot.post(10, (2**32,))
        with pytest.raises(ValueError, match="expected 8 words of 32 bits"):
            slot.post(10, range(9))

    def test_a_channel_of_another_rank_is_refused(self, joined):
        first, second = joined(spec())
        with pytest.raises(TransportError, match="is no outgoing channel"):
            second.reserve(THERE, soon())
        with pytest.raises(TransportError, match="is no incoming channel"):
            first.take(THERE, soon())

    def test_a_channel_at_rest_grows_at_either_end(self, joined):
        first, second = joined(spec(num_slots=1))
        for number in range(3):
            send(first, THERE, number, 900)
            receive(second, THERE, number, 900)
        first.grow(THERE, 4)
        second.grow(THERE, 8)
        for number in range(3, 15):  # as many as both ends hold, and none taken
            send(first, THERE, number, 900)
        with pytest.raises(TimeoutError):
            first.reserve(THERE, soon(0.1))
        for number in range(3, 15):
            receive(second, THERE, number, 900)
        with pytest.raises(TransportError, match="can't have 2"):
            first.grow(THERE, 2)

    def test_a_channel_with_an_untaken_message_does_not_grow(self, joined):
        first, second = joined(spec())
        send(first, THERE, 0, 10)
        slot = second.take(THERE, soon())
        with pytest.raises(TransportError, match="not at rest"):
            second.grow(THERE, 8)
        slot.release()
        second.grow(THERE, 8)
        send(first, THERE, 1, 10)
        receive(second, THERE, 1, 10)

    def test_emulated_latency_delays_messages_that_overlap(self, joined):
        first, second = joined(spec())
        send(first, THERE, 0, 10)
        receive(second, THERE, 0, 10)
        late_s = 0.8
        emulate(first, link(latency_ms=1e3 * late_s))
        began_s = time.monotonic()
        for number in range(1, 4):
            send(first, THERE, number, 10)
        for number in range(1, 4):
            receive(second, THERE, number, 10)
        assert late_s <= time.monotonic() - began_s < 2 * late_s
        emulate(first)
        began_s = time.monotonic()
        send(first, THERE, 4, 10)
        receive(second, THERE, 4, 10)
        assert time.monotonic() - began_s < late_s

    def test_a_cut_link_delivers_once_it_is_healed(self, joined):
        first, second = joined(spec())
        emulate(first, link(cut=True))
        send(first, THERE, 0, 10)
        with pytest.raises(TimeoutError):
            second.take(THERE, soon(0.2))
        emulate(first)
        receive(second, THERE, 0, 10)

    def test_emulated_bandwidth_is_shared_by_all_channels_of_a_direction(self, joined):
        first, second = joined(spec(slot_bytes=40_000), spec(BESIDE, 40_000))
        emulate(first, link(bandwidth_mbps=8.0))  # a byte a microsecond
        began_s = time.monotonic()
        for channel in (THERE, BESIDE):
            send(first, channel, 0, 40_000)
        took_s = [
            receive(second, channel, 0, 40_000).landed_s - began_s for channel in (THERE, BESIDE)
        ]
        assert min(took_s) >= 0.04
        assert max(took_s) >= 0.08

    def test_an_emulated_direction_is_slow_and_the_other_is_not_held_up_by_it(self, joined):
        planes = joined(spec(), spec(BACK))
        late_s = 2 * PATIENCE_S  # however busy this machine is, what isn't delayed comes before
        for plane in planes:
            emulate(plane, link(latency_ms=1e3 * late_s, source=0))
        send(planes[0], THERE, 0, 10)
        slow_s = time.monotonic() + late_s
        send(planes[1], BACK, 0, 10)
        assert receive(planes[0], BACK, 0, 10).landed_s < slow_s
        with pytest.raises(TimeoutError):
            planes[1].take(THERE, soon(0.1))
        planes[0].close(flush=False)

    def test_an_emulated_direction_is_as_slow_as_it_is_told_to_be(self, joined):
        planes = joined(spec(), spec(BACK))
        for plane in planes:
            emulate(plane, link(latency_ms=60, source=1))
        began_s = time.monotonic()
        send(planes[1], BACK, 0, 10)
        assert receive(planes[0], BACK, 0, 10).landed_s >= began_s + 0.06

    def test_an_emulated_condition_is_of_the_steps_that_messages_name(self, joined):
        first, second = joined(spec(), spec(BESIDE), spec(BEHIND))
        emulate(first, link(cut=True, from_step=5, to_step=7))
        send(first, THERE, 5, 10)  # the first word after the epoch is the step
        send(first, BESIDE, 6, 10)
        for step in (4, 7):
            send(first, BEHIND, step, 10)
            receive(second, BEHIND, step, 10)
        for channel in (THERE, BESIDE):
            with pytest.raises(TimeoutError):
                second.take(channel, soon(0.05))
        emulate(first)
        receive(second, THERE, 5, 10)
        receive(second, BESIDE, 6, 10)
        emulate(first, link(latency_ms=60, from_step=8, to_step=9))
        began_s = time.monotonic()
        send(first, THERE, 8, 10)
        assert receive(second, THERE, 8, 10).landed_s >= began_s + 0.06
        emulate(first, link(cut=True, from_step=5))
        send(first, BEHIND, 2**32 - 1, 10)  # step -1: of the warm-up
        receive(second, BEHIND, 2**32 - 1, 10)

    def test_an_emulated_cut_heals_by_itself_when_its_time_is_over(self, joined):
        first, second = joined(spec())
        send(first, THERE, 0, 10)
        receive(second, THERE, 0, 10)
        origin_s = time.monotonic() - 10.0
        healed_s = time.monotonic() + 0.15
        now = link(cut=True, from_s=9.9, to_s=healed_s - origin_s)
        emulate(first, now, link(cut=True, from_s=1e6), origin_s=origin_s)
        for number in (1, 2):
            send(first, THERE, number, 10)
        for number in (1, 2):
            assert receive(second, THERE, number, 10).landed_s >= healed_s - 1e-6

    def test_emulated_jitter_is_what_the_emulator_draws_for_each_message(self, joined):
        conditions = [link(latency_ms=20, jitter_ms=20)]
        emulator = LinkEmulator(conditions)
        first, second = joined(spec())
        emulate(first, *conditions)
        early_s = []
        for number in range(6):
            began_s = time.monotonic()
            departure_s = emulator.departure_s(0, 1, (0, number, 10), 10, began_s)
            send(first, THERE, number, 10)
            early_s.append(departure_s - receive(second, THERE, number, 10).landed_s)
        assert max(early_s) <= 1e-6

    def test_closing_without_a_flush_waits_for_no_message(self, joined):
        first, _ = joined(spec())
        emulate(first, link(cut=True))
        send(first, THERE, 0, 10)
        began_s = time.monotonic()
        first.close(flush=False)
        assert time.monotonic() - began_s < FLUSH_S

    def test_a_rank_that_closes_is_gone_for_its_peer_once_its_messages_are_taken(self, joined):
        first, second = joined(spec(), spec(BACK))
        for number in range(3):
            send(first, THERE, number, 10)
        first.close()
        for number in range(3):
            receive(second, THERE, number, 10)
        with pytest.raises(PeerGoneError, match="rank 0 is gone"):
            second.take(THERE, soon())
        assert [event["peer"] for event in second.events() if event["kind"] == "peer_gone"] == [0]
        with pytest.raises(PeerGoneError, match="rank 0 is gone"):
            reserve_all(second, BACK)

    def test_a_waiting_thread_hears_at_once_that_its_peer_is_gone(self, joined):
        first, second = joined(spec())
        send(first, THERE, 0, 10)
        receive(second, THERE, 0, 10)
        waiting = threading.Event()

        def wait():
            waiting.set()
            with pytest.raises(PeerGoneError):
                second.take(THERE, soon())

        thread = in_thread(wait)
        assert waiting.wait(PATIENCE_S)
        began_s = time.monotonic()
        first.close()
        thread.join()
        assert time.monotonic() - began_s < 5

    def test_closing_twice_is_harmless(self, joined):
        first, _ = joined(spec())
        first.close()
        first.close()


def _write_word(address, value):
    ctypes.c_uint32.from_address(address).value = value % 2**32
