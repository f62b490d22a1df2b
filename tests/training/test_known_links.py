"""Degraded links that a run records for its next start."""

import json
from dataclasses import replace

import pytest

from jaxmorph.config import check_config
from jaxmorph.control.link_state import LinkHealth, PathState
from jaxmorph.control.verdicts import Evidence, KnownDirection, Verdict
from jaxmorph.plain_json import dump
from jaxmorph.report.run_directory import links_file, open_run_directory
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.training.starting_point import KnownLinks, known_links

THREE_STAGES = (range(2), range(2, 4), range(4, 6))


def adapting(**sections):
    adapts = {"parallelism": {"stages": 3}, "adaptation": {"enabled": True}}
    return check_config(adapts | {"schedule": {"name": "zb-h2"}} | sections)


def direction(source, destination, path=PathState.UP, step=7):
    evidence = Evidence((41.0, 42.0), 1.0, 0.5, 6.0)
    state = LinkHealth.SLOW, 41.5, 0.5, step, evidence, "is slow", path
    verdict = Verdict(source, destination, *state)
    return KnownDirection(verdict, "delegated", {"direct": 0.5, "delegated": 1.5})


KNOWN = (direction(1, 2), direction(0, 1, PathState.FAILED), direction(1, 0, PathState.FAILED))


@pytest.fixture
def written(tmp_path):
    """A run directory with a record of degraded links."""
    config = adapting(run={"dir": str(tmp_path / "run")})
    with open_run_directory(config) as directory:
        path = links_file(directory.path, 0)
        message = KnownLinks(config, path, THREE_STAGES).take_changes(7, KNOWN)
        assert message is not None
        directory.write_links(message)
        directory.write_links(replace(message, directions=message.directions[:1], replica=1))
    return directory.path


def read_links(directory, layers=THREE_STAGES, replica=0, **sections):
    path = links_file(directory, replica)
    return known_links(adapting(**sections), SoleRank(), path, layers)


def test_each_replica_reads_its_own_links(written):
    assert read_links(written, replica=1) == KNOWN[:1]
    assert read_links(written, replica=2) == ()
    assert (written / "links_r1.json").is_file()


def test_the_same_pipeline_reads_its_links(written):
    assert read_links(written) == KNOWN
    assert read_links(written, run={"steps": 900}, batch={"microbatches": 3}) == KNOWN


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
    assert read_links(written, **sections) == ()


def test_a_run_that_does_not_adapt_reads_none(written):
    assert read_links(written, adaptation={"enabled": False}) == ()


def test_without_failover_dead_links_are_not_read(written):
    assert read_links(written, failover={"enabled": False}) == KNOWN[:1]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"pipeline"', '{"pipeline": 1, "step": 2}'])
def test_an_unreadable_record_is_ignored(written, text):
    links_file(written, 0).write_text(text)
    assert read_links(written) == ()
    links_file(written, 0).unlink()
    assert read_links(written) == ()


class Follower(SoleRank):
    """Rank 1, which gets rank 0's message."""

    rank, num_ranks = 1, 2

    def __init__(self, message):
        self._message = message

    def exchange(self, message, detail=b"", addressed=()):
        assert message == {"value": ()}
        return [self._message, message]


def test_all_ranks_get_rank_0s_record(written, tmp_path):
    message = {"value": json.loads(links_file(written, 0).read_text())["directions"]}
    path = links_file(tmp_path, 0)
    assert known_links(adapting(), Follower(message), path, THREE_STAGES) == KNOWN


def test_each_change_is_reported_once(tmp_path):
    known = KnownLinks(adapting(), links_file(tmp_path, 0), THREE_STAGES)
    assert known.take_changes(0, ()) is None
    for directions in (KNOWN, (direction(1, 2, step=9),), ()):
        message = known.take_changes(9, directions)
        assert message is not None
        assert message.directions == tuple(json.loads(dump(each)) for each in directions)
        assert known.take_changes(10, directions) is None


def test_an_earlier_record_is_cleared_by_the_first_step(written):
    message = KnownLinks(adapting(), links_file(written, 0), THREE_STAGES).take_changes(0, ())
    assert message is not None
    assert message.directions == ()
