import json

import pytest

from jaxmorph.cli.measured_run import read_run, run_fields
from jaxmorph.config import Config, dump_config
from jaxmorph.control.profiler import Profile
from jaxmorph.errors import UserError
from jaxmorph.records import Link
from jaxmorph.schedule.costs import LinkDelay, StageCosts, StashBytes
from jaxmorph.schedule.problem import parse_problem

COSTS = StageCosts((1.0, 2.0, 3.0), (4.0, 5.0, 6.0), (7.0, 8.0, 9.0))
LINKS = {Link(0, 1): LinkDelay(1.5, 2.5), Link(0, 2): LinkDelay(9.0, 9.5)}
CONFIG = {
    "parallelism": {"stages": 3},
    "batch": {"microbatches": 6},
    "schedule": {"name": "zb-h1", "max_live": 5, "live_until": "W"},
}


@pytest.fixture
def run_directory(tmp_path):
    (tmp_path / "config.yaml").write_text(dump_config(Config.model_validate(CONFIG)))
    (tmp_path / "profile.json").write_text(json.dumps(Profile(COSTS, LINKS).to_json()))
    return tmp_path


def test_a_run_becomes_a_planning_problem(run_directory):
    problem = parse_problem({"name": "run", "link_ms": 0, **run_fields(*read_run(run_directory))})
    assert (problem.num_microbatches, problem.schedule, problem.num_chunks) == (6, "zb-h1", 1)
    assert problem.costs == COSTS
    assert problem.links == {Link(0, 1): LinkDelay(1.5, 2.5), Link(1, 2): LinkDelay()}
    assert (problem.limits.max_live, problem.limits.live_until) == ((5, 5, 5), "W")


def test_a_run_gives_its_stash_sizes(run_directory):
    sizes = StashBytes((30, 20, 10), (3, 2, 1))
    profile = Profile(COSTS, LINKS, sizes)
    (run_directory / "profile.json").write_text(json.dumps(profile.to_json()))
    config = Config.model_validate(CONFIG | {"schedule": {"max_stash_bytes": 90}})
    (run_directory / "config.yaml").write_text(dump_config(config))
    fields = run_fields(*read_run(run_directory))
    limits = parse_problem({"name": "run", "link_ms": 0, **fields}).limits
    assert (limits.max_stash_bytes, limits.stash_bytes) == ((90, 90, 90), sizes)


def test_another_schedule_may_need_the_wrap_around_link(run_directory):
    fields = run_fields(*read_run(run_directory), "interleaved")
    problem = parse_problem({"name": "run", "link_ms": 0, **fields})
    assert (problem.schedule, problem.num_chunks) == ("interleaved", 2)
    assert problem.links[Link(0, 2)] == LinkDelay(9.0, 9.5)


def test_an_interleaved_run_keeps_its_chunks(run_directory):
    own = {"parallelism": {"stages": 3, "chunks": 4}, "schedule": {"name": "interleaved"}}
    config = Config.model_validate(CONFIG | own)
    (run_directory / "config.yaml").write_text(dump_config(config))
    run = read_run(run_directory)
    for asked in (None, "interleaved"):
        assert run_fields(*run, asked)["chunks"] == 4
    assert run_fields(*run, "zb-h2")["chunks"] == 1


def test_a_directory_without_a_run_is_named(run_directory, tmp_path):
    with pytest.raises(UserError, match=r"^profile: got \S+/x, expected a run directory"):
        read_run(tmp_path / "x")
    profile = run_directory / "profile.json"
    one = Profile(StageCosts.uniform(1, 1, 1, 1), {}).to_json()
    for text in ("{", "[]", '{"costs": {}}', '{"costs": {"x": [1]}, "links": {}}'):
        profile.write_text(text)
        with pytest.raises(UserError, match=r"^profile: \S+/profile.json: got .* expected meas"):
            read_run(run_directory)
    profile.write_text(json.dumps(one))
    with pytest.raises(UserError, match=r"got costs of 1 stages, expected parallelism.stages, 3"):
        read_run(run_directory)
    profile.unlink()
    with pytest.raises(UserError, match=r"without profile.json, expected a run that has recorded"):
        read_run(run_directory)
