"""Random sequences of faults, checked against a model; and tampered frames."""

import hypothesis.strategies as st
import pytest
from exchanges import receive, send
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from benchmarks.transport_faults import CHANNELS, NUM_SLOTS, FaultyLink, fuzz_and_check
from jaxmorph.transport.nixl_lanes import missing

has_nixl = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.fixture(autouse=True, scope="module")
def emulated_rdma():
    """Makes UCX emulate RDMA over TCP; sidecars over plain TCP ignore it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp")
        yield


class FaultsInAnyOrder(RuleBasedStateMachine):
    """The model: messages in flight on each channel, oldest first."""

    backend = "tcp"

    @initialize(seed=st.integers(0, 1000))
    def join(self, seed):
        self.link = FaultyLink(seed, self.backend)
        self.under_way = {name: [] for name in CHANNELS}
        self.sent = dict.fromkeys(CHANNELS, 0)
        self.is_cut = False

    @rule(channel=st.sampled_from(CHANNELS), sizes=st.lists(st.integers(0, 50_000), max_size=3))
    def send(self, channel, sizes):
        for num_bytes in sizes:
            if len(self.under_way[channel]) < NUM_SLOTS:
                number = self.sent[channel]
                send(self.link.planes[channel.source], channel, number, num_bytes)
                self.sent[channel] += 1
                self.under_way[channel].append((number, num_bytes))

    @precondition(lambda self: not self.is_cut)
    @rule(channel=st.sampled_from(CHANNELS))
    def receive(self, channel):
        if self.under_way[channel]:
            number, num_bytes = self.under_way[channel].pop(0)
            receive(self.link.planes[channel.destination], channel, number, num_bytes)

    @rule(fault=st.sampled_from(["cut", "throttle", "delay", "reset", "kill"]))
    def harm(self, fault):
        self.link.harm(fault)
        self.is_cut |= fault == "cut"

    @rule()
    def heal(self):
        self.link.heal()
        self.is_cut = False

    @invariant()
    def nobody_is_gone(self):
        if hasattr(self, "link"):
            for plane in self.link.planes:
                assert "peer_gone" not in [event["kind"] for event in plane.events()]

    def teardown(self):
        if not hasattr(self, "link"):
            return
        try:
            self.link.heal()
            for channel, messages in self.under_way.items():
                for number, num_bytes in messages:
                    receive(self.link.planes[channel.destination], channel, number, num_bytes)
        finally:
            self.link.close()


class FaultsInAnyOrderOverNixl(FaultsInAnyOrder):
    backend = "nixl"


FaultsInAnyOrder.TestCase.settings = FaultsInAnyOrderOverNixl.TestCase.settings = settings(
    max_examples=6, stateful_step_count=25, derandomize=True, deadline=None
)
TestFaultsInAnyOrder = FaultsInAnyOrder.TestCase
TestFaultsInAnyOrderOverNixl = pytest.mark.extras(has_nixl(FaultsInAnyOrderOverNixl.TestCase))


def test_tampered_frames_do_a_sidecar_no_harm():
    members, wrong = fuzz_and_check(200, seed=4)
    assert wrong == []
    assert members > 100
