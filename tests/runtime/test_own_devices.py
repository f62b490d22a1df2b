"""Where JAX has no device of those that were asked for, one line says so."""

import jax
import pytest

from jaxmorph.errors import UserError
from jaxmorph.runtime.own_devices import device_kind, own_devices


@pytest.fixture
def fails(monkeypatch):
    """Has JAX fail to find devices."""

    def fails(error):
        def local_devices():
            raise error

        monkeypatch.setattr(jax, "local_devices", local_devices)

    return fails


def test_devices_are_those_of_jax():
    assert own_devices() == jax.local_devices()
    assert device_kind() == jax.local_devices()[0].device_kind


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (AssertionError(), "it has no such platform installed"),
        (RuntimeError("Unable to initialize backend 'cuda':\nno GPU"), "backend 'cuda': no GPU"),
    ],
)
def test_a_platform_that_is_not_to_be_had_is_named(fails, error, reason):
    fails(error)
    with pytest.raises(UserError) as raised:
        own_devices()
    told = str(raised.value)
    assert told.startswith(f"JAX_PLATFORMS: got {jax.config.values['jax_platforms']!r}, of which")
    assert reason in told
    assert "\n" not in told


def test_other_failures_stay_what_they_are(fails):
    fails(RuntimeError("DEADLINE_EXCEEDED: rank 1 did not come"))
    with pytest.raises(RuntimeError, match="rank 1 did not come"):
        own_devices()
