import pytest

from jaxmorph.program.pipeline import Pipeline, Place


@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "chain"),
    [
        (3, 1, "0.0 1.0 2.0"),
        (3, 2, "0.0 1.0 2.0 0.1 1.1 2.1"),
        (2, 3, "0.0 1.0 0.1 1.1 0.2 1.2"),
        (1, 2, "0.0 0.1"),
    ],
)
def test_the_chain_goes_around_the_ranks_once_for_each_chunk(num_ranks, num_chunks, chain):
    pipeline = Pipeline(num_ranks, num_chunks)
    places = [Place(*map(int, word.split("."))) for word in chain.split()]
    assert list(map(pipeline.after, places)) == [*places[1:], None]
    assert list(map(pipeline.before, places)) == [None, *places[:-1]]
