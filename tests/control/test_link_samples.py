import numpy as np

from jaxmorph.control.link_samples import LinkSample, link_samples
from jaxmorph.schedule.timeline import Timeline, TransferSpan


def samples(*spans, num_stages=4):
    rows = (np.zeros(0),) * num_stages
    return link_samples(Timeline(((),) * num_stages, rows, rows, spans))


def test_a_direct_message_takes_what_the_end_that_came_later_saw():
    waited = TransferSpan(0, "activation[3] 0>1", 10.0, 47.0)
    came_later = TransferSpan(1, "activation[3] 0>1", 44.0, 47.5)
    assert samples(waited, came_later) == (LinkSample(0, 1, 3, 3.5, 47.5, is_held=True),)


def test_a_delegated_message_takes_from_its_sending_to_its_landing():
    landed = TransferSpan(2, "gradient[1] 3>2", 5.0, 36.0, holds_queue=False)
    (sample,) = samples(landed)
    assert sample == LinkSample(3, 2, 1, 31.0, 36.0, is_held=False)
    assert sample.sent_ms == 5.0


def test_messages_come_in_the_order_in_which_they_were_sent():
    spans = [
        TransferSpan(1, f"activation[{m}] 0>1", sent, landed, holds_queue=False)
        for m, (sent, landed) in enumerate(((8.0, 9.0), (1.0, 90.0), (3.0, 5.0)))
    ]
    assert [sample.microbatch for sample in samples(*spans)] == [1, 2, 0]


def test_each_chunks_message_of_a_microbatch_is_one_of_its_own():
    spans = [
        TransferSpan(end, label, 0.0, 2.0)
        for label in ("activation[0] 0>1", "1.activation[0] 0>1", "activation[0] 1>0")
        for end in (0, 1)
    ]
    assert [sample[:3] for sample in samples(*spans)] == [(0, 1, 0), (0, 1, 0), (1, 0, 0)]


def test_tied_gradients_are_no_samples():
    spans = [TransferSpan(end, "tied[0] 0>3", 0.0, 40.0) for end in (0, 3)]
    landed = TransferSpan(0, "tied[0] 3>0", 0.0, 40.0, holds_queue=False)
    assert samples(*spans, landed) == ()


def test_a_message_that_one_end_has_not_reported_is_no_sample():
    alone = TransferSpan(0, "activation[0] 0>1", 0.0, 40.0)
    sent = TransferSpan(0, "activation[1] 0>1", 0.0, 40.0, holds_queue=False)
    assert samples(alone, sent) == ()
