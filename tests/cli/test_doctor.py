"""The command from its words to what it prints, with this machine's own facts."""

import json
import re

import pytest

ABOUT = [
    "software", "host", "privileges", "network", "cluster and environment", "devices", "copies",
]  # fmt: skip


@pytest.fixture
def told(run):
    def told(*words):
        code, out, _ = run("doctor", *words)
        assert code == 0
        return out

    return told


def test_as_json_every_fact_says_whether_it_works_and_why_not(told):
    sections = json.loads(told("--json"))
    assert list(sections) == ABOUT
    facts = {fact["name"]: fact for facts in sections.values() for fact in facts}
    assert "this could not be looked at" not in facts
    assert facts["attention by cuDNN"]["works"] is False
    assert facts["jax"]["found"].count(".") >= 2
    assert facts["into slots by buffer_callback"]["works"] is True
    assert all(fact["note"] for fact in facts.values() if fact["works"] is False)


def test_the_table_has_a_line_for_every_fact_however_narrow_the_terminal(told, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    lines = told().splitlines()
    assert [line for line in lines if not line.startswith("  ")] == ABOUT
    names = ("python", "cores", "CUDA driver", "into slots by buffer_callback", "NIXL")
    for name in names:
        (line,) = [line for line in lines if line.startswith(f"  {name}  ")]
        assert line.split("  ")[-1].strip()
    # A verdict is not told twice.
    assert not [line for line in lines if re.search("  no  none?(:|$)|  ok  yes:", line)]
    (line,) = [line for line in lines if line.startswith("  attention by cuDNN ")]
    assert line.endswith("  no  JAX computes on cpu, not on a GPU")
