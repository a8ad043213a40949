"""Every fault that a loader can make is named, and healthy batches of all layouts are silent."""

import json
import re
import textwrap
import types

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_varlen.batches.layout import lay_out
from ms_varlen.diagnose.lint.files import HOW, lint_file
from ms_varlen.diagnose.lint.lint import lint_batch
from ms_varlen.errors import DataError
from ms_varlen.lengths import SeqLens
from ms_varlen.limits import IGNORE_INDEX
from tests.support.lint_cases import CASES

PAD = 0
TOKENS = np.arange(10, 22)
LENGTHS = [5, 4, 3]


def packed():
    return lay_out(SeqLens.packed(LENGTHS, 8, 16), TOKENS, PAD)


def in_rows():
    """[4, 8] with lengths 5, 4, 3 and an empty row."""
    lens = SeqLens.in_rows(LENGTHS, 8, 8, 4, split_tails=False)
    columns = lay_out(lens, TOKENS, PAD)
    rows = {name: columns[name].reshape(4, 8) for name in ("input_ids", "labels", "position_ids")}
    return rows | {"seq_lens": columns["seq_lens"]}


def codes(batch, pad_id=PAD):
    return [finding.code for finding in lint_batch(batch, pad_id)]


@given(
    st.lists(st.integers(1, 8), min_size=1, max_size=6),
    st.sampled_from(["packed", "split", "whole"]),
    st.integers(0, 7),
    st.booleans(),
    st.booleans(),
)
def test_healthy_batches_of_every_layout_are_silent(lengths, kind, tail, ends_with_pad, know_pad):
    tokens = np.arange(10, 10 + sum(lengths))
    if ends_with_pad:  # models whose end-of-text is their pad id
        tokens[np.cumsum(lengths) - 1] = PAD
    if kind == "packed":
        lens = SeqLens.packed(lengths, 8, sum(lengths) + tail)
    else:
        lens = SeqLens.in_rows(lengths, 8, 8, len(lengths) + 1, split_tails=kind == "split")
    found = lint_batch(lay_out(lens, tokens, PAD), PAD if know_pad else None)
    assert [f for f in found if f.code != "LABEL-NONE"] == []
    assert bool(found) == (max(lengths) == 1)


@pytest.mark.parametrize("name", CASES)
def test_batches_of_other_frameworks(name):
    batch, pad_id, expected = CASES[name]
    assert codes(batch, pad_id) == expected


@given(
    st.lists(st.integers(2, 8), min_size=1, max_size=5),
    st.integers(1, 3),
    st.sampled_from(["shifted", "unshifted", "cut"]),
    st.sampled_from(["left", "right"]),
    st.sampled_from(["mask", "lengths", "pad id", "lengths and pad id", "mask, lengths and pad id"]),
    st.sampled_from([PAD, None]),
)
def test_healthy_padded_rows_are_silent(lengths, vocabulary, labelled, side, told, eos):
    """Few ids, so that tokens repeat; samples may end with the pad id; labels of all three conventions."""
    rng = np.random.default_rng(sum(lengths))
    ids, labels, kept = np.full((len(lengths), 10), PAD), np.full((len(lengths), 10), IGNORE_INDEX), []
    for row, length in enumerate(lengths):
        text = rng.integers(1, 1 + vocabulary, length + 1)
        if eos is not None and labelled != "cut":  # cut: the eos that is the last target equals the padding after it
            text[length - 1] = eos
        start = 10 - length if side == "left" else 0
        ids[row, start : start + length] = text[:length]
        targets = {"cut": text[1:], "unshifted": text[:-1], "shifted": np.append(text[1:-1], IGNORE_INDEX)}
        labels[row, start : start + length] = targets[labelled]
        kept.append((np.arange(10) >= start) & (np.arange(10) < start + length))
    columns = {"input_ids": ids, "labels": labels}
    if "mask" in told:
        columns["attention_mask"] = np.array(kept, np.float32)
    if "lengths" in told:
        columns["lengths"] = np.array(lengths)
    assert codes(columns, PAD if "pad id" in told else None) == []


