"""A checkpoint has all ranks' parts or does not exist: several ranks' savers in one process."""

import errno
import gc
import math
import resource
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmorph.checkpoints.checksums import write_synced
from jaxmorph.checkpoints.folder import CheckpointFolder, new_rank_file
from jaxmorph.checkpoints.manifest import Manifest, stage_path
from jaxmorph.checkpoints.saver import CheckpointError, CheckpointSaver, SaveReport, require_shared
from jaxmorph.checkpoints.tree_files import TreeFiles
from jaxmorph.config import Config, check_config
from jaxmorph.errors import UserError
from jaxmorph.messages import EventEmitted, StepDone
from jaxmorph.records import EventKind
from jaxmorph.runtime.rendezvous import SoleRank
from jaxmorph.training.train import train

LIMIT_S = 30
CONFIG = {
    "run": {"steps": 1},
    "model": {"preset": "tiny", "width": 8, "num_layers": 1, "num_heads": 1},
    "data": {"sequence_length": 4},
    "parallelism": {"stages": 1},
    "batch": {"microbatches": 1, "microbatch_size": 1},
    "checkpoint": {"every_steps": 1},
}


class FakeRendezvous(SoleRank):
    """A rank among several; the test passes their messages on."""

    def __init__(self, rank, num_ranks):
        self.rank, self.num_ranks = rank, num_ranks


class Disk:
    """Writes once it is free, or fails; `called` says that a write has begun."""

    def __init__(self):
        self.free, self.called = threading.Event(), threading.Event()
        self.error: OSError | None = None
        self.elsewhere = False

    def write(self, path, tree):
        self.called.set()
        assert self.free.wait(LIMIT_S)
        if self.error:
            raise self.error
        if not self.elsewhere:
            path.mkdir()
            np.save(path / "array.npy", tree["array"])


class Unsent(Future):
    """Records that are not sent yet; `awaited` says that something waits for them."""

    def __init__(self):
        super().__init__()
        self.awaited = threading.Event()

    def result(self, timeout=None):
        self.awaited.set()
        return super().result(timeout)


def all_sent():
    sent = Future()
    sent.set_result(None)
    return sent


class Ranks:
    """Two ranks of one virtual stage each."""

    def __init__(self, path, keep=2, within_s=math.inf):
        self.folder = CheckpointFolder(path)
        self.disks = [Disk(), Disk()]
        self.events = []
        self.sent = all_sent()
        layers = (range(1), range(1, 2))
        describe = partial(Manifest, layers=layers, vocab_size=9, tied=(), config=Config())
        self.savers = [
            CheckpointSaver(
                self.folder, FakeRendezvous(rank, 2), describe=describe, own_stages=[rank],
                write=disk.write, keep=keep, emit=lambda *event: self.events.append(event),
                on_disk=lambda: self.sent, within_s=within_s,
            )
            for rank, disk in enumerate(self.disks)
        ]  # fmt: skip

    def save(self, step):
        for rank, saver in enumerate(self.savers):
            saver.save(step, [{"array": jnp.full(3, 10.0 * step + rank)}])

    def exchange(self):
        """Exchanges a step's reports; returns the phases that the ranks reported."""
        reports = [saver.report() for saver in self.savers]
        for saver in self.savers:
            saver.advance(reports)
        return [report.phase for report in reports]

    def exchange_until(self, done):
        """Exchanges reports until they have these phases."""
        deadline = threading.Timer(LIMIT_S, self.close)
        deadline.start()
        while (phases := self.exchange()) != done:
            assert deadline.is_alive(), phases
        deadline.cancel()

    def free(self, *ranks):
        for rank in ranks:
            self.disks[rank].free.set()

    def close(self):
        self.free(0, 1)
        for saver in self.savers:
            saver.__exit__(None)


@pytest.fixture
def ranks(tmp_path):
    made = Ranks(tmp_path)
    yield made
    made.close()


def test_there_is_no_checkpoint_before_every_rank_has_written(ranks):
    ranks.save(7)
    assert ranks.exchange() == ["writing", "writing"]
    ranks.free(0)
    ranks.exchange_until(["written", "writing"])
    assert ranks.exchange() == ["written", "writing"]
    assert ranks.folder.steps() == ()
    assert ranks.events == []


