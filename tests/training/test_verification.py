"""Ranks that have joined verify the checkpoint together."""

import pytest
from written_run import CONFIG, write_run

from jaxmorph.checkpoints.manifest import stage_path
from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.training.resume import RunStart, checkpoint_folder
from jaxmorph.training.verification import verified, verified_script_start


class OneOfTwo(SoleRank):
    """One of two ranks; the other one finds everything whole."""

    num_ranks = 2

    def __init__(self, rank):
        self.rank = rank

    def exchange(self, message, detail=b"", addressed=()):
        (own,) = super().exchange(message, detail)
        whole = {"value": {"file": "", "got": "", "expected": ""}}
        other = whole if isinstance(message["value"], dict) else own
        return [own, other] if self.rank == 0 else [other, own]


def damage_part(run, step, number):
    part = stage_path(checkpoint_folder(Config(), run).finished(step), number)
    (part / "array").write_text("x" * len(f"{step} {number}"))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_have_joined_verify_their_own_parts(tmp_path, rank):
    run = write_run(tmp_path, [7, 14])
    damage_part(run, 14, rank)
    start = RunStart(Config(), 14, run)
    found = verified(start, OneOfTwo(rank))
    assert found.first_step == 7
    (passed_over,) = found.passed_over
    assert passed_over.step == 14
    assert passed_over.damage.file.name == "array"
    assert verified(start, OneOfTwo(1 - rank)) == start


def test_ranks_that_find_no_whole_checkpoint_say_so(tmp_path):
    run = write_run(tmp_path, [7, 14])
    damage_part(run, 7, 0)
    damage_part(run, 14, 0)
    with pytest.raises(UserError, match=r"got no whole checkpoint in .*step_14.*step_7"):
        verified(RunStart(Config(), 14, run), SoleRank())


def test_a_run_from_the_start_has_nothing_to_verify():
    start = RunStart(Config())
    assert verified(start, SoleRank()) is start


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_begin_together_where_there_is_no_checkpoint(tmp_path, rank):
    start = RunStart(Config(), 0, tmp_path)
    assert verified(start, OneOfTwo(rank)) == start


def script_of(directory):
    return Config.model_validate(CONFIG | {"run": {"dir": str(directory), "steps": 20}})


def test_a_scripts_rank_0_reads_its_own_parts_alone(tmp_path):
    config = script_of(tmp_path)
    run = write_run(tmp_path, [7, 14], config)
    damage_part(run, 14, 1)
    start = verified_script_start(config, OneOfTwo(0), resume=True)
    assert (start.first_step, start.directory) == (14, run)
    damage_part(run, 14, 0)
    start = verified_script_start(config, OneOfTwo(0), resume=True)
    assert (start.first_step, [each.step for each in start.passed_over]) == (7, [14])


def test_a_script_without_a_whole_checkpoint_is_refused(tmp_path):
    config = script_of(tmp_path)
    assert verified_script_start(config, SoleRank(), resume=True) == RunStart(config)
    run = write_run(tmp_path, [7], config)
    damage_part(run, 7, 0)
    with pytest.raises(UserError, match=r"got no whole checkpoint in .*step_7"):
        verified_script_start(config, SoleRank(), resume=True)
