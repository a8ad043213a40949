import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ms_varlen.data.sources import tables
from ms_varlen.data.sources.source import open_source
from ms_varlen.errors import DataError

CHAT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


def rows(source):
    return [(record.fields, record.where) for record in source]


def parquet(path, columns, **options):
    pq.write_table(pa.table(columns), path, **options)
    return str(path)


def test_parquet_rows_are_records(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"id": [1, 2], "text": ["a", "ü"], "messages": [CHAT, CHAT[:1]]})
    source = open_source(path)
    assert rows(source) == [
        ({"text": "a", "messages": CHAT}, f"{path} row 0"),
        ({"text": "ü", "messages": CHAT[:1]}, f"{path} row 1"),
    ]
    assert [record.done for record in source] == [1.0, 1.0]


def test_a_table_without_a_known_column_keeps_its_columns(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"content": ["a"], "id": [1]})
    assert rows(open_source(path)) == [({"content": "a", "id": 1}, f"{path} row 0")]


def test_lists_of_integers_become_arrays(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"input_ids": [[1, 2, 3], [], [4]], "labels": [[-100, 2, 3], [], None]})
    found = [record.fields for record in open_source(path)]
    assert [fields["input_ids"].tolist() for fields in found] == [[1, 2, 3], [], [4]]
    assert all(isinstance(fields["input_ids"], np.ndarray) for fields in found)
    assert [fields["labels"] for fields in found] == [[-100, 2, 3], [], None]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=12), st.integers(1, 5), st.integers(1, 5))
def test_batches_do_not_show_in_tables(tmp_path_factory, documents, group, batch):
    folder = tmp_path_factory.mktemp("tables")
    columns = {"input_ids": pa.array(documents, pa.list_(pa.int32())), "text": list(map(str, documents))}
    path = parquet(folder / "a.parquet", columns, row_group_size=group)
    datasets.Dataset(pa.table(columns)).save_to_disk(folder / "saved")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "BATCH_RECORDS", batch)
        for source in (path, str(folder / "saved")):
            found = list(open_source(source))
            assert [record.fields["input_ids"].tolist() for record in found] == documents
            assert [record.fields["text"] for record in found] == list(map(str, documents))
            assert [record.where for record in found] == [f"{source} row {i}" for i in range(len(documents))]
            assert found[-1].done == 1.0


def test_a_saved_data_set_is_read_with_its_order(tmp_path):
    dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "id": [1, 2, 3]}).select([2, 0])
    dataset.save_to_disk(tmp_path / "saved")
    source = open_source(str(tmp_path / "saved"))
    assert rows(source) == [({"text": "c"}, f"{tmp_path}/saved row 0"), ({"text": "a"}, f"{tmp_path}/saved row 1")]
    before = source.fingerprint()
    datasets.Dataset.from_dict({"text": ["c", "b"]}).save_to_disk(tmp_path / "saved")
    assert open_source(str(tmp_path / "saved")).fingerprint() != before


def test_a_saved_data_set_follows_the_types_of_its_columns(tmp_path):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    before = open_source(str(tmp_path / "saved")).fingerprint()
    about = tmp_path / "saved" / "dataset_info.json"
    about.write_text(about.read_text().replace('"string"', '"large_string"'))
    assert open_source(str(tmp_path / "saved")).fingerprint() != before


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.json", "[]", "a whole saved data set with an object in state.json, got list"),
        ("state.json", "{", "a whole saved data set with a state.json of JSON, got Expecting property name"),
        ("state.json", "{}", "a whole saved data set, got KeyError: "),
        ("dataset_info.json", "3", "a whole saved data set with an object in dataset_info.json, got int"),
        (
            "dataset_info.json",
            '{"features": {"text": {"_type": "Foo"}}}',
            "a whole saved data set, got ValueError: .*Foo",
        ),
        ("dataset_info.json", '{"features": {"text": 3}}', "a whole saved data set, got "),
    ],
)
def test_a_wrong_description_of_a_saved_data_set_is_named(tmp_path, name, content, message):
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "saved" / name).write_text(content)
    with pytest.raises(DataError, match=rf"a source must be {message}.*, in .*saved; write") as raised:
        list(open_source(str(tmp_path / "saved")))
    assert "\n" not in str(raised.value)


def test_tables_give_masks_of_every_name_and_tell_the_rest(tmp_path):
    columns = {name: [[1, 0]] for name in ("input_ids", "attention_mask", "assistant_masks", "loss_masks")}
    columns |= {"id": [3], "text": ["a"]}
    datasets.Dataset(pa.table(columns)).save_to_disk(tmp_path / "saved")
    for source in (parquet(tmp_path / "a.parquet", columns), str(tmp_path / "saved")):
        (record,) = open_source(source)
        assert list(record.fields) == ["input_ids", "attention_mask", "assistant_masks", "loss_masks", "text"]
        assert record.unread == ("id",)
    (record,) = open_source(parquet(tmp_path / "b.parquet", {"text": ["a"], "label": [1]}))
    assert (record.fields, record.unread) == ({"text": "a"}, ("label",))


def test_all_splits_of_a_saved_data_set_are_refused_by_name(tmp_path):
    one = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"must be one split of a saved data set.*saved; name one of .*\(test, train\)"):
        open_source(str(tmp_path / "saved"))
    assert rows(open_source(str(tmp_path / "saved" / "test"))) == [({"text": "a"}, f"{tmp_path}/saved/test row 0")]


def test_a_damaged_table_is_named(tmp_path):
    path = tmp_path / "a.parquet"
    parquet(path, {"text": ["a" * 100]})
    content = path.read_bytes()
    for damaged in (content[:-30], b"", b"text\n"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"a source must be a whole Parquet file, got .*, in .*a.parquet; write"):
            list(open_source(str(path)))
    datasets.Dataset.from_dict({"text": ["a", "b", "c"]}).save_to_disk(tmp_path / "saved")
    (arrow,) = (tmp_path / "saved").glob("*.arrow")
    arrow.unlink()
    with pytest.raises(DataError, match=r"a source must be a whole saved data set, got .*, in .*saved; write"):
        list(open_source(str(tmp_path / "saved")))


def test_a_table_without_rows_has_no_records(tmp_path):
    path = parquet(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    assert rows(open_source(path)) == []
