"""Throughput by the number of sidecars a rank: `python -m benchmarks.several_sidecars`.

Two ranks on this machine send messages of 4 MB, one way and both ways, by 1, 2 and 4 sidecars
each. Beside them are as many pairs of processes that only send and receive on a TCP connection.
Where the cores are fewer than the processes, more sidecars can't bring more. What carries over to
other machines is the processor time of a GB: its inverse is what sidecars with cores of their own
move. All are measured in turn, in rounds, after a first that warms up.
"""

import argparse
import multiprocessing
import os
import socket
import threading
import time
from multiprocessing.connection import Connection
from statistics import median

from jaxmorph.compare.provenance import load_averages
from jaxmorph.transport.plane import TransportSettings
from jaxmorph.transport.sidecar_trial import SidecarTrial, try_sidecars

COUNTS = (1, 2, 4)
MB = 1 << 20
MESSAGE_BYTES, NUM_MESSAGES = 4 * MB, 256
NEEDED_BYTES_PER_S = 7e9
"""Sent and received by an interior stage of a model of 70 billion parameters."""


def raw_bytes_per_s(count: int) -> float:
    """What so many connections carry together, each from this process to one of its own."""
    context = multiprocessing.get_context("spawn")
    each = NUM_MESSAGES * MESSAGE_BYTES // count
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = [context.Pipe() for _ in range(count)]
        processes = [
            context.Process(target=_receive, args=(listener.getsockname()[1], each, theirs))
            for _, theirs in pairs
        ]
        for process in processes:
            process.start()
        connections = [listener.accept()[0] for _ in processes]
    senders = [threading.Thread(target=_send, args=(at, each)) for at in connections]
    for own, _ in pairs:
        own.recv()  # it is ready
    began_s = time.monotonic()
    for sender in senders:
        sender.start()
    for own, _ in pairs:
        own.recv()  # it has received everything
    took_s = time.monotonic() - began_s
    for joined in (*senders, *processes):
        joined.join()
    for connection in connections:
        connection.close()
    return count * each / took_s


def _send(connection: socket.socket, num_bytes: int) -> None:
    payload = memoryview(bytearray(MESSAGE_BYTES))
    for _ in range(num_bytes // MESSAGE_BYTES):
        connection.sendall(payload)


def _receive(port: int, num_bytes: int, link: Connection) -> None:
    memory = memoryview(bytearray(MESSAGE_BYTES))
    with socket.create_connection(("127.0.0.1", port)) as connection:
        link.send("ready")
        while num_bytes:
            num_bytes -= connection.recv_into(memory)
    link.send("done")


def trial(count: int, *, both_ways: bool) -> SidecarTrial:
    """As many messages as the raw connections carry, by so many sidecars at either end."""
    settings = TransportSettings(sidecars=count)
    number = NUM_MESSAGES // (2 if both_ways else 1)
    return try_sidecars(settings, number, MESSAGE_BYTES, both_ways=both_ways)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    arguments = parser.parse_args()
    load, found = load_averages()[0], {count: [] for count in arguments.counts}
    for number in range(arguments.rounds + 1):
        for count, values in found.items():
            one_way, both = trial(count, both_ways=False), trial(count, both_ways=True)
            rates = raw_bytes_per_s(count), one_way.bytes_per_s, both.bytes_per_s
            costs = (each.processor_s / each.num_bytes for each in (one_way, both))
            if number:
                values.append((*rates, *costs))
    print("GB/s, one way and both ways together; ms of processor time of a rank's sidecars a GB")
    print("sidecars   raw sockets   one way   of raw   both ways   ms, one way   ms, both ways")
    for count, values in found.items():
        raw, one_way, both, cost, both_cost = (median(each) for each in zip(*values, strict=True))
        ratio = median(each[1] / each[0] for each in values)
        print(
            f"{count:>8} {raw / 1e9:>13.2f} {one_way / 1e9:>9.2f} {ratio:>8.2f} {both / 1e9:>11.2f}"
            f" {1e12 * cost:>13.0f} {1e12 * both_cost:>15.0f}"
        )
    cost = median(each[4] for each in found[min(found)])
    print(
        f"one sidecar with a core of its own: {1e-9 / cost:.1f} GB/s both ways together; "
        f"{NEEDED_BYTES_PER_S / 1e9:.0f} GB/s take {NEEDED_BYTES_PER_S * cost:.1f} cores a rank"
    )
    print(f"load {load:.1f} before, {load_averages()[0]:.1f} after; {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
