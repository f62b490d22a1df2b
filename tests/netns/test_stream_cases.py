import pytest

from benchmarks.netns.faults import bridge_lost, card_lost, host_cut_off, switch_out
from benchmarks.netns.hosts import lay_hosts
from benchmarks.netns.namespaces import why_unavailable
from benchmarks.netns.stream_cases import stream_with_fault
from benchmarks.netns.stream_end import RECEIVER, SENDER
from benchmarks.netns.streams import StreamError, run_stream

WHY = why_unavailable()
pytestmark = [pytest.mark.netns, pytest.mark.skipif(WHY is not None, reason=str(WHY))]

MESSAGE_BYTES = 1_000_000
OUTAGE_S = 0.5


@pytest.fixture(scope="module")
def hosts():
    """Two hosts whose cards are slow enough for a fault to meet a message on any machine."""
    with lay_hosts(2) as laid:
        for host in range(2):
            for nic in range(2):
                laid.set_rate(host, nic, 100)
        yield laid


# The receiver checks each message, and fails the stream if one is not the next, or not as sent.
@pytest.mark.parametrize(
    "fault",
    [
        card_lost(SENDER, "sender"),
        pytest.param(bridge_lost(), marks=pytest.mark.long),
        host_cut_off(RECEIVER, "receiver", OUTAGE_S),
        pytest.param(switch_out(OUTAGE_S), marks=pytest.mark.long),
    ],
    ids=lambda fault: fault.name,
)
def test_every_message_comes_once_in_order_and_whole_whatever_cards_are_lost(hosts, fault):
    faulty = stream_with_fault(hosts, fault, 40, MESSAGE_BYTES, after=8, delay_s=0.02)
    _, received = (each["peers"] for each in faulty.stream.statistics)
    assert received[str(SENDER)]["receiving"]["messages"] == 40
    if fault.lasts_s is not None:  # then nothing can have come meanwhile
        assert faulty.stream.longest_gap_s() > fault.lasts_s * 0.9


def test_a_stream_uses_both_cards(hosts):
    before = [hosts.sent_bytes(SENDER, nic) for nic in range(2)]
    run_stream(hosts, 20, MESSAGE_BYTES, (0, 1))
    sent = [hosts.sent_bytes(SENDER, nic) - before[nic] for nic in range(2)]
    assert min(sent) > 20 * MESSAGE_BYTES / 10


def test_a_stream_that_cannot_start_is_an_error_with_its_reason(hosts):
    with pytest.raises(StreamError, match="can't open its data plane on"):
        run_stream(hosts, 1, MESSAGE_BYTES, (7,))
