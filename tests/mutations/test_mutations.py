"""Code that moves takes its mutations along."""

from mutations.__main__ import faults, load


def test_every_mutation_can_be_made():
    assert list(faults(load())) == []
