"""Trees of arrays read back from Orbax's files to the bit."""

import shutil

import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.checkpoints import tree_files
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.errors import UserError

COUNT = ("optimizer", "0", "count")


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("tree") / "part"
    tree = {
        "params": {
            "embed": {"token": jnp.linspace(-1, 1, 12).reshape(3, 4) / 3},
            "layers": {"mlp/~/linear_0": {"w": jnp.arange(3.0)}},
        },
        "optimizer": {"0": {"count": jnp.int32(7), "mu": {"token": jnp.array([1e-45, -0.0])}}},
    }
    TreeFiles().write(path, tree)
    return path, tree


def same_bits(got, expected):
    expected = np.asarray(expected)
    return (
        type(got) is np.ndarray
        and (got.dtype, got.shape) == (expected.dtype, expected.shape)
        and got.tobytes() == expected.tobytes()
    )


def test_a_tree_reads_back_to_the_bit(written):
    path, tree = written
    read = TreeFiles().read(path)
    assert read.keys() == tree.keys()
    assert same_bits(read["params"]["embed"]["token"], tree["params"]["embed"]["token"])
    named = read["params"]["layers"]["mlp/~/linear_0"]["w"]
    assert same_bits(named, tree["params"]["layers"]["mlp/~/linear_0"]["w"])
    assert same_bits(read["optimizer"]["0"]["count"], tree["optimizer"]["0"]["count"])
    assert same_bits(read["optimizer"]["0"]["mu"]["token"], tree["optimizer"]["0"]["mu"]["token"])


def test_a_branch_can_be_read_alone(written):
    path, tree = written
    read = TreeFiles().read(path, ["params"])
    assert read.keys() == {"params"}
    assert same_bits(read["params"]["embed"]["token"], tree["params"]["embed"]["token"])


@pytest.mark.parametrize("at_once_bytes", [1, 30, 1 << 30])
def test_only_the_requested_rows_are_read(written, monkeypatch, at_once_bytes):
    monkeypatch.setattr(tree_files, "_AT_ONCE_BYTES", at_once_bytes)
    path, tree = written
    table, moment = ("params", "embed", "token"), ("optimizer", "0", "mu", "token")
    assert {table, moment} < set(TreeFiles().key_paths(path))
    read = TreeFiles().read_rows(path, {table: slice(1, 3), moment: ..., COUNT: ...})
    assert read.keys() == {table, moment, COUNT}
    assert same_bits(read[table], tree["params"]["embed"]["token"][1:3])
    assert read[table].base is None  # the other rows are freed
    assert same_bits(read[moment], tree["optimizer"]["0"]["mu"]["token"])
    assert same_bits(read[COUNT], tree["optimizer"]["0"]["count"])


@pytest.mark.parametrize("damage", ["truncated", "lost", "all_lost", "no_branch"])
def test_a_damaged_tree_is_one_line(written, tmp_path, damage):
    path = shutil.copytree(written[0], tmp_path / "part")
    files = [file for file in path.rglob("*") if file.is_file()]
    largest = max(files, key=lambda file: file.stat().st_size)
    if damage == "truncated":
        largest.write_bytes(largest.read_bytes()[:-20])
    elif damage == "lost":
        largest.unlink()
    elif damage == "all_lost":
        shutil.rmtree(path)
    with pytest.raises(UserError) as error:
        TreeFiles().read(path, ["absent"] if damage == "no_branch" else None)
    assert str(error.value).startswith(f"{path}: not a whole part of a checkpoint: ")
    assert "\n" not in str(error.value)


def test_nothing_is_overwritten(written):
    path, tree = written
    with pytest.raises(ValueError, match="already exists"):
        TreeFiles().write(path, tree)


def test_a_place_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("precious")
    with pytest.raises(OSError, match="file"):
        TreeFiles().write(tmp_path / "file" / "part", {"a": jnp.zeros(1)})


def test_a_tree_that_cannot_be_read_back_is_not_written(tmp_path):
    """Orbax looks for what it has written by patterns, for which this path is another."""
    with pytest.raises(UserError, match="not a whole part of a checkpoint: got no tree"):
        TreeFiles().write(tmp_path / "a[1]" / "part", {"params": {"w": jnp.arange(3.0)}})