@given(st.lists(st.integers(1, 8), min_size=2, max_size=6), st.integers(1, 3), st.booleans(), st.booleans())
def test_healthy_packs_of_few_ids_are_silent(lengths, vocabulary, shifted, with_ends):
    ids = np.random.default_rng(sum(lengths)).integers(1, 1 + vocabulary, sum(lengths))
    ends = np.cumsum(lengths)
    labels = np.append(ids[1:], 0) if shifted else ids.copy()
    labels[ends - 1 if shifted else ends - lengths] = IGNORE_INDEX
    told = {"cu_seqlens": ends} if with_ends else {"position_ids": np.concatenate([np.arange(n) for n in lengths])}
    if max(lengths) > 1:
        assert codes({"input_ids": ids, "labels": labels} | told) == []


@pytest.mark.parametrize("shift", ["shifted", "unshifted"])
def test_both_conventions_of_labels_are_understood(shift):
    batch = in_rows()
    if shift == "unshifted":
        batch["labels"] = np.where(batch["input_ids"] == PAD, IGNORE_INDEX, batch["input_ids"])
    assert codes(batch) == []


def test_labels_shifted_twice():
    batch = packed()
    batch["labels"] = np.append(batch["labels"][1:], IGNORE_INDEX)
    assert codes(batch) == ["LABEL-SHIFT"]


def test_the_last_label_of_a_pack_is_the_pad_id():
    batch = packed()
    batch["labels"][11] = PAD
    assert codes(batch) == ["LABEL-PAD"]


def test_padding_is_a_target():
    batch = in_rows()
    batch["labels"][0, 4:] = PAD
    assert "LABEL-PAD" in codes(batch)


def test_a_target_across_a_boundary():
    batch = packed()
    batch["labels"][4] = batch["input_ids"][5]
    (finding,) = lint_batch(batch, PAD)
    assert finding.code == "LABEL-BOUNDARY"
    assert finding.text == ("labels[0, 4] must be -100 (end of a sample), got 15; its target lies in another sample")


def test_a_label_that_is_not_the_next_token():
    batch = packed()
    batch["labels"][1] = 99
    assert codes(batch) == ["LABEL-WRONG"]


def test_plain_lengths_where_ends_belong():
    batch = packed()
    batch["actual_seq_qlen"] = np.array([5, 4, 3, 4], np.int32)
    assert codes(batch)[0] == "LEN-PLAIN"


def test_ends_that_miss_the_tail():
    batch = packed()
    batch["actual_seq_qlen"] = np.array([5, 9, 12], np.int32)
    assert codes(batch) == ["LEN-TAIL"]


def test_ends_filled_up_with_the_last_one_are_well():
    batch = packed()
    batch["actual_seq_len"] = np.array([5, 9, 12, 16, 16, 16], np.int32)
    del batch["actual_seq_qlen"], batch["seq_lens"]
    assert codes(batch) == []


def test_ends_with_a_leading_zero_and_ends_by_row_are_well():
    batch = {name: value.reshape(2, 8) for name, value in packed().items() if name[:3] in ("inp", "lab", "pos")}
    lens = SeqLens.packed([5, 3, 4], 8, 16)
    batch = {n: v.reshape(2, 8) for n, v in lay_out(lens, TOKENS, PAD).items() if v.size == 16}
    assert codes(batch | {"actual_seq_len": np.array([[5, 8, 8], [4, 8, 8]])}) == []
    flat = {name: value.reshape(-1) for name, value in batch.items()}
    assert codes(flat | {"cu_seqlens": np.array([0, 5, 8, 12, 16])}) == []


def test_an_empty_sequence_among_the_ends():
    batch = packed()
    batch["actual_seq_qlen"] = np.array([5, 5, 9, 12, 16], np.int32)
    assert codes(batch)[0] == "LEN-ZERO"


def test_lengths_in_another_order_than_the_rows():
    batch = in_rows()
    batch["seq_lens"] = batch["seq_lens"][::-1].copy()
    assert codes(batch)[0] == "LEN-ORDER"


@pytest.mark.parametrize(
    ("lengths", "code"),
    [
        (np.array([5, 0, 3]), "LEN-ZERO"),
        (np.array([5, -1, 3]), "LEN-ZERO"),
        (np.array([5.0, 4, 3]), "LEN-DTYPE"),
        (np.array([7, 4, 3]), "LEN-WRONG"),
        (np.array([]), "LEN-SHAPE"),
        (np.array([9, 4, 3]), "LEN-SHAPE"),
        (np.array([1, 1, 1, 1, 1]), "LEN-SHAPE"),
    ],
)
def test_wrong_lengths(lengths, code):
    assert codes(in_rows() | {"seq_lens": lengths})[0] == code