def test_a_save_written_by_all_can_be_committed_later(ranks):
    ranks.save(7)
    ranks.free(0, 1)
    for rank, saver in enumerate(ranks.savers):  # their threads end, and they never agree
        saver.__exit__(None)
        assert saver.report().phase == "written", rank
    assert ranks.folder.steps() == ()
    assert ranks.folder.commit_written(7) == (7,)
    assert ranks.folder.newest_whole() == (7, ())


def test_rank_0_commits_once_all_have_written(ranks):
    ranks.save(7)
    ranks.free(0, 1)
    ranks.exchange_until(["committed", "written"])
    assert ranks.folder.steps() == (7,)
    assert ranks.exchange() == ["idle", "idle"]
    for rank in (0, 1):
        part = np.load(stage_path(ranks.folder.finished(7), rank) / "array.npy")
        assert part.tolist() == [70.0 + rank] * 3
    ((step, kind, detail),) = ranks.events
    assert (step, kind) == (6, "checkpoint_saved")  # the last step that is in it
    assert "step_7: 24 bytes" in detail


def test_there_is_no_checkpoint_before_its_records_are_sent(ranks):
    ranks.sent = Unsent()
    ranks.save(7)
    ranks.free(0, 1)
    ranks.exchange_until(["written", "written"])
    assert ranks.sent.awaited.wait(LIMIT_S)
    assert ranks.exchange() == ["written", "written"]
    assert ranks.folder.steps() == ()
    ranks.sent.set_result(None)
    ranks.exchange_until(["committed", "written"])
    assert ranks.folder.steps() == (7,)


def _unsent(ranks):
    ranks.sent = Future()
    ranks.sent.set_exception(OSError("Broken pipe"))


def _elsewhere(ranks):
    ranks.disks[1].elsewhere = True


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (_unsent, "rank 0: Broken pipe"),
        (_elsewhere, "virtual_stage_1 isn't here: do all ranks share this folder?"),
    ],
)
def test_missing_records_or_parts_fail_the_save(ranks, harm, says):
    harm(ranks)
    ranks.save(7)
    ranks.free(0, 1)
    ranks.exchange_until(["idle", "idle"])
    ((step, kind, detail),) = ranks.events
    assert (step, kind) == (6, "checkpoint_failed")
    assert detail.startswith("rank 0: ")
    assert detail.endswith(says)
    assert ranks.folder.steps() == ()


def test_a_save_that_hangs_fails_and_the_run_ends(tmp_path):
    ranks = Ranks(tmp_path, within_s=0.0)
    ranks.save(7)
    ranks.free(0)
    assert ranks.disks[1].called.wait(LIMIT_S)
    ranks.exchange_until(["idle", "idle"])
    ((step, kind, detail),) = ranks.events
    assert (step, kind) == (6, "checkpoint_failed")
    assert "rank 1: not over after 0 s (timeouts.save_s)" in detail
    ranks.savers[1].__exit__(None)  # doesn't wait for the disk
    assert not ranks.disks[1].free.is_set()
    ranks.close()


def test_waiting_for_the_save_before_is_not_save_time(tmp_path, monkeypatch):
    now_s, begun, free = [0.0], threading.Event(), threading.Event()
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("jaxmorph.checkpoints.saver.time", clock)

    def write(path, tree):
        now_s[0] += 8.0
        if tree["array"][0] == 14.0:
            begun.set()
            assert free.wait(LIMIT_S)
        path.mkdir()
        np.save(path / "array.npy", tree["array"])

    with alone(tmp_path, write, [], within_s=10.0) as saver:
        saver.save(7, [{"array": jnp.full(3, 7.0)}])
        saver.save(14, [{"array": jnp.full(3, 14.0)}])  # waits for the first
        assert begun.wait(LIMIT_S)
        assert saver.report().phase == "writing"
        free.set()
        assert saver.finish() == ""


