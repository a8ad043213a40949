import itertools
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen.data.sources.source import open_source
from ms_varlen.errors import DataError

CODES = {"u1": 1, "<i4": 4, "<u2": 8, "<i8": 5}


def megatron(folder, documents, dtype="<u2", version=1, code=None):
    """A pair as Megatron's IndexedDatasetBuilder writes it; a document is a list of sequences."""
    sequences = [np.array(sequence, dtype) for document in documents for sequence in document]
    (folder / "a.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    lengths = np.array([sequence.size for sequence in sequences], "<i4")
    starts = np.array([0, *np.cumsum([sequence.nbytes for sequence in sequences])[:-1]], "<i8")[: lengths.size]
    bounds = np.array([0, *np.cumsum([len(document) for document in documents])], "<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", version, code or CODES[dtype], lengths.size, bounds.size)
    (folder / "a.idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + bounds.tobytes())
    return str(folder / "a.bin")


def tokens(source):
    return [record.fields["input_ids"].tolist() for record in source]


def test_megatron_documents_are_put_together_from_sequences(tmp_path):
    path = megatron(tmp_path, [[[1, 2, 3]], [[4], [5, 6]], [], [[7]]])
    source = open_source(path)
    assert tokens(source) == [[1, 2, 3], [4, 5, 6], [], [7]]
    assert [record.where for record in source] == [f"{path} document {number}" for number in range(4)]
    assert [list(record.fields) for record in source] == [["input_ids"]] * 4
    assert tokens(open_source(str(tmp_path))) == tokens(source), "a folder with the pair is one source"


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.lists(st.lists(st.integers(0, 255), min_size=1, max_size=4), max_size=3), max_size=5),
    st.sampled_from(sorted(CODES)),
)
def test_megatron_pairs_come_back_as_written(tmp_path_factory, documents, dtype):
    path = megatron(tmp_path_factory.mktemp("pair"), documents, dtype)
    assert tokens(open_source(path)) == [list(itertools.chain(*document)) for document in documents]


def test_a_megatron_source_follows_both_files(tmp_path):
    before = open_source(megatron(tmp_path, [[[1, 2], [3]]])).fingerprint()
    assert open_source(megatron(tmp_path, [[[1, 2]], [[3]]])).fingerprint() != before
    assert open_source(megatron(tmp_path, [[[1, 4], [3]]])).fingerprint() != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, r"must be of version 1 with integers as tokens, got version 2 and type 8, in .*a.idx; write"),
        ({"code": 6}, r"got version 1 and type 6, in .*a.idx"),
        ({"code": 4}, r"a.bin must hold the 12 bytes that a.idx tells of, each in one sequence, got 6; copy both"),
    ],
)
def test_a_wrong_megatron_index_is_named(tmp_path, changes, message):
    with pytest.raises(DataError, match=message):
        tokens(open_source(megatron(tmp_path, [[[1, 2, 3]]], **changes)))


def test_a_damaged_megatron_pair_is_named(tmp_path):
    path = megatron(tmp_path, [[[1, 2, 3]], [[4]]])
    index = tmp_path / "a.idx"
    content = index.read_bytes()
    for damaged, message in (
        (content[:-1], r"a Megatron index of 2 sequences must have 82 bytes or more, got 81, in .*a.idx; copy"),
        (b"PK" + content[2:], r"a Megatron index must begin with b'MMIDIDX.*, got b'PK.*, in .*a.idx; write"),
        (content[:10], r"a Megatron index must begin"),
        (content[:-8] + struct.pack("<q", 3), r"the documents of a Megatron index must be in order.* in .*a.idx; copy"),
        (content[:-24] + struct.pack("<3q", 0, 1, 1), r"from sequence 0 to its end, 2, got 0 to 1, in .*a.idx; copy"),
        (content[:-24] + struct.pack("<3q", 1, 1, 2), r"from sequence 0 to its end, 2, got 1 to 2, in .*a.idx; copy"),
        (content[:-24] + struct.pack("<3q", 0, 3, 2), r"got 0 to 2 out of order, in .*a.idx; copy"),
        (content[:34] + struct.pack("<2i", 3, 0) + content[42:], r"a.bin must hold the 6 bytes that a.idx .* got 8"),
    ):
        index.write_bytes(damaged)
        with pytest.raises(DataError, match=message):
            tokens(open_source(path))
    index.unlink()
    with pytest.raises(DataError, match=r"a.bin must have a.idx next to it, got no such file; copy both"):
        open_source(path)


def test_mindrecord_files_give_their_fields_in_order(tmp_path):
    from mindspore.mindrecord import FileWriter

    path = tmp_path / "a.mindrecord"
    writer = FileWriter(str(path), shard_num=2)
    schema = {"input_ids": {"type": "int32", "shape": [-1]}, "loss_mask": {"type": "int64", "shape": [-1]}}
    writer.add_schema(schema, "tokens")
    written = [{"input_ids": np.arange(n, dtype=np.int32), "loss_mask": np.ones(n, np.int64)} for n in range(1, 8)]
    writer.write_raw_data(written)
    writer.commit()
    source = open_source(str(tmp_path))
    assert tokens(source) == [list(range(n)) for n in range(1, 8)]
    assert [record.fields["loss_mask"].tolist() for record in source] == [[1] * n for n in range(1, 8)]
    places = [record.where for record in source]
    assert (places[0], len(set(places))) == (f"{path}0 record 0", 7)
    first = tokens(open_source(f"{path}0"))
    assert first == [list(range(n + 1)) for n in range(len(first))]
    assert f"{path}1 record 0" == places[len(first)]


def test_a_damaged_mindrecord_file_is_named(tmp_path):
    path = tmp_path / "a.mindrecord"
    path.write_bytes(b"nothing" * 100)
    with pytest.raises(DataError, match=r"a.mindrecord must have a.mindrecord.db next to it, got no such file; copy"):
        open_source(str(path))
    (tmp_path / "a.mindrecord.db").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"a source must be a whole MindRecord file, got .*, in .*a.mindrecord; copy"):
        list(open_source(str(path)))
