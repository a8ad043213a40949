"""Messages between ranks, over TCP through rank 0; gradients take the device's collectives.

A rank that has another recipe, another corpus, or an error, stops all ranks before they wait for it in a gradient
exchange that would never end. All of them print the same message, which names the rank. A rank that dies closes its
connection, which the others see at once, on other nodes too.

Not through MindSpore's collectives: on the CPU these give up after 30 s, which nothing changes (MindSpore 2.9), and a
rank may compile, save or wait for its data for longer; on Ascend they would have to wait for the device.
"""

import dataclasses
import json
import logging
import os
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from ms_varlen.errors import RanksError, VarlenError
from ms_varlen.ranks.join import Ranks

logger = logging.getLogger("ms_varlen")

TOKEN_BYTES = 16
_LENGTH = struct.Struct("<q")

Value = TypeVar("Value")


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Where rank 0 listens, and what others show it to be let in."""

    host: str
    port: int
    token: bytes

    def to_words(self) -> np.ndarray:
        """[72] int32, for an all-gather of the device."""
        text = json.dumps([self.host, self.port, self.token.hex()]).encode().ljust(288)
        return np.frombuffer(text, "<i4").astype(np.int32)

    @classmethod
    def from_words(cls, words: np.ndarray) -> "Meeting":
        """The meeting that `to_words` gave."""
        host, port, token = json.loads(words.astype("<i4").tobytes())
        return cls(host, port, bytes.fromhex(token))


class Exchange:
    """Gathers bytes from all ranks; a single rank gets its own back.

    Args:
        ranks: this process among the others.
        connections: on rank 0, to ranks 1, 2, ...; on the others one, to rank 0.
    """

    def __init__(self, ranks: Ranks, connections: Sequence[socket.socket] = ()):
        assert len(connections) == (ranks.size - 1 if ranks.rank == 0 else 1)
        self.ranks = ranks
        self._connections = list(connections)

    def close(self) -> None:
        """Close the connections; a rank that waits for this one sees that at once, even if this process exits later."""
        for connection in self._connections:
            connection.close()

    def gather(self, payload: bytes) -> list[bytes]:
        """Every rank's bytes, by rank.

        Raises:
            RanksError: a rank died or did not answer in time; the same message on all other ranks.
        """
        if self.ranks.size == 1:
            return [payload]
        if self.ranks.rank == 0:
            return self._gather_first(payload)
        (first,) = self._connections
        try:
            _send(first, payload)
            parts = [_receive(first) for _ in range(self.ranks.size)]
            failure = _receive(first)
        except OSError as error:
            raise _gone(0, error) from error
        if failure:
            raise RanksError(failure.decode(), "RANK-LOST")
        return parts

    def _gather_first(self, payload: bytes) -> list[bytes]:
        parts, failure = [payload], ""
        for rank, connection in enumerate(self._connections, start=1):
            try:
                parts.append(_receive(connection))
            except OSError as error:
                failure = failure or str(_gone(rank, error))
                parts.append(b"")
        frame = b"".join(_LENGTH.pack(len(part)) + part for part in (*parts, failure.encode()))
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.sendall(frame)
            except OSError as error:
                failure = failure or str(_gone(rank, error))
        if failure:
            raise RanksError(failure, "RANK-LOST")
        return parts

    def gather_words(self, words: np.ndarray) -> np.ndarray:
        """[n] int32 of each rank -> [R, n] int32."""
        return np.stack([np.frombuffer(part, "<i4") for part in self.gather(words.astype("<i4").tobytes())])

    def gather_floats(self, values: Sequence[float]) -> np.ndarray:
        """[R, n] float64, every rank's n values, to the last bit."""
        return np.stack([np.frombuffer(part, "<f8") for part in self.gather(np.array(values, "<f8").tobytes())])

    def messages(self, message: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's message, of JSON values."""
        return [json.loads(part) for part in self.gather(json.dumps(message).encode())]

    def together(self, work: Callable[[], Value]) -> Value:
        """Call `work` on every rank, and wait until all have finished.

        Returns:
            what `work` gave on this rank.
        Raises:
            VarlenError: what `work` raised on this rank.
            RanksError: it raised on another; the message holds that rank's.
        """
        try:
            value = work()
        except (VarlenError, OSError) as error:
            self.messages({"error": str(error)})
            raise
        for rank, answer in enumerate(self.messages({})):
            if "error" in answer:
                raise RanksError(f"rank {rank} stopped, and with it all others: {answer['error']}")
        return value

    def agree(self, identity: dict[str, Any]) -> None:
        """Raise if ranks would train with other settings or data.

        Args:
            identity: nested JSON values that must be the same on all ranks.
        Raises:
            RanksError: a rank differs; names the rank and the keys, and is the same on every rank.
        """
        first, *others = self.messages(identity)
        for rank, other in enumerate(others, start=1):
            differences = _differences(first, other)
            if differences:
                raise RanksError(
                    f"all ranks must train the same, but on rank {rank} {'; '.join(differences[:4])}"
                    f"{'; ...' if len(differences) > 4 else ''}; start every rank with the same recipe, on the same "
                    "corpus"
                )


def connect(ranks: Ranks, gather: Callable[[np.ndarray], np.ndarray], seconds: float) -> Exchange:
    """Connect every rank with rank 0.

    Args:
        ranks: this process among the others.
        gather: [n] int32 -> [R, n] int32 by the device's collective: tells the others where rank 0 listens.
        seconds: the longest wait for a rank, here and later.
    Raises:
        RanksError: a rank did not connect.
    """
    if ranks.size == 1:
        return Exchange(ranks)
    if ranks.rank > 0:
        meeting = Meeting.from_words(gather(Meeting("", 0, b"").to_words())[0])
        try:
            connection = socket.create_connection((meeting.host, meeting.port), timeout=seconds)
            _prepared(connection, seconds).sendall(meeting.token + _LENGTH.pack(ranks.rank))
        except OSError as error:
            raise _gone(0, error) from error
        return Exchange(ranks, [connection])
    with socket.create_server(("", 0), backlog=ranks.size) as listener:
        meeting = Meeting(_own_address(), listener.getsockname()[1], secrets.token_bytes(TOKEN_BYTES))
        gather(meeting.to_words())
        listener.settimeout(seconds)
        found: dict[int, socket.socket] = {}
        while len(found) < ranks.size - 1:
            try:
                connection = _prepared(listener.accept()[0], seconds)
                greeting = _exactly(connection, TOKEN_BYTES + _LENGTH.size)
            except OSError as error:
                missing = min(set(range(1, ranks.size)) - found.keys())
                raise _gone(missing, error) from error
            if secrets.compare_digest(greeting[:TOKEN_BYTES], meeting.token):
                found[_LENGTH.unpack(greeting[TOKEN_BYTES:])[0]] = connection
    return Exchange(ranks, [found[rank] for rank in range(1, ranks.size)])


def _own_address() -> str:
    """This machine's address on the way to the scheduler."""
    scheduler = os.environ.get("MS_SCHED_HOST", "127.0.0.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((scheduler, int(os.environ.get("MS_SCHED_PORT", 1))))  # of a datagram: nothing is sent
        return probe.getsockname()[0]


def _prepared(connection: socket.socket, seconds: float) -> socket.socket:
    connection.settimeout(seconds)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


def _send(connection: socket.socket, payload: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(payload)) + payload)


def _receive(connection: socket.socket) -> bytes:
    return _exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0])


def _exactly(connection: socket.socket, size: int) -> bytes:
    content = bytearray()
    while len(content) < size:
        piece = connection.recv(size - len(content))
        if not piece:
            raise ConnectionResetError("the connection is closed")
        content += piece
    return bytes(content)


def _gone(rank: int, error: OSError) -> RanksError:
    return RanksError(
        f"rank {rank} must answer the others, and is gone ({error}); the first error is in its log, worker_{rank}.log; "
        "start again, the run resumes from its last checkpoint",
        "RANK-LOST",
    )


def _differences(first: dict[str, Any], other: dict[str, Any], prefix: str = "") -> list[str]:
    found = []
    for key in sorted(first.keys() | other.keys()):
        name, here, there = prefix + key, first.get(key), other.get(key)
        if here == there:
            continue
        if isinstance(here, dict) and isinstance(there, dict):
            found += _differences(here, there, f"{name}.")
        else:
            found.append(f"{name} is {json.dumps(there)}, on rank 0 {json.dumps(here)}")
    return found
