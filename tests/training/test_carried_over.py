"""What a run keeps for its next life: the cut that it measured, and what it knows of its links."""

import json
from typing import Any

import pytest

from jaxmorph.checkpoints.folder import CheckpointFolder
from jaxmorph.checkpoints.manifest import Manifest
from jaxmorph.config import check_config
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.verdicts import Evidence, KnownWay, Verdict
from jaxmorph.messages import as_object
from jaxmorph.report import open_run_directory
from jaxmorph.report.run_directory import LINKS
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.stage.layer_costs import LayerCosts
from jaxmorph.training import run
from jaxmorph.training.carried_over import FILE, KnownLinks, chosen_before, keep_choice, known_links
from jaxmorph.training.run_checkpoints import RunCheckpoints
from jaxmorph.training.run_parts import load_parts

HEAVY_HEAD, HEAVY_EMBEDDING = LayerCosts(0.0, 2.0, 5.0), LayerCosts(5.0, 2.0, 0.0)
LAYERS = (range(5), range(5, 8))
THREE_STAGES = (range(2), range(2, 4), range(4, 6))


def config_of(layers: Any = "auto", stages=2, chunks=1, schedule="zb-h2"):
    return check_config(
        {
            "model": {"preset": "tiny", "width": 16, "num_heads": 2, "num_layers": 8},
            "data": {"sequence_length": 8},
            "parallelism": {"stages": stages, "chunks": chunks, "layers": layers},
            "schedule": {"name": schedule},
            "checkpoint": {"every_steps": 0},
        }
    )


@pytest.mark.parametrize("first_step", [0, 7])
def test_a_life_after_a_failure_keeps_the_cut_that_the_one_before_has_measured(
    tmp_path, monkeypatch, first_step
):
    """With a checkpoint of one stage to go on from, or none at all."""
    manifest = Manifest(7, (range(8),), 256, (), config_of(stages=1))
    monkeypatch.setattr(CheckpointFolder, "manifest", lambda folder, step: manifest)
    measured = [HEAVY_HEAD, HEAVY_EMBEDDING]
    monkeypatch.setattr(run, "measured_on_rank_0", lambda *_: measured.pop(0))

    def life(restarts):
        checkpoints = RunCheckpoints(config_of(), tmp_path, first_step)
        config = checkpoints.starting_config
        model = load_parts(config).model
        return run.load_run(config, SoleRank(), model, checkpoints, restarts=restarts)

    lives = [life(restarts) for restarts in (0, 1)]
    assert [life.cut.layers for life in lives] == [LAYERS, LAYERS]
    assert measured == [HEAVY_EMBEDDING]


def test_only_a_cut_that_was_to_be_chosen_is_kept(tmp_path):
    keep_choice(tmp_path, config_of(layers=[5, 3]), LAYERS)
    assert chosen_before(tmp_path, config_of(), 8) is None
    keep_choice(tmp_path, config_of(), LAYERS)
    assert chosen_before(tmp_path, config_of(), 8) == (5, 3)
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


@pytest.mark.parametrize(
    ("config", "num_layers"),
    [
        (config_of(stages=4), 8),
        (config_of(stages=1), 8),
        (config_of(stages=1, chunks=2, schedule="interleaved"), 8),
        (config_of(), 9),
    ],
)
def test_other_stages_are_cut_anew(tmp_path, config, num_layers):
    keep_choice(tmp_path, config_of(), LAYERS)
    assert chosen_before(tmp_path, config, num_layers) is None


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", json.dumps({"stages": 2, "chunks": 1, "layers": [9, -1]})]
)
def test_what_cannot_be_is_cut_anew(tmp_path, text):
    (tmp_path / FILE).write_text(text)
    assert chosen_before(tmp_path, config_of(), 8) is None


def adapting(**sections):
    adapts = {"parallelism": {"stages": 3}, "adaptation": {"enabled": True}}
    return check_config(adapts | {"schedule": {"name": "zb-h2"}} | sections)


def way(source, destination, path=PathState.UP, step=7):
    evidence = Evidence((41.0, 42.0), 1.0, 0.5, 6.0)
    state = LinkHealth.SLOW, 41.5, 0.5, step, evidence, "is slow", path
    told = Verdict(source, destination, *state)
    return KnownWay(told, "delegated", {"direct": 0.5, "delegated": 1.5})


KNOWN = (way(1, 2), way(0, 1, PathState.FAILED), way(1, 0, PathState.FAILED))


@pytest.fixture
def written(tmp_path):
    """A run's directory, in which all that is known is written."""
    config = adapting(run={"dir": str(tmp_path / "run")})
    with open_run_directory(config) as directory:
        told = KnownLinks(config, directory.path, THREE_STAGES).news(7, KNOWN)
        assert told is not None
        directory.write_links(as_object(told))
    return directory.path


def heard(directory, layers=THREE_STAGES, **sections):
    return known_links(adapting(**sections), SoleRank(), directory, layers)


def test_what_was_written_is_heard_by_the_same_pipeline(written):
    assert heard(written) == KNOWN
    assert heard(written, run={"steps": 900}, batch={"microbatches": 3}) == KNOWN


@pytest.mark.parametrize(
    "sections",
    [
        {"layers": (range(1), range(1, 4), range(4, 6))},
        {"layers": (range(3), range(3, 6)), "parallelism": {"stages": 2}},
        {"batch": {"microbatch_size": 7}},
        {"data": {"sequence_length": 32}},
        {"precision": {"compute": "bfloat16"}},
    ],
)
def test_another_pipeline_has_other_links(written, sections):
    assert heard(written, **sections) == ()


def test_a_run_that_does_not_adapt_would_never_take_them_back(written):
    assert heard(written, adaptation={"enabled": False}) == ()


def test_without_failing_over_nobody_finds_that_a_dead_links_path_is_up(written):
    assert heard(written, failover={"enabled": False}) == KNOWN[:1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pipeline"', '{"pipeline": 1, "ways": 2}'])
def test_what_cannot_be_read_is_found_again(written, text):
    (written / LINKS).write_text(text)
    assert heard(written) == ()
    (written / LINKS).unlink()
    assert heard(written) == ()


class Follower(SoleRank):
    """Rank 1, which hears rank 0."""

    rank, num_ranks = 1, 2

    def __init__(self, message):
        self._message = message

    def exchange(self, message, detail=None):
        assert message == {"value": ()}
        return [self._message, message]


def test_all_ranks_hear_what_rank_0_has_read(written, tmp_path):
    told = {"value": json.loads((written / LINKS).read_text())["ways"]}
    assert known_links(adapting(), Follower(told), tmp_path, THREE_STAGES) == KNOWN


def test_news_are_told_once_and_so_is_their_end(tmp_path):
    known = KnownLinks(adapting(), tmp_path, THREE_STAGES)
    assert known.news(0, ()) is None
    for ways in (KNOWN, (way(1, 2, step=9),), ()):
        told = known.news(9, ways)
        assert told is not None
        assert told.ways == tuple(each.to_json() for each in ways)
        assert known.news(10, ways) is None


def test_what_an_earlier_life_wrote_is_taken_back_by_the_first_step(written):
    told = KnownLinks(adapting(), written, THREE_STAGES).news(0, ())
    assert told is not None
    assert told.ways == ()
