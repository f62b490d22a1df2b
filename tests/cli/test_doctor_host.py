"""Facts about a host, its network, cluster and NVIDIA driver, from made-up files and variables."""

import shutil

import pytest

from jaxmorph.cli import doctor_host as host
from jaxmorph.cli.doctor_host import (
    Fact,
    cluster_facts,
    host_facts,
    network_facts,
    nvidia_facts,
    run_checks,
)
from jaxmorph.transport.sidecar_trial import SidecarTrial


def test_a_failed_check_is_a_fact():
    def broken():
        yield Fact("first", "1")
        raise OSError("no such\nthing")

    sections = [*run_checks({"a": broken, "b": lambda: [Fact("second", "2", True)]})]
    assert sections == [
        ("a", (Fact("first", "1"), Fact("check failed", "", False, "OSError: no such thing"))),
        ("b", (Fact("second", "2", True),)),
    ]

    def hangs():
        raise KeyboardInterrupt

    found = run_checks({"b": lambda: [Fact("second", "2", True)], "a": hangs})
    assert next(found) == sections[1]  # before the next check begins


TRIAL = SidecarTrial(1.5e9, 3 * 10**9, 1.0)


@pytest.fixture
def facts(tmp_path):
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "memory.max").write_text("max\n")

    def facts(**places):
        found = {"quota": tmp_path / "cpu.max", "shared": tmp_path}
        found |= {"memory_limit": tmp_path / "memory.max", "trial": lambda: TRIAL}
        return {fact.name: fact for fact in host_facts(**{**found, **places})}

    return facts


def test_host_facts_come_from_linux(facts):
    found = facts()
    assert found["memory"].found.endswith(" GiB")
    assert found["cores"].found.endswith(", by quota 2.5")
    sent = "sends 1.5 GB/s to another one here, 3.0 with a core of its own"
    assert found["a sidecar"].found == sent
    assert found["a sidecar"].note.startswith("a rank that is alone here has at most 1 by")
    assert found["/dev/shm"].found.endswith("GiB free")
    assert found["shared memory for slots"].works


@pytest.mark.parametrize(
    ("file", "text", "name", "found"),
    [
        ("memory.max", f"{3 << 29}\n", "memory", ", by limit 1.5 GiB"),
        ("cpu.max", None, "cores", ""),
        ("cpu.max", "max 100000\n", "cores", ""),
    ],
)
def test_missing_limits_are_no_error(facts, tmp_path, file, text, name, found):
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    text = facts()[name].found
    assert found in text
    assert "quota" not in text
    assert facts(shared=tmp_path / "none")["/dev/shm"].found == "none"


def test_slots_that_cannot_be_made_have_a_reason(facts, monkeypatch):
    def none(num_slots, slot_bytes):
        raise OSError("too many open files")

    monkeypatch.setattr(host.Slots, "create", none)
    fact = facts()["shared memory for slots"]
    assert (fact.works, fact.note) == (False, "too many open files")


@pytest.fixture
def cards(tmp_path):
    for name, flags, speed in (("eth0", "0x1003", "25000"), ("lo", "0x9", None)):
        card = tmp_path / "net" / name
        (card / "device").mkdir(parents=True)
        (card / "flags").write_text(flags)
        if speed:
            (card / "speed").write_text(speed)
    return tmp_path


def network(cards, **kind):
    addresses = {"eth0": "10.0.0.7", "lo": "127.0.0.1"}
    places = {"network_class": cards / "net", "rdma_class": cards / "infiniband"}
    known = {"address_of": addresses.get, "nixl_missing": lambda: "none of its packages is here"}
    return {fact.name: fact for fact in network_facts(**places, **{**known, **kind})}


def test_each_card_has_address_speed_and_use(cards):
    found = network(cards)
    assert found["card eth0"].found == "10.0.0.7, 25,000 Mbit/s"
    assert found["card eth0"].note.startswith("carries")
    assert (found["card lo"].found, found["card lo"].note) == ("127.0.0.1", "")


@pytest.mark.parametrize(
    ("address", "works", "note"),
    [
        ("10.0.0.7", True, ""),
        ("127.0.1.1", None, "enough for runs on this machine"),
        (None, False, "Gloo must resolve this name: Name or service not known"),
    ],
)
def test_a_loopback_name_does_not_reach_other_hosts(cards, address, works, note):
    def look_up(name):
        if address is None:
            raise OSError("Name or service not known")
        return address

    host = network(cards, look_up=look_up)["host"]
    assert address is None or host.found.endswith(f", {address}")
    assert host.works is works
    assert host.note.startswith(note)


def test_rdma_needs_devices_and_nixl(cards):
    found = network(cards)
    assert (found["RDMA devices"].found, found["RDMA devices"].works) == ("none", False)
    assert (found["NIXL"].works, found["NIXL"].note) == (False, "none of its packages is here")
    for name in ("mlx5_0", "mlx5_1"):
        (cards / "infiniband" / name).mkdir(parents=True)
    found = network(cards, nixl_missing=lambda: None)
    assert (found["RDMA devices"].found, found["RDMA devices"].works) == ("mlx5_0, mlx5_1", True)
    assert found["NIXL"].works


def test_clusters_are_detected_by_variables():
    variables = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "NCCL_DEBUG": "INFO", "HOME": "/root"}
    found = {fact.name: fact.found for fact in cluster_facts(variables)}
    assert found == {
        "Slurm": "SLURM_JOB_ID=7, SLURM_PROCID=1",
        "Open MPI": "no",
        "Kubernetes": "no",
        "NCCL_DEBUG": "INFO",
    }


VERSION = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 2025\n"
INFORMATION = "Model: \t\t NVIDIA H800\nIRQ:   \t\t 191\nBus Type: \t PCIe\n"


@pytest.fixture
def driver(tmp_path):
    (tmp_path / "version").write_text(VERSION + "GCC version:  gcc 13\n")
    for number in range(2):
        folder = tmp_path / "gpus" / f"0000:{number}8:00.0"
        folder.mkdir(parents=True)
        (folder / "information").write_text(INFORMATION)
    return tmp_path


def facts_of(driver):
    return {fact.name: fact for fact in nvidia_facts(driver)}


def test_nvidias_driver_lists_its_gpus(driver):
    found = facts_of(driver)
    assert found["NVIDIA's driver"].found == "580.65.06"
    assert (found["its GPUs"].found, found["its GPUs"].works) == ("2 x NVIDIA H800", True)
    (driver / "gpus" / "0000:08:00.0" / "information").write_text("IRQ: 1\n")
    assert facts_of(driver)["its GPUs"].found == "1 x unknown, 1 x NVIDIA H800"
    shutil.rmtree(driver / "gpus")
    none = facts_of(driver)["its GPUs"]
    assert (none.found, none.works, none.note) == ("none", False, "the driver found none")
    assert facts_of(driver / "nowhere") == {}
