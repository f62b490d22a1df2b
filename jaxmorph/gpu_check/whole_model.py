"""A whole model as one stage in float32, compiled once for all parts that want it."""

from dataclasses import dataclass
from functools import cache

import jax

from jaxmorph.gpu_check.settings import Sizes, build_gpt2
from jaxmorph.gpu_check.stage_ops import build_lone_stage
from jaxmorph.stage.build import StagePrograms
from jaxmorph.stage.model import Params, PipelineModel
from jaxmorph.stage.parameters import init_stage_params


@dataclass(frozen=True)
class WholeModel:
    """A model as one stage.

    Attributes:
        programs: The stage's, with products of the highest precision.
    """

    model: PipelineModel
    params: Params
    programs: StagePrograms


@cache
def whole_model(sizes: Sizes) -> WholeModel:
    """A GPT-2 of these sizes as one stage."""
    model = build_gpt2(sizes, "float32")
    key, layers = jax.random.key(0), range(sizes.num_layers)
    with jax.default_matmul_precision("highest"):
        programs = build_lone_stage(model, sizes, is_whole=True)
    return WholeModel(
        model, init_stage_params(model, key, layers, is_first=True, is_last=True), programs
    )
