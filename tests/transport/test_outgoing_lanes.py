import pytest

from jaxmorph.transport.outgoing_lanes import LaneRate

CHUNK = 256 * 1024


def drive(rate, bytes_per_s, latency_s, chunks, start_s=0.0, depth=1):
    """Keeps `depth` chunks in flight on a lane of that rate; returns when the last arrives."""
    sent, free_s, now_s = [start_s] * depth, start_s, start_s
    for _ in range(chunks):
        sent_s = sent.pop(0)
        free_s = max(free_s, sent_s) + CHUNK / bytes_per_s
        now_s = free_s + latency_s
        rate.acknowledged(CHUNK, sent_s, now_s)
        sent.append(now_s)
    return now_s


@pytest.mark.parametrize("depth", [1, 2, 8])
@pytest.mark.parametrize("bytes_per_s", [1.25e6, 125e6])
@pytest.mark.parametrize("latency_s", [1e-4, 60e-3])
def test_the_rate_does_not_depend_on_latency(bytes_per_s, latency_s, depth):
    rate = LaneRate()
    rate.round_trip(latency_s)
    drive(rate, bytes_per_s, latency_s, 40, depth=depth)
    share = rate.bytes_per_s / bytes_per_s
    filled = min(1.0, depth * CHUNK / (latency_s * bytes_per_s))  # in-flight share
    assert 0.7 * filled < share < 1.3


def test_the_first_slow_chunk_shows_a_slow_lane():
    rate = LaneRate()
    rate.round_trip(1e-4)
    end_s = drive(rate, 125e6, 1e-4, 40)
    drive(rate, 1.25e6, 1e-4, 1, start_s=end_s)
    assert rate.bytes_per_s == pytest.approx(1.25e6, rel=0.1)


def test_small_chunks_do_not_count():
    rate = LaneRate()
    rate.acknowledged(4096, 0.0, 1.0)
    assert rate.bytes_per_s is None
    assert rate.window_bytes(CHUNK) == CHUNK
    assert rate.expected_s(CHUNK) is None


def test_the_window_is_30_ms_and_a_round_trip():
    quick, slow = LaneRate(), LaneRate()
    for rate, speed in ((quick, 125e6), (slow, 1.25e6)):
        rate.round_trip(0.010)
        drive(rate, speed, 0.010, 40, depth=8)
    assert quick.window_bytes(CHUNK) == pytest.approx(125e6 * 0.040, rel=0.1)
    assert slow.window_bytes(CHUNK) == CHUNK


def test_long_round_trips_count_slowly_and_short_ones_at_once():
    rate = LaneRate()
    rate.round_trip(0.010)
    rate.round_trip(1.0)
    assert rate.round_trip_s == pytest.approx(0.0595)
    rate.round_trip(0.001)
    assert rate.round_trip_s == 0.001


def test_one_long_stop_hardly_changes_a_regular_lane():
    rate, num_bytes, now_s = LaneRate(), 16 * 1024, 0.0
    for takes_s in [1e-4] * 1000 + [10e-3] + [1e-4] * 12:
        sent_s, now_s = now_s, now_s + takes_s
        rate.acknowledged(num_bytes, sent_s, now_s)
        assert takes_s < 10e-3 or rate.overdue_factor == 4.0
    assert rate.overdue_factor < 2.0


def test_a_regular_lane_is_overdue_sooner():
    regular, irregular = LaneRate(), LaneRate()
    assert regular.overdue_factor == 4.0  # until measured
    drive(regular, 12.5e6, 1e-4, 40)
    assert regular.overdue_factor == 1.5
    now_s = 0.0
    for number in range(40):
        sent_s, now_s = now_s, now_s + (0.01 if number % 2 else 0.05)
        irregular.acknowledged(CHUNK, sent_s, now_s)
    assert irregular.overdue_factor > 2.5
