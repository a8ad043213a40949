"""Sections of the smallest recipe that trains, for tests that are about something else."""

TINY = {
    "batch": {"token_budget": 128},
    "shapes": {"divisor": 16},
    "model": {
        "config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2},
        "variable_seq_lengths": True,
        "seq_length": 64,
        "max_position_embeddings": 64,
    },
    "graph": {"mode": "pynative"},
}
