"""Micro-batches as a MindSpore data set, prepared while the step before them trains.

One item is one micro-batch: the columns of `ms_varlen.batches.layout`, checked against the store, and those that the
attention body in use asks for. One worker thread prepares them ahead: more are slower here (46 s for ten early stops
with two) and processes slower still.
"""

from collections.abc import Callable, Iterable, Iterator

import numpy as np
from mindspore.dataset import GeneratorDataset

from ms_varlen.batches.check import check_micro_batch
from ms_varlen.batches.layout import Layout, lay_out
from ms_varlen.batches.micro_batch import COLUMNS, Columns, MicroBatch
from ms_varlen.batches.samples import Samples
from ms_varlen.errors import VarlenError
from ms_varlen.lengths import SeqLens


class MicroBatches:
    """Turns planned sample ids into micro-batches.

    Args:
        table: the samples: of a token store, or `ArraySamples`.
        layout: where they lie on the token axis.
        pad_id: id that fills the rest.
        attention_columns: further columns from the lengths, for the attention body in use.
    """

    def __init__(
        self,
        table: Samples,
        layout: Layout,
        pad_id: int,
        attention_columns: Callable[[SeqLens], Columns],
    ):
        self._table = table
        self._layout = layout
        self._pad_id = pad_id
        self._attention_columns = attention_columns

    def micro_batch(self, ids: np.ndarray) -> MicroBatch:
        """One micro-batch.

        Args:
            ids: [B] sample ids, in their order on the token axis.
        Returns:
            its columns are `COLUMNS` and those of the attention body.
        Raises:
            LengthsError: the micro-batch does not match the store.
        """
        tokens = self._table.gather(ids)
        lengths = np.asarray(self._table.lengths[ids])
        ends = np.cumsum(lengths)
        edges = tokens[[ends - lengths, ends - 1]]
        lens = self._layout.place(lengths)
        columns = lay_out(lens, tokens, self._pad_id, self._table.gather_supervised(ids))
        whole_rows = not self._layout.mode.follows_lengths
        check_micro_batch(columns, lens.starts, lengths, edges, self._layout.seq_length, whole_rows)
        return MicroBatch({**columns, **self._attention_columns(lens)})

    def column_names(self) -> list[str]:
        """Names of all columns, in the order in which an item holds them."""
        smallest = self._layout.place(np.ones(1, np.int32))
        return [*COLUMNS, *(name for name in self._attention_columns(smallest) if name not in COLUMNS)]


class MicroBatchLoader:
    """Serves one micro-batch per entry of a schedule, in order, prefetched; iterating gives dicts of arrays.

    Args:
        batches: makes the micro-batches.
        schedule: gives the sample ids [B] of each micro-batch; called once per pass, may be endless.
    Attributes:
        dataset: the `GeneratorDataset` with named columns, for `mindspore.train.Model` and the like.
    """

    def __init__(self, batches: MicroBatches, schedule: Callable[[], Iterable[np.ndarray]]):
        self._failure: VarlenError | None = None
        names = batches.column_names()

        def items() -> Iterator[tuple[np.ndarray, ...]]:
            try:
                for ids in schedule():
                    columns = batches.micro_batch(ids)
                    yield tuple(columns[name] for name in names)
            except VarlenError as error:
                self._failure = error
                raise

        self.dataset = GeneratorDataset(
            items, names, shuffle=False, num_parallel_workers=1, python_multiprocessing=False
        )

    def __iter__(self) -> Iterator[MicroBatch]:
        """Micro-batches until the schedule ends.

        Raises:
            VarlenError: whatever preparing a micro-batch raised, without MindSpore's traceback around it.
        """
        try:
            yield from map(MicroBatch, self.dataset.create_dict_iterator(num_epochs=1, output_numpy=True))
        except RuntimeError as error:
            if self._failure is not None:
                raise self._failure from error
            raise
