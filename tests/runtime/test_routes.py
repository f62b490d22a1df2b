from itertools import product

from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.runtime.identity import TransferIdentity


def test_messages_that_differ_have_different_words():
    transfers = [
        Transfer(*fields) for fields in product(Payload, range(2), range(2, 4), range(3), range(4))
    ]
    identities = [
        TransferIdentity(epoch, step, transfer)
        for epoch, step, transfer in product(range(2), (-1, 0, 1), transfers)
    ]
    words = {identity.words() for identity in identities}
    assert len(words) == len(identities)
    assert all(len(name) == 6 and 0 <= min(name) <= max(name) < 2**32 for name in words)


def test_chunks_share_a_channel_and_what_goes_around_two_ranks_has_its_own():
    def channel(text):
        return channel_of(Transfer.parse(text))

    assert channel("activation[0] 0>1") == channel("1.activation[3] 0>1")
    assert channel("activation[0] 1>0") != channel("gradient[0] 1>0")
    assert channel("tied[0] 0>1") != channel("tied[1] 0>1")
