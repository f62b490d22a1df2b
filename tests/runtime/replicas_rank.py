"""One rank of the parity test of replicas: what they sum is what one device computes."""

import itertools
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from compiled_once import compile_alike_once
from parity import CHUNKS, Parity, batch, gradients_of
from parity_models import Auxiliary
from parity_rank import CLIP_NORM, STEADY_OPTIMIZER, TRAINED_ON, check_parameters

from jaxmorph.runtime.join import Joining, join_run
from jaxmorph.runtime.rank_process import run_rank
from jaxmorph.runtime.rendezvous import gather
from jaxmorph.schedule.ops import OpKind

SCHEDULES, IN_A_V = ("gpipe", "1f1b", "zb-h2", "adaptive"), ("zb-v",)
SUMS = ("direct", "delegated")


def check_replicas(parity, schedules, test="gradients", random_step=None):
    """Gradients against one device's, and bit by bit on all routes, again, and in all replicas."""
    tokens, targets = batch(4 * parity.replicas.own.count, 4)
    everywhere = dict.fromkeys(parity.links, "delegated") if parity.num_ranks > 1 else None
    for name in schedules:
        parity.check_gradients(name, tokens, targets, test, random_step)
        ways = [(None, "direct"), *itertools.product((None, everywhere), SUMS)]
        found = [
            gradients_of(parity, name, tokens, targets, routes, random_step or 0, summed=summed)
            for routes, summed in ways
        ]
        digests = [digest(each) for each in found]
        parity.report(
            "bits",
            schedule=name,
            same=len({*digests}) == 1,
            in_replicas=len({*gather(parity.replicas.peers, str, digests[0])}),
        )


def digest(tree):
    found = sha256()
    for leaf in jax.tree.leaves(tree):
        found.update(np.asarray(leaf).tobytes())
    return found.hexdigest()


def check_training(parity, schedule_name):
    """Three steps of AdamW against one device's; all replicas end with the same bits."""
    expected = parity.reference.steps(STEADY_OPTIMIZER, CLIP_NORM, TRAINED_ON)
    check_parameters(parity, schedule_name, expected)
    own = digest(parity.trainer.state)
    parity.report("trained bits", in_replicas=len({*gather(parity.replicas.peers, str, own)}))


def check_tying(rendezvous, link, tied, **sizes):
    """One model, down the stages and in a V."""
    whole: dict[str, Any] = {
        "optimizer": STEADY_OPTIMIZER,
        "delegated": True,
        "tied": tied,
        **sizes,
    }
    parity = Parity(rendezvous, link, **whole)
    check_replicas(parity, SCHEDULES)
    check_training(parity, "zb-h2")
    parity.close()
    v = Parity(
        rendezvous,
        link,
        num_chunks=CHUNKS,
        placement_kind="v",
        kinds=(OpKind.F, OpKind.B, OpKind.W),
        reference=parity.reference,
        **whole,
    )
    check_replicas(v, IN_A_V)
    check_training(v, "zb-v")
    v.close()


def main(arguments, link, rest):
    num_replicas, num_devices, *cases = rest
    sizes: dict[str, Any] = {"num_replicas": int(num_replicas), "num_devices": int(num_devices)}
    rendezvous = join_run(arguments, Joining(60, 60, num_devices=sizes["num_devices"]))
    compile_alike_once()
    for tied in [case == "tied" for case in cases if case.endswith("tied")]:
        check_tying(rendezvous, link, tied, **sizes)
    if "random" in cases:
        parity = Parity(rendezvous, link, tied=True, build_model=Auxiliary, delegated=True, **sizes)
        check_replicas(parity, SCHEDULES, "random", random_step=5)
        parity.close()


if __name__ == "__main__":
    run_rank(main)
