"""The whole command, with this machine's own facts."""

import json
import re

import pytest

ABOUT = [
    "software", "host", "network", "cluster and environment", "devices",
    "settings for GPUs", "copies",
]  # fmt: skip


@pytest.fixture
def doctor(run):
    def doctor(*words):
        code, out, _ = run("doctor", *words)
        assert code == 0
        return out

    return doctor


def test_json_facts_say_what_works(doctor):
    sections = json.loads(doctor("--json"))
    assert list(sections) == ABOUT
    facts = {fact["name"]: fact for facts in sections.values() for fact in facts}
    assert "check failed" not in facts
    assert facts["attention by cuDNN"]["works"] is False
    assert facts["jax"]["found"].count(".") >= 2
    assert facts["into slots by buffer_callback"]["works"] is True
    assert all(fact["note"] for fact in facts.values() if fact["works"] is False)


def test_each_fact_is_one_line_on_a_narrow_terminal(doctor, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = doctor().splitlines()
    assert [line for line in lines if not line.startswith("  ")] == ABOUT
    names = ("python", "cores", "CUDA driver", "into slots by buffer_callback", "NIXL")
    for name in names:
        (line,) = [line for line in lines if line.startswith(f"  {name}  ")]
        assert line.split("  ")[-1].strip()
    # No line repeats its verdict.
    assert not [line for line in lines if re.search("  no  none?(:|$)|  ok  yes:", line)]
    (line,) = [line for line in lines if line.startswith("  attention by cuDNN ")]
    assert line.endswith("  no  JAX computes on cpu, not on a GPU")
