import pytest
from conformance import Conformance
from exchanges import SECRET, THERE, receive, send, soon, spec
from oracles.loopback import LoopbackNetwork

from jaxmorph.transport.plane import DataPlane


class TestLoopback(Conformance):
    @pytest.fixture
    def make_plane(self):
        network = LoopbackNetwork()
        made = []

        def make(*arguments) -> DataPlane:
            made.append(network.plane(*arguments))
            return made[-1]

        yield make
        for plane in made:
            plane.close()


def test_planes_with_different_secrets_do_not_join():
    network = LoopbackNetwork()
    first, second = network.plane(0, [spec()], []), network.plane(1, [], [spec()])
    try:
        first.connect({1: second.addresses()}, SECRET)
        second.connect({0: first.addresses()}, SECRET[::-1])
        send(first, THERE, 0, 10)
        with pytest.raises(TimeoutError):
            second.take(THERE, soon(0.1))
        second.connect({0: first.addresses()}, SECRET)
        receive(second, THERE, 0, 10)
    finally:
        second.close()
        first.close()
