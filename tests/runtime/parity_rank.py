"""One rank of the parity test: runs every schedule and reports its errors."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np
from compiled_once import compile_alike_once
from one_device import data_of, untie
from shared_reference import SharedReference, norm

from jaxmorph.models.gpt2 import build
from jaxmorph.program.check import check
from jaxmorph.program.lowering import forward_only, lower
from jaxmorph.program.offload import count_offloads, offload
from jaxmorph.program.slots_needed import slots_needed
from jaxmorph.records import Link
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import join_run
from jaxmorph.runtime.kept_programs import CompilationCounter
from jaxmorph.runtime.link_connections import Start, open_data_plane
from jaxmorph.runtime.optimizer import OptimizerSettings, clip_scale
from jaxmorph.runtime.payloads import channel_specs
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.report import StepReport, total
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import StepRunner, apply_gradients, not_finite_in_words
from jaxmorph.schedule.costs import Limits, StageCosts, StageMemory, chain_links
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.planner import PLANNED_SCHEDULES, plan
from jaxmorph.schedule.simulate import simulate
from jaxmorph.stage.model import MicrobatchShapes, cut_layers
from jaxmorph.stage.stage_functions import StashPolicy
from jaxmorph.transport.client import SidecarPlane
from jaxmorph.transport.plane import TransportSettings
from tests.transport.proxy import Proxy

SCHEDULES = ("gpipe", "1f1b", "zb-h1", "zb-h2", "adaptive", "initial")
MICROBATCHES = (1, 4, 8)
CHUNKS = 2
SPOILT_BYTES = 7_000  # more than the longest message, so that messages can get through
SEED, VOCABULARY, SEQUENCE, MICROBATCH_SIZE = 3, 61, 12, 2
CLIP_NORM = 0.5  # below the gradients' norm, so that clipping is at work
OPTIMIZER = OptimizerSettings(
    learning_rate=1e-2, warmup_steps=1, total_steps=10, weight_decay=0.1, epsilon=1e-6
)
# Adam divides a gradient by its own size: where that is near zero, rounding decides the update but
# for an epsilon well above it. BW, which interleaving runs, rounds otherwise than the split does.
CHUNKED_OPTIMIZER = replace(OPTIMIZER, epsilon=1e-4)


class Parity:
    """One model on this rank's stage, beside the same model on one device."""

    def __init__(
        self,
        rendezvous,
        link,
        *,
        tied: bool,
        compute_dtype: str = "float32",
        stash: StashPolicy = "full",
        num_chunks: int = 1,
        build_model: Callable[..., Any] = build,
        optimizer: OptimizerSettings = OPTIMIZER,
        kinds: Sequence[OpKind] = tuple(OpKind),
        reference: SharedReference | None = None,
        delegated: bool = False,
        start: Start | None = None,
        counts: Sequence[int] | None = None,
        lengths: Sequence[int] = (SEQUENCE,),
        room: int | None = None,
    ):
        self.rendezvous, self.link = rendezvous, link
        self.rank, self.num_ranks = rendezvous.rank, rendezvous.num_ranks
        self.num_chunks, self.lengths, self.room = num_chunks, lengths, room
        self.case = {
            "tied": tied,
            "compute": compute_dtype,
            "stash": stash,
            "chunks": num_chunks,
        }
        self.model = build_model(
            preset="tiny",
            sequence_length=SEQUENCE,
            vocab_size=VOCABULARY,
            compute_dtype=compute_dtype,
            width=16,
            num_layers=max(5, CHUNKS * self.num_ranks + 1),
            num_heads=2,
            tied=tied,
        )
        self.layers = self._cut(num_chunks, counts)
        settings = StageSettings(
            layers=self.layers,
            shapes=self._shapes(),
            seed=SEED,
            kinds=frozenset(kinds),
            optimizer=optimizer,
            stash=stash,
            num_chunks=num_chunks,
        )
        self._opened = ExitStack()
        plane = None
        if delegated and self.num_ranks > 1:
            settings = replace(settings, delegated=frozenset(self.links))
            ends = channel_specs(settings.payloads(self.model), settings.delegated, self.rank)
            opened = open_data_plane(rendezvous, *ends, start=start)
            plane = self._opened.enter_context(opened)
        self.trainer = StageTrainer(self.model, settings, self.rank, plane=plane)
        self.reference = reference or SharedReference(self.model, SEED, rendezvous)

    def _shapes(self):
        longest, *shorter = (self._shapes_of(length) for length in self.lengths)
        return replace(longest, shorter=tuple(shorter))

    def _shapes_of(self, length):
        tokens = np.zeros((1, MICROBATCH_SIZE, length), np.int32)
        return MicrobatchShapes.of_step(*data_of(self.model, tokens, tokens))

    def extras(self, tokens):
        """What the model's layers take beside activations."""
        return data_of(self.model, tokens, tokens)[2]

    @property
    def links(self):
        """Every link, also the wrap-around."""
        ring = range(self.num_ranks)
        return {Link(*sorted((rank, (rank + 1) % self.num_ranks))) for rank in ring}

    def close(self):
        self.trainer.close()
        self._opened.close()

    def _cut(self, num_chunks, counts):
        """The layers of each virtual stage; the first takes the remainder."""
        if num_chunks == 1:
            return cut_layers(self.model.num_layers, self.num_ranks, counts or "even")
        others = num_chunks * self.num_ranks - 1
        counts = [self.model.num_layers - others, *[1] * others]
        return cut_layers(self.model.num_layers, self.num_ranks, counts, num_chunks)

    def program(self, schedule_name, num_microbatches, routes=None, narrowed_to=None):
        programs, slots = lowered(
            self.num_ranks,
            self.num_chunks,
            len(self.model.tied),
            schedule_name,
            num_microbatches,
            tuple(sorted((routes or {}).items())),
            narrowed_to,
        )
        if routes:
            self.trainer.add_slots(slots)
            self.rendezvous.exchange({})
        if self.room is None:
            return programs[self.rank]
        placed = offload(programs[self.rank], StageMemory(1, 0, self.room), ahead=2)
        assert count_offloads([placed]) > 0
        return placed

    def run(self, schedule_name, tokens, targets, step=0, routes=None):
        """One step's loss and norm over all ranks; the gradients stay on the trainer."""
        arrays, targets, extras = data_of(self.model, tokens, targets)
        weight = 1.0 / np.count_nonzero(targets >= 0)
        length = self.lengths.index(tokens.shape[-1])
        inputs = StepInputs(arrays, targets, weight, extras, length=length)
        program = self.program(schedule_name, len(tokens), routes)
        outcome = self.trainer.run(program, inputs, step)
        squared_norm = self.trainer.squared_norm()
        not_finite = not_finite_in_words(self.trainer, outcome, squared_norm)
        report = StepReport(outcome.loss, squared_norm, not_finite=not_finite)
        reports = self.rendezvous.exchange(report.to_json())
        return total([StepReport.from_json(each, rank) for rank, each in enumerate(reports)])

    def own_part(self, tree):
        """This stage's part of a whole model's tree, chunk by chunk, tied copies filled in."""
        tree = untie(self.model, tree)
        virtual_stages = range(self.rank, len(self.layers), self.num_ranks)
        return tuple(self._part_of(stage, tree) for stage in virtual_stages)

    def _part_of(self, virtual_stage, tree):
        layers = self.layers[virtual_stage]
        part = {
            "layers": jax.tree.map(lambda leaf: leaf[layers.start : layers.stop], tree["layers"])
        }
        if virtual_stage == 0:
            part["embed"] = tree["embed"]
        if virtual_stage == len(self.layers) - 1:
            part["head"] = tree["head"]
        return part

    def report(self, test, **figures):
        self.link.send({"kind": "result", "test": test, "rank": self.rank, **self.case, **figures})

    def check_gradients(
        self, schedule_name, tokens, targets, test="gradients", random_step=None, routes=None
    ):
        totals = self.run(schedule_name, tokens, targets, random_step or 0, routes)
        loss, gradients = self.reference.initial_loss_and_gradients(tokens, targets, random_step)
        self.report(
            test,
            schedule=schedule_name,
            microbatches=len(tokens),
            loss_error=abs(totals.loss / loss - 1),
            norm_error=abs(totals.grad_norm / norm(gradients) - 1),
            worst_leaf=worst_leaf(self.trainer.gradients, self.own_part(gradients)),
        )
        self.trainer.discard()


