"""Ranks read a run's data on their own, before the first step: what differs is refused."""

from dataclasses import asdict
from types import SimpleNamespace
from typing import Any, cast

import pytest

from jaxmorph.compare import rank
from jaxmorph.config import check_config, dump_config
from jaxmorph.data.tokens import DataDigest
from jaxmorph.errors import UserError
from jaxmorph.messages import RunMessage
from jaxmorph.runtime.rendezvous import Rendezvous, SoleRank
from jaxmorph.training.run_parts import load_parts, require_same_data
from jaxmorph.training.train import train

PATH = "data: got other tokens on rank 1 than on rank 0"


class WithAnother(SoleRank):
    """Rank 0 of two; rank 1 has read the data of this digest."""

    num_ranks = 2

    def __init__(self, other: DataDigest) -> None:
        super().__init__()
        self._other = {"value": asdict(other)}

    def exchange(self, message: Any, detail: bytes = b"", addressed: Any = ()) -> list[Any]:
        return [message, self._other]


def with_another(*digest: Any) -> Rendezvous:
    return cast(Rendezvous, WithAnother(DataDigest(*digest)))


def config_of(path: Any):
    path.write_text("a text of some length, " * 100)
    sizes = {"sequence_length": 8, "path": str(path)}
    batch = {"microbatches": 2, "microbatch_size": 1}
    conditions = [{"name": "healthy"}]
    return check_config({"data": sizes, "batch": batch, "compare": {"conditions": conditions}})


def test_training_needs_the_same_text_on_all_ranks(tmp_path):
    sent: list[RunMessage] = []
    with pytest.raises(UserError, match=rf"^{PATH} \(9, rank 0 has 2,300\), expected the s"):
        train(config_of(tmp_path / "a.txt"), with_another(9, "ab"), sent.append, tmp_path)
    assert not sent


def test_comparisons_need_the_same_text_on_all_ranks(tmp_path, monkeypatch):
    path, sent = tmp_path / "config.yaml", []
    path.write_text(dump_config(config_of(tmp_path / "a.txt")))
    monkeypatch.setattr(rank, "join_run", lambda *_, **__: with_another(9, "ab"))
    link = cast(Any, SimpleNamespace(send=sent.append))
    with pytest.raises(UserError, match=f"^{PATH}"):
        rank._run_rank(cast(Any, None), link, [str(path), "adaptive", "1"])
    assert not sent


def test_own_data_are_compared_by_their_digest():
    config = check_config({"data": {"factory": "own"}})
    require_same_data(config, with_another(0, "ab"), DataDigest(0, "ab"))
    with pytest.raises(UserError, match=r"^data.factory: own: got other data, or another module"):
        require_same_data(config, with_another(0, "ab"), DataDigest(0, "cd"))


def test_texts_of_one_length_may_differ(tmp_path):
    config = config_of(tmp_path / "a.txt")
    with pytest.raises(UserError, match=f"^{PATH}, expected"):
        require_same_data(config, with_another(9, "ab"), DataDigest(9, "cd"))


def test_ranks_with_the_same_text_go_on(tmp_path):
    config = config_of(tmp_path / "a.txt")
    data = load_parts(config).data
    require_same_data(config, with_another(data.num_tokens, data.digest), data)


@pytest.mark.parametrize(
    "data", [{"path": "none.txt"}, {"path": "none.bin"}, {"tokenizer": "none.json"}]
)
def test_missing_data_are_retried_after_a_restart(tmp_path, data):
    """Their storage may be back; at the first start it is the user's mistake."""
    gone = {name: str(tmp_path / file) for name, file in data.items()}
    tree = {**config_of(tmp_path / "a.txt").model_dump()["data"], **gone}
    config, sent = check_config({"data": tree}), cast(list[RunMessage], [])
    with pytest.raises(UserError):
        train(config, SoleRank(), sent.append, tmp_path)
    with pytest.raises(FileNotFoundError):
        train(config, SoleRank(), sent.append, tmp_path, restarts=1)
