"""A state saved with any cut can be restored with any other one, to the bit."""

import shutil
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.checkpoints.manifest import stage_path
from jaxmorph.checkpoints.recut import joined, read_part, rows_to_read, shares
from jaxmorph.checkpoints.tree_files import KeyPath, TreeFiles, leaves_of
from jaxmorph.errors import UserError
from jaxmorph.placement import Replica
from jaxmorph.runtime.optimizer import OptimizerSettings, StageOptimizer, adamw
from jaxmorph.runtime.shares import Shares
from jaxmorph.runtime.stage_state import from_parts, nested, own_parts, stage_parts, stored_parts
from jaxmorph.stage.parameters import init_stage_params

SETTINGS = OptimizerSettings(learning_rate=1e-2, warmup_steps=2, total_steps=10)


def cut(*counts):
    return tuple(range(start, end) for start, end in pairwise(accumulate(counts, initial=0)))


def tree(layers, num_layers, name):
    """A virtual stage's tree, whose numbers show the tree and the layer that they are of."""
    stacked = np.array([[name * 100 + layer] * 3 for layer in layers], np.float32)
    own: dict[str, Any] = {"layers": {"mlp": {"kernel": stacked, "layers": stacked[:, :1] + 0.5}}}
    if layers.start == 0:
        own["embed"] = {"token": np.full((5, 2), name + 0.25, np.float32)}
    if layers.stop == num_layers:
        own["head"] = {"output": {"token": np.full((5, 2), name + 0.25, np.float32)}}
    return own


def part(layers, num_layers):
    moments = {"count": np.int32(7), "mu": tree(layers, num_layers, 2)}
    state = {"0": {**moments, "nu": tree(layers, num_layers, 3)}, "2": {"count": np.int32(7)}}
    return {"params": tree(layers, num_layers, 1), "optimizer": state}


def recut(saved, wanted):
    """Does what `read_part` does with parts in memory; returns the part and the rows read."""
    parts, stacked, read = [], set(), {}
    num_layers = saved[-1].stop
    for share in shares(saved, wanted):
        stored = leaves_of(part(saved[share.stage], num_layers))
        ends = {"embed": wanted.start == 0, "head": wanted.stop == num_layers}
        rows = rows_to_read(stored, share.rows, **ends)
        read[share.stage] = rows
        parts.append({key: stored[key][which] for key, which in rows.items()})
        stacked |= {key for key, which in rows.items() if which is not ...}
    return nested(joined(parts, stacked)), read


def same_bits(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for got, expected in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert (np.asarray(got).dtype, got.shape) == (np.asarray(expected).dtype, expected.shape)
        assert np.asarray(got).tobytes() == np.asarray(expected).tobytes()


@st.composite
def two_cuts(draw):
    num_layers = draw(st.integers(1, 9))

    def counts():
        ends = draw(st.sets(st.integers(1, num_layers), max_size=num_layers)) | {0, num_layers}
        return [end - start for start, end in pairwise(sorted(ends))]

    return counts(), counts()


@given(two_cuts())
def test_any_cut_becomes_any_other_from_its_rows_alone(cuts):
    saved, wanted = (cut(*counts) for counts in cuts)
    num_layers = saved[-1].stop
    for layers in wanted:
        got, read = recut(saved, layers)
        same_bits(got, part(layers, num_layers))
        from_stages = {stage for stage, own in enumerate(saved) if set(own) & set(layers)}
        assert read.keys() == from_stages
        for stage, rows in read.items():
            kernel = rows["params", "layers", "mlp", "kernel"]
            assert set(saved[stage][kernel]) == set(saved[stage]) & set(layers)


def test_only_end_stages_read_embedding_and_head():
    _, read = recut(cut(4), range(1, 3))
    assert {key for key in read[0] if {"embed", "head"} & set(key)} == set()
    _, read = recut(cut(4), range(2))
    assert ("optimizer", "0", "mu", "embed", "token") in read[0]
    assert ("optimizer", "0", "mu", "head", "output", "token") not in read[0]


def test_parts_with_different_step_counts_are_refused():
    count = ("optimizer", "0", "count")
    parts: list[dict[KeyPath, np.ndarray]] = [{count: np.array(number)} for number in (7, 8)]
    with pytest.raises(UserError, match=r"^the state's optimizer/0/count: got 7, 8 on different"):
        joined(parts, set())


class Model:
    """Two matrices a layer, and a table that embedding and head share."""

    num_layers = 4
    tied = ((("token",), ("output", "token")),)

    def init_embed(self, key):
        return {"token": jax.random.normal(key, (5, 3))}

    def init_layer(self, key):
        return {"kernel": jax.random.normal(key, (3, 3)), "bias": jnp.zeros(3)}

    def init_head(self, key):
        return {"gain": jnp.ones(3), "output": {"token": jnp.zeros((5, 3))}}


def params_of(layers):
    key = jax.random.key(3)
    model: Any = Model()  # without the functions that compute
    return init_stage_params(model, key, layers, layers.start == 0, layers.stop == 4)


def forms_of(layers):
    """The structures, shapes, types and devices that a virtual stage restores."""
    params = (params_of(layers),)
    held = params, adamw(SETTINGS).init(params)
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), held
    )


