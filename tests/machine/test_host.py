import pytest

from jaxmorph.machine import host
from jaxmorph.machine.host import host_facts, privilege_facts


@pytest.fixture
def facts(tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal:       33554432 kB\nMemFree: 1 kB\n")
    (tmp_path / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "memory.max").write_text("max\n")

    def facts(**places):
        found = {"memory": tmp_path / "meminfo", "quota": tmp_path / "cpu.max", "shared": tmp_path}
        found |= {"memory_limit": tmp_path / "memory.max"}
        return {fact.name: fact for fact in host_facts(**{**found, **places})}

    return facts


def test_the_hosts_size_is_told_as_linux_tells_it(facts):
    found = facts()
    assert found["memory"].found == "32.0 GiB"
    assert found["cores"].found.endswith(", by quota 2.5")
    assert found["/dev/shm"].found.endswith("GiB free")
    assert found["shared memory for slots"].works


def test_what_a_container_may_use_of_the_memory_is_told(facts, tmp_path):
    (tmp_path / "memory.max").write_text(f"{3 << 29}\n")
    assert facts()["memory"].found == "32.0 GiB, by limit 1.5 GiB"


def test_what_the_system_does_not_tell_is_unknown(facts, tmp_path):
    none = tmp_path / "none"
    found = facts(memory=none, quota=none, shared=none)
    assert found["memory"].found == "unknown"
    assert found["/dev/shm"].found == "none"
    assert "quota" not in found["cores"].found


def test_an_unlimited_quota_is_none(facts, tmp_path):
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert "quota" not in facts()["cores"].found


def test_why_no_slots_can_be_had_is_told(facts, monkeypatch):
    def none(num_slots, slot_bytes):
        raise OSError("too many open files")

    monkeypatch.setattr(host.Slots, "create", none)
    fact = facts()["shared memory for slots"]
    assert (fact.works, fact.note) == (False, "too many open files")


@pytest.mark.parametrize(
    ("command", "works", "note"),
    [
        (("true",), True, ""),
        (("sh", "-c", "echo not permitted >&2; exit 1"), False, "not permitted"),
        (("jaxmorph-no-such-command",), False, "there is no command unshare"),
    ],
    ids=["can", "may not", "has no command"],
)
def test_whether_namespaces_can_be_made_is_tried(monkeypatch, command, works, note):
    monkeypatch.setattr(host, "_NAMESPACES", command)
    fact = {fact.name: fact for fact in privilege_facts()}["network namespaces"]
    assert (fact.works, fact.note) == (works, note)
