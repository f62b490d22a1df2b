"""Where the run's secret comes from, and that nothing is proved or sealed without it."""

import os
import stat
import threading

import pytest

from jaxmorph.errors import UserError
from jaxmorph.transport.secret import (
    SECRET_FILE,
    VARIABLE,
    Seal,
    derived,
    hand_down,
    inherited_secret,
    is_proof,
    run_secret,
    seals,
)

NUM_RANKS = 8


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.fixture
def named(monkeypatch, tmp_path):
    """A file that the variable names, with some content and mode."""

    def named(content="s" * 64, mode=0o600):
        path = tmp_path / "secret"
        path.write_text(content)
        path.chmod(mode)
        monkeypatch.setenv(VARIABLE, str(path))
        return path

    return named


def test_ranks_that_start_together_share_one_secret(tmp_path):
    found, together = [], threading.Barrier(NUM_RANKS)

    def ask():
        together.wait(20)
        found.append(run_secret(tmp_path / "runs" / "demo"))

    ranks = [threading.Thread(target=ask) for _ in range(NUM_RANKS)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(20)
    assert len(found) == NUM_RANKS
    assert len(set(found)) == 1
    (file,) = (tmp_path / "runs" / "demo").iterdir()
    assert file.name == SECRET_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert run_secret(tmp_path / "another") not in found


def test_a_named_file_comes_first(named, tmp_path):
    named("  a secret of more than 32 characters\n")
    assert run_secret(tmp_path / "run") == b"a secret of more than 32 characters"
    assert run_secret(None) == b"a secret of more than 32 characters"
    assert not (tmp_path / "run").exists()


def test_kubernetes_secrets_may_be_links_that_a_group_reads(named, monkeypatch, tmp_path):
    target, link = named(mode=0o440), tmp_path / "link"
    link.symlink_to(target)
    monkeypatch.setenv(VARIABLE, str(link))
    assert run_secret(None) == b"s" * 64


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        ("s" * 64, 0o644, "has mode 0644, so that others can use it: expected 0600"),
        ("s" * 64, 0o620, "has mode 0620"),
        ("short\n", 0o600, "has a secret of 5 bytes, expected 32 to 4096"),
        ("s" * 5000, 0o600, "has a secret of 4097 bytes"),
        ("", 0o600, "has a secret of 0 bytes"),
    ],
)
def test_a_bad_file_is_one_clear_line(named, content, mode, message):
    path = named(content, mode)
    with pytest.raises(UserError) as raised:
        run_secret(None)
    assert str(raised.value).startswith(f"{path}: the run's secret {message}")
    assert "\n" not in str(raised.value)
    assert content.strip() not in str(raised.value) or not content


def test_a_pipe_is_refused_and_not_waited_for(named, monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "pipe"))
    with pytest.raises(UserError, match="is not a regular file"):
        run_secret(None)


def test_missing_files_and_folders_are_named(named, monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "nothing"))
    with pytest.raises(UserError, match=r"nothing: the run's secret cannot be read \(No such"):
        run_secret(None)
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(UserError, match=f"{VARIABLE}: not set, expected a file"):
        run_secret(None)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        run_secret(tmp_path / "file" / "run")


def test_a_stranger_cannot_provide_the_secret(named, monkeypatch):
    found = named().stat()
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    monkeypatch.setattr(os, "fstat", lambda fd: _owned_by(found, 4712))
    with pytest.raises(UserError, match="belongs to user 4712, expected 4711"):
        run_secret(None)


def _owned_by(found, user):
    return os.stat_result([*found[:4], user, *found[5:]])


def test_a_handed_down_secret_is_read_once():
    fd = hand_down()
    copy = os.dup(fd)
    secret = inherited_secret(fd)
    assert len(set(secret)) > 1
    assert inherited_secret(copy) == secret
    with pytest.raises(OSError, match="descriptor"):
        os.fstat(fd)


def test_proofs_hold_for_one_secret_label_and_parts():
    proof = derived(b"secret", "role", b"ab", b"c")
    assert is_proof(proof, b"secret", "role", b"ab", b"c")
    for others in [
        (b"another", "role", b"ab", b"c"),
        (b"secret", "another", b"ab", b"c"),
        (b"secret", "role", b"a", b"bc"),
        (b"secret", "role", b"abc"),
        (b"secret", "role", b"c", b"ab"),
    ]:
        assert not is_proof(proof, *others)


def test_each_end_opens_only_what_the_other_sealed():
    (own, peers), (theirs, ours) = (seals(b"s", b"said", is_caller=each) for each in (True, False))
    first, second = own(b"data"), own(b"data")
    assert first != second
    assert (ours(b"data"), ours(b"data")) == (first, second)
    assert theirs(b"data") == peers(b"data")
    assert Seal(b"k")(b"data") != Seal(b"j")(b"data")
