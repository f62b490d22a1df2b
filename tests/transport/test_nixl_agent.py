import os

import pytest

from jaxmorph.transport import nixl_lanes
from jaxmorph.transport.lanes import LaneError
from jaxmorph.transport.nixl_lanes import NixlAgent, device_of, missing


def card(folder, name, adapter=None, port=0):
    (folder / name).mkdir()
    (folder / name / "dev_port").write_text(f"{port}\n")
    if adapter:
        (folder / name / "device" / "infiniband" / adapter).mkdir(parents=True)


@pytest.fixture
def interfaces(tmp_path, monkeypatch):
    addresses = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "eth1": "10.0.1.1"}
    monkeypatch.setattr(nixl_lanes.socket, "if_nameindex", lambda: [*enumerate(addresses)])
    monkeypatch.setattr(nixl_lanes, "interface_address", addresses.get)
    card(tmp_path, "lo")
    card(tmp_path, "eth0")
    card(tmp_path, "eth1", adapter="mlx5_1", port=1)
    return tmp_path


def test_a_card_that_does_rdma_goes_by_its_adapter_and_port(interfaces):
    assert device_of("10.0.1.1", interfaces) == "mlx5_1:2"


def test_any_other_card_goes_by_its_interface(interfaces):
    assert device_of("10.0.0.1", interfaces) == "eth0"
    assert device_of("127.0.0.7", interfaces) == "lo"


def test_an_address_that_is_not_here_is_an_error_that_names_it(interfaces):
    with pytest.raises(LaneError, match=r"no network interface has the address 10\.0\.9\.9"):
        device_of("10.0.9.9", interfaces)


def test_without_a_choice_neither_shared_memory_nor_tcp_is_used(monkeypatch, interfaces):
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    with nixl_lanes._chosen_devices("127.0.0.1"):
        assert (os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"]) == ("^tcp,sm", "lo")
    assert "UCX_TLS" not in os.environ
    assert "UCX_NET_DEVICES" not in os.environ


def test_what_the_environment_says_is_left_as_it_is(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "rc,ud")
    monkeypatch.setenv("UCX_NET_DEVICES", "mlx5_bond_0:1")
    with nixl_lanes._chosen_devices("192.0.2.1"):
        assert os.environ["UCX_TLS"] == "rc,ud"
        assert os.environ["UCX_NET_DEVICES"] == "mlx5_bond_0:1"
    assert os.environ["UCX_TLS"] == "rc,ud"


def test_a_missing_package_is_named(monkeypatch):
    monkeypatch.setattr(nixl_lanes, "MODULES", ("nixl_cu12_that_is_not_here",))
    assert "nixl-cu12-that-is-not-here" in str(missing())
    with pytest.raises(LaneError, match="nixl-cu12-that-is-not-here"):
        NixlAgent("127.0.0.1")
