"""One rank of the parity test: runs every schedule and reports its errors."""

from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
from compiled_once import compile_alike_once
from parity import CHUNKS, OPTIMIZER, Parity, batch, gradients_of, worst_leaf
from parity_models import check_dropout, check_examples, check_more_models

from jaxmorph.program.instructions import SendReceive
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.runtime.optimizer import clip_scale
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.step import StepRunner, apply_gradients
from jaxmorph.schedule.ops import OpKind
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.plane import TransportSettings
from tests.transport.proxy import Proxy

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "adaptive", "initial")
MICROBATCHES = (1, 4, 8)
SPOILT_BYTES = 7_000  # more than the longest message, so that messages can get through
CLIP_NORM = 0.5  # below the gradients' norm, so that clipping is at work
# Adam divides a gradient by its own size: where that is near zero, rounding decides the update but
# for an epsilon well above it. BW, which interleaving runs, rounds otherwise than the split does.
# So do sums over the devices of a stage.
STEADY_OPTIMIZER = replace(OPTIMIZER, epsilon=1e-4)


TRAINED_ON = [batch(4, 20 + step) for step in range(3)]


def check_all_schedules(parity, compilations):
    parity.check_gradients("gpipe", *batch(1, 0), test="first")  # compiles small helper programs
    before = compilations.count
    for schedule_name, microbatches in product(SCHEDULES, MICROBATCHES):
        parity.check_gradients(schedule_name, *batch(microbatches, microbatches))
    parity.report("compilations", count=compilations.count - before, before=before)


def check_ignored_microbatch(parity):
    """Targets below 0 remove a microbatch and leave the others unchanged."""
    tokens, targets = batch(4, 7)
    ignored = targets.copy()
    ignored[2] = -1
    parity.check_gradients("zb-h2", tokens, ignored, test="ignored microbatch")
    parity.run("zb-h2", tokens, ignored)
    with_three = jax.tree.map(np.asarray, parity.trainer.gradients)
    parity.trainer.discard()
    kept = [0, 1, 3]
    parity.run("zb-h2", tokens[kept], targets[kept])
    same = jax.tree.map(np.array_equal, with_three, parity.trainer.gradients)
    parity.trainer.discard()
    parity.report("contribution vanishes", same=all(jax.tree.leaves(same)))


def check_bitwise_equal(parity):
    """Any schedule that splits the backward gives the same bits."""
    tokens, targets = batch(8, 11)
    results = []
    for schedule_name in ("zb-h1", "zb-h2", "adaptive", "initial", "zb-h1"):
        parity.run(schedule_name, tokens, targets)
        results.append(jax.tree.map(np.asarray, parity.trainer.gradients))
        parity.trainer.discard()
    first, *others = results
    same = [jax.tree.leaves(jax.tree.map(np.array_equal, first, other)) for other in others]
    parity.report("bitwise", same=all(map(all, same)))


def check_routes(parity, schedules, compilations):
    """The bits are the same on all routes, which change from step to step."""
    tokens, targets = batch(8, 13)
    mixes = [dict.fromkeys(parity.links, "delegated"), *mixed_routes(parity.links)]
    before = None
    for schedule_name in schedules:
        direct = gradients_of(parity, schedule_name, tokens, targets, None)
        for routes in mixes:
            delegated = gradients_of(parity, schedule_name, tokens, targets, routes)
            same = jax.tree.leaves(jax.tree.map(np.array_equal, direct, delegated))
            named = {str(link): route for link, route in routes.items()}
            parity.report("routes", schedule=schedule_name, routes=named, same=all(same))
        before = before or compilations.count  # without the first schedule's small helper programs
    parity.report(
        "route changes",
        compiled=compilations.count - before,
        scarce={str(channel): held for channel, held in parity.scarce.items()},
        skipped=parity.trainer.delegated.counts.skipped,
    )


