"""The payloads of channels, their parts in slots, and the seal of messages on direct paths."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxmorph.copies.backends import PayloadShape, SlotUse
from jaxmorph.placement import Placement
from jaxmorph.program.instructions import Channel, Payload
from jaxmorph.program.slots_needed import FIRST_SLOTS
from jaxmorph.records import Link
from jaxmorph.stage.activations import boundary_of
from jaxmorph.stage.model import MicrobatchShapes, PipelineModel
from jaxmorph.stage.parameters import leaf_at
from jaxmorph.stage.sharding import partition_specs, spread
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import ChannelSpec

LARGEST_TIED_SLOT_BYTES = 8 * 2**20
"""Tied gradients can be larger than all other messages together, so they are sent in parts."""

IDENTITY_WORDS = 8
"""32-bit words in which each end of a transfer names the transfer it is at."""

SEAL_WORDS = 2
"""32-bit words of a sealed message's sum, behind the identity; only the first counts."""

_SEED = 0x6A6D7370  # so that memory full of zeros has no right sum

_CODES = {payload: code for code, payload in enumerate(Payload)}


def slot_use(channel: Channel, payload: PayloadShape) -> SlotUse:
    """How a channel's payload lies in slots: whole, except long tied gradients."""
    elements = int(np.prod(payload.shape, dtype=np.int64))
    if channel.payload is Payload.TIED:
        elements = min(elements, LARGEST_TIED_SLOT_BYTES // payload.dtype.itemsize)
    return SlotUse(payload, elements)


def channel_name(channel: Channel) -> ChannelName:
    """The data plane's name of a channel."""
    code = _CODES[channel.payload]
    return ChannelName(code, channel.source, channel.destination, channel.tied_index)


def channel_specs(
    payloads: Mapping[Channel, PayloadShape], delegated: Collection[Link], rank: int
) -> tuple[list[ChannelSpec], list[ChannelSpec]]:
    """A rank's outgoing and incoming channels in the data plane, with `FIRST_SLOTS` each."""
    outgoing, incoming = [], []
    for channel, payload in payloads.items():
        if channel.link in delegated and rank in channel.link:
            slot_bytes = slot_use(channel, payload).slot_bytes
            spec = ChannelSpec(channel_name(channel), slot_bytes, FIRST_SLOTS)
            (outgoing if channel.source == rank else incoming).append(spec)
    return outgoing, incoming


def channel_payloads(
    model: PipelineModel,
    placement: Placement,
    shapes: MicrobatchShapes,
    num_devices: int = 1,
) -> dict[Channel, PayloadShape]:
    """Every channel of a pipeline, with the payload of one message.

    Args:
        shapes: The data of one microbatch.
        num_devices: Devices of a stage.
    """
    boundary = boundary_of(model, shapes, num_devices=num_devices)
    activation = _payload(boundary.sent, boundary.spec, num_devices)
    channels: dict[Channel, PayloadShape] = {}
    for (rank, _), (next_rank, _) in placement.hops():
        if rank != next_rank:
            channels[Channel(Payload.ACTIVATION, rank, next_rank)] = activation
            channels[Channel(Payload.GRADIENT, next_rank, rank)] = activation
    first, last = placement.first.rank, placement.last.rank
    tied = _tied_payloads(model, num_devices) if first != last else ()
    for index, payload in enumerate(tied):
        channels[Channel(Payload.TIED, first, last, index)] = payload
        channels[Channel(Payload.TIED, last, first, index)] = payload
    return channels


def _tied_payloads(model: PipelineModel, num_devices: int) -> Sequence[PayloadShape]:
    embed = jax.eval_shape(model.init_embed, jax.random.key(0))
    specs = spread(partition_specs(model, num_devices)["embed"], embed)
    pairs = ((leaf_at(embed, path), leaf_at(specs, path)) for path, _ in model.tied)
    return [_payload(leaf, spec, num_devices) for leaf, spec in pairs]


def _payload(array: Any, spec: PartitionSpec, num_devices: int) -> PayloadShape:
    num_parts = num_devices if any(spec) else 1
    return PayloadShape(array.shape, array.dtype, num_parts, spec)


def seal(identity: jax.Array, words: jax.Array) -> jax.Array:
    """A message of an identity and a payload, with their sum between them."""
    return jnp.concatenate([identity, _in_words(_sum_of(identity, words), words.dtype), words])


def unseal(message: jax.Array) -> jax.Array:
    """A message's identity, then 1 if the whole message is as it was sealed, else 0."""
    per_word = message.dtype.itemsize
    end, begin = IDENTITY_WORDS * 4 // per_word, (IDENTITY_WORDS + SEAL_WORDS) * 4 // per_word
    identity, words = message[:end], message[begin:]
    due = _in_words(_sum_of(identity, words), message.dtype)
    is_whole = jnp.all(message[end:begin] == due)
    return jnp.concatenate([identity, _in_words(is_whole.astype(jnp.uint32), message.dtype)])


def _sum_of(*parts: jax.Array) -> jax.Array:
    sums = (jnp.sum(part.astype(jnp.uint32), dtype=jnp.uint32) for part in parts)
    return sum(sums, jnp.uint32(_SEED))


def _in_words(number: jax.Array, dtype: Any) -> jax.Array:
    """A number of 32 bits, and zeros behind it, as words of a message."""
    pair = jnp.stack([number, jnp.uint32(0)])
    return jax.lax.bitcast_convert_type(pair, dtype).reshape(-1)
