from pathlib import Path

import pytest

from jaxmorph.config import Config, dump_config, load_config, located_error
from jaxmorph.errors import UserError
from jaxmorph.records import Link

TEN_LINES = """
run: {steps: 40, seed: 7}
model: {preset: tiny, num_layers: 4, tied: false}
parallelism: {stages: 2, layers: [1, 3]}
batch: {microbatches: 6, microbatch_size: 2}
schedule: {name: zb-h1, max_live: 3, live_until: W}
optimizer: {learning_rate: 1e-3, clip_norm: null}
emulation:
  accelerator: {forward_ms: 10, backward_input_ms: [10, 12.5], backward_weight_ms: 9}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(text: str | bytes, *overrides: str) -> Config:
    Path("x.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    return load_config("x.yaml", overrides)


def error(text: str | bytes, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(text, *overrides)
    message = str(caught.value)
    assert message.isprintable(), "one line"
    return message


def test_a_short_file_is_a_whole_run():
    config = load(TEN_LINES)
    assert config.run.dir == "runs/x"
    assert config.run.seed == 7
    assert config.model.factory == "gpt2"
    assert config.model.options == {"num_layers": 4, "tied": False}
    assert config.parallelism.layers == (1, 3)
    assert config.schedule.max_live_per_stage(2) == (3, 3)
    assert config.optimizer.learning_rate == 1e-3
    assert config.optimizer.clip_norm is None
    assert config.optimizer.warmup_steps == 4
    assert config.emulation.accelerator is not None
    assert config.emulation.accelerator.backward_input_ms == (10.0, 12.5)
    assert config.tokens_per_step == 6 * 2 * 128


LINKS = (
    "parallelism={stages: 4}",
    "emulation.accelerator=null",
    "routes={default: direct, 2-3: delegated, 0-3: delegated}",
    "schedule.link_ms={1-2: 7, 2-3: 30.5}",
    "emulation.links=[{between: [2, 3], latency_ms: 30, jitter_ms: 3},"
    " {between: [0, 1], bandwidth_mbps: 10.5, cut: true, from_step: 3, to_step: 9, source: 1}]",
    "emulation.trace=traces/week.csv",
    "transport={addresses: [10.0.0.1, 10.0.1.1], lanes: 3, checksum: false}",
)


@pytest.mark.parametrize("overrides", [[], ["data.path='1e-3'", "model.mode='off'"], LINKS])
def test_a_dumped_config_loads_back_equal(overrides):
    config = load(TEN_LINES, *overrides)
    Path("another.yaml").write_text(dump_config(config))
    assert load_config("another.yaml") == config


def test_an_override_replaces_a_value_a_list_or_a_section():
    config = load(
        TEN_LINES,
        "parallelism.layers=[2, 2]",
        "stash=recompute",
        "schedule={name: gpipe}",
        "emulation.accelerator=null",
        "run.steps=3",
        "run.steps=5",
    )
    assert config.parallelism.layers == (2, 2)
    assert config.stash == "recompute"
    assert (config.schedule.name, config.schedule.max_live) == ("gpipe", None)
    assert config.emulation.accelerator is None
    assert (config.run.steps, config.optimizer.warmup_steps) == (5, 0)


def test_links_can_be_overridden_one_by_one():
    config = load(
        TEN_LINES,
        *LINKS,
        "emulation.links.0.latency_ms=60",
        "routes.0-1=delegated",
        "routes.default=delegated",
        "routes.2-3=direct",
        "schedule.link_ms.0-1=2",
    )
    assert [link.latency_ms for link in config.emulation.links] == [60.0, 0.0]
    assert config.emulation.links[0].jitter_ms == 3.0
    assert config.emulation.links[1].between == (0, 1)
    links = [Link(0, 1), Link(1, 2), Link(2, 3), Link(0, 3)]
    routes = config.routes.of_links(links)
    assert [routes[link] for link in links] == ["delegated", "delegated", "direct", "delegated"]
    assert config.schedule.link_ms == {"0-1": 2.0, "1-2": 7.0, "2-3": 30.5}
    assert config.transport.addresses == ("10.0.0.1", "10.0.1.1")


@pytest.mark.parametrize(
    ("mistake", "says"),
    [
        ("emulation.links.0.latency_ms=-1", "got -1, expected a number of at least 0"),
        ("emulation.links.2.latency_ms=1", "emulation.links: got"),
    ],
)
def test_a_wrong_override_of_a_lists_entry_names_itself(mistake, says):
    message = error(TEN_LINES, *LINKS, mistake)
    assert message.startswith(f"{mistake} (command line): {says}")


def test_chunks_have_layers_for_each_virtual_stage():
    config = load(
        TEN_LINES,
        "schedule={name: interleaved}",
        "parallelism={stages: 2, chunks: 2, layers: [1, 2, 3, 4]}",
    )
    assert config.parallelism.virtual_stages == 4
    assert config.parallelism.layers == (1, 2, 3, 4)
    assert config.schedule.max_live_per_stage(2) is None


def test_an_empty_section_has_its_defaults():
    assert load("schedule:\nbatch: {microbatches: 2}").schedule == Config().schedule


WRONG_VALUES = Path(__file__).with_name("wrong_values.txt").read_text().splitlines()


@pytest.mark.parametrize("line", WRONG_VALUES)
def test_a_wrong_value_is_one_line(line):
    text, says = line.split(" => ")
    assert error(text) == f"x.yaml: {says}"


FILE_ERRORS = {
    b"": "the file is empty, expected sections such as 'run' and 'model'",
    b"# only a comment": "the file is empty, expected sections such as 'run' and 'model'",
    b"[run, model]": "got [run, model], expected sections such as 'run' and 'model'",
    b"run:\n  steps: 3\n  steps: 4": "not YAML: line 3, column 3: the key 'steps' is there twice",
    b"run: a: b": "not YAML: line 1, column 7: mapping values are not allowed here",
    b"run: {steps: 3": "not YAML: line 1, column 15: expected ',' or '}', but got '<stream end>'",
    b"run: {}\n---\nrun: {}": (
        "not YAML: line 2, column 1: "
        "expected a single document in the stream but found another document"
    ),
    b"run: \x07": "not YAML: character #x0007 is not allowed in YAML",
    b"{" * 5000: "not YAML: it is nested too deeply",
    b"run: \xff": "not UTF-8 text (byte 5 is 0xff), expected a YAML file",
    b"!!python/object:os.system x": (
        "not YAML: line 1, column 1: "
        "could not determine a constructor for the tag 'tag:yaml.org,2002:python/object:os.system'"
    ),
}


@pytest.mark.parametrize("text", FILE_ERRORS)
def test_a_file_that_is_no_config_is_one_line(text):
    assert error(text) == f"x.yaml: {FILE_ERRORS[text]}"


def test_a_missing_file_and_a_folder_are_one_line():
    Path("folder").mkdir()
    for path, says in {"nope.yaml": "no such file", "folder": "got a folder"}.items():
        with pytest.raises(UserError, match=f"^{path}: {says}, expected a YAML file$"):
            load_config(path)


OVERRIDE_ERRORS = {
    "batch.microbatches=abc": "got 'abc', expected a whole number of at least 1",
    "batch={microbatches: abc}": (
        "batch.microbatches: got 'abc', expected a whole number of at least 1"
    ),
    "schedule.nmae=paper": "unknown key; did you mean 'name'?",
    "shedule.name=paper": "shedule: unknown key; did you mean 'schedule'?",
    "stash.mode=full": "stash: got {mode: full}, expected one of full, recompute",
    "run.dir=": "got null, expected text",
    "run.steps": "expected section.key=value",
    "=3": "expected section.key=value",
    "run..steps=3": "expected section.key=value",
    "run.steps=[1,": (
        "the value is not YAML: line 1, column 4: "
        "expected the node content, but found '<stream end>'"
    ),
}


@pytest.mark.parametrize("override", OVERRIDE_ERRORS)
def test_a_wrong_override_names_itself(override):
    assert error("run: {}", override) == f"{override} (command line): {OVERRIDE_ERRORS[override]}"

    says = "got 'a b', expected a whole number of at least 1"  # a line break becomes a space
    assert error("run: {}", "run.steps=a\n b") == f"run.steps=a  b (command line): {says}"
    in_file = error("run: {steps: 0}", "run.seed=3", "batch.microbatches=2")
    assert in_file == "x.yaml: run.steps: got 0, expected a whole number of at least 1"


@pytest.mark.parametrize(
    ("overrides", "later", "says"),
    [
        ([], "parallelism.stages: got 9", "a.yaml: parallelism.stages: got 9"),
        (["run.steps=3"], "parallelism.stages: got 9", "a.yaml: parallelism.stages: got 9"),
        (
            ["parallelism={stages: 7}", "parallelism.stages=9"],  # the last one
            "parallelism.stages: got 9",
            "parallelism.stages=9 (command line): got 9",
        ),
        ([], "schedule.max_live[2]: got 3", "a.yaml: schedule.max_live[2]: got 3"),
        (
            ["schedule.max_live=[4, 3, 3]"],
            "schedule.max_live[2]: got 3",
            "schedule.max_live=[4, 3, 3] (command line): schedule.max_live[2]: got 3",
        ),
        ([], "no key here", "no key here"),
        ([], "two words: then more", "two words: then more"),
    ],
)
def test_an_error_found_later_names_the_file_or_the_override(overrides, later, says):
    assert str(located_error("a.yaml", overrides, UserError(later))) == says