@cache
def lowered(num_ranks, num_chunks, num_tied, schedule_name, num_microbatches, routes, narrowed_to):
    """Every rank's checked program of a step, and the slots it needs."""
    schedule, planned = planned_schedule(num_ranks, num_chunks, schedule_name, num_microbatches)
    programs = lower(schedule, planned, dict(routes) or None, num_tied=num_tied)
    if narrowed_to is not None:
        programs = [forward_only(program, first_microbatch=narrowed_to) for program in programs]
    check(programs)
    return programs, slots_needed(programs) if routes else {}


@cache
def planned_schedule(num_ranks, num_chunks, schedule_name, num_microbatches):
    costs, links, limits = problem(num_ranks, schedule_name)
    schedule = plan(
        costs, links, limits, num_microbatches, schedule_name, num_chunks=num_chunks
    ).schedule
    return schedule, simulate(schedule, costs, links)


def problem(num_ranks, schedule_name):
    """The problem to plan: with uneven stages, a slow link and caps for planned schedules."""
    if schedule_name not in PLANNED_SCHEDULES:
        return StageCosts.uniform(num_ranks, 1.0, 1.0, 1.0), {}, Limits()
    durations = [
        tuple(1.0 + (3 * rank + kind) % 4 / 2 for rank in range(num_ranks)) for kind in range(3)
    ]
    links = chain_links([2.5 if rank == 0 else 0.0 for rank in range(num_ranks - 1)])
    return StageCosts(*durations), links, Limits((5,) * num_ranks, "W")


