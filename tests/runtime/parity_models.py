"""Models that use more of the protocol than GPT-2, compared with one device's gradients."""

import itertools
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from parity import CHUNKS, SEQUENCE, VOCABULARY, Parity, batch, gradients_of

from jaxmorph.models import llama
from jaxmorph.models.gpt2 import build
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.step import StepRunner

MAIN_SCHEDULES = ("gpipe", "1f1b", "zb-h2", "adaptive")


class Auxiliary:
    """GPT-2 with dropout, whose layers have two auxiliary losses and several activations."""

    aux_weights: ClassVar = {"size": 3.0, "expanded": 0.5}

    def __init__(self, **sizes):
        self._model = build(dropout=0.3, **sizes)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def embed(self, params, tokens, *, key):
        x = self._model.embed(params, tokens, key=key)
        return x, {"is_odd": tokens % 2 == 1, "depth": 0 * tokens[:, 0]}

    def layer(self, params, activations, *, key):
        x, marks = activations
        depth = marks["depth"] + 1
        expanded = x @ params["expand"]["kernel"]
        aux = {"expanded": jax.nn.softplus(expanded).mean(), "size": (x**2).mean()}
        x = self._model.layer(params, x, key=key) / depth[:, None, None]
        return (jnp.where(marks["is_odd"][..., None], x, -x), marks | {"depth": depth}), aux

    def head(self, params, activations, targets):
        return self._model.head(params, activations[0], targets)


def check_both_routes(parity, schedules, test, length=SEQUENCE):
    """One device's gradients under these schedules, on both routes."""
    everywhere = dict.fromkeys(parity.links, "delegated")
    for schedule_name, routes in itertools.product(schedules, (None, everywhere)):
        tokens, targets = (array[..., :length] for array in batch(4, 4))
        parity.check_gradients(schedule_name, tokens, targets, test, random_step=5, routes=routes)


def check_even_stages(rendezvous, link, build_model, *, tied=False):
    """One device's gradients on even stages; returns the reference."""
    parity = Parity(rendezvous, link, tied=tied, build_model=build_model, delegated=True)
    check_both_routes(parity, MAIN_SCHEDULES, build_model.__name__)
    parity.close()
    return parity.reference


def packed_and_dropping(build_model=build, **sizes):
    """A model with dropout, whose tokens attend within the documents that some of them begin."""
    model: Any = build_model(dropout=0.3, **sizes)
    model.extras_of = lambda tokens: {"segments": (tokens < VOCABULARY // 4).cumsum(-1, np.int32)}
    return model


def packed_llama(**sizes):
    return packed_and_dropping(llama.build, num_key_value_heads=1, hidden_width=24, **sizes)


def moe_decoder(*, tied, **sizes):
    """The example: experts are chosen by a router, with a loss that balances their load."""
    return import_module("moe_decoder").build(**sizes)


def patch_encoder(*, tied, vocab_size, **sizes):
    """The example, with patches of an image, some of them missing, made of tokens."""
    model = import_module("patch_encoder").build(vocab_size=8, **sizes)
    divisors = np.arange(2, 18, dtype=np.int32)
    model.inputs_of = lambda tokens: {
        "patches": (tokens[..., None] % divisors).astype(np.float32) / 8
    }
    model.targets_of = lambda targets: targets[..., 0] % 8
    model.extras_of = lambda tokens: {"is_patch": (tokens > 20) | (np.arange(SEQUENCE) == 0)}
    return model


def check_examples(rendezvous, link):
    """The models of docs/examples that use most of what a model may use."""
    sys.path.append(str(Path(__file__).parents[2] / "docs" / "examples"))
    for build_model, lengths in ((moe_decoder, (SEQUENCE, 7, 4)), (patch_encoder, (SEQUENCE,))):
        reference = check_even_stages(rendezvous, link, build_model)
        check_cuts(rendezvous, link, build_model, reference, lengths)


def check_cuts(rendezvous, link, build_model, reference, lengths, *, tied=False):
    """The same gradients on other cuts, offloaded, recomputed, and in shorter steps."""
    cases: Sequence[tuple[Sequence[str], Mapping[str, Any]]] = (
        (MAIN_SCHEDULES, {"counts": (1, 4), "room": 1}),
        (MAIN_SCHEDULES, {"counts": (4, 1), "stash": "recompute", "lengths": lengths}),
        (["interleaved"], {"num_chunks": CHUNKS}),
    )
    for schedules, more in cases:
        parity = Parity(
            rendezvous,
            link,
            tied=tied,
            build_model=build_model,
            reference=reference,
            delegated=True,
            **more,
        )
        for length in (*parity.lengths, *parity.lengths):
            check_both_routes(parity, schedules, f"{build_model.__name__} otherwise", length)
        parity.close()


def check_more_models(rendezvous, link):
    """Llama with dropout, packed; and auxiliary losses beside dropout and several activations."""
    check_even_stages(rendezvous, link, packed_llama)
    reference = check_even_stages(rendezvous, link, Auxiliary, tied=True)
    check_cuts(rendezvous, link, Auxiliary, reference, (SEQUENCE,), tied=True)


def check_dropout(rendezvous, link, compilations):
    """Every step, microbatch and layer has masks of its own: those of one device."""
    dropping = packed_and_dropping
    parity = Parity(rendezvous, link, tied=True, build_model=dropping, delegated=True)
    for routes in (None, dict.fromkeys(parity.links, "delegated")):
        before = None
        for step, schedule_name in enumerate(MAIN_SCHEDULES):
            parity.check_gradients(
                schedule_name, *batch(4, 4), "dropout", random_step=step, routes=routes
            )
            before = before or compilations.count
        parity.report("dropout compilations", count=compilations.count - (before or 0))
    check_dropout_routes(parity)
    check_dropout_evaluates(parity)
    parity.close()
    check_cuts(rendezvous, link, dropping, parity.reference, (SEQUENCE,), tied=True)


def check_dropout_routes(parity):
    """The bits are the same on both routes, and in a step that is run again; not in another."""
    tokens, targets = batch(4, 4)
    everywhere = dict.fromkeys(parity.links, "delegated") if parity.num_ranks > 1 else None
    first, again, delegated, other = (
        gradients_of(parity, schedule, tokens, targets, routes, step)
        for schedule, routes, step in (
            ("zb-h1", None, 7),
            ("adaptive", None, 7),
            ("zb-h2", everywhere, 7),
            ("zb-h1", None, 8),
        )
    )
    same = [
        all(jax.tree.leaves(jax.tree.map(np.array_equal, first, each)))
        for each in (again, delegated, other)
    ]
    parity.report("dropout bits", same=same)


def check_dropout_evaluates(parity):
    """Forwards alone drop nothing."""
    tokens, targets = batch(4, 4)
    extras = parity.extras(tokens)
    inputs = StepInputs(tokens, targets, 1.0 / targets.size, extras, first_microbatch=4)
    program = parity.program("1f1b", 4, narrowed_to=4)
    totals = StepRunner(parity.trainer, parity.rendezvous).forwards(program, inputs, 0)
    loss, _ = parity.reference.initial_loss_and_gradients(tokens, targets)
    parity.report("dropout evaluates", loss_error=abs(totals.loss / loss - 1))
