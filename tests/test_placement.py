import pytest

from jaxmorph.placement import ALONE, Layout, Place, Placement, Position, Replica
from jaxmorph.records import Link


@pytest.mark.parametrize(
    ("num_ranks", "num_chunks", "chain"),
    [
        (3, 1, "0.0 1.0 2.0"),
        (3, 2, "0.0 1.0 2.0 0.1 1.1 2.1"),
        (2, 3, "0.0 1.0 0.1 1.1 0.2 1.2"),
        (1, 2, "0.0 0.1"),
    ],
)
def test_the_pipeline_visits_ranks_once_per_chunk(num_ranks, num_chunks, chain):
    placement = Placement(num_ranks, num_chunks)
    places = [Place(*map(int, word.split("."))) for word in chain.split()]
    assert list(map(placement.after, places)) == [*places[1:], None]
    assert list(map(placement.before, places)) == [None, *places[:-1]]
    assert placement.places() == places
    assert [*map(placement.virtual_stage, places)] == [*range(len(places))]
    assert (placement.first, placement.last) == (places[0], places[-1])


def test_a_v_goes_down_the_ranks_and_back():
    in_a_v = Placement(3, 2, "v")
    places = [Place(0, 0), Place(1, 0), Place(2, 0), Place(2, 1), Place(1, 1), Place(0, 1)]
    assert in_a_v.places() == places
    assert [*map(in_a_v.virtual_stage, places)] == [*range(6)]
    assert [*map(in_a_v.after, places)] == [*places[1:], None]
    assert [*map(in_a_v.own_stages, range(3))] == [[0, 5], [1, 4], [2, 3]]


def test_a_rank_runs_every_s_th_virtual_stage():
    assert [*map(Placement(3, 2).own_stages, range(3))] == [[0, 3], [1, 4], [2, 5]]


@pytest.mark.parametrize(
    ("placement", "links", "ends_link"),
    [
        (Placement(1), [], None),
        (Placement(1, 2), [], None),
        (Placement(2), ["0-1"], "0-1"),
        (Placement(2, 2), ["0-1"], "0-1"),
        (Placement(4), ["0-1", "1-2", "2-3"], "0-3"),
        (Placement(4, 3), ["0-1", "1-2", "2-3", "0-3"], "0-3"),
        (Placement(3, 2, "v"), ["0-1", "1-2"], None),
    ],
)
def test_links_join_the_ranks_of_hops_and_of_the_ends(placement, links, ends_link):
    assert [*map(str, placement.links)] == links
    assert placement.ends_link == (Link.parse(ends_link) if ends_link else None)


def test_a_layout_says_who_is_where():
    layout = Layout.first(2, 3, ranks_per_host=2)
    assert layout.ranks == ((0, 1), (2, 3), (4, 5))
    assert layout.positions[3] == Position(1, 1)
    assert str(layout.positions[3]) == "r1 stage 1"
    assert layout.peers(1) == (1, 3, 5)
    assert layout.host_of == (0, 0, 1, 1, 2, 2)
    assert layout.between((0, 2)) == [(0, 4), (0, 5), (1, 4), (1, 5)]
    named = layout.on_hosts(["b", "a", "b", "a", "c", "c"])
    assert named.host_of == (0, 1, 0, 1, 2, 2)
    assert [named.on(host) for host in named.hosts] == [[0, 2], [1, 3], [4, 5]]
    swapped = layout.swapped(1, 4)
    assert swapped.ranks == ((0, 4), (2, 3), (1, 5))
    assert swapped.swapped(1, 4) == layout


def test_replicas_divide_the_microbatches():
    replicas = [Replica(index, 3) for index in range(3)]
    assert [each.share([*range(6)]) for each in replicas] == [[0, 1], [2, 3], [4, 5]]
    assert [ALONE.is_alone, replicas[0].is_alone] == [True, False]
