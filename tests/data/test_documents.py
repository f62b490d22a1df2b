import os

import pytest

from jaxmorph.data.documents import (
    STANDARD_LIBRARY_BYTES,
    standard_library_documents,
    text_documents,
)
from jaxmorph.errors import UserError


def test_the_standard_library_is_real_text_of_a_bounded_size():
    documents = standard_library_documents()
    size = sum(map(len, documents))
    assert STANDARD_LIBRARY_BYTES // 2 < size <= STANDARD_LIBRARY_BYTES
    assert any(b"class OrderedDict" in text for text in documents)
    assert documents == standard_library_documents()


def test_a_folder_gives_its_text_files_in_the_order_of_their_paths(tmp_path):
    for name, text in {
        "b.txt": b"second", "a/z.MD": b"first", "c/tests/d.py": b"third", "skipped.png": b"\xff",
        ".hidden.txt": b"no", ".git/e.txt": b"no", "empty.txt": b"",
    }.items():  # fmt: skip
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(text)
    assert text_documents(tmp_path) == [b"first", b"second", b"third"]


def test_a_file_is_read_whatever_its_name(tmp_path):
    (tmp_path / "corpus").write_text("grüße")
    assert text_documents(tmp_path / "corpus") == ["grüße".encode()]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: None, "no such file or folder, expected a text file, a folder of text"),
        (lambda path: path.write_bytes(b"ab\xff"), r"not UTF-8 text \(byte 2 is 0xff\)"),
        (lambda path: path.mkdir(), "no text file in this folder, expected .c .cc "),
        (lambda path: os.mkfifo(path), "got neither a file nor a folder"),
    ],
)
def test_input_that_is_not_text_is_refused(tmp_path, make, says):
    path = tmp_path / "input"
    make(path)
    with pytest.raises(UserError, match=rf"^data.path: {path}: {says}"):
        text_documents(path)


def test_a_folder_of_token_arrays_is_refused_by_one_of_their_names(tmp_path):
    for name in ("val.bin", "train.bin"):
        (tmp_path / name).touch()
    one = f"; or name a token array: data.path={tmp_path}/train.bin"
    with pytest.raises(UserError, match=rf"^data.path: .* no text file in this folder.*{one}$"):
        text_documents(tmp_path)


def test_a_folder_with_empty_or_undecodable_files_is_refused(tmp_path):
    (tmp_path / "a.txt").touch()
    with pytest.raises(UserError, match="every text file in this folder is empty"):
        text_documents(tmp_path)
    (tmp_path / "b.txt").write_bytes(b"\xfe")
    with pytest.raises(UserError, match=rf"^data.path: {tmp_path}/b.txt: not UTF-8 text"):
        text_documents(tmp_path)


def test_an_unlistable_folder_keeps_its_cause(tmp_path, monkeypatch):
    stale = OSError(116, "Stale file handle", str(tmp_path))
    monkeypatch.setattr(os, "walk", lambda folder, onerror: onerror(stale))
    says = rf"^data.path: {tmp_path}: cannot be listed: Stale file handle$"
    with pytest.raises(UserError, match=says) as raised:
        text_documents(tmp_path)
    assert raised.value.__cause__ is stale
