from itertools import combinations, pairwise

import numpy as np
import pytest

from jaxmorph.stage.minimum_cut import ValueGraph


def test_hands_over_the_narrowest_value_of_a_chain():
    graph = chain({"a": 5, "b": 2, "c": 3})
    assert graph.cheapest_cut() == ["b"]


def test_of_equal_prices_hands_over_the_earlier():
    assert chain({"a": 2, "b": 2}).cheapest_cut() == ["a"]


def test_hands_over_what_may_not_be_made_late():
    graph = chain({"a": 1, "b": 2, "c": 3})
    graph.made_early("c")
    assert graph.cheapest_cut() == ["c"]


def test_pays_for_making_a_value_late():
    graph = chain({"a": 2, "b": 4})
    graph.made_early("b", otherwise=3)
    assert graph.cheapest_cut() == ["b"]


def test_values_made_together_stay_in_one_half():
    graph = chain({"a": 10, "b": 1})
    graph.add("c", 100)
    graph.depends("c", "a")
    graph.together("b", "c")
    graph.used_late("c")
    assert graph.cheapest_cut() == ["a"]


def test_a_value_without_a_limit_is_refused():
    graph = ValueGraph[str]()
    graph.add("a", float("inf"))
    graph.made_early("a")
    graph.used_late("a")
    with pytest.raises(ValueError, match="no price"):
        graph.cheapest_cut()


@pytest.mark.parametrize("seed", range(30))
def test_agrees_with_trying_every_choice(seed):
    random = np.random.default_rng(seed)
    prices = {i: int(random.integers(1, 20)) for i in range(8)}
    operands = {i: [j for j in range(i) if random.random() < 0.4] for i in prices}
    early = {i for i in prices if not operands[i] or random.random() < 0.2}
    late = {i for i in prices if random.random() < 0.3} | {7}
    graph = ValueGraph[int]()
    for value, price in prices.items():
        graph.add(value, price)
        graph.depends(value, *operands[value])
        if value in early:
            graph.made_early(value)
    graph.used_late(*late)
    cut = graph.cheapest_cut()
    assert reaches(cut, operands, early, late)
    choices = (c for n in range(9) for c in combinations(prices, n))
    best = min(
        sum(prices[v] for v in choice)
        for choice in choices
        if reaches(choice, operands, early, late)
    )
    assert sum(prices[v] for v in cut) == best


def chain(prices):
    graph = ValueGraph[str]()
    names = list(prices)
    for name, price in prices.items():
        graph.add(name, price)
    for operand, value in pairwise(names):
        graph.depends(value, operand)
    graph.made_early(names[0])
    graph.used_late(names[-1])
    return graph


def reaches(kept, operands, early, late):
    """Whether every value used late is kept, or can be made from what is kept."""

    def available(value):
        return value in kept or (value not in early and all(map(available, operands[value])))

    return all(map(available, late))
