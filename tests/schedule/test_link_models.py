import pytest

from jaxmorph.schedule.costs import Link, LinkState, chain_links
from jaxmorph.schedule.link_models import Direction, LinkQueue, outgoing, stage_queues

NOWHERE = Direction(0.0, 0.0)


def test_a_chain_sends_nothing_beyond_its_ends():
    ways = outgoing({Link(0, 1): LinkState(1.0, 2.0, 3.0, 4.0), Link(0, 2): LinkState(9.0)}, 3)
    assert [way.forward for way in ways] == [Direction(1.0, 3.0), NOWHERE, NOWHERE]
    assert [way.backward for way in ways] == [NOWHERE, Direction(2.0, 4.0), NOWHERE]


@pytest.mark.parametrize("stages", [2, 3])
def test_chunks_wrap_around_over_the_link_of_the_first_and_last_stage(stages):
    around = LinkState(1.0, 2.0, 3.0, 4.0)
    ways = outgoing({Link(0, stages - 1): around}, stages, num_chunks=2)
    assert ways[-1].forward == Direction(2.0, 4.0)
    assert ways[0].backward == Direction(1.0, 3.0)


def test_one_stage_sends_to_itself_over_no_link():
    assert outgoing({}, 1, num_chunks=3) == [(NOWHERE, NOWHERE)]


def test_a_message_gets_the_link_when_those_before_it_have_left_it():
    queue = LinkQueue(5.0)
    assert [queue.enter(at) for at in (1.0, 2.0, 20.0, 20.0)] == [1.0, 6.0, 20.0, 25.0]


def test_no_queue_is_kept_for_messages_that_never_wait():
    assert stage_queues(outgoing(chain_links([5.0, 0.0]), 3), "latency") is None
    queues = stage_queues(outgoing(chain_links([5.0, 0.0]), 3), "serialized")
    assert queues is not None
    waits = [(queue.forward is not None, queue.backward is not None) for queue in queues]
    assert waits == [(True, False), (False, True), (False, False)]


def test_ways_between_the_same_two_stages_are_one_queue():
    links = {Link(0, 1): LinkState(forward_occupancy_ms=1.0, backward_occupancy_ms=1.0)}
    queues = stage_queues(outgoing(links, 2, num_chunks=2), "latency")
    assert queues is not None
    lower, upper = queues
    assert lower.forward is lower.backward is not upper.forward
    assert upper.forward is upper.backward
