"""What a run knew of its links, kept for when it is started again."""

import json

import pytest

from jaxmorph.config import check_config
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.verdicts import Evidence, KnownDirection, Verdict
from jaxmorph.plain_json import as_object
from jaxmorph.report import open_run_directory
from jaxmorph.report.run_directory import LINKS
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.training.starting_point import KnownLinks, known_links

THREE_STAGES = (range(2), range(2, 4), range(4, 6))


def adapting(**sections):
    adapts = {"parallelism": {"stages": 3}, "adaptation": {"enabled": True}}
    return check_config(adapts | {"schedule": {"name": "zb-h2"}} | sections)


def direction(source, destination, path=PathState.UP, step=7):
    evidence = Evidence((41.0, 42.0), 1.0, 0.5, 6.0)
    state = LinkHealth.SLOW, 41.5, 0.5, step, evidence, "is slow", path
    told = Verdict(source, destination, *state)
    return KnownDirection(told, "delegated", {"direct": 0.5, "delegated": 1.5})


KNOWN = (direction(1, 2), direction(0, 1, PathState.FAILED), direction(1, 0, PathState.FAILED))


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
    for directions in (KNOWN, (direction(1, 2, step=9),), ()):
        told = known.news(9, directions)
        assert told is not None
        assert told.directions == tuple(each.to_json() for each in directions)
        assert known.news(10, directions) is None


def test_what_an_earlier_life_wrote_is_taken_back_by_the_first_step(written):
    told = KnownLinks(adapting(), written, THREE_STAGES).news(0, ())
    assert told is not None
    assert told.directions == ()
