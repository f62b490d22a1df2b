import numpy as np
import pytest

from jaxmorph.data.tokens import digest_of

IDS = np.random.default_rng(0).integers(0, 256, 100_000).astype(np.uint16)


def test_the_same_tokens_have_the_same_digest_whatever_their_type():
    assert digest_of(IDS) == digest_of(IDS.astype(np.uint32).copy())
    assert digest_of(IDS).num_tokens == 100_000


@pytest.mark.parametrize("changed", [0, 99_999, 390 * 100])
def test_another_token_at_either_end_or_at_a_sample_is_another_text(changed):
    ids = IDS.copy()
    ids[changed] ^= 1
    assert digest_of(ids) != digest_of(IDS)


def test_a_text_that_has_grown_or_is_tiny_has_its_own():
    found = {digest_of(np.zeros(size, np.uint16)) for size in (0, 1, 2, 255, 256, 9000, 9001)}
    assert len(found) == 7
