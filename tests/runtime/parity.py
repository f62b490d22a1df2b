"""A model on one rank's stage, compared with the same model on one device."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import numpy as np
from one_device import data_of, untie
from shared_reference import SharedReference, norm

from jaxmorph.config.sections import PLANNED_SCHEDULES
from jaxmorph.models.gpt2 import build
from jaxmorph.placement import Layout, PlacementKind
from jaxmorph.program.check import check
from jaxmorph.program.lowering import forward_only, lower
from jaxmorph.program.offload import count_offloads, offload
from jaxmorph.program.slots_needed import scarce_slots, slots_needed
from jaxmorph.records import Link
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.gradient_sum import GradientSum
from jaxmorph.runtime.link_connections import Start, open_data_plane
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.payloads import channel_name, channel_specs
from jaxmorph.runtime.reduction import DelegatedSum, DirectSum, sum_channels
from jaxmorph.runtime.replicas import Replicas
from jaxmorph.runtime.report import StepReport, total
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.runtime.step import not_finite_in_words
from jaxmorph.schedule.costs import Limits, StageCosts, StageMemory, chain_links
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulate import simulate
from jaxmorph.stage.mesh import make_data_mesh
from jaxmorph.stage.model import MicrobatchShapes
from jaxmorph.stage.stage_functions import StashPolicy
from jaxmorph.transport.client import SidecarPlane

CHUNKS = 2
SUM_TIMEOUT_S = 60.0
SEED, VOCABULARY, SEQUENCE, MICROBATCH_SIZE = 3, 61, 12, 2
OPTIMIZER = OptimizerSettings(
    learning_rate=1e-2, warmup_steps=1, total_steps=10, weight_decay=0.1, epsilon=1e-6
)


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
        placement_kind: PlacementKind = "wrap",
        num_devices: int = 1,
        num_replicas: int = 1,
        build_model: Callable[..., Any] = build,
        optimizer: OptimizerSettings = OPTIMIZER,
        kinds: Sequence[OpKind] = tuple(OpKind),
        reference: SharedReference | None = None,
        delegated: bool = False,
        start: Start | None = None,
        counts: Sequence[int] | None = None,
        lengths: Sequence[int] = (SEQUENCE,),
        room: int | None = None,
        weight_group: int = 1,
    ):
        layout = Layout.first(rendezvous.num_ranks // num_replicas, num_replicas)
        self.replicas, self.link = Replicas.of(rendezvous, layout), link
        self.rendezvous = self.replicas.pipeline
        self.rank, self.num_ranks = self.rendezvous.rank, self.rendezvous.num_ranks
        self.num_chunks, self.lengths, self.room = num_chunks, lengths, room
        self.weight_group = weight_group
        self.case = {
            "tied": tied,
            "compute": compute_dtype,
            "stash": stash,
            "chunks": num_chunks,
            "placement": placement_kind,
            "devices": num_devices,
            "replicas": num_replicas,
            "weight_group": weight_group,
        }
        self.model = build_model(
            preset="tiny",
            sequence_length=SEQUENCE,
            # An odd number can't be split; none of the batches has the added token.
            vocab_size=VOCABULARY + (VOCABULARY % num_devices),
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
            weight_group=weight_group,
            placement_kind=placement_kind,
            num_devices=num_devices,
            ranks=layout.ranks[self.replicas.own.index],
        )
        self._own_stages = settings.own_stages(self.rank)
        self._opened = ExitStack()
        self.plane, self.scarce = None, {}
        if delegated and self.num_ranks > 1:
            settings = replace(settings, delegated=frozenset(self.links))
            ends = channel_specs(settings.payloads(self.model), settings.delegated, self.rank)
            opened = open_data_plane(self.rendezvous, *ends, start=start)
            self.plane = self._opened.enter_context(opened)
        self.trainer = StageTrainer(self.model, settings, self.rank, plane=self.plane)
        self.reference = reference or SharedReference(self.model, SEED, rendezvous)
        self.sums = self._open_sums(num_devices)

    def _open_sums(self, num_devices):
        """What sums over the replicas, on each route; nothing where there is one."""
        own, peers, gradients = self.replicas.own, self.replicas.peers, self.trainer.gradients
        if own.is_alone:
            return {}
        mesh = make_data_mesh(self.replicas.layout.peers(self.rank), num_devices)
        opened = open_data_plane(peers, *sum_channels(gradients, own), start=SidecarPlane)
        plane = self._opened.enter_context(opened)
        assert plane is not None
        over_hosts = DelegatedSum(plane, own, peers.members, gradients, SUM_TIMEOUT_S)
        direct = DirectSum(mesh, gradients)
        return {
            "direct": GradientSum(self.replicas, direct),
            "delegated": GradientSum(self.replicas, None, over_hosts),
        }

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
        return {Link.of(rank, (rank + 1) % self.num_ranks) for rank in ring}

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

    def program(self, schedule_name, num_microbatches, routes=None, narrowed_to=None, pairs=None):
        programs, slots = lowered(
            self.num_ranks,
            self.num_chunks,
            len(self.model.tied),
            schedule_name,
            num_microbatches,
            tuple(sorted((routes or {}).items())),
            narrowed_to,
            pairs,
            self.weight_group,
        )
        if routes:
            assert self.plane is not None
            self.trainer.add_slots(slots)
            ends = [each for each in slots if self.rank in (each.source, each.destination)]
            held = {each: self.plane.num_slots(channel_name(each)) for each in ends}
            self.scarce |= scarce_slots(held, slots)
            self.rendezvous.exchange({})
        if self.room is None:
            return programs[self.rank]
        placed = offload(programs[self.rank], StageMemory(1, 0, self.room), ahead=2)
        # Only under gpipe has the last rank ever several stashes.
        has_one_stash = self.rank == self.num_ranks - 1 and schedule_name != "gpipe"
        assert (count_offloads([placed]) == 0) == has_one_stash
        return placed

    def run(self, schedule_name, tokens, targets, step=0, routes=None, pairs=None, summed="direct"):
        """One step's loss and norm over all ranks; the gradients stay on the trainer."""
        arrays, targets, extras = data_of(self.model, tokens, targets)
        weight = 1.0 / np.count_nonzero(targets >= 0)
        length_index = self.lengths.index(tokens.shape[-1])
        inputs = StepInputs(arrays, targets, weight, extras, length_index=length_index)
        own = self.replicas.own
        program = self.program(schedule_name, len(tokens) // own.count, routes, pairs=pairs)
        outcome = self.trainer.run(program, inputs.of_replica(own), step)
        if self.sums:
            outcome, _ = self.sums[summed].run(self.trainer, outcome, (), step)
        squared_norm = self.trainer.squared_norm()
        not_finite = not_finite_in_words(self.trainer, outcome, squared_norm)
        report = StepReport(outcome.loss, squared_norm, not_finite=not_finite)
        reports = self.rendezvous.exchange(report.to_json())
        return total([StepReport.from_json(each, rank) for rank, each in enumerate(reports)])

    def own_part(self, tree):
        """This stage's part of a whole model's tree, chunk by chunk, tied copies filled in."""
        tree = untie(self.model, tree)
        return tuple(self._part_of(stage, tree) for stage in self._own_stages)

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
        self.link.send(
            {
                "kind": "result",
                "test": test,
                "rank": self.replicas.all_ranks.rank,
                **self.case,
                **figures,
            }
        )

    def check_gradients(
        self,
        schedule_name,
        tokens,
        targets,
        test="gradients",
        random_step=None,
        routes=None,
        summed="direct",
    ):
        totals = self.run(schedule_name, tokens, targets, random_step or 0, routes, summed=summed)
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
def lowered(
    num_ranks, num_chunks, num_tied, schedule_name, num_microbatches, routes, narrowed_to, pairs,
    weight_group,
):  # fmt: skip
    """Every rank's checked program of a step, and the slots it needs."""
    sizes = num_ranks, num_chunks, schedule_name, num_microbatches, weight_group
    schedule, planned = planned_schedule(*sizes)
    programs = lower(schedule, planned, dict(routes) or None, num_tied=num_tied, pairs=pairs)
    if narrowed_to is not None:
        programs = [forward_only(program, first_microbatch=narrowed_to) for program in programs]
    check(programs)
    return programs, slots_needed(programs) if routes else {}


@cache
def planned_schedule(num_ranks, num_chunks, schedule_name, num_microbatches, weight_group):
    costs, links, limits = problem(num_ranks, schedule_name)
    limits = replace(limits, weight_group=weight_group)
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


def gradients_of(parity, schedule_name, tokens, targets, routes, step=0, **options):
    parity.run(schedule_name, tokens, targets, step, routes=routes, **options)
    gradients = jax.tree.map(np.asarray, parity.trainer.gradients)
    parity.trainer.discard()
    return gradients
