from pathlib import Path

import pytest

from jaxmorph.config import Config, dump_config, load_config
from jaxmorph.errors import UserError
from jaxmorph.schedule.costs import Link

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
    assert config.model.factory == "models.gpt2"
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


def test_the_demo_loads_with_its_defaults_and_with_fewer_steps():
    demo = Path(__file__).parents[2] / "configs/demo.yaml"
    assert load_config(demo).run.dir == "runs/demo"
    assert load_config(demo, ["run.steps=3"]).run.steps == 3


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


def test_links_may_be_named_in_the_file_and_overridden_one_by_one():
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


def test_an_override_of_one_entry_of_a_list_is_told_as_itself():
    mistake = "emulation.links.0.latency_ms=-1"
    message = error(TEN_LINES, *LINKS, mistake)
    assert message == f"{mistake} (command line): got -1, expected a number of at least 0"


def test_an_override_of_an_entry_that_is_not_there_is_refused():
    message = error(TEN_LINES, *LINKS, "emulation.links.2.latency_ms=1")
    assert message.startswith("emulation.links.2.latency_ms=1 (command line): emulation.links: got")


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


VALUE_ERRORS = {
    "schedule: {name: zbh2}": (
        "schedule.name: got 'zbh2', expected one of gpipe, 1f1b, 1f1b-eager, zb-h1, zb-h2, "
        "interleaved, paper, adaptive, initial"
    ),
    "schedule: {nmae: paper}": "schedule.nmae: unknown key; did you mean 'name'?",
    "shedule: {name: paper}": "shedule: unknown key; did you mean 'schedule'?",
    "batch: {sequence_length: 3}": (
        "batch.sequence_length: unknown key; did you mean 'data.sequence_length'?"
    ),
    "run: {frobnicate: 1}": "run.frobnicate: unknown key; expected one of dir, seed, steps",
    "run: {1: 2}": "run.1: unknown key; expected one of dir, seed, steps",
    "batch: {microbatches: '12'}": (
        "batch.microbatches: got '12', expected a whole number of at least 1"
    ),
    "batch: {microbatches: true}": (
        "batch.microbatches: got true, expected a whole number of at least 1"
    ),
    "batch: {microbatches: 8.0}": (
        "batch.microbatches: got 8.0, expected a whole number of at least 1"
    ),
    "batch: {microbatches: 0}": (
        "batch.microbatches: got 0, expected a whole number of at least 1"
    ),
    "batch: {microbatches: 99999999999}": (
        "batch.microbatches: got 99999999999, expected a whole number of at most 2147483647"
    ),
    "batch: 3": "batch: got 3, expected a section of keys: microbatches, microbatch_size",
    "optimizer: {learning_rate: .nan}": (
        "optimizer.learning_rate: got .nan, expected a number above 0"
    ),
    "optimizer: {learning_rate: -.inf}": (
        "optimizer.learning_rate: got -.inf, expected a number above 0"
    ),
    "optimizer: {clip_norm: off}": (
        "optimizer.clip_norm: got 'off', expected a number above 0, or null"
    ),
    "run: {steps: 20}\noptimizer: {warmup_steps: 30}": (
        "optimizer.warmup_steps: got 30, expected at most run.steps, which is 20"
    ),
    "parallelism: {stages: 3, layers: [1, 2]}": (
        "parallelism.layers: got [1, 2], expected a list of 3, one for each of parallelism.stages"
    ),
    "parallelism: {layers: [1, 0]}": (
        "parallelism.layers: got [1, 0], "
        "expected auto, even, or a list with the number of layers of each stage (at least 1)"
    ),
    "parallelism: {stages: 2, chunks: 2, layers: [2, 2]}\nschedule: {name: interleaved}": (
        "parallelism.layers: got [2, 2], expected a list of 4, one for each of parallelism.stages "
        "times the 2 of parallelism.chunks"
    ),
    "parallelism: {chunks: 2}\nschedule: {name: zb-h2}": (
        "parallelism.chunks: got 2, "
        "expected 1, or schedule.name interleaved: zb-h2 runs one chunk on each stage"
    ),
    "parallelism: {chunks: 0}": (
        "parallelism.chunks: got 0, expected a whole number of at least 1"
    ),
    "parallelism: {tensor: 2}": (
        "parallelism.tensor: got 2, expected 1 (tensor parallelism is not supported yet)"
    ),
    "parallelism: {data: true}": (
        "parallelism.data: got true, expected 1 (data parallelism is not supported yet)"
    ),
    "routes: {default: relayed}": (
        "routes.default: got 'relayed', expected one of direct, delegated"
    ),
    "parallelism: {stages: 3}\nroutes: {1-2: relayed}": (
        "routes.1-2: got 'relayed', expected one of direct, delegated"
    ),
    "parallelism: {stages: 4}\nroutes: {2-4: delegated}": (
        "routes.2-4: unknown key; did you mean '2-3'?"
    ),
    "parallelism: {stages: 4}\nroutes: {3-2: delegated}": (
        "routes.3-2: unknown key; did you mean '2-3'?"
    ),
    "parallelism: {stages: 4}\nroutes: {last: delegated}": (
        "routes.last: unknown key; expected one of default, 0-1, 1-2, 2-3, 0-3"
    ),
    "routes: {defualt: delegated, 0-1: direct}": (
        "routes.defualt: unknown key; a pipeline of one stage has no links (and 1 more)"
    ),
    "parallelism: {stages: 4}\nroutes: {defualt: delegated}": (
        "routes.defualt: unknown key; did you mean 'default'?"
    ),
    "parallelism: {stages: 3}\nschedule: {link_ms: {1-3: 5}}": (
        "schedule.link_ms.1-3: unknown key; did you mean '1-2'?"
    ),
    "parallelism: {stages: 3}\nschedule: {link_ms: {1-2: -5}}": (
        "schedule.link_ms: got {1-2: -5}, "
        "expected null, or milliseconds of at least 0 by link, such as {2-3: 30}"
    ),
    "emulation: {links: {between: [0, 1]}}": (
        "emulation.links: got {between: [0, 1]}, "
        "expected a list of links, such as [{between: [2, 3], latency_ms: 30}]"
    ),
    "emulation: {links: [{latency_ms: 3}]}": (
        "emulation.links.0.between: missing, "
        "expected two neighbouring stages, the lower one first, such as [2, 3]"
    ),
    "parallelism: {stages: 4}\nemulation: {links: [{between: [0, 3]}, {between: [1, 3]}]}": (
        "emulation.links.1.between: got [1, 3], expected two neighbours of the 4 stages, "
        "the lower one first, or the first and the last"
    ),
    "parallelism: {stages: 2}\nemulation: {links: [{between: [0, 1], source: 2}]}": (
        "emulation.links.0.source: got 2, expected null, 0 or 1"
    ),
    "emulation: {links: [{between: [0, 1], latancy_ms: 2}]}": (
        "emulation.links.0.latancy_ms: unknown key; did you mean 'latency_ms'?"
    ),
    "emulation: {links: [{between: [0, 1], bandwidth_mbps: 0}]}": (
        "emulation.links.0.bandwidth_mbps: got 0, expected megabits per second above 0, or null"
    ),
    "parallelism: {stages: 2}\nemulation: {links: [{between: [0, 1], from_step: 5, to_step: 5}]}": (
        "emulation.links.0.to_step: got 5, expected null, or a step after from_step, which is 5"
    ),
    "emulation: {trace: 3}": (
        "emulation.trace: got 3, expected null, the path of a CSV file, or keys such as "
        "{regime: A, seed: 1}"
    ),
    "emulation: {trace: {regime: D}}": (
        "emulation.trace.regime: got 'D', expected null, or one of A, B, C, bursty"
    ),
    "emulation: {trace: {}}": (
        "emulation.trace.file: missing, expected the path of a CSV file, or a regime"
    ),
    "emulation: {trace: {file: x.csv, regime: A}}": (
        "emulation.trace.regime: got 'A', expected null, as a file is given: one of the two"
    ),
    "transport: {addresses: [localhost]}": (
        "transport.addresses: got [localhost], expected auto, or a list of IP addresses, "
        "one for each of this host's network cards, or of IPv4 subnets that they are in"
    ),
    "transport: {addresses: [10.0.0.0/33]}": (
        "transport.addresses: got [10.0.0.0/33], expected auto, or a list of IP addresses, "
        "one for each of this host's network cards, or of IPv4 subnets that they are in"
    ),
    "data: {held_out_fraction: 1}": (
        "data.held_out_fraction: got 1, expected a number from 0 to below 1"
    ),
    "evaluation: {every_steps: 5}": (
        "data.held_out_fraction: got 0.0, "
        "expected a number above 0, as evaluation.every_steps is given: what to evaluate"
    ),
    "evaluation: {every_steps: 0}": (
        "evaluation.every_steps: got 0, expected null, or a whole number of at least 1"
    ),
    "metrics: {tensorboard: 1}": "metrics.tensorboard: got 1, expected true or false",
    "transport: {lanes: 0}": (
        "transport.lanes: got 0, expected auto, or a whole number from 1 to 64"
    ),
    "transport: {chunk_bytes: 100}": (
        "transport.chunk_bytes: got 100, expected a whole number from 4096 to 16777216"
    ),
    "transport: {checksum: 1}": "transport.checksum: got 1, expected true or false",
    "transport: {backend: udp}": "transport.backend: got 'udp', expected one of tcp, nixl",
    "transport: {copies: dma}": (
        "transport.copies: got 'dma', expected one of auto, copy_engine, pallas, "
        "buffer_callback, pinned_host, io_callback"
    ),
    "model: {width: .nan}": "model.width: got .nan, expected a number, text, true, false or null",
    "emulation: {accelerator: {forward_ms: 1, backward_input_ms: 1}}": (
        "emulation.accelerator.backward_weight_ms: missing, expected "
        "milliseconds above 0: one number, or a list with one for each stage"
    ),
    "parallelism: {stages: 2}\nemulation: {accelerator: {forward_ms: [1, 2, 3], "
    "backward_input_ms: 1, backward_weight_ms: 1}}": (
        "emulation.accelerator.forward_ms: got [1.0, 2.0, 3.0], "
        "expected a list of 2, one for each of parallelism.stages"
    ),
    "run: {steps: abc, sed: 1}\nbatch: 3": (
        "run.steps: got 'abc', expected a whole number of at least 1 (and 2 more)"
    ),
}


@pytest.mark.parametrize("text", VALUE_ERRORS)
def test_a_wrong_value_is_told_in_one_line(text):
    assert error(text) == f"x.yaml: {VALUE_ERRORS[text]}"


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
def test_a_file_that_is_no_config_is_told_in_one_line(text):
    assert error(text) == f"x.yaml: {FILE_ERRORS[text]}"


def test_a_missing_file_and_a_folder_are_told_in_one_line():
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


def test_an_error_of_the_file_is_not_blamed_on_an_override():
    message = error("run: {steps: 0}", "run.seed=3", "batch.microbatches=2")
    assert message == "x.yaml: run.steps: got 0, expected a whole number of at least 1"


def test_a_line_break_in_an_override_stays_on_one_line():
    assert error("run: {}", "run.steps=a\n b").startswith(
        "run.steps=a  b (command line): got 'a b'"
    )