def test_a_given_up_save_that_fails_frees_its_copies(tmp_path):
    ranks, copies = Ranks(tmp_path, within_s=0.0), []
    disk = ranks.disks[1]

    def write(path, tree):
        copies.append(weakref.ref(tree["array"]))
        disk.write(path, tree)
        raise OSError("its folder is gone")

    ranks.savers[1]._write = write
    ranks.save(7)
    ranks.free(0)
    assert disk.called.wait(LIMIT_S)
    ranks.exchange_until(["idle", "idle"])  # it is given up
    assert ranks.savers[1]._stuck is not None
    ranks.free(1)
    wait([ranks.savers[1]._stuck], LIMIT_S)
    ranks.save(14)
    gc.collect()
    assert copies[0]() is None
    ranks.close()


def test_a_state_that_does_not_fit_into_host_memory_fails_the_save(ranks):
    """A deleted array stands for one that host memory has no room for: its copy raises too."""
    state = {"array": jnp.full(3, 71.0), "other": jnp.zeros(1 << 18)}
    state["other"].delete()
    ranks.free(0, 1)
    ranks.savers[0].save(7, [{"array": jnp.full(3, 70.0)}])
    ranks.savers[1].save(7, [state])
    ranks.exchange_until(["idle", "idle"])
    ((step, kind, detail),) = ranks.events
    assert (step, kind) == (6, "checkpoint_failed")
    assert detail.startswith("rank 1: array 2 of 2 (1.0 MiB) was not copied to host memory: ")
    ranks.save(14)
    ranks.exchange_until(["committed", "written"])
    assert ranks.folder.steps() == (14,)


def test_arrays_are_copied_one_after_another(ranks, monkeypatch):
    on_the_way = []

    def put(array, sharding):
        on_the_way.append(array)
        assert len(on_the_way) == 1
        return array

    monkeypatch.setattr(jax, "device_put", put)
    monkeypatch.setattr(jax, "block_until_ready", lambda _: on_the_way.pop())
    ranks.savers[0].save(7, [{"array": jnp.zeros(3), "other": jnp.ones(3)}])
    assert ranks.savers[0].report().num_bytes == 24


def test_no_copies_pile_up_behind_a_save_that_hangs(tmp_path):
    ranks = Ranks(tmp_path, within_s=0.0)
    ranks.free(0)
    for step in (7, 14):
        ranks.save(step)
        assert ranks.disks[1].called.wait(LIMIT_S)
        ranks.exchange_until(["idle", "idle"])
    assert "rank 1: an earlier save, which was given up, still writes" in ranks.events[1][2]
    ranks.close()


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (["written", "writing"], "writing"),
        (["failed", "writing"], "writing"),
        (["written", "failed"], "failed"),
        (["committed", "written"], "committed"),
        (["written", "written"], "written"),
        (["written", "idle"], "written"),
        (["idle", "idle"], "idle"),
    ],
)
def test_a_stage_has_saved_when_all_its_replicas_have(phases, expected):
    whys = [f"why {index}" if phase == "failed" else "" for index, phase in enumerate(phases)]
    reports = [SaveReport(phase, 4, why) for phase, why in zip(phases, whys, strict=True)]
    joined = reports[0].joined(reports)
    assert (joined.phase, joined.num_bytes) == (expected, 8)
    assert joined.why == "; ".join(f"replica {at}: {why}" for at, why in enumerate(whys) if why)


def test_a_failed_part_leaves_nothing_behind(ranks):
    ranks.disks[1].error = OSError("No space left on device")
    ranks.save(7)
    ranks.free(1)
    ranks.exchange_until(["writing", "failed"])  # the other rank may still be writing
    ranks.free(0)
    ranks.exchange_until(["written", "failed"])
    assert ranks.exchange() == ["idle", "idle"]
    assert ranks.events == [(6, "checkpoint_failed", "rank 1: No space left on device")]
    ranks.disks[1].error = None
    ranks.save(14)
    ranks.exchange_until(["committed", "written"])
    assert ranks.folder.steps() == (14,)
    ranks.close()
    assert [path.name for path in ranks.folder.path.iterdir()] == ["step_14"]