def check_pairs(parity, schedules, compilations):
    """Pairs change no bit, compile nothing, and each of their messages is timed."""
    tokens, targets = batch(8, 29)
    for schedule_name in schedules:
        ways = []
        for pairs in (False, True):
            before = compilations.count
            gradients = gradients_of(parity, schedule_name, tokens, targets, None, pairs=pairs)
            timed = sorted(str(label) for label, _ in parity.trainer.message_times_ms())
            ways.append((gradients, timed))
        (single, messages), (paired, same_messages) = ways
        program = parity.program(schedule_name, len(tokens), pairs=True)
        same = jax.tree.leaves(jax.tree.map(np.array_equal, single, paired))
        parity.report(
            "pairs",
            schedule=schedule_name,
            same=all(same) and messages == same_messages,
            pairs=sum(isinstance(step, SendReceive) for step in program.instructions),
            compiled=compilations.count - before,
        )


def check_recomputing(rendezvous, link, reference):
    """Another stash, and sidecars over a network that flips bits repeatedly."""
    tokens, targets = batch(8, 23)
    with ExitStack() as proxies:
        planes = []

        def start(rank, outgoing, incoming, settings):
            plane: Any = SidecarPlane(rank, outgoing, incoming, TransportSettings())
            proxy = proxies.enter_context(Proxy(*plane.addresses()))
            proxy.spoil_every(SPOILT_BYTES)
            plane.addresses = lambda: [proxy.address]
            planes.append((plane, proxy))
            return plane

        parity = Parity(
            rendezvous,
            link,
            tied=True,
            stash="recompute",
            reference=reference,  # recomputing changes nothing
            delegated=True,
            start=start,
        )
        check_variants(parity)
        everywhere = dict.fromkeys(parity.links, "delegated")
        sound, *others = (
            gradients_of(parity, "zb-h2", tokens, targets, routes)
            for routes in (None, *[everywhere] * 4)
        )
        same = [jax.tree.leaves(jax.tree.map(np.array_equal, sound, other)) for other in others]
        ((plane, proxy),) = planes
        receivers = [peer["receiving"] for peer in plane.statistics()["peers"].values()]
        parity.report(
            "corruption",
            same=all(map(all, same)),
            spoilt=proxy.spoilt,
            found=sum(each["wrong_checksums"] for each in receivers),
        )
        parity.close()


def check_forwards_alone(parity, schedules, compilations):
    """Forwards alone give the step's loss bit by bit, and no gradients."""
    tokens, targets = batch(8, 17)
    weight, first = 1.0 / np.count_nonzero(targets >= 0), len(tokens)
    everywhere = [dict.fromkeys(parity.links, "delegated")] if parity.num_ranks > 1 else []
    for schedule_name, routes in product(schedules, [None, *everywhere]):
        step = parity.run(schedule_name, tokens, targets, routes=routes)
        parity.trainer.discard()
        before = compilations.count
        program = parity.program(schedule_name, first, routes, narrowed_to=first)
        inputs = StepInputs(tokens, targets, weight, first_microbatch=first)
        runner = StepRunner(parity.trainer, parity.rendezvous)
        totals = runner.forwards(program, inputs, 0)
        compiled = compilations.count - before
        gradients = jax.tree.leaves(parity.trainer.gradients)
        loss, _ = parity.reference.initial_loss_and_gradients(tokens, targets)
        parity.report(
            "forwards alone",
            schedule=schedule_name,
            compiled=compiled,
            same=totals.loss == step.loss,
            loss_error=abs(totals.loss / loss - 1),
            zero=not any(np.any(leaf) for leaf in gradients),
        )


def mixed_routes(links):
    """Every other link delegated, then the rest; nothing for a single link."""
    ordered = sorted(links)
    for start in range(2) if len(ordered) > 1 else ():
        yield {
            link: "delegated" if index % 2 == start else "direct"
            for index, link in enumerate(ordered)
        }