def test_lengths_that_overflow_when_they_are_added():
    batch = packed() | {"seq_lens": np.full(4, 2**62)}
    del batch["actual_seq_qlen"]
    assert codes(batch)[0] == "LEN-WRONG"


def test_positions_that_do_not_restart():
    batch = packed()
    batch["position_ids"] = np.arange(16, dtype=np.int32)
    assert codes(batch) == ["POS-RESET"]


def test_a_batch_without_targets():
    batch = packed()
    batch["labels"][:] = IGNORE_INDEX
    assert codes(batch) == ["LABEL-NONE"]


def test_files_of_several_batches(tmp_path):
    good, bad = packed(), packed()
    bad["labels"] = np.append(bad["labels"][1:], IGNORE_INDEX)
    arrays = {f"{i}/{name}": value for i, batch in enumerate((good, bad)) for name, value in batch.items()}
    np.savez(tmp_path / "b.npz", **arrays)
    result = lint_file(tmp_path / "b.npz", PAD)
    assert (result["batches"], result["codes"]) == (2, {"LABEL-SHIFT": 1})
    assert [row["batch"] for row in result["findings"]] == ["1"]
    lines = [json.dumps({name: value.tolist() for name, value in batch.items()}) for batch in (good, bad)]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert lint_file(tmp_path / "b.jsonl", PAD)["codes"] == {"LABEL-SHIFT": 1}
    assert lint_file(tmp_path / "b.jsonl", PAD, limit=1)["codes"] == {}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.npz", b"nothing", "must be a NumPy .npz"),
        ("a.npz", b"", "must be a NumPy .npz"),
        ("a.jsonl", b"\n\n", "must hold a batch"),
        ("a.jsonl", b"", "must hold a batch"),
        ("a.bin", b"", "must end with"),
    ],
)
def test_files_that_hold_no_batch(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        lint_file(path)


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        (b"[1, 2]", "DATA-SOURCE", "must be a JSON object of lists, got .* in .*a.jsonl line 2; mend or remove"),
        (b"[" * 100_000, "DATA-SOURCE", "must be a JSON object of lists, got .* in .*a.jsonl line 2; mend or remove"),
        (b'{"input_ids": [1, 2', "DATA-SOURCE", "must be a JSON object of lists"),
        (b'{"input_ids": [[1, 2], [3]]}', "DATA-SOURCE", "must be a JSON object of lists"),
        ('{"text": "\xe9"}'.encode("latin-1"), "DATA-SOURCE", "must be a JSON object of lists"),
        (b'{"labels": [1]}', "LEN-LOST", "must have the column input_ids"),
        (b'{"input_ids": [1, 2], "labels": [1]}', "DATA-SOURCE", "must be as large as input_ids"),
        (b'{"input_ids": [1.5]}', "DATA-SOURCE", "must be integers"),
        (b'{"input_ids": [1, null]}', "DATA-SOURCE", "must be integers"),
        (b'{"input_ids": [], "cu_seqlens": [0]}', "DATA-SOURCE", "must hold a token"),
    ],
)
def test_one_batch_that_cannot_be_read_hides_no_other(tmp_path, line, code, message):
    good = json.dumps({name: value.tolist() for name, value in packed().items()}).encode()
    shifted = {"input_ids": list(range(9)), "labels": [*range(2, 9), IGNORE_INDEX, IGNORE_INDEX]}
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + b"\n".join([good, line, json.dumps(shifted).encode()]))
    result = lint_file(tmp_path / "a.jsonl")
    assert (result["batches"], [(row["batch"], row["code"]) for row in result["findings"]]) == (
        3,
        [("2", code), ("3", "LABEL-SHIFT")],
    )
    assert re.search(message, result["findings"][0]["text"])


def test_an_array_that_cannot_be_read_hides_no_other_batch(tmp_path):
    ragged = np.array([[1, 2], [3]], dtype=object)
    np.savez(tmp_path / "a.npz", **{"0/input_ids": ragged, "1/input_ids": TOKENS, "1/labels": np.roll(TOKENS, -2)})
    assert lint_file(tmp_path / "a.npz")["codes"] == {"DATA-SOURCE": 1, "LABEL-SHIFT": 1}
    np.savez(tmp_path / "b.npz", input_ids=np.arange(10_000))
    content = bytearray((tmp_path / "b.npz").read_bytes())
    content[500] ^= 1
    (tmp_path / "b.npz").write_bytes(content)
    (finding,) = lint_file(tmp_path / "b.npz")["findings"]
    assert "must be a NumPy .npz of plain arrays, got Bad CRC-32" in finding["text"]