def worst_leaf(got, expected):
    """The largest relative error of any leaf, and its name."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    return max(
        (relative_error(np.float64(leaf), np.float64(wanted)), jax.tree_util.keystr(path))
        for (path, leaf), wanted in pairs
    )


def relative_error(got, expected):
    """The relative error of a whole leaf; infinite where a value is not finite."""
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    return float(error) if np.isfinite(error) else float("inf")


def batch(num_microbatches, seed):
    random = np.random.default_rng(seed)
    shape = (num_microbatches, MICROBATCH_SIZE, SEQUENCE + 1)
    ids = random.integers(0, VOCABULARY, shape, dtype=np.int32)
    return ids[..., :-1], ids[..., 1:]


TRAINED_ON = [batch(4, 20 + step) for step in range(3)]


def check_all_schedules(parity, compilations):
    parity.check_gradients("gpipe", *batch(1, 0), test="first")  # compiles small helper programs
    before = compilations.count
    for schedule_name, microbatches in itertools.product(SCHEDULES, MICROBATCHES):
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
    counts = parity.trainer.delegated.statistics()
    parity.report("route changes", compiled=compilations.count - before, counts=counts)


def check_recomputing(rendezvous, link, reference):
    """Another stash, and sidecars over a network that flips bits repeatedly."""
    tokens, targets = batch(8, 23)
    with ExitStack() as proxies:
        planes = []

        def start(rank, outgoing, incoming, settings):
            plane: Any = SidecarPlane.start(rank, outgoing, incoming, TransportSettings())
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


class Auxiliary:
    """GPT-2 with dropout, whose layers have two auxiliary losses."""

    aux_weights: ClassVar = {"size": 3.0, "expanded": 0.5}

    def __init__(self, **sizes):
        self._model = build(dropout=0.3, **sizes)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def layer(self, params, x, *, key):
        expanded = x @ params["expand"]["kernel"]
        aux = {"expanded": jax.nn.softplus(expanded).mean(), "size": (x**2).mean()}
        return self._model.layer(params, x, key=key), aux


def check_auxiliary(rendezvous, link):
    """Auxiliary losses of every layer are in the loss, and differentiated on every stage."""
    reference = None
    for stash in ("full", "recompute"):
        parity = Parity(
            rendezvous,
            link,
            tied=True,
            stash=stash,
            build_model=Auxiliary,
            reference=reference,
        )
        reference = parity.reference
        for schedule_name in ("gpipe", "1f1b", "zb-h2", "adaptive"):
            parity.check_gradients(schedule_name, *batch(4, 4), "auxiliary", random_step=5)
        parity.close()


def packed_and_dropping(**sizes):
    """GPT-2 with dropout, whose tokens attend within the documents that some of them begin."""
    model: Any = build(dropout=0.3, **sizes)
    model.extras_of = lambda tokens: {"segments": (tokens < VOCABULARY // 4).cumsum(-1, np.int32)}
    return model


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
    for build_model in (moe_decoder, patch_encoder):
        reference = None
        for stash in ("full", "recompute"):
            parity = Parity(
                rendezvous,
                link,
                tied=False,
                stash=stash,
                build_model=build_model,
                reference=reference,
                delegated=True,
            )
            reference = parity.reference
            everywhere = dict.fromkeys(parity.links, "delegated")
            for schedule_name in ("gpipe", "1f1b", "zb-h2", "adaptive"):
                for routes in (None, everywhere):
                    test, batch_ = build_model.__name__, batch(4, 4)
                    parity.check_gradients(
                        schedule_name, *batch_, test, random_step=5, routes=routes
                    )
            parity.close()
        lengths = (SEQUENCE, 7, 4) if build_model is moe_decoder else (SEQUENCE,)
        check_cuts(rendezvous, link, build_model, reference, lengths)


def check_cuts(rendezvous, link, build_model, reference, lengths, *, tied=False):
    """The same gradients on other cuts, from offloaded stashes, and in shorter steps."""
    cases: Sequence[tuple[str, Mapping[str, Any]]] = (
        ("gpipe", {"counts": (1, 4), "room": 1}),
        ("zb-h2", {"counts": (4, 1), "stash": "recompute", "lengths": lengths}),
        ("interleaved", {"num_chunks": CHUNKS}),
    )
    for schedule_name, more in cases:
        parity = Parity(
            rendezvous,
            link,
            tied=tied,
            build_model=build_model,
            reference=reference,
            delegated=True,
            **more,
        )
        test = f"{build_model.__name__} otherwise"
        everywhere = dict.fromkeys(parity.links, "delegated")
        for routes, length in itertools.product(
            (None, everywhere), (*parity.lengths, *parity.lengths)
        ):
            tokens, targets = (array[..., :length] for array in batch(4, 4))
            parity.check_gradients(
                schedule_name, tokens, targets, test, random_step=5, routes=routes
            )
        parity.close()


def check_dropout(rendezvous, link, compilations):
    """Every step, microbatch and layer has masks of its own: those of one device."""
    reference, dropping = None, packed_and_dropping
    for stash in ("full", "recompute"):
        parity = Parity(
            rendezvous,
            link,
            tied=True,
            stash=stash,
            build_model=dropping,
            reference=reference,
            delegated=stash == "full",
        )
        reference, before = parity.reference, None
        for step, schedule_name in enumerate(("gpipe", "1f1b", "zb-h2", "adaptive")):
            batch_ = batch(4, 4)
            parity.check_gradients(schedule_name, *batch_, "dropout", random_step=step)
            before = before or compilations.count
        compiled = compilations.count - before
        parity.report("dropout compilations", count=compiled)
        if stash == "full":
            check_dropout_routes(parity)
            check_dropout_evaluates(parity)
        parity.close()
    check_cuts(rendezvous, link, dropping, reference, (SEQUENCE,), tied=True)


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


def check_forwards_alone(parity, schedules, compilations):
    """Forwards alone give the step's loss bit by bit, and no gradients."""
    tokens, targets = batch(8, 17)
    weight, first = 1.0 / np.count_nonzero(targets >= 0), len(tokens)
    everywhere = [dict.fromkeys(parity.links, "delegated")] if parity.num_ranks > 1 else []
    for schedule_name, routes in itertools.product(schedules, [None, *everywhere]):
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


