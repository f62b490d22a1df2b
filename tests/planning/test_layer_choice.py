import pytest

from jaxmorph.config import Config
from jaxmorph.errors import UserError
from jaxmorph.planning.layer_choice import choose_layers, cut_by_costs
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.stage.layer_costs import LayerCosts

HEAVY_HEAD = LayerCosts(embed_ms=0.5, layer_ms=2.0, head_ms=5.0)
PACED = {"forward_ms": 1, "backward_input_ms": 1, "backward_weight_ms": 1}


class Rank(SoleRank):
    """One of several ranks: rank 0's messages are kept, another rank hears them."""

    def __init__(self, rank, heard=()):
        self.rank, self.num_ranks = rank, 2
        self.said, self._heard = [], list(heard)

    def exchange(self, message, detail=None):
        self.said.append(message)
        return [message if self.rank == 0 else self._heard.pop(0), {}]


def config_of(stages=2, accelerator=None, schedule="zb-h2", **parallelism):
    return Config.model_validate(
        {
            "parallelism": {"stages": stages, "layers": "auto"} | parallelism,
            "emulation": {"accelerator": accelerator},
            "schedule": {"name": schedule},
        }
    )


def not_measured():
    raise AssertionError("nothing needs to be measured")


def counts(choice):
    return [len(layers) for layers in choice.layers]


def test_the_stage_with_a_heavy_head_gets_fewer_layers():
    layers, reason = cut_by_costs(HEAVY_HEAD, 8, 2)
    assert layers == (5, 3)
    assert reason == (
        "slowest stage 11 ms a microbatch, 13 ms under the even cut 4 4; "
        "embedding 0.5, a layer 2, the head 5 ms"
    )


def test_a_heavy_embedding_counts_as_well():
    layers, _ = cut_by_costs(LayerCosts(embed_ms=4.0, layer_ms=2.0, head_ms=6.0), 9, 3)
    assert layers == (3, 4, 2)


@pytest.mark.parametrize(("head_ms", "layers"), [(2.05, (4, 4)), (2.25, (5, 3))])
def test_the_even_cut_stays_unless_another_is_clearly_faster(head_ms, layers):
    chosen, reason = cut_by_costs(LayerCosts(0.0, 2.0, head_ms), 8, 2)
    assert chosen == layers
    assert reason.startswith("even: slowest stage 10") == (layers == (4, 4))


def test_rank_0_measures_and_the_others_take_its_answer():
    rank_0 = Rank(0)
    first = choose_layers(config_of(), rank_0, 8, lambda: HEAVY_HEAD)
    second = choose_layers(config_of(), Rank(1, heard=rank_0.said), 8, not_measured)
    assert counts(first) == [5, 3]
    assert first == second
    assert rank_0.said[0] == {}


def test_what_was_chosen_before_stays_and_nothing_is_measured():
    rank_0 = Rank(0)
    first = choose_layers(config_of(), rank_0, 8, not_measured, (6, 2))
    second = choose_layers(config_of(), Rank(1, heard=rank_0.said), 8, not_measured)
    assert counts(first) == [6, 2]
    assert first == second
    assert first.reason == "as the run was cut before"


@pytest.mark.parametrize(
    ("config", "cut", "reason"),
    [
        (config_of(accelerator=PACED), [4, 4], "even: paced ops last as long"),
        (config_of(chunks=2, schedule="interleaved"), [2, 2, 2, 2], "even: a stage's chunks"),
        (config_of(layers="even"), [4, 4], ""),
        (config_of(layers=[3, 5]), [3, 5], ""),
        (config_of(stages=8), [1] * 8, ""),
        (config_of(stages=1), [8], ""),
    ],
)
def test_nothing_is_measured_where_it_does_not_matter(config, cut, reason):
    choice = choose_layers(config, SoleRank(), 8, not_measured)
    assert counts(choice) == cut
    assert choice.reason.startswith(reason)
    assert bool(choice.reason) == bool(reason)


def test_more_stages_than_layers_is_refused_before_measuring():
    with pytest.raises(UserError, match=r"parallelism.stages: got 9, expected between 1 and"):
        choose_layers(config_of(stages=9), SoleRank(), 8, not_measured)
