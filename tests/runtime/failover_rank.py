"""One of three ranks whose link 0-1 fails within steps: reports the results of each step.

Activations 2 and 3 of the link go in pairs with gradients 0 and 1.
"""

import hashlib
import os
import signal
import subprocess
import threading
import time
from contextlib import closing, contextmanager

import jax
import numpy as np
from compiled_once import compile_alike_once

from jaxmorph.emulation.link_conditions import LinkCondition
from jaxmorph.models.gpt2 import build
from jaxmorph.program.check import check
from jaxmorph.program.lowering import lower
from jaxmorph.records import Link
from jaxmorph.runtime.emulated_links import EmulatedLinks
from jaxmorph.runtime.executor import StepInputs
from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.link_connections import open_data_plane, open_failover_connections
from jaxmorph.runtime.optimizer import OptimizerSettings
from jaxmorph.runtime.payloads import channel_specs
from jaxmorph.runtime.queue import Pace
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.stage_settings import StageSettings
from jaxmorph.runtime.stage_trainer import StageTrainer
from jaxmorph.schedule.costs import Limits, StageCosts
from jaxmorph.schedule.ops import OpKind
from jaxmorph.schedule.partition import cut_layers
from jaxmorph.schedule.planner import plan
from jaxmorph.schedule.simulate import simulate
from jaxmorph.stage.model import MicrobatchShapes
from tests.oracles.switch_check import check_every_switch

COLLECTIVE_S, CUT_S, STOPPED_S = 2, 0.5, 5
MICROBATCHES, MICROBATCH_SIZE, SEQUENCE, VOCABULARY = 4, 2, 12, 61
LIMIT_S = 30.0
LINK = Link(0, 1)
CUT = LinkCondition((0, 1), cut=True, route="direct")


class LinksWithActions(EmulatedLinks):
    """Runs an action right before a transfer begins at this end, when both ends have come to it."""

    def __init__(self):
        super().__init__()
        self.before = {}

    def wait_until_whole(self, identity, arrived_s, deadline_s):
        self.before.pop((identity.step, str(identity.transfer)), lambda: None)()
        return super().wait_until_whole(identity, arrived_s, deadline_s)


class Rank:
    """This rank's stage and the faults that hit it."""

    def __init__(self, rendezvous, link, trainer, links, program, queue):
        self.rendezvous, self.link, self.queue = rendezvous, link, queue
        self.trainer, self.links, self.program = trainer, links, program
        self.rank, self.step = rendezvous.rank, 0
        rng = np.random.default_rng(7)
        shape = (MICROBATCHES, MICROBATCH_SIZE, SEQUENCE)
        tokens, targets = (rng.integers(0, VOCABULARY, shape, np.int32) for _ in range(2))
        self.inputs = StepInputs(tokens, targets, 1 / tokens.size)

    def run(self, name):
        """Run a step on the same parameters and data as all others."""
        outcome = self.trainer.run(self.program, self.inputs, self.step)
        self.rendezvous.exchange({})
        digest = hashlib.sha256(np.float64(outcome.loss).tobytes())
        for leaf in jax.tree.leaves(self.trainer.gradients):
            digest.update(np.asarray(leaf).tobytes())
        self.trainer.discard()
        self.link.send(
            {
                "kind": "ran",
                "rank": self.rank,
                "queue": self.queue,
                "step": name,
                "digest": digest.hexdigest(),
                "failures": [failure.to_json() for failure in self.trainer.take_link_failures()],
                "on_direct": self.trainer.path_is_up(LINK) is None,
            }
        )
        self.step += 1

    def before(self, transfer, action, ranks):
        if self.rank in ranks:
            self.links.before[self.step, transfer] = action

    def restore(self):
        """Restore the link at a step boundary, once both ends report the path up, as a run does."""
        until_s = time.monotonic() + LIMIT_S
        while False in [end["up"] for end in self.rendezvous.exchange(self.is_up())]:
            assert time.monotonic() < until_s, "the path never came up again"
        self.trainer.restore_direct(LINK)

    def begin_without_path(self):
        """Start with a dead path, as a run does after a restart."""
        if self.rank in LINK:
            assert self.trainer.path_is_up(LINK) is None
            self.trainer.begin_failed_over(LINK)
            assert self.trainer.path_is_up(LINK) is not None
        self.restore()

    def is_up(self):
        return {"up": self.trainer.path_is_up(LINK)}


