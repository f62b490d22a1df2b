"""What authentication costs the processor: `python -m benchmarks.seal_cost`.

Frames: a chunk's frame, packed and parsed again, with a plain check and with a seal. Payloads: each
checksum over one chunk. Both are shown beside copying the chunk, and as a part of a second in which
1 GB passes. For whole messages between processes see `benchmarks.transport_speed`.
"""

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

from jaxmorph.compare.provenance import load_averages
from jaxmorph.transport.lanes import CHECKSUMS, CRC32, CRC32C, PayloadMac
from jaxmorph.transport.names import ChannelName
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.secret import Check, Seal, plain_check
from jaxmorph.transport.wire import TO_RECEIVER, Chunk, FrameReader, pack_chunk

CHUNK_BYTES = TransportSettings().chunk_bytes
FRAME = Chunk(ChannelName(1, 0, 1), 7, CHUNK_BYTES, 0, CHUNK_BYTES, (0,) * 8, 1, 1)
FRAMES_PER_CHUNK = 2  # the chunk's own and its acknowledgement
KEY = bytes(range(32))


def seconds(work: Callable[[], object], times: int, rounds: int) -> float:
    """What one call takes: the median of rounds of so many."""
    found = []
    for _ in range(rounds):
        began_s = time.perf_counter()
        for _ in range(times):
            work()
        found.append((time.perf_counter() - began_s) / times)
    return median(found)


def frame_passes(sealing: Check, opening: Check) -> Callable[[], None]:
    """Packs a frame at one end, and parses it at the other."""
    reader = FrameReader(TO_RECEIVER)
    reader.check = opening

    def passes() -> None:
        reader.feed(pack_chunk(FRAME, 1, sealing))
        assert reader.next_frame() is not None
        reader.skip(CHUNK_BYTES)

    return passes


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    load, chunks = load_averages()[0], 1e9 / CHUNK_BYTES
    frames = {"plain check": (plain_check, plain_check), "seal": (Seal(KEY), Seal(KEY))}
    print(f"frames, both ends{'':>13} us each   ms per GB")
    for name, checks in frames.items():
        each_s = seconds(frame_passes(*checks), 2000, rounds)
        per_gb_ms = 1e3 * each_s * FRAMES_PER_CHUNK * chunks
        print(f"{name:>28} {1e6 * each_s:>9.2f} {per_gb_ms:>11.1f}")
    payload, into = memoryview(os.urandom(CHUNK_BYTES)), bytearray(CHUNK_BYTES)
    sums = {"CRC-32": CHECKSUMS[CRC32], "MAC": PayloadMac(KEY)}
    if CRC32C in CHECKSUMS:
        sums["CRC-32C"] = CHECKSUMS[CRC32C]
    print(f"payloads, one end {'':>17} GB/s   ms per GB")

    def copy() -> None:
        into[:] = payload

    works: dict[str, Callable[[], object]] = {"a copy": copy}
    works |= {name: lambda check=check: check(payload) for name, check in sums.items()}
    for name, work in works.items():
        each_s = seconds(work, 100, rounds)
        print(f"{name:>28} {CHUNK_BYTES / each_s / 1e9:>11.2f} {1e3 * each_s * chunks:>11.1f}")
    print(f"load {load:.1f} before, {load_averages()[0]:.1f} after; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
