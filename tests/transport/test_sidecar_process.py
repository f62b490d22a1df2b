import contextlib
import os
import resource
import socket

import pytest

from jaxmorph.transport.sidecar_process import RecordReader, send_record


@pytest.fixture
def link():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def read(reader, theirs, count):
    records = []
    while len(records) < count:
        records += reader.read(theirs)
    return records


def test_records_arrive_in_order_with_their_descriptors(link):
    ours, theirs = link
    readers, writers = zip(*(os.pipe() for _ in range(3)), strict=True)
    send_record(ours, {"number": 0}, (writers[0], writers[1]))
    send_record(ours, {"number": 1})
    send_record(ours, {"number": 2}, (writers[2],))
    records = read(RecordReader(), theirs, 3)
    assert [record["number"] for record, _ in records] == [0, 1, 2]
    assert [len(fds) for _, fds in records] == [2, 0, 1]
    for fd, reader in zip((*records[0][1], *records[2][1]), readers, strict=True):
        os.write(fd, b"here")
        assert os.read(reader, 10) == b"here"
        assert not os.get_inheritable(fd)
        os.close(fd)
    for fd in (*readers, *writers):
        os.close(fd)


def test_a_long_record_is_put_together(link):
    ours, theirs = link
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    send_record(ours, {"text": "x" * 150_000})
    ((record, fds),) = read(RecordReader(), theirs, 1)
    assert (len(record["text"]), fds) == (150_000, ())


def test_descriptors_beyond_the_limit_are_an_error(link):
    ours, theirs = link
    send_record(ours, {"number": 0}, (ours.fileno(), theirs.fileno()))
    most, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.closing(RecordReader()) as reader:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor(), hard))
            with pytest.raises(OSError, match=r"too many open files \(ulimit -n\)"):
                reader.read(theirs)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def next_descriptor():
    """The lowest that is free, so that one more can be opened at most."""
    fd = os.dup(0)
    os.close(fd)
    return fd + 1


def test_the_end_of_the_other_process_is_reported(link):
    ours, theirs = link
    ours.close()
    with pytest.raises(EOFError):
        RecordReader().read(theirs)


def test_an_impossible_record_ends_the_link(link):
    ours, theirs = link
    ours.sendall(b"\xff" * 8)
    with pytest.raises(EOFError, match="a record of 4294967295 bytes"):
        RecordReader().read(theirs)