def stop_for_a_while():
    """Stop this process, as from outside, until long after the collective's deadline."""
    subprocess.Popen(["sh", "-c", f"sleep {STOPPED_S}; kill -CONT {os.getpid()}"])
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)  # here, before the next line


@contextmanager
def opened(rendezvous, link, queue):
    model = build(
        preset="tiny",
        sequence_length=SEQUENCE,
        vocab_size=VOCABULARY,
        width=16,
        num_layers=3,
        num_heads=2,
        tied=True,
    )
    links = frozenset({Link(0, 1), Link(1, 2), Link(0, 2)})
    settings = StageSettings(
        layers=cut_layers(model.num_layers, rendezvous.num_ranks),
        shapes=MicrobatchShapes.of_text(MICROBATCH_SIZE, SEQUENCE),
        seed=3,
        kinds=frozenset({OpKind.F, OpKind.B, OpKind.W}),
        optimizer=OptimizerSettings(learning_rate=1e-2, warmup_steps=0, total_steps=10),
        pace=Pace.of_stage(4, 4, 4) if queue == "paced" else None,
        transfer_timeout_s=LIMIT_S,
        delegated=links,
        fails_over=True,
        direct_timeout_s=CUT_S,
    )
    ends = channel_specs(settings.payloads(model), links, rendezvous.rank)
    costs = StageCosts.uniform(3, 4, 4, 4)
    schedule = plan(costs, {}, Limits(), MICROBATCHES, "zb-h1").schedule
    planned = simulate(schedule, costs, {})
    programs = lower(schedule, planned, num_tied=len(model.tied), pairs=True)
    check(programs)
    check_every_switch(programs)
    own, acting = programs[rendezvous.rank], LinksWithActions()
    with (
        open_data_plane(rendezvous, *ends) as plane,
        open_failover_connections(rendezvous, links, "127.0.0.1", LIMIT_S) as failover,
        closing(StageTrainer(model, settings, rendezvous.rank, acting, plane, failover)) as trainer,
    ):
        yield Rank(rendezvous, link, trainer, acting, own, queue)


def cut_in_mid_step(rank):
    rank.run("undisturbed")
    rank.before("activation[2] 0>1", lambda: rank.links.emulate([CUT]), ranks=LINK)
    rank.run("cut")
    rank.run("delegated")
    rank.links.emulate(())
    rank.restore()
    rank.run("restored")


def stopped_in_mid_transfer(rank):
    rank.before("gradient[1] 1>0", stop_for_a_while, ranks=[1])
    rank.run("stopped")
    rank.run("delegated after")
    rank.restore()
    rank.run("restored after")


def cut_while_one_end_waits(rank, name):
    """Cut the link at one end only, so that the other end's collective fails."""
    rank.before("activation[2] 0>1", lambda: rank.links.emulate([CUT]), ranks=[1])
    rank.run(name)
    rank.links.emulate(())
    rank.restore()
    rank.run(f"{name}, restored")


def main(arguments, link, rest):
    rendezvous = join_run(arguments, Joining(60, COLLECTIVE_S, fails_over=True))
    compile_alike_once()
    with opened(rendezvous, link, "unpaced") as rank:
        cut_in_mid_step(rank)
    with opened(rendezvous, link, "paced") as rank:
        rank.begin_without_path()
        cut_in_mid_step(rank)
        stopped_in_mid_transfer(rank)
        for number in range(2):
            cut_while_one_end_waits(rank, f"closed {number}")


if __name__ == "__main__":
    run_rank(main)
