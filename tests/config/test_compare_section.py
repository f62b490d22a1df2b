from pathlib import Path

import pytest

from jaxmorph.config import Config, dump_config, load_config
from jaxmorph.config.link_sections import LinkTrace
from jaxmorph.errors import UserError

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
TEXT = """
parallelism: {stages: 4}
compare:
  systems: [zb, adaptive]
  conditions:
    - {name: slow, links: [{between: [2, 3], latency_ms: 30}]}
    - {name: healthy}
  steps: 5
  warmup_steps: 1
  repeats: 3
  reference: {zb: [703, null]}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(*overrides: str) -> Config:
    Path("x.yaml").write_text(TEXT)
    return load_config("x.yaml", overrides)


def test_systems_conditions_and_steps_are_read():
    compare = load().compare
    assert compare is not None
    assert compare.systems == ("zb", "adaptive")
    assert compare.conditions[0].links[0].between == (2, 3)
    assert compare.conditions[1].links == ()
    assert compare.reference == {"zb": (703.0, None)}
    assert compare.total_steps == 8 + 2 * (1 + 5)  # of a block, which is one round


def test_a_conditions_trace_is_a_path_or_a_regime():
    by_path = load("compare.conditions.0.trace=delays.csv").compare
    by_regime = load("compare.conditions.0.trace={regime: A, seed: 3}").compare
    assert by_path is not None
    assert by_regime is not None
    assert by_path.conditions[0].trace == LinkTrace(file="delays.csv")
    assert by_regime.conditions[0].trace == LinkTrace(regime="A", seed=3)


def healthy(*overrides: str) -> str | None:
    compare = load(*overrides).compare
    assert compare is not None
    return compare.healthy


def test_a_healthy_condition_has_neither_links_nor_trace():
    assert healthy() == "healthy"
    assert healthy("compare.conditions.1.name=calm") == "calm"
    assert healthy("compare.conditions.1.trace={regime: A}") is None
    assert healthy("compare.conditions.0.name=healthy", "compare.conditions.1.name=b") == "b"


def test_a_former_name_is_the_system():
    systems = "compare.systems=[adaptive-detecting, adaptive-informed]"
    compare = load(systems, "compare.reference={adaptive-detecting: [703, null]}").compare
    assert compare is not None
    assert compare.systems == ("adaptive", "adaptive-informed")
    assert compare.reference == {"adaptive": (703.0, None)}


def test_bars_are_read_and_written_back():
    bars = "compare.bars=[{systems: [zb], over: adaptive, at_most: 2}]"
    config = load(bars)
    assert config.compare is not None
    (bar,) = config.compare.bars
    assert (bar.systems, bar.conditions, bar.value) == (("zb",), None, "step")
    assert (bar.over, bar.at_least, bar.at_most) == ("adaptive", None, 2.0)
    Path("again.yaml").write_text(dump_config(config))
    assert load_config("again.yaml").compare == config.compare


def test_the_section_is_optional_and_written_back():
    assert Config().compare is None
    Path("again.yaml").write_text(dump_config(load()))
    assert load_config("again.yaml") == load("run.dir=runs/x")


def test_a_restarting_system_makes_whole_runs_with_cuts():
    cut = "compare.conditions.0.links=[{between: [2, 3], cut: true, from_step: 9, to_step: 12}]"
    systems = "compare.systems=[restart, adaptive]"
    compare = load(cut, systems, "compare.reference={}", "checkpoint.every_steps=2")
    assert compare.compare is not None
    assert compare.compare.has_whole_runs
    assert compare.compare.conditions[0].links[0].cut
    usual = load().compare
    assert usual is not None
    assert not usual.has_whole_runs


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_configuration_loads(path):
    load_config(path)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("compare.systems=[zbb]", "got [zbb], expected a list of systems among gpipe, 1f1b, inter"),
        ("compare.systems=[falcon, adaptive-informed]", "expected only gpipe, 1f1b, zb, zb-dele"),
        ("compare.systems=[restart, adaptive-informed]", "expected only gpipe, 1f1b, zb, zb-dele"),
        ("compare.systems=[adaptive, adaptive-detecting]", "once: adaptive-detecting is adaptive"),
        ("compare.systems=[]", "got [], expected a list of systems among"),
        ("compare.systems=[zb, zb]", "got [zb, zb], expected each system once"),
        ("compare.conditions=[]", "got [], expected a list of conditions"),
        ("compare.conditions.1.name=slow", "compare.conditions: got 'slow' twice"),
        ("compare.conditions.0.links.0.between=[1, 3]", "got [1, 3], expected two neighbours of"),
        ("compare.conditions.0.links.0.latency=3", "unknown key; did you mean 'latency_ms'?"),
        ("compare.conditions.0.links.0.cut=true", "got true, expected no cut: a condition lasts a"),
        ("compare.conditions.0.links.0.source=1", "got 1, expected null, 2 or 3"),
        ("compare.conditions.0.trace={}", "missing, expected the path of a CSV file, or a regime"),
        ("compare.conditions.0.trace={regime: A, seed: -1}", "got -1, expected a whole number of"),
        ("compare.reference.zb=[1]", "got [1.0], expected a list of 2, one for each of compare.c"),
        ("compare.reference.zzb=[1, 2]", "expected by system (gpipe, "),
        ("compare.reference={adaptive: [1, 2], adaptive-detecting: [1, 2]}", "expected by system"),
        ("compare.bars=[{systems: [zb]}]", "got no limit, expected at_least, at_most, or both"),
        (
            "compare.bars=[{systems: [zb], conditions: [x], at_most: 1}]",
            "got [x], expected some of",
        ),
        (
            "compare.bars=[{systems: [zb], over: zbb, at_most: 1}]",
            "expected null, healthy, predict",
        ),
        (
            "compare.bars=[{systems: [zb], value: total, over: prediction, at_most: 1}]",
            "expected step, as over is prediction",
        ),
        (
            "compare={conditions: [{name: A, trace: {regime: A}}], "
            "bars: [{systems: [zb], over: healthy, at_most: 1}]}",
            "expected another one, as no condition is without links and trace",
        ),
        ("compare.steps=0", "got 0, expected a whole number of at least 1"),
    ],
)
def test_a_mistake_is_one_line(override, says):
    with pytest.raises(UserError) as caught:
        load(override)
    message = str(caught.value)
    assert message.isprintable()
    assert message.startswith(override.partition("=")[0].partition(".links")[0])
    assert says in message
