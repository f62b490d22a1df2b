import jax.numpy as jnp
import pytest

from jaxmorph.program.instructions import Payload, Transfer, channel_of
from jaxmorph.runtime.identity import TransferIdentity
from jaxmorph.runtime.kept_outputs import KeptOutputs


def activation(microbatch, epoch=0):
    return TransferIdentity(epoch, 0, Transfer(Payload.ACTIVATION, 0, 1, microbatch))


CHANNEL = channel_of(activation(0).transfer)


def kept(count):
    outputs = KeptOutputs()
    for microbatch in range(count):
        outputs.keep(activation(microbatch), jnp.full(4, microbatch, jnp.float32))
    return outputs


def microbatches(rest):
    return [(identity.transfer.microbatch, int(value[0])) for identity, value in rest]


def test_what_the_receiver_has_is_let_go_and_the_rest_is_sent_again_in_order():
    outputs = kept(5)
    assert outputs.num_bytes == 5 * 16
    outputs.cover(CHANNEL, 2)
    assert outputs.num_bytes == 3 * 16
    assert microbatches(outputs.take_uncovered(CHANNEL, 3)) == [(3, 3), (4, 4)]
    assert outputs.num_bytes == 0


def test_numbers_go_on_through_epochs():
    outputs = kept(3)
    for identity, value in outputs.take_uncovered(CHANNEL, 1):
        outputs.keep(identity._replace(epoch=1), value)
    outputs.keep(activation(3, epoch=1), jnp.full(4, 3, jnp.float32))
    outputs.cover(CHANNEL, 2)
    assert microbatches(outputs.take_uncovered(CHANNEL, 3)) == [(3, 3)]


@pytest.mark.parametrize("count", [0, 4])
def test_a_count_that_goes_back_or_covers_what_was_never_sent_is_an_error(count):
    outputs = kept(3)
    outputs.cover(CHANNEL, 1)
    with pytest.raises(ValueError, match=f"got a count of {count}, expected 1 up to 3"):
        outputs.cover(CHANNEL, count)


def test_channels_are_counted_apart():
    outputs = kept(2)
    down = TransferIdentity(0, 0, Transfer(Payload.GRADIENT, 0, 1, 0))
    outputs.keep(down, jnp.zeros(4))
    outputs.cover(CHANNEL, 2)
    assert outputs.take_uncovered(channel_of(down.transfer), 0)[0][0] == down


def test_all_of_a_link_is_let_go_and_counts_as_taken():
    outputs = kept(2)
    other = TransferIdentity(0, 0, Transfer(Payload.ACTIVATION, 1, 2, 0))
    outputs.keep(other, jnp.zeros(4))
    outputs.let_go(CHANNEL.link)
    assert outputs.num_bytes == 16  # the other link's
    outputs.keep(activation(2), jnp.full(4, 2, jnp.float32))
    assert microbatches(outputs.take_uncovered(CHANNEL, 2)) == [(2, 2)]
