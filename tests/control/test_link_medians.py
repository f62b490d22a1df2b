import numpy as np

from jaxmorph.control.link_medians import link_medians_ms
from jaxmorph.control.link_samples import link_samples
from jaxmorph.schedule.ops import Op
from jaxmorph.schedule.timeline import Timeline, TransferSpan


def _timeline(*transfers: TransferSpan) -> Timeline:
    op = ((Op.parse("F0"),),) * 2
    return Timeline(op, (np.zeros(1),) * 2, (np.ones(1),) * 2, transfers)


def test_a_direct_transfer_took_what_the_later_end_saw_and_a_delegated_one_what_its_receiver_saw():
    timeline = _timeline(
        TransferSpan(0, "activation[0] 0>1", 0.0, 30.0),
        TransferSpan(1, "activation[0] 0>1", 28.0, 30.0),
        TransferSpan(0, "gradient[0] 1>0", 40.0, 71.25, holds_queue=False),
        TransferSpan(0, "gradient[1] 1>0", 50.0, 82.75, holds_queue=False),
    )
    assert link_medians_ms(link_samples(timeline)) == {"0>1": 2.0, "1>0": 32.0}


def test_what_one_end_alone_tells_and_tied_gradients_are_left_out():
    timeline = _timeline(
        TransferSpan(0, "activation[0] 0>1", 0.0, 30.0),
        TransferSpan(0, "tied[0] 0>1", 40.0, 41.0),
        TransferSpan(1, "tied[0] 0>1", 40.0, 41.0),
    )
    assert link_medians_ms(link_samples(timeline)) == {}
