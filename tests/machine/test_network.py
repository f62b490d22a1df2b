import pytest

from jaxmorph.machine.network import cluster_facts, network_facts


@pytest.fixture
def cards(tmp_path):
    for name, flags, speed in (("eth0", "0x1003", "25000"), ("lo", "0x9", None)):
        card = tmp_path / "net" / name
        (card / "device").mkdir(parents=True)
        (card / "flags").write_text(flags)
        if speed:
            (card / "speed").write_text(speed)
    return tmp_path


def facts(cards, **kind):
    addresses = {"eth0": "10.0.0.7", "lo": "127.0.0.1"}
    places = {"network_class": cards / "net", "rdma_class": cards / "infiniband"}
    known = {"address_of": addresses.get, "nixl_missing": lambda: "none of its packages is here"}
    return {fact.name: fact for fact in network_facts(**places, **{**known, **kind})}


def test_each_card_is_told_with_its_address_and_rate_and_whether_it_is_used(cards):
    found = facts(cards)
    assert found["card eth0"].found == "10.0.0.7, 25,000 Mbit/s"
    assert found["card eth0"].note.startswith("carries")
    assert (found["card lo"].found, found["card lo"].note) == ("127.0.0.1", "")


@pytest.mark.parametrize(
    ("address", "works", "note"),
    [("10.0.0.7", True, ""), ("127.0.1.1", None, "enough for runs on this machine")],
)
def test_a_host_whose_name_is_its_loopbacks_is_not_said_to_reach_others(
    cards, address, works, note
):
    host = facts(cards, look_up=lambda name: address)["host"]
    assert host.found.endswith(f", {address}")
    assert host.works is works
    assert host.note.startswith(note)


def test_a_host_whose_name_has_no_address_is_told_so(cards):
    def look_up(name):
        raise OSError("Name or service not known")

    host = facts(cards, look_up=look_up)["host"]
    assert (host.works, host.note) == (False, "Gloo wants to look it up: Name or service not known")


def test_rdma_needs_devices_and_nixl(cards):
    found = facts(cards)
    assert (found["RDMA devices"].found, found["RDMA devices"].works) == ("none", False)
    assert (found["NIXL"].works, found["NIXL"].note) == (False, "none of its packages is here")
    for name in ("mlx5_0", "mlx5_1"):
        (cards / "infiniband" / name).mkdir(parents=True)
    found = facts(cards, nixl_missing=lambda: None)
    assert (found["RDMA devices"].found, found["RDMA devices"].works) == ("mlx5_0, mlx5_1", True)
    assert found["NIXL"].works


def test_a_cluster_is_known_by_what_it_tells_its_processes():
    told = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "NCCL_DEBUG": "INFO", "HOME": "/root"}
    found = {fact.name: fact.found for fact in cluster_facts(told)}
    assert found == {
        "Slurm": "SLURM_JOB_ID=7, SLURM_PROCID=1",
        "Open MPI": "no",
        "Kubernetes": "no",
        "NCCL_DEBUG": "INFO",
    }
