"""Batches of records to tokens, in this process or in several, always in the order of the source.

Worker processes are plain Python programs that read batches on their standard input and write tokens on their standard
output: they import neither the caller's script nor MindSpore, and end when the caller does, however it ends. They start
with the `PARALLEL_FROM`-th batch, so small sources never wait for them (about 1 s each).
"""

import collections
import contextlib
import dataclasses
import itertools
import os
import pickle
import queue
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from ms_varlen.data.sources.record_batches import Batch
from ms_varlen.data.tokens.records import Encoded, RecordEncoder
from ms_varlen.errors import DataError, VarlenError

SERVE = "from ms_varlen.data.tokens.encoding import serve; serve()"
PARALLEL_FROM = 8
"""Batches, of about 1 MB, that are done before worker processes are started."""
MOST_WORKERS = 16
"""Worker processes unless told otherwise: from there on reading and writing take longest."""


@dataclasses.dataclass(frozen=True)
class EncodedBatch:
    """The records of a batch as tokens.

    Attributes:
        encoded: one for each record.
        done: share of the source that is read with this batch, 0 to 1.
        skipped: how much the batch passed over, by reason.
    """

    encoded: list[Encoded]
    done: float
    skipped: collections.Counter[str]


def default_workers() -> int:
    """One process a core that this process may use, at most `MOST_WORKERS`."""
    return min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def encode_batches(batches: Iterator[Batch], encoder: RecordEncoder, workers: int) -> Generator[EncodedBatch]:
    """Encode every batch, in order.

    Args:
        workers: processes for large sources; 1 means this process alone. The result does not depend on it.
    Raises:
        DataError: a record cannot be read or encoded; the first one in the order of the source.
    """
    for batch in itertools.islice(batches, None if workers == 1 else PARALLEL_FROM):
        yield _encode(encoder, batch)
    following = next(batches, None)
    if following is not None:
        yield from _encode_elsewhere(itertools.chain([following], batches), encoder, workers)


def _encode(encoder: RecordEncoder, batch: Batch) -> EncodedBatch:
    encoded = encoder.encode(list(batch.records()))
    return EncodedBatch(encoded, batch.done, batch.skipped)


def _encode_elsewhere(batches: Iterator[Batch], encoder: RecordEncoder, workers: int) -> Iterator[EncodedBatch]:
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()

    def run(batch: Batch) -> EncodedBatch:
        worker = idle.get()
        try:
            return worker.encode(batch)
        finally:
            idle.put(worker)

    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(workers))
        for _ in range(workers):
            # Closed before the threads are waited for, so that none hangs on a worker after an error.
            idle.put(stack.enter_context(contextlib.closing(_Worker(encoder))))
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        pending: collections.deque[Future[EncodedBatch]] = collections.deque()
        failures: list[DataError] = []
        for batch in _until_failure(batches, failures):
            pending.append(threads.submit(run, batch))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
        if failures:  # later in the source than what is encoded by now
            raise failures[0]


def _until_failure(batches: Iterator[Batch], failures: list[DataError]) -> Iterator[Batch]:
    """The batches up to where reading fails; the error is put into `failures`."""
    try:
        yield from batches
    except DataError as error:
        failures.append(error)


class _Worker:
    """A process that encodes batches, one at a time."""

    def __init__(self, encoder: RecordEncoder):
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TOKENIZERS_PARALLELISM": "false",  # a process a core is parallel enough
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-c", SERVE]
        self._process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._encoder: RecordEncoder | None = encoder

    def encode(self, batch: Batch) -> EncodedBatch:
        """The batch's tokens.

        Raises:
            VarlenError: whatever encoding it raised.
            DataError: the process ended; its own traceback is on the standard error.
        """
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if self._encoder is not None:
                pickle.dump(self._encoder, process.stdin, pickle.HIGHEST_PROTOCOL)
                self._encoder = None
            pickle.dump(batch, process.stdin, pickle.HIGHEST_PROTOCOL)
            process.stdin.flush()
            answer = pickle.load(process.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            raise DataError(
                f"a process that makes tokens must go on to the end, got exit status {process.wait()}; what it wrote "
                "above says why, or memory ran out: lower data.workers"
            ) from error
        if isinstance(answer, VarlenError):
            raise answer
        return _unpacked(answer)

    def close(self) -> None:
        """End the process; a batch in it is lost."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


def serve() -> None:
    """What a worker process does: an encoder, then batches in, tokens or an error out, until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the caller too, which ends this process
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    encoder: RecordEncoder = pickle.load(sys.stdin.buffer)
    while True:
        try:
            batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: Any
        try:
            answer = _packed(_encode(encoder, batch))
        except VarlenError as error:
            answer = error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


@dataclasses.dataclass(frozen=True)
class _PackedBatch:
    """An `EncodedBatch` as a few arrays and lists, which pickle many times faster than an object a record.

    Attributes:
        ids: [sum of lengths] uint16 where that is enough, else int32.
        lengths: [n] int64.
        masks: [sum of the lengths of those with a mask] bool.
        masked: [n] bool, whether `Encoded.supervised` is there.
        others: the values of each other field of `Encoded`.
    """

    ids: np.ndarray
    lengths: np.ndarray
    masks: np.ndarray
    masked: np.ndarray
    others: dict[str, list[Any]]
    done: float
    skipped: collections.Counter[str]


OTHERS = [field.name for field in dataclasses.fields(Encoded)][2:]
"""The fields of `Encoded` after `ids` and `supervised`."""


def _packed(batch: EncodedBatch) -> _PackedBatch:
    encoded = batch.encoded
    ids = np.concatenate([np.zeros(0, np.int32), *(e.ids for e in encoded)])
    masks = [e.supervised for e in encoded if e.supervised is not None]
    return _PackedBatch(
        ids=ids.astype(np.uint16) if ids.size and ids.max() < 1 << 16 else ids,
        lengths=np.array([e.ids.size for e in encoded], np.int64),
        masks=np.concatenate([np.zeros(0, bool), *masks]),
        masked=np.array([e.supervised is not None for e in encoded], bool),
        others={name: [getattr(e, name) for e in encoded] for name in OTHERS},
        done=batch.done,
        skipped=batch.skipped,
    )


def _unpacked(packed: _PackedBatch) -> EncodedBatch:
    parts = _parts(packed.ids.astype(np.int32), packed.lengths)
    masks = iter(_parts(packed.masks, packed.lengths[packed.masked]))
    encoded = [
        Encoded(ids, next(masks) if masked else None, *others)
        for ids, masked, *others in zip(parts, packed.masked.tolist(), *packed.others.values(), strict=True)
    ]
    return EncodedBatch(encoded, packed.done, packed.skipped)


def _parts(array: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Views of an array's parts, one after another; `np.split` takes three times as long."""
    ends = np.cumsum(lengths)
    return [array[start:end] for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True)]
