import pytest

from jaxmorph.config import check_config
from jaxmorph.config.schema import Config
from jaxmorph.errors import UserError


def test_nothing_is_offloaded_unless_the_configuration_says_so():
    assert not Config().offload.enabled
    assert check_config({"offload": {"enabled": True}}).offload.enabled


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"offload": {"device_memory_fraction": 0}}, "got 0, expected a number above 0, at most 1"),
        ({"offload": {"enabled": "yes"}}, "got 'yes', expected true or false"),
        ({"emulation": {"host_copy_gbps": 0}}, "got 0, expected a number above 0"),
    ],
)
def test_values_that_mean_nothing_are_refused(section, says):
    with pytest.raises(UserError, match=says):
        check_config(section)