@pytest.mark.parametrize("told", ["mask", "mask and lengths", "pad id alone"])
def test_a_mask_the_other_way_round(told):
    batch = in_rows()
    kept = batch["input_ids"] != PAD
    batch["attention_mask"] = (~kept).astype(np.int64)
    if told != "mask and lengths":
        del batch["seq_lens"]
    if told == "pad id alone":
        del batch["labels"]
    assert codes(batch) == ["MASK-INVERTED"]


def test_another_number_for_no_target():
    batch = packed()
    batch["labels"] = np.where(batch["labels"] == IGNORE_INDEX, -1, batch["labels"])
    (finding,) = lint_batch(batch)
    assert finding.code == "LABEL-WRONG"
    where, _, advice = finding.text.partition("; ")
    assert where == "labels[0, 4] must be a token id, or -100 where there is no target, got -1 (7 such places)"
    assert advice == "write -100, or dump the loss_mask too"
    assert codes(batch | {"loss_mask": batch["labels"] != -1}) == []


def test_labels_of_another_batch_are_not_called_shifted():
    batch = packed()
    batch["labels"] = np.where(batch["labels"] == IGNORE_INDEX, IGNORE_INDEX, np.arange(16) * 7 % 5 + 40)
    assert codes(batch) == ["LABEL-WRONG"]


def test_a_missing_file(tmp_path):
    with pytest.raises(DataError, match="existing file"):
        lint_file(tmp_path / "a.npz")


def run_snippet(framework, **names):
    """Run the code that `--how` prints for a framework."""
    (code,) = re.findall(rf"^{framework}.*:\n((?:    .+\n)+)", HOW, re.MULTILINE)
    exec(textwrap.dedent(code), {"numpy": np} | names)


def test_the_snippet_for_mindformers_dumps_its_dtypes(tmp_path, monkeypatch):
    import mindspore.dataset as ds

    batch, _, _ = CASES["packed_rows: a row each, filled"]
    columns = {name: value.astype(np.int32) for name, value in batch.items()}
    columns |= {"loss_mask": (columns["labels"] != IGNORE_INDEX).astype(np.int32)}
    columns |= {"attention_mask": np.ones((2, 1, 64, 64), np.int32)}
    dataset = ds.NumpySlicesDataset(columns, shuffle=False).batch(2)
    monkeypatch.chdir(tmp_path)
    run_snippet("MindFormers", dataset=dataset)
    result = lint_file(tmp_path / "batches.npz")
    assert (result["batches"], result["codes"]) == (1, {})


def test_the_snippet_for_megatron_dumps_its_dtypes(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    text = torch.arange(5, 70)[None]
    names = {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": torch.arange(64)[None]}
    monkeypatch.chdir(tmp_path)
    run_snippet("MindSpeed", **names, loss_mask=torch.ones(1, 64), cu_seqlens=None, step=0)
    assert lint_file(tmp_path / "batches-0.npz")["codes"] == {}
    ends = torch.tensor([0, 20, 64], dtype=torch.int32)
    names["position_ids"] = torch.cat([torch.arange(20), torch.arange(44)])[None]
    run_snippet("MindSpeed", **names, loss_mask=torch.ones(1, 64), cu_seqlens=ends, step=1)
    assert lint_file(tmp_path / "batches-1.npz")["codes"] == {"LABEL-BOUNDARY": 1}


def test_the_snippet_for_transformers_dumps_what_its_collators_make(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_tensors="pt")
    samples = [{"input_ids": list(range(10, 10 + n)), "labels": list(range(10, 10 + n))} for n in (5, 4, 3)]
    trainer = types.SimpleNamespace(get_train_dataloader=lambda: [collate(samples), collate(samples[1:])])
    monkeypatch.chdir(tmp_path)
    run_snippet("transformers", trainer=trainer)
    result = lint_file(tmp_path / "batches.npz")
    assert (result["batches"], result["codes"]) == (2, {})