def check_overflow(parity):
    """The last stage's activations overflow: no rank's state changes by a bit.

    That stage then restores its weights; the others keep their state.
    """
    sound, is_last = copied(parity.trainer.state), parity.rank == parity.num_ranks - 1
    if is_last:
        huge = [{**part, "params": jax.tree.map(_huge, part["params"])} for part in sound]
        parity.trainer.restore(huge)
    before = copied(parity.trainer.state)
    totals = parity.run("zb-h2", *batch(4, 19))
    updated = apply_gradients(parity.trainer, totals, CLIP_NORM)
    after = copied(parity.trainer.state)
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    parity.report(
        "overflow",
        updated=updated,
        loss=str(totals.loss),
        stages={str(stage): what for stage, what in totals.not_finite.items()},
        same=all(one.tobytes() == other.tobytes() for one, other in pairs),
        zero=not any(np.any(leaf) for leaf in jax.tree.leaves(parity.trainer.gradients)),
    )
    if is_last:
        parity.trainer.restore(list(sound))


def copied(tree):
    return jax.tree.map(np.array, tree)


def _huge(leaf):
    return leaf * np.float32(1e30)


def check_parameters(parity, schedule_name, expected):
    """Three optimizer steps, clipped, against Optax on one device."""
    for step, (tokens, targets) in enumerate(TRAINED_ON):
        totals = parity.run(schedule_name, tokens, targets, step)
        parity.trainer.update(clip_scale(totals.grad_norm, CLIP_NORM))
    worst = worst_leaf(parity.trainer.params, parity.own_part(expected))
    parity.report("parameters", worst_leaf=worst)


def check_chunks(parity, expected):
    """Several virtual stages per rank; the first has more layers."""
    for microbatches in (4, 8):
        parity.check_gradients("interleaved", *batch(microbatches, microbatches))
    check_parameters(parity, "interleaved", expected)


def check_v(rendezvous, link, tied, compilations, reference=None, num_devices=1):
    """Two virtual stages per rank, down the ranks and back."""
    optimizer = OPTIMIZER if num_devices == 1 else STEADY_OPTIMIZER
    v = Parity(
        rendezvous,
        link,
        tied=tied,
        num_chunks=CHUNKS,
        placement_kind="v",
        num_devices=num_devices,
        optimizer=optimizer,
        kinds=(OpKind.F, OpKind.B, OpKind.W),
        reference=reference,
        delegated=True,
    )
    for microbatches in (1, 4, 8):
        v.check_gradients("zb-v", *batch(microbatches, microbatches))
    v.check_gradients("dualpipe-v", *batch(8, 8))
    check_forwards_alone(v, ("zb-v",), compilations)
    if rendezvous.num_ranks > 1:
        check_routes(v, ("zb-v",), compilations)
    check_parameters(v, "zb-v", v.reference.steps(optimizer, CLIP_NORM, TRAINED_ON))
    v.close()


def check_weight_groups(rendezvous, link, reference):
    """One W for several microbatches, on all routes and in a V; the bits are those of its size."""
    tokens, targets = batch(8, 17)
    names_of = {1: ("zb-h1", "adaptive", "initial"), CHUNKS: ("zb-v",)}
    for weight_group, (chunks, names) in product((2, 4), names_of.items()):
        parity = Parity(
            rendezvous,
            link,
            tied=True,
            num_chunks=chunks,
            placement_kind="v" if chunks > 1 else "wrap",
            kinds=(OpKind.F, OpKind.B, OpKind.W),
            reference=reference,
            delegated=True,
            weight_group=weight_group,
        )
        on_routes = (None, dict.fromkeys(parity.links, "delegated")) if parity.plane else (None,)
        found = []
        for name in names:
            parity.check_gradients(name, tokens, targets, test="weight groups")
            found += [gradients_of(parity, name, tokens, targets, each) for each in on_routes]
        same = [jax.tree.all(jax.tree.map(np.array_equal, found[0], other)) for other in found]
        parity.report("bits of weight groups", same=all(same))
        parity.close()