def gradients_of(parity, schedule_name, tokens, targets, routes, step=0):
    parity.run(schedule_name, tokens, targets, step, routes=routes)
    gradients = jax.tree.map(np.asarray, parity.trainer.gradients)
    parity.trainer.discard()
    return gradients


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


def main(arguments, link, rest):
    rendezvous = join_run(arguments, start_timeout_s=60, step_timeout_s=60)
    if rest == ["examples"]:
        check_examples(rendezvous, link)
        return
    compilations = CompilationCounter()
    if rest == ["random models"]:
        check_dropout(rendezvous, link, compilations)
        check_auxiliary(rendezvous, link)
        return
    compile_alike_once()  # the tied and the untied model's stages compute the same
    references = {
        tied: check_whole_stages(rendezvous, link, tied, compilations) for tied in (True, False)
    }
    if rendezvous.num_ranks == 2:
        bfloat16 = Parity(rendezvous, link, tied=True, compute_dtype="bfloat16")
        check_variants(bfloat16)
        bfloat16.close()
        check_recomputing(rendezvous, link, references[True])
    if rest != ["schedules"]:
        for tied, reference in references.items():
            check_chunked_stages(rendezvous, link, tied, reference, compilations)


def check_whole_stages(rendezvous, link, tied, compilations):
    """One stage per rank; returns the reference."""
    parity = Parity(rendezvous, link, tied=tied, delegated=True)
    check_all_schedules(parity, compilations)
    check_ignored_microbatch(parity)
    check_bitwise_equal(parity)
    check_forwards_alone(parity, ("1f1b", "zb-h2"), compilations)
    if rendezvous.num_ranks > 1:
        check_routes(parity, ("zb-h1", "1f1b", "adaptive"), compilations)
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
        optimizer=CHUNKED_OPTIMIZER,
        kinds=(OpKind.F, OpKind.BW),
        reference=reference,
        delegated=True,
    )
    expected = reference.steps(CHUNKED_OPTIMIZER, CLIP_NORM, TRAINED_ON)
    check_forwards_alone(chunks, ("interleaved",), compilations)
    check_chunks(chunks, expected)
    if rendezvous.num_ranks > 1:
        check_routes(chunks, ("interleaved",), compilations)
    chunks.close()


def check_variants(parity):
    """Other arithmetic or another stash, with BW and with B and W."""
    for schedule_name in ("1f1b", "zb-h2"):
        parity.check_gradients(schedule_name, *batch(4, 4))


if __name__ == "__main__":
    run_rank(main)
