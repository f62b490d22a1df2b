import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.training.cluster import is_first_task, require_one_host

PACED = {"accelerator": {"forward_ms": 5.0, "backward_input_ms": 5.0, "backward_weight_ms": 5.0}}


class RanksOn:
    """A rendezvous of ranks on some hosts."""

    def __init__(self, *hosts: str) -> None:
        self._hosts = hosts

    def exchange(self, _: dict) -> list[dict]:
        return [{"value": host} for host in self._hosts]


def require(emulation: dict, *hosts: str) -> None:
    config = Config.model_validate({"parallelism": {"stages": 2}, "emulation": emulation})
    require_one_host(config, RanksOn(*hosts))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("emulation", [PACED, {"trace": {"regime": "A", "duration_s": 1}}])
def test_clocked_emulation_is_refused_on_several_hosts(emulation):
    require(emulation, "one", "one")
    with pytest.raises(UserError, match="got ranks on 2 hosts, expected one"):
        require(emulation, "one", "two")


def test_a_trace_by_step_works_on_several_hosts(tmp_path):
    path = tmp_path / "events.csv"
    path.write_text("step,links,latency_ms\n0,0-1,30\n")
    require({"trace": str(path)}, "one", "two")
    require({}, "one", "two")


@pytest.mark.parametrize("name", ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"])
def test_the_first_task_is_known(monkeypatch, name):
    for each in ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX"):
        monkeypatch.delenv(each, raising=False)
    assert is_first_task()
    monkeypatch.setenv(name, "0")
    assert is_first_task()
    monkeypatch.setenv(name, "1")
    assert not is_first_task()
