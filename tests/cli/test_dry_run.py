"""`jaxmorph train --dry-run`: what it prints, and that it leaves nothing behind."""

import re

import pytest

from jaxmorph.models.gpt2.model import GPT2

TINY = """
model: {width: 16, num_heads: 2, num_layers: 4}
data: {sequence_length: 8}
batch: {microbatches: 4, microbatch_size: 2}
parallelism: {stages: 2}
schedule: {name: 1f1b}
"""


@pytest.fixture
def run(run, tmp_path, monkeypatch):
    """Runs the command in a folder with only a configuration; returns its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as it would stay set
    (tmp_path / "tiny.yaml").write_text(TINY)

    def run_(*words):
        output = run("train", *words)
        assert [path.name for path in tmp_path.iterdir()] == ["tiny.yaml"]
        return output

    return run_


def test_dry_run_shows_memory_and_starts_nothing(run):
    code, out, _ = run("tiny.yaml", "--dry-run")
    assert code == 0
    assert "1f1b, warm-up forwards 2 1" in out
    assert "links     direct; 1.0 KiB a message" in out
    assert "device    traced for cpu" in out
    rows = [line.split() for line in out.splitlines() if re.match(r" *[01] +\d-\d", line)]
    assert [row[:2] for row in rows] == [["0", "0-1"], ["1", "2-3"]]
    assert [row[6] for row in rows] == ["-", "-"]  # BW leaves nothing for a W
    assert [len(row) for row in rows] == [14, 14]  # nine cells, five of them with a unit
    hosts = [line.split() for line in out.splitlines() if re.match(r" *[01] +\d+ B", line)]
    assert [" ".join(row[1:5]) for row in hosts] == ["0 B 0 B", "0 B 0 B"]  # slots, stashes
    assert re.search(r"an estimate, .*\nfuses many, is [\d.]+ KiB\. When", out)
    assert re.search(r"A host with all 2 ranks needs [\d.]+ KiB; this one has [\d.]+ GiB", out)


def test_dry_run_tells_what_a_limit_on_host_memory_costs(run):
    adapts = "schedule.name=adaptive", "adaptation.enabled=true", "batch.microbatches=32"
    _, free, _ = run("tiny.yaml", "--dry-run", *adapts)
    _, out, _ = run("tiny.yaml", "--dry-run", *adapts, "limits.host_gib=0.0003")
    assert "with all links delegated" in free
    assert "limits.host_gib" not in free.splitlines()[-1]
    assert re.search(r"limits.host_gib is 0.0003 a rank; without it a rank takes up to", out)
    code, _, error = run("tiny.yaml", "--dry-run", *adapts, "limits.host_gib=1e-6")
    assert code == 2
    assert error.startswith("error: limits.host_gib=1e-6 (command line): got 1e-06, expected at l")
    assert error.count("\n") == 1


def test_tables_with_chunks_are_not_cut(run):
    _, out, _ = run(
        "tiny.yaml", "--dry-run", "schedule.name=interleaved", "parallelism={stages: 2, chunks: 2}"
    )
    assert "…" not in out
    assert re.search(r"^ *1 +1-1 3-3 ", out, re.MULTILINE)
    assert "counted for each chunk" in out


def test_automatic_layers_and_offload_are_explained(run):
    _, out, _ = run(
        "tiny.yaml", "--dry-run", "parallelism={stages: 4, layers: auto}", "model.num_layers=8",
        "batch.microbatches=8", "schedule={name: adaptive, max_live: 2}", "offload.enabled=true",
        "data.packing=segments",
    )  # fmt: skip
    assert "data      the Python standard library's sources, packed: token 0 ends a document" in out
    assert "layers    cut evenly here; a run times them first" in out
    assert "wait in host memory" in out
    assert "total" not in out  # two kinds of memory


def test_a_model_that_cannot_be_traced_is_one_line(run, monkeypatch):
    def broken(self, params, x):
        raise TypeError("dot_general requires equal sizes\n\nand more")

    monkeypatch.setattr(GPT2, "layer", broken)
    says = r"error: test_dry_run\.py:\d+: {}: TypeError: dot_general requires equal sizes\n"
    code, _, error = run("tiny.yaml", "--dry-run")
    assert code == 2
    assert re.fullmatch(says.format("layer"), error)
    code, _, error = run("tiny.yaml", "--dry-run", "limits.host_gib=1")  # traces it earlier
    assert code == 2
    assert re.fullmatch(says.format("its model can't be traced"), error)


def test_a_model_that_would_train_wrongly_is_one_line(run, monkeypatch):
    head = GPT2.head

    def mean(self, params, x, targets):
        return head(self, params, x, targets) / targets.size

    monkeypatch.setattr(GPT2, "head", mean)
    code, _, error = run("tiny.yaml", "--dry-run")
    assert code == 2
    assert re.fullmatch(
        r"error: test_dry_run\.py:\d+: head: got the loss [\d.]+ of one example, and [\d.]+ where "
        r"it stands twice: a mean\? expected [\d.]+: the sum of the losses\n",
        error,
    )


def test_replicas_and_devices_are_counted(run):
    sizes = "tiny.yaml", "--dry-run", "data.vocab_size=260", "parallelism.tensor=2"
    sizes += ("routes.default=delegated",)
    _, alone, _ = run(*sizes)
    code, out, _ = run(*sizes, "parallelism.data=2")
    assert code == 0
    assert "2 of them in each replica\n" in out
    assert (
        "ranks     4, one for each of 2 stages of each of 2 replicas, with 2 devices each;" in out
    )
    assert "loss      the mean over a step's targets that are not negative\n" in out
    host = re.compile(r"A host with all \d ranks needs ([\d.]+) KiB")
    two, four = (float(host.findall(each)[0]) for each in (alone, out))
    assert two < four < 2 * two  # only replica 0 copies its state for a checkpoint


def test_parameters_without_a_gradient_are_a_warning(run, monkeypatch):
    monkeypatch.setattr(GPT2, "layer", lambda self, params, x: x)
    code, out, _ = run("tiny.yaml", "--dry-run")
    assert code == 0
    assert re.search(
        r"^warning   no gradient reaches layer\.\S+( \(model\.py:\d+\))?, "
        r"(layer\.\S+, ){6}layer\.\S+ and \d+ more: not "
        "trained, but for weight decay$",
        out,
        re.MULTILINE,
    )


def test_packing_needs_layers_that_take_segments(run, monkeypatch):
    monkeypatch.setattr(GPT2, "layer", lambda self, params, x: x)
    code, _, error = run("tiny.yaml", "--dry-run", "data.packing=segments")
    assert code == 2
    assert error == (
        "error: data.packing=segments (command line): got segments, expected none: the layer of "
        "model.factory, gpt2, takes no extras\n"
    )


def test_a_wrong_configuration_is_one_line(run):
    code, _, error = run("tiny.yaml", "--dry-run", "schedule.max_stash_bytes=1000")
    assert code == 2
    assert error.startswith(
        "error: schedule.max_stash_bytes=1000 (command line): schedule.max_stash_bytes[0]: got 1"
    )
    assert error.count("\n") == 1


def test_dry_run_refuses_resume_and_launch(run):
    assert run("tiny.yaml", "--launch", "cluster", "--dry-run")[0] == 2
    code, _, error = run("--resume", "runs/some", "--dry-run")
    assert (code, error) == (
        2, "error: --dry-run: got --resume, expected a configuration's YAML file alone\n",
    )  # fmt: skip