def trained():
    """The whole model on one stage after two updates."""
    params = (params_of(range(4)),)
    optimizer = StageOptimizer(SETTINGS, params)
    state = optimizer.initial_state(params)
    for step in range(2):
        gradients = jax.tree.map(lambda leaf, step=step: jnp.sin(leaf + step), params)
        params, state, _ = optimizer.update(params, state, gradients, 1.0)
    return jax.device_get(stage_parts(params, state))


def write(files, folder, parts):
    for number, each in enumerate(parts):
        files.write(folder / f"virtual_stage_{number}", jax.tree.map(jnp.asarray, each))


def test_four_stages_become_two_one_and_four_again_to_the_bit(tmp_path):
    """Through Orbax's files and the optimizer's state."""
    files, begun, was = TreeFiles(), trained(), {}
    cuts = [(4,), (1, 1, 1, 1), (2, 2), (4,), (1, 1, 1, 1), (3, 1)]
    write(files, tmp_path / "0", begun)
    for number, (saved, wanted) in enumerate(pairwise([cut(*each) for each in cuts])):
        parts = [read_part(files, tmp_path / str(number), saved, layers) for layers in wanted]
        for layers, each in zip(wanted, parts, strict=True):
            same_bits(stage_parts(*from_parts([each], *forms_of(layers)))[0], each)
        write(files, tmp_path / str(number + 1), parts)
        same_bits(parts, was.setdefault(wanted, parts))
    (again,) = was[cut(4)]
    same_bits(again, begun[0])
    first, last = was[cut(1, 1, 1, 1)][0], was[cut(1, 1, 1, 1)][3]
    same_bits(last["params"]["head"], again["params"]["head"])
    same_bits(last["optimizer"]["0"]["nu"]["head"], again["optimizer"]["0"]["nu"]["head"])
    same_bits(first["optimizer"]["0"]["mu"]["embed"], again["optimizer"]["0"]["mu"]["embed"])


def write_divided(files, folder, parts, layers, num_replicas):
    """Writes what replicas do that each have a share of the optimizer's state."""
    for number, (each, own_layers) in enumerate(zip(parts, layers, strict=True)):
        params = (params_of(own_layers),)
        for index in range(num_replicas):
            shares = Shares.of(params, Replica(index, num_replicas))
            optimizer = StageOptimizer(SETTINGS, params, shares=shares)
            axes = stage_parts(shares.axes, optimizer.state_axes)
            own = own_parts([each], axes, shares.own)
            (stored,) = stored_parts(own, axes, index)
            path = stage_path(folder, number, index)
            files.write(path, jax.tree.map(jnp.asarray, stored))


@pytest.mark.parametrize("num_replicas", [2, 3, 7])
def test_a_state_divided_among_replicas_is_read_whole(tmp_path, num_replicas):
    """Layers are divided among two, other axes among three, and nothing among seven."""
    files, wanted = TreeFiles(), cut(3, 1)
    write(files, tmp_path / "whole", trained())
    saved = cut(2, 2)
    parts = [read_part(files, tmp_path / "whole", cut(4), layers) for layers in saved]
    folder = tmp_path / "divided"
    write_divided(files, folder, parts, saved, num_replicas)
    for layers in (*saved, *wanted):
        got = read_part(files, folder, saved, layers, num_replicas)
        same_bits(got, read_part(files, tmp_path / "whole", cut(4), layers))
        assert all(holds_no_more(leaf) for leaf in jax.tree.leaves(got))


def holds_no_more(leaf):
    """Whether an array keeps no memory but its own."""
    return leaf.base is None or getattr(leaf.base, "nbytes", 0) <= leaf.nbytes


def test_a_replica_reads_only_its_own_share(tmp_path):
    files, saved = TreeFiles(), cut(2, 2)
    write(files, tmp_path / "whole", trained())
    parts = [read_part(files, tmp_path / "whole", cut(4), layers) for layers in saved]
    folder = tmp_path / "divided"
    write_divided(files, folder, parts, saved, num_replicas=2)
    read = partial(read_part, files, folder, saved, num_replicas=2)
    of_replicas = [read(saved[1], share=index) for index in range(2)]
    shutil.rmtree(stage_path(folder, 1, 1))  # the other replica's
    same_bits(read(saved[1], share=0), of_replicas[0])
    params = (params_of(saved[1]),)
    for index, got in enumerate(of_replicas):
        each = Shares.of(params, Replica(index, 2))
        optimizer = StageOptimizer(SETTINGS, params, shares=each)
        (own,) = own_parts([parts[1]], stage_parts(each.axes, optimizer.state_axes), each.own)
        same_bits(got, own)
