"""A whole model as one stage in float32, compiled once for all parts that want it."""

from dataclasses import dataclass
from functools import cache

import jax

from jaxmorph.gpu_check.settings import Sizes, build_gpt2
from jaxmorph.stage.build import StagePrograms, build_stage
from jaxmorph.stage.mesh import make_mesh, stage_submesh
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import init_stage_params


@dataclass(frozen=True)
class WholeModel:
    """A model as one stage.

    Attributes:
        model: The model.
        params: Its initial parameters.
        programs: The stage's, with products of the highest precision.
    """

    model: PipelineModel
    params: Params
    programs: StagePrograms


@cache
def whole_model(sizes: Sizes) -> WholeModel:
    """A GPT-2 of these sizes as one stage.

    Args:
        sizes: Of the model.
    """
    model = build_gpt2(sizes, "float32")
    key, layers = jax.random.key(0), range(sizes.num_layers)
    with jax.default_matmul_precision("highest"):
        programs = build_stage(
            model,
            stage_submesh(make_mesh(1), 0),
            num_layers=sizes.num_layers,
            is_first=True,
            is_last=True,
            microbatch_size=sizes.microbatch_size,
            sequence_length=sizes.sequence_length,
        )
    return WholeModel(
        model, init_stage_params(model, key, layers, is_first=True, is_last=True), programs
    )