def test_old_checkpoints_go_after_the_new_one_exists(tmp_path):
    ranks = Ranks(tmp_path, keep=1)
    ranks.free(0, 1)
    ranks.save(7)
    ranks.exchange_until(["committed", "written"])
    for disk in ranks.disks:
        disk.free.clear()
    ranks.save(14)
    ranks.exchange()
    assert ranks.folder.steps() == (7,)
    ranks.free(0, 1)
    ranks.exchange_until(["committed", "written"])
    ranks.close()
    assert ranks.folder.steps() == (14,)


def alone(path, write, events=None, within_s=math.inf):
    describe = partial(Manifest, layers=(range(2),), vocab_size=9, tied=(), config=Config())
    emitted = events if events is not None else []
    return CheckpointSaver(
        CheckpointFolder(path), SoleRank(), describe=describe, own_stages=[0],
        write=write, keep=2, emit=lambda *event: emitted.append(event), on_disk=all_sent,
        within_s=within_s,
    )  # fmt: skip


def test_training_may_donate_the_arrays_at_once(tmp_path):
    disk = Disk()
    state = {"array": jnp.arange(1000.0)}
    add = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    with alone(tmp_path, disk.write) as saver:
        saver.save(7, [state])
        assert disk.called.wait(LIMIT_S)
        for _ in range(3):
            state = add(state)
        jax.block_until_ready(state)
        disk.free.set()
        saver.finish()
    saved = np.load(stage_path(CheckpointFolder(tmp_path).finished(7), 0) / "array.npy")
    assert np.array_equal(saved, np.arange(1000.0))


def test_the_next_save_waits_for_the_one_before(tmp_path):
    disk, events = Disk(), []
    with alone(tmp_path, disk.write, events) as saver:
        saver.save(1, [{"array": jnp.zeros(1)}])
        assert events == []
        threading.Timer(0.05, disk.free.set).start()
        saver.save(2, [{"array": jnp.zeros(1)}])
        assert [(step, kind) for step, kind, _ in events] == [(0, "checkpoint_saved")]
        saver.finish()
    assert CheckpointFolder(tmp_path).steps() == (1, 2)


@contextmanager
def files_of_at_most(num_bytes):
    """Has the kernel refuse to write more to a file, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_fails_one_save_and_frees_its_space(tmp_path):
    events, part = [], {"params": {"array": jax.random.normal(jax.random.key(0), (1 << 20,))}}
    with alone(tmp_path, TreeFiles().write, events) as saver:
        with files_of_at_most(1 << 20):
            saver.save(1, [part])
            while not events:  # the exchanges of the steps
                saver.advance([saver.report()])
        ((step, kind, detail),) = events
        assert (step, kind) == (0, "checkpoint_failed")
        assert "File too large" in detail
        saver.save(2, [part])
        assert saver.finish() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]
    assert CheckpointFolder(tmp_path).newest_whole() == (2, ())


@pytest.mark.parametrize("written", ["virtual_stage_0.files", "manifest.json", "manifest.seal"])
def test_a_disk_full_after_the_parts_fails_the_save(tmp_path, monkeypatch, written):
    def write(path, content):
        if path.name == written:
            path.write_bytes(content[:5])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write_synced(path, content)

    monkeypatch.setattr("jaxmorph.checkpoints.folder.write_synced", write)
    disk, events = Disk(), []
    disk.free.set()
    with alone(tmp_path, disk.write, events) as saver:
        saver.save(1, [{"array": jnp.zeros(1)}])
        assert saver.finish().startswith("rank 0: [Errno 28] No space left on device: ")
    assert [kind for _, kind, _ in events] == ["checkpoint_failed"]
    assert [*tmp_path.iterdir()] == []


def test_only_a_failed_last_save_is_a_failure_of_the_run(tmp_path):
    disk, events, failed = Disk(), [], (0, "checkpoint_failed", "rank 0: No space left on device")
    disk.free.set()
    disk.error = OSError("No space left on device")
    with alone(tmp_path, disk.write, events) as saver:
        saver.save(1, [{"array": jnp.zeros(1)}])
        assert saver.finish() == "rank 0: No space left on device"
        assert events == [failed]
        disk.error = None
        saver.save(2, [{"array": jnp.zeros(1)}])
        assert saver.finish() == ""
    assert [kind for _, kind, _ in events] == ["checkpoint_failed", "checkpoint_saved"]
    assert [path.name for path in tmp_path.iterdir()] == ["step_2"]


def test_a_checkpoint_that_cannot_be_removed_is_an_event(tmp_path):
    disk, events = Disk(), []
    disk.free.set()
    (tmp_path / "step_1.removed").touch()  # in the way
    with alone(tmp_path, disk.write, events) as saver:
        for step in (1, 2, 3, 4):
            saver.save(step, [{"array": jnp.zeros(1)}])
        assert saver.finish() == ""
    found = [(step, detail) for step, kind, detail in events if kind == "checkpoint_not_removed"]
    assert [step for step, _ in found] == [2]  # the same of a later save is not repeated
    assert "step_1.removed" in found[0][1]
    assert CheckpointFolder(tmp_path).steps() == (1, 3, 4)


class Thread(SoleRank):
    """A rank among several, each of them a thread."""

    def __init__(self, rank, messages, barrier):
        self.rank, self.num_ranks = rank, len(messages)
        self._messages, self._barrier = messages, barrier

    def exchange(self, message, detail=b"", addressed=()):
        self._messages[self.rank] = message
        self._barrier.wait(LIMIT_S)
        everything = list(self._messages)
        self._barrier.wait(LIMIT_S)
        return everything


def outcomes(*folders):
    """Each rank's error, or an empty text; each has a folder of its own."""
    messages, barrier = [{} for _ in folders], threading.Barrier(len(folders))

    def check(rank):
        try:
            require_shared(folders[rank], Thread(rank, messages, barrier))
        except UserError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(folders)) as threads:
        return list(threads.map(check, range(len(folders))))


