"""Rank 1 in a process of its own: joins rank 0, sends one message and waits to be ended.

Reads rank 0's addresses as a line of JSON, and writes its own and its sidecar's process number.
"""

import json
import sys
import time

from exchanges import BACK, SECRET, THERE, receive, send, spec

from jaxmorph.transport.client import SidecarPlane

if __name__ == "__main__":
    plane = SidecarPlane.start(1, [spec(BACK)], [spec(THERE)])
    print(json.dumps([plane.addresses(), plane.sidecar_pid]), flush=True)
    plane.connect({0: json.loads(sys.stdin.readline())}, SECRET)
    send(plane, BACK, 0, 10)
    receive(plane, THERE, 0, 10)
    print("joined", flush=True)
    while True:
        time.sleep(1)
