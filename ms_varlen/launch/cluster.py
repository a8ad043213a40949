"""The ranks that a launcher starts, the variables that describe them, and the checks before any of them runs."""

import contextlib
import dataclasses
import errno
import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, TypeVar

from ms_varlen.errors import VarlenError
from ms_varlen.files import try_lock

TRAIN_SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "train.py"

_Number = TypeVar("_Number", int, float)


@dataclasses.dataclass(frozen=True)
class Cluster:
    """All ranks of a launch, and which of them run on this node."""

    workers: int
    local_workers: int
    master_addr: str
    master_port: int
    node_rank: int
    log_dir: Path
    cluster_time_out: int
    stop_seconds: float

    @classmethod
    def from_environment(cls, workers: int, environment: Mapping[str, str]) -> "Cluster":
        """Read the variables that the launcher's usage lists.

        Args:
            workers: ranks over all nodes.
            environment: the variables.
        Raises:
            VarlenError: a variable is wrong.
        """

        def number(name: str, default: _Number, least: int, kind: Callable[[str], _Number]) -> _Number:
            text = environment.get(name, str(default))
            try:
                value = kind(text)
            except ValueError as error:
                raise VarlenError(f"{name} must be a number, got {text!r}; set or unset it") from error
            if not value >= least:
                raise VarlenError(f"{name} must be at least {least}, got {text}; set or unset it")
            return value

        if workers < 1:
            raise VarlenError(f"N must be at least 1, got {workers}; it is the number of ranks over all nodes")
        cluster = cls(
            workers=workers,
            local_workers=number("LOCAL_WORKER", workers, 1, int),
            master_addr=environment.get("MASTER_ADDR", "127.0.0.1"),
            master_port=number("MASTER_PORT", 8118, 1, int),
            node_rank=number("NODE_RANK", 0, 0, int),
            log_dir=Path(environment.get("LOG_DIR", "output/msrun_log")),
            cluster_time_out=number("CLUSTER_TIME_OUT", 7200, 1, int),
            stop_seconds=number("STOP_SECONDS", 600.0, 0, float),
        )
        cluster._check()
        return cluster

    def _check(self) -> None:
        here, all_ranks, node = self.local_workers, self.workers, self.node_rank
        if self.master_port > 65535:
            raise VarlenError(f"MASTER_PORT must be at most 65535, got {self.master_port}; set another")
        if here > all_ranks:
            raise VarlenError(
                f"LOCAL_WORKER must be at most N ({all_ranks}), got {here}; N is the number of ranks over all nodes"
            )
        if node > 0 and here == all_ranks:
            raise VarlenError(
                f"LOCAL_WORKER must be less than N ({all_ranks}) on several nodes, got NODE_RANK={node} and "
                f"LOCAL_WORKER={here}; set LOCAL_WORKER to the ranks of this node, or unset NODE_RANK"
            )
        if node > 0 and (node + 1) * here > all_ranks:
            raise VarlenError(
                f"NODE_RANK must leave LOCAL_WORKER ({here}) of the N ({all_ranks}) ranks to this node, got {node}; "
                "nodes are counted from 0"
            )

    @property
    def first_rank(self) -> int:
        """The lowest rank of this node."""
        return self.node_rank * self.local_workers if self.local_workers < self.workers else 0

    @property
    def msrun_log(self) -> Path:
        """The log of this node's msrun; nodes may share a folder."""
        return self.log_dir / (f"msrun_{self.node_rank}.log" if self.node_rank else "msrun.log")

    @property
    def scheduler_log(self) -> Path:
        """The log of the scheduler, which runs on node 0."""
        return self.log_dir / "scheduler.log"

    def log_of(self, rank: int) -> Path:
        """The log of a rank of this node."""
        return self.log_dir / f"worker_{rank}.log"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """Return msrun's command. It prints no worker's log, so that it starts no `tail` for each."""
        return [
            sys.executable,
            *("-m", "mindspore.parallel.cluster.run"),
            f"--worker_num={self.workers}",
            f"--local_worker_num={self.local_workers}",
            f"--master_addr={self.master_addr}",
            f"--master_port={self.master_port}",
            f"--node_rank={self.node_rank}",
            f"--log_dir={self.log_dir}",
            f"--cluster_time_out={self.cluster_time_out}",
            "--join=True",
            f"--tail_worker_log={self.workers}",
            str(TRAIN_SCRIPT),
            *arguments,
        ]

    def check_address(self) -> None:
        """Refuse an address or port at which ranks and scheduler would wait for each other forever.

        msrun starts the scheduler on each machine that owns MASTER_ADDR, whatever NODE_RANK is.

        Raises:
            VarlenError: the address is not node 0's, or the port is in use.
        """
        with contextlib.suppress(socket.gaierror):  # MindSpore reports an unknown host
            family, kind, _, _, address = socket.getaddrinfo(
                self.master_addr, self.master_port, type=socket.SOCK_STREAM
            )[0]
            here = _bind(family, kind, (address[0], 0, *address[2:])) != errno.EADDRNOTAVAIL
            if self.local_workers < self.workers:
                loopback = ipaddress.ip_address(address[0]).is_loopback
                if loopback or here != (self.node_rank == 0):
                    owner = "the loopback" if loopback else "an" if here else "no"
                    raise VarlenError(
                        f"MASTER_ADDR must be node 0's address that all nodes reach, got {self.master_addr}, {owner} "
                        f"address of this machine, with NODE_RANK={self.node_rank}; set both on every node"
                    )
            if here and _bind(family, kind, address) == errno.EADDRINUSE:
                raise VarlenError(f"MASTER_PORT must be free, got {self.master_port} in use; set another")

    def take_log_dir(self) -> IO[bytes]:
        """Lock the folder of the logs for this launch, and remove the logs of the last one.

        Returns:
            the open log of msrun. It stays locked while it is open here or in a process that inherited it. Its first
            line holds the process id.
        Raises:
            VarlenError: another launch holds the folder, or it cannot be written.
        """
        try:
            return self._locked_log()
        except OSError as error:
            raise VarlenError(
                f"LOG_DIR must be a folder that can be written to, got {self.log_dir} ({error}); set another"
            ) from error

    def _locked_log(self) -> IO[bytes]:
        self.log_dir.mkdir(parents=True, exist_ok=True)
        log = self.msrun_log.open("a+b")
        if not try_lock(log.fileno()):
            log.seek(0)
            owner = log.readline().decode("utf-8", "replace").strip()
            log.close()
            raise VarlenError(
                f"logs in {self.log_dir} belong to a running launch, {owner}; set LOG_DIR and MASTER_PORT"
            )
        log.truncate(0)
        log.write(f"pid {os.getpid()}\n".encode())
        log.flush()
        if self.local_workers == self.workers:
            stale = list(self.log_dir.glob("worker_*.log"))
        else:
            stale = [self.log_of(self.first_rank + rank) for rank in range(self.local_workers)]
        for path in [*stale, *([] if self.node_rank else [self.scheduler_log])]:
            path.unlink(missing_ok=True)
        return log


def _bind(family: socket.AddressFamily, kind: socket.SocketKind, address: tuple) -> int:
    """Return the error number of binding a socket to an address, 0 if it succeeds."""
    with socket.socket(family, kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed is free
        try:
            probe.bind(address)
        except OSError as error:
            return error.errno or 0
    return 0
