import pytest
from conformance import Conformance

from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.plane import DataPlane


class TestSidecar(Conformance):
    @pytest.fixture
    def make_plane(self):
        made = []

        def make(*arguments) -> DataPlane:
            made.append(SidecarPlane.start(*arguments))
            return made[-1]

        yield make
        for plane in made:
            plane.close()