def check_split_stages(rendezvous, link, tied, compilations):
    """Stages of two devices, each with a part of the parameters."""
    split = Parity(
        rendezvous, link, tied=tied, delegated=True, num_devices=2, optimizer=STEADY_OPTIMIZER
    )
    for schedule_name in ("gpipe", "1f1b", "zb-h2", "adaptive"):
        split.check_gradients(schedule_name, *batch(4, 4))
    check_bitwise_equal(split)
    if rendezvous.num_ranks > 1:
        check_routes(split, ("1f1b", "zb-h2"), compilations)
        check_pairs(split, ("1f1b",), compilations)
    expected = split.reference.steps(STEADY_OPTIMIZER, CLIP_NORM, TRAINED_ON)
    check_parameters(split, "zb-h2", expected)
    split.close()
    check_v(rendezvous, link, tied, compilations, split.reference, num_devices=2)


def main(arguments, link, rest):
    num_devices = 2 if "split stages" in rest else 1
    rendezvous = join_run(arguments, Joining(60, 60, num_devices=num_devices))
    if num_devices > 1:
        compilations = CompilationCounter()
        for tied in [name == "tied" for name in ("tied", "untied") if name in rest]:
            check_split_stages(rendezvous, link, tied, compilations)
        return
    if rest == ["examples"]:
        check_examples(rendezvous, link)
        return
    if rest == ["more models"]:
        check_more_models(rendezvous, link)
        return
    compilations = CompilationCounter()
    if rest == ["random models"]:
        check_dropout(rendezvous, link, compilations)
        return
    compile_alike_once()  # the tied and the untied model's stages compute the same
    whole_stages_alone = rest == ["whole stages"]
    untied_too = not whole_stages_alone and rendezvous.num_ranks < 4
    references = {
        tied: check_whole_stages(rendezvous, link, tied, compilations)
        for tied in ((True, False) if untied_too else (True,))
    }
    if rendezvous.num_ranks == 2:
        bfloat16 = Parity(rendezvous, link, tied=True, compute_dtype="bfloat16")
        check_variants(bfloat16)
        bfloat16.close()
    if whole_stages_alone:
        return
    if rendezvous.num_ranks == 2:
        check_recomputing(rendezvous, link, references[True])
    check_weight_groups(rendezvous, link, references[True])
    for tied, reference in references.items():
        check_chunked_stages(rendezvous, link, tied, reference, compilations)
        check_v(rendezvous, link, tied, compilations, reference)


def check_whole_stages(rendezvous, link, tied, compilations):
    """One stage per rank; returns the reference."""
    parity = Parity(rendezvous, link, tied=tied, delegated=True)
    check_all_schedules(parity, compilations)
    check_ignored_microbatch(parity)
    check_bitwise_equal(parity)
    check_forwards_alone(parity, ("1f1b", "zb-h2"), compilations)
    if rendezvous.num_ranks > 1:
        check_routes(parity, ("zb-h1", "1f1b", "adaptive"), compilations)
        check_pairs(parity, ("1f1b", "1f1b-eager", "zb-h2", "adaptive"), compilations)
    expected = parity.reference.steps(OPTIMIZER, CLIP_NORM, TRAINED_ON)
    check_overflow(parity)
    check_parameters(parity, "zb-h2", expected)
    parity.close()
    return parity.reference


def check_chunked_stages(rendezvous, link, tied, reference, compilations):
    """Several virtual stages per rank."""
    chunks = Parity(
        rendezvous,
        link,
        tied=tied,
        num_chunks=CHUNKS,
        optimizer=STEADY_OPTIMIZER,
        kinds=(OpKind.F, OpKind.BW),
        reference=reference,
        delegated=True,
    )
    expected = reference.steps(STEADY_OPTIMIZER, CLIP_NORM, TRAINED_ON)
    check_forwards_alone(chunks, ("interleaved",), compilations)
    check_chunks(chunks, expected)
    if rendezvous.num_ranks > 1:
        check_routes(chunks, ("interleaved",), compilations)
        check_pairs(chunks, ("interleaved",), compilations)
    chunks.close()


def check_variants(parity):
    """Other arithmetic or another stash, with BW and with B and W."""
    for schedule_name in ("1f1b", "zb-h2"):
        parity.check_gradients(schedule_name, *batch(4, 4))


if __name__ == "__main__":
    run_rank(main)
