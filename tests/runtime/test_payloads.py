import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmorph.copies.backends import PayloadShape
from jaxmorph.models.gpt2 import build
from jaxmorph.placement import Placement
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.records import Link
from jaxmorph.runtime.direct import is_of_path
from jaxmorph.runtime.link_programs import read_identity
from jaxmorph.runtime.payloads import (
    IDENTITY_WORDS,
    LARGEST_TIED_SLOT_BYTES,
    SEAL_WORDS,
    channel_name,
    channel_payloads,
    channel_specs,
    seal,
    slot_use,
    unseal,
)
from jaxmorph.stage.model import MicrobatchShapes

ACTIVATION = Channel(Payload.ACTIVATION, 0, 1)
TIED = Channel(Payload.TIED, 0, 1)


def payloads(num_ranks, num_chunks=1, *, tied=True):
    model = build(
        preset="tiny",
        sequence_length=4,
        vocab_size=16,
        tied=tied,
        width=8,
        num_heads=1,
        num_layers=4,
    )
    return channel_payloads(model, Placement(num_ranks, num_chunks), MicrobatchShapes.of_text(2, 4))


def test_each_payload_and_direction_has_a_channel():
    found = {str(channel): payload.shape for channel, payload in payloads(3).items()}
    assert found == {
        "activation 0>1": (2, 4, 8), "gradient 1>0": (2, 4, 8),
        "activation 1>2": (2, 4, 8), "gradient 2>1": (2, 4, 8),
        "tied[0] 0>2": (16, 8), "tied[0] 2>0": (16, 8),
    }  # fmt: skip


def test_chunks_go_around_and_one_rank_sends_nothing():
    around = {str(channel) for channel in payloads(3, 2, tied=False)}
    assert {"activation 2>0", "gradient 0>2"} <= around
    assert payloads(1, 4) == {}


def test_only_long_tied_gradients_are_split():
    long = PayloadShape((5 * LARGEST_TIED_SLOT_BYTES // 2,), jnp.dtype("float32"))
    whole, parts = slot_use(ACTIVATION, long), slot_use(TIED, long)
    assert whole.parts == [range(long.shape[0])]
    assert parts.slot_bytes == LARGEST_TIED_SLOT_BYTES
    assert [len(part) for part in parts.parts] == [parts.part_elements] * 10
    assert (whole.slots_for(8), parts.slots_for(1)) == (8, 2)


def test_a_rank_has_ends_of_its_delegated_links():
    found = payloads(4)
    outgoing, incoming = channel_specs(found, {Link(1, 2), Link(0, 3)}, rank=2)
    assert [spec.name for spec in outgoing] == [channel_name(Channel(Payload.GRADIENT, 2, 1))]
    assert [spec.name for spec in incoming] == [channel_name(Channel(Payload.ACTIVATION, 1, 2))]
    assert outgoing[0].slot_bytes == 2 * 4 * 8 * 4
    outgoing, _ = channel_specs(found, {Link(1, 2), Link(0, 3)}, rank=0)
    assert [spec.name.destination for spec in outgoing] == [3]
    assert channel_specs(found, set(), rank=2) == ([], [])


def test_channels_have_different_names():
    names = {channel_name(channel) for channel in payloads(2, 2)}
    assert len(names) == len(payloads(2, 2))


def cut_short(message):
    """Its first words have come; the rest of the memory is an older message's."""
    return message.at[-5:].set(message[-5:] // 2)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
@pytest.mark.parametrize(
    ("damage", "is_whole"), [(lambda message: message, 1), (cut_short, 0), (jnp.zeros_like, 0)]
)
def test_a_sealed_message_shows_whether_it_came_whole(dtype, damage, is_whole):
    identity = np.arange(100, 100 + IDENTITY_WORDS, dtype=np.uint32)
    words = jnp.arange(50, 250).astype(dtype)
    message = jax.jit(seal)(jnp.asarray(identity.view(dtype)), words)
    seal_words = SEAL_WORDS * 4 // message.dtype.itemsize
    assert message.size == identity.view(dtype).size + seal_words + words.size
    assert np.array_equal(message[-words.size :], words)
    found = np.asarray(jax.jit(unseal)(damage(message))).view(np.uint32)
    assert found[IDENTITY_WORDS] == is_whole
    if is_whole:
        assert read_identity(jnp.asarray(found)) == tuple(identity)
    else:
        with pytest.raises(jax.errors.JaxRuntimeError, match="has not come whole") as raised:
            read_identity(jnp.asarray(found))
        assert is_of_path(raised.value)  # so that the link fails over


@pytest.mark.parametrize("changed", range(4))
def test_parts_of_different_messages_are_refused(changed):
    """Of a stage of several devices each has received its own part."""
    devices = Mesh(np.array(jax.devices()[:4]), "tensor")
    messages = np.tile(np.arange(IDENTITY_WORDS, dtype=np.uint32), 4)
    words = jax.device_put(messages, NamedSharding(devices, PartitionSpec("tensor")))
    assert read_identity(words) == tuple(range(IDENTITY_WORDS))
    messages[changed * IDENTITY_WORDS + 3] += 1
    words = jax.device_put(messages, NamedSharding(devices, PartitionSpec("tensor")))
    with pytest.raises(jax.errors.JaxRuntimeError, match="has not come whole"):
        read_identity(words)
