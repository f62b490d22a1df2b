import pytest

from jaxmorph.pallas_kernels import FROM_HOST, TO_HOST, CopyTuning
from jaxmorph.pallas_kernels.tiling import tile

pytestmark = pytest.mark.one_jax

KIB = 1024


def test_the_defaults_have_more_in_flight_than_the_bus_moves_in_a_round_trip():
    assert (TO_HOST.bytes_in_flight, FROM_HOST.bytes_in_flight) == (64 * KIB, 128 * KIB)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ctas": 0}, "got 0 CTAs, expected 1 to 1024"),
        ({"ctas": 1025}, "got 1025 CTAs, expected 1 to 1024"),
        ({"ctas": 1, "threads": 96}, "got 96 threads, expected a multiple of 128 up to 1024"),
        ({"ctas": 1, "threads": 1152}, "got 1152 threads, expected a multiple of 128 up to 1024"),
        ({"ctas": 1, "loads": 0}, "got 0 loads in each of 128 threads, expected 1 to 32"),
        ({"ctas": 1, "threads": 1024, "loads": 5}, "got 5 loads in each of 1024 .* 1 to 4"),
    ],
)
def test_a_tuning_out_of_bounds_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        CopyTuning(**wrong)


@pytest.mark.parametrize(
    ("num_bytes", "tiles", "vectors", "tail", "ctas"),
    [
        (1, 0, 0, 1, 1),
        (16, 0, 1, 0, 1),
        (2048, 0, 128, 0, 1),
        (2049, 0, 128, 1, 2),
        (8192, 1, 0, 0, 4),
        (3 * 8192 + 47, 3, 2, 15, 8),
        (64 * KIB * KIB + 5, 8192, 0, 5, 8),
    ],
)
def test_a_payload_is_tiles_then_vectors_then_bytes(num_bytes, tiles, vectors, tail, ctas):
    tiling = tile(num_bytes, CopyTuning(ctas=8, loads=4))
    assert (tiling.num_tiles, tiling.num_vectors, tiling.tail_bytes) == (tiles, vectors, tail)
    assert tiling.ctas == ctas
    assert tiling.tail_at + tiling.tail_bytes == num_bytes
