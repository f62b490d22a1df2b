"""The identity of direct transfers, and the outputs that a sender keeps until they are received."""

from itertools import product

import jax.numpy as jnp
import pytest
from two_ends import kept_bytes

from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.runtime.direct import KeptOutputs
from jaxmorph.runtime.routes import TransferIdentity


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


def activation(microbatch, epoch=0, source=0):
    transfer = Transfer(Payload.ACTIVATION, source, source + 1, microbatch)
    return TransferIdentity(epoch, 0, transfer)


CHANNEL = channel_of(activation(0).transfer)
OTHER = activation(0, source=1)


def kept(count, other=None):
    outputs = KeptOutputs()
    for microbatch in range(count):
        outputs.keep(activation(microbatch), jnp.full(4, microbatch, jnp.float32))
    if other is not None:
        outputs.keep(other, jnp.zeros(4))
    return outputs


def microbatches(rest):
    return [(identity.transfer.microbatch, int(value[0])) for identity, value in rest]


def test_what_the_receiver_lacks_is_sent_again():
    outputs = kept(5)
    assert kept_bytes(outputs) == 5 * 16
    assert microbatches(outputs.take_uncovered(CHANNEL, 3)) == [(3, 3), (4, 4)]
    assert kept_bytes(outputs) == 0


def test_counts_continue_through_epochs():
    outputs = kept(3)
    for identity, value in outputs.take_uncovered(CHANNEL, 1):
        outputs.keep(identity._replace(epoch=1), value)
    outputs.keep(activation(3, epoch=1), jnp.full(4, 3, jnp.float32))
    assert microbatches(outputs.take_uncovered(CHANNEL, 3)) == [(3, 3)]


@pytest.mark.parametrize("count", [0, 4])
def test_an_impossible_count_is_an_error(count):
    outputs = kept(3)
    for sent in outputs.take_uncovered(CHANNEL, 1):
        outputs.keep(*sent)
    with pytest.raises(ValueError, match=f"got a count of {count}, expected 1 up to 3"):
        outputs.take_uncovered(CHANNEL, count)


def test_channels_are_counted_apart():
    down = TransferIdentity(0, 0, Transfer(Payload.GRADIENT, 0, 1, 0))
    outputs = kept(2, down)
    assert outputs.take_uncovered(CHANNEL, 2) == []
    assert outputs.take_uncovered(channel_of(down.transfer), 0)[0][0] == down


def test_released_outputs_count_as_received():
    outputs = kept(2, OTHER)
    outputs.release(CHANNEL.link)
    assert kept_bytes(outputs) == 16  # the other link's
    outputs.keep(activation(2), jnp.full(4, 2, jnp.float32))
    assert microbatches(outputs.take_uncovered(CHANNEL, 2)) == [(2, 2)]
