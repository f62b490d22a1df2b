"""One rank of the second model's parity test: the same checks, fewer of them."""

from functools import partial

from compiled_once import compile_alike_once
from parity_rank import CLIP_NORM, OPTIMIZER, TRAINED_ON, Parity, batch, check_parameters

from jaxmorph.models.llama import build
from jaxmorph.runtime.join import join_run
from jaxmorph.runtime.rank_process import run_rank

SCHEDULES = ("1f1b", "zb-h2", "adaptive")
GROUPED = {"num_key_value_heads": 1, "hidden_width": 24}  # two query heads on one of keys


def main(arguments, link, rest):
    rendezvous = join_run(arguments, start_timeout_s=60, step_timeout_s=60)
    compile_alike_once()  # the tied and the untied model's stages compute the same
    for tied in (False, True):
        build_model = partial(build, **GROUPED)
        parity = Parity(rendezvous, link, tied=tied, build_model=build_model, optimizer=OPTIMIZER)
        for schedule_name in SCHEDULES:
            parity.check_gradients(schedule_name, *batch(4, 4))
        expected = parity.reference.steps(OPTIMIZER, CLIP_NORM, TRAINED_ON)
        check_parameters(parity, "zb-h2", expected)
        parity.close()


if __name__ == "__main__":
    run_rank(main)
