import pytest

from jaxmorph.placement import Placement
from jaxmorph.records import Link
from jaxmorph.report.draw.messages import link_delays_ms, messages_in_flight
from jaxmorph.schedule.costs import LinkDelay, Links, StageCosts, chain_links
from jaxmorph.schedule.fixed import interleaved, one_forward_one_backward
from jaxmorph.schedule.replay import LinkModel
from jaxmorph.schedule.simulate import simulate
from jaxmorph.schedule.timeline import Timeline, TransferSpan

COSTS = StageCosts.uniform(2, 10.0, 10.0, 10.0)
SCHEDULE = one_forward_one_backward(2, 2)


def _drawn(timeline: Timeline, links: Links, link_model: LinkModel = "latency") -> list[str]:
    return [
        f"{m.sender}>{m.receiver} {m.sent_ms:g}-{m.arrives_ms:g}"
        for m in messages_in_flight(timeline, links, link_model)
    ]


def test_messages_leave_after_their_op():
    links = {Link(0, 1): LinkDelay(5.0, 7.0)}
    timeline = simulate(SCHEDULE, COSTS, links)
    assert _drawn(timeline, links) == ["0>1 10-15", "0>1 20-25", "1>0 45-52", "1>0 75-82"]
    assert timeline.start_ms[0].tolist() == [0.0, 10.0, 52.0, 82.0]


def test_links_without_delay_draw_nothing():
    assert _drawn(simulate(SCHEDULE, COSTS), {}) == []
    links = {Link(0, 1): LinkDelay(0.0, 7.0)}
    assert _drawn(simulate(SCHEDULE, COSTS, links), links) == ["1>0 40-47", "1>0 70-77"]


def test_queued_messages_arrive_one_after_another():
    links = {Link(0, 1): LinkDelay(4.0, 0.0, 16.0, 0.0)}
    timeline = simulate(SCHEDULE, COSTS, links)
    assert _drawn(timeline, links) == ["0>1 10-30", "0>1 20-46"]
    slow = chain_links([20.0])
    timeline = simulate(SCHEDULE, COSTS, slow, "serialized")
    assert _drawn(timeline, slow, "serialized")[:2] == ["0>1 10-30", "0>1 20-50"]


def test_a_recorded_transfer_times_its_message():
    links = chain_links([5.0])
    plain = simulate(SCHEDULE, COSTS, links)
    recorded = (
        TransferSpan(0, "activation[1] 0>1", 20.0, 33.0),
        TransferSpan(1, "activation[1] 0>1", 25.0, 33.0),
    )
    timeline = Timeline(plain.orders, plain.start_ms, plain.end_ms, recorded)
    assert _drawn(timeline, links)[:2] == ["0>1 10-15", "0>1 28-33"]


def test_a_recorded_transfer_belongs_to_its_chunk():
    costs, links = StageCosts.uniform(2, 4.0, 4.0, 4.0), chain_links([1.0])
    plain = simulate(interleaved(2, 2, 2), costs, links)
    recorded = (
        TransferSpan(1, "activation[0] 0>1", 2.0, 6.0),
        TransferSpan(1, "1.activation[0] 0>1", 14.0, 20.0),
    )
    timeline = Timeline(plain.orders, plain.start_ms, plain.end_ms, recorded)
    drawn = _drawn(timeline, links)
    assert "0>1 5-6" in drawn
    assert "0>1 19-20" in drawn


@pytest.mark.parametrize("stages", [2, 3])
def test_chunks_send_from_last_to_first_stage(stages):
    costs = StageCosts.uniform(stages, 4.0, 4.0, 4.0)
    links = {Link(0, stages - 1): LinkDelay(3.0, 5.0)}
    timeline = simulate(interleaved(stages, stages, 2), costs, links)
    around = list(messages_in_flight(timeline, links))
    up = [m for m in around if m.is_forward and m.sender == stages - 1]
    down = [m for m in around if not m.is_forward and m.sender == 0]
    assert [m.receiver for m in up] == [0] * stages
    assert [m.receiver for m in down] == [stages - 1] * stages
    assert {m.arrives_ms - m.sent_ms for m in up} == {5.0}
    assert {m.arrives_ms - m.sent_ms for m in down} == {3.0}


def test_a_link_slow_in_one_direction_is_slow():
    links = {
        Link(0, 1): LinkDelay(1.0, 2.0, 3.0, 4.0),
        Link(1, 2): LinkDelay(),
        Link(0, 2): LinkDelay(5.0, 6.0),
    }
    assert link_delays_ms(links, Placement(3)) == {Link(0, 1): (4.0, 6.0)}
    assert link_delays_ms(links, Placement(3, num_chunks=2)) == {
        Link(0, 1): (4.0, 6.0),
        Link(0, 2): (5.0, 6.0),
    }
