"""The smallest recipe that trains, for tests about anything else, and a corpus for it."""

import json


def tiny_recipe(folder, **sections):
    """Return the recipe as plain values. Corpus, token stores and checkpoints lie in `folder`.

    Args:
        folder: an existing folder.
        sections: what differs. A mapping changes keys of its section (``train={"steps": 9}``), any other value
            replaces (``mode="packed"``).
    """
    values = {
        "mode": "varlen",
        "data": {
            "source": f"{folder}/corpus.jsonl",
            "tokenizer": "bytes",
            "eval_fraction": 0.1,
            "store_dir": f"{folder}/stores",
        },
        "batch": {"token_budget": 128},
        "shapes": {"kind": "range", "divisor": 16},
        "model": {
            "config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
            "variable_seq_lengths": True,
            "seq_length": 64,
            "max_position_embeddings": 64,
        },
        "train": {"steps": 4, "learning_rate": 0.01},
        "graph": {"mode": "pynative"},
        "checkpoint": {"output_dir": f"{folder}/output"},
    }
    for section, change in sections.items():
        values[section] = {**values[section], **change} if isinstance(change, dict) else change
    return values


def write_recipe(folder, **sections):
    """Write the recipe to `folder` and return its path."""
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(tiny_recipe(folder, **sections)))  # JSON is YAML
    return path


def write_corpus(folder, texts):
    """Write one document per text where the recipe looks for it."""
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def numbered(rng, lengths, letters="abcdefgh "):
    """Return random texts of these lengths, each after its number."""
    return [f"{number} " + "".join(rng.choices(letters, k=length)) for number, length in enumerate(lengths)]