def test_a_shared_folder_is_left_as_it_was(tmp_path):
    assert outcomes(tmp_path, tmp_path, tmp_path) == [""] * 3
    assert not list(tmp_path.iterdir())


def test_a_folder_not_shared_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "own").mkdir()
    one, other, third = outcomes(tmp_path, tmp_path / "own", tmp_path)
    for line, folder in ((one, tmp_path), (other, tmp_path / "own"), (third, tmp_path)):
        assert line == (
            f"checkpoint.dir: {folder}: rank 0 does not see all files: none of rank 1; expected a "
            "folder that all ranks share (checkpoint.every_steps=0 saves nothing)"
        )
    assert [path.name for path in tmp_path.rglob("*")] == ["own"]


def test_an_unwritable_folder_is_an_error_on_all_ranks(tmp_path):
    one, other = outcomes(tmp_path, tmp_path / "none")
    assert one.startswith(f"checkpoint.dir: {tmp_path}: rank 1 cannot write there: No such file")
    assert "rank 1 cannot write there: No such file" in other
    assert not list(tmp_path.iterdir())


def test_files_of_killed_ranks_are_cleaned(tmp_path):
    for rank in (0, 1):
        new_rank_file(tmp_path, rank).touch()
    (tmp_path / ".rank_0_of_mine").touch()
    CheckpointFolder(tmp_path).clean()
    assert [path.name for path in tmp_path.iterdir()] == [".rank_0_of_mine"]


def test_a_run_fails_after_its_last_save_fails(tmp_path, monkeypatch):
    def write(files, path, tree):
        path.mkdir()
        raise OSError("No space left on device")

    monkeypatch.setattr(TreeFiles, "write", write)
    # Freezing the garbage of other tests would keep it alive.
    monkeypatch.setattr("jaxmorph.training.train.settle_garbage", lambda: None)
    (tmp_path / "checkpoints").mkdir()
    messages = []
    with pytest.raises(CheckpointError, match="rank 0: No space left on device"):
        train(check_config(CONFIG), SoleRank(), messages.append, tmp_path)
    assert [each.record.step for each in messages if isinstance(each, StepDone)] == [0]
    kinds = [each.event.kind for each in messages if isinstance(each, EventEmitted)]
    assert EventKind.CHECKPOINT_FAILED in kinds
    assert [*(tmp_path / "checkpoints").iterdir()] == []
