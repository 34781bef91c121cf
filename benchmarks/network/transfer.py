"""What TCP gets from the links: each host sends to the next and receives from the one before, all at once.

Runs on every host, with its rank's environment: `transfer.py SECONDS PORT ADDRESS...` prints the Mbit/s it received.
Plain sockets and no torch, so that nothing but the links and TCP is measured, and it starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time

WARM_UP = 0.3  # seconds: all hosts are sending by then, and TCP has found its rate
CHUNK = 1 << 20


def connect(address: str, port: int) -> socket.socket:
    """The other end may not listen yet."""
    for _ in range(200):
        try:
            return socket.create_connection((address, port), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"nobody listens at {address}:{port}")


def send(connection: socket.socket) -> None:
    """Until the receiver has enough and closes."""
    data = bytes(CHUNK)
    with connection, contextlib.suppress(ConnectionError):
        while True:
            connection.sendall(data)


def receive(connection: socket.socket, seconds: float) -> float:
    """Mbit/s."""
    buffer = bytearray(CHUNK)
    begin, received = None, 0
    stop = time.perf_counter() + WARM_UP
    while True:
        count = connection.recv_into(buffer)
        if count == 0:
            raise ConnectionError("the sender is gone")
        now = time.perf_counter()
        if begin is not None:
            received += count
        if now < stop:
            continue
        if begin is not None:
            return received * 8 / (now - begin) / 1e6
        begin, stop = now, now + seconds


def main(seconds: float, port: int, addresses: list[str]) -> None:
    rank = int(os.environ["RANK"])
    with socket.create_server((addresses[rank], port)) as server:
        server.settimeout(10)
        outgoing = connect(addresses[(rank + 1) % len(addresses)], port)
        incoming, _ = server.accept()
        incoming.settimeout(10)
        sender = threading.Thread(target=send, args=(outgoing,))
        sender.start()
        with incoming:
            print(receive(incoming, seconds))
        sender.join()


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
