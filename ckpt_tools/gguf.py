"""A GGUF file (llama.cpp) as a Hugging Face folder: `model.safetensors` (fp32), `config.json` and the tokenizer.

Llama (Mistral is one there), Qwen2 and Qwen3. Quantised weights are dequantised one at a time, so memory is that of the
largest tensor. llama.cpp stores the rows of a Llama model's q and k so that the two parts of a rotary pair are
neighbours; they are put back. The tokenizer is exact for the byte-level BPEs in `_DIGITS_APART`; any other is refused.

The folder appears whole or not at all.
"""

import importlib
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from ckpt_tools.huggingface import export_hugging_face
from ckpt_tools.weights import Weights, checked
from ms_varlen.checkpoint.tensors import StoredTensor
from ms_varlen.errors import CheckpointError
from ms_varlen.models.config import DecoderConfig

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

MAGIC = b"GGUF"
"""First bytes of every such file."""

_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TENSOR = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")

_DIGITS_APART = {"gpt-2": False, "smollm": True}
"""`tokenizer.ggml.pre` -> whether each digit is a word of its own; words are GPT-2's else."""

_CONTROL, _USER_DEFINED = 3, 4
_SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def open_gguf(file: Path) -> Weights:
    """The weights of a GGUF file under their Hugging Face names, dequantised to fp32 when they are read.

    Raises:
        CheckpointError: no GGUF file, or it holds something that has no place in the decoder.
    """
    reader = _reader(file)
    tensors = {_name(file, tensor.name): tensor for tensor in reader.tensors}
    config = _config(file, _fields(reader), tensors)
    return checked(file, "gguf", config, {name: _stored(file, name, t, config) for name, t in tensors.items()}, {})


def import_gguf(
    file: Path, folder: Path, with_tokenizer: bool = True, progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, Any]:
    """Write a model as a Hugging Face folder.

    Args:
        file: the .gguf file.
        folder: where to write; it must not exist.
        with_tokenizer: False leaves `tokenizer.json` and `tokenizer_config.json` out.
        progress: called with bytes written and bytes in all.
    Returns:
        what was written; see `export_hugging_face`.
    Raises:
        CheckpointError: the folder exists, or as `open_gguf` and `gguf_tokenizer`.
    """
    weights = open_gguf(file)
    assert weights.config.max_position_embeddings is not None, "a GGUF file must say it"
    size = max(weights.nbytes, 1)
    with tempfile.TemporaryDirectory() as temporary:
        for name, values in (gguf_tokenizer(file) if with_tokenizer else {}).items():
            text = json.dumps(values, indent=2, ensure_ascii=False)
            Path(temporary, name).write_text(text + "\n", encoding="utf-8")
        positions = weights.config.max_position_embeddings
        return export_hugging_face(weights, folder, "F32", size, Path(temporary), positions, progress)


def stored_types(file: Path) -> dict[str, tuple[str, int]]:
    """How a GGUF file holds its tensors: Hugging Face name -> (type as llama.cpp calls it, bytes).

    Raises:
        CheckpointError: as `open_gguf`.
    """
    return {_name(file, t.name): (t.tensor_type.name, int(t.n_bytes)) for t in _reader(file).tensors}


def _gguf() -> Any:
    """The gguf package, which is an extra."""
    try:
        return importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise CheckpointError(
            "a GGUF file must be read by the package gguf (0.10 or later), found none; install it with "
            "pip install 'ms_varlen[gguf]' or pip install gguf"
        ) from error


def _reader(file: Path) -> "GGUFReader":
    if not file.is_file():
        raise CheckpointError(f"{file} must be a GGUF file, found none there; correct the path")
    with file.open("rb") as opened:
        begin = opened.read(len(MAGIC))
    if begin != MAGIC:
        raise CheckpointError(
            f"{file} must be a GGUF file, which begins with {MAGIC!r}, found {begin!r}; `ckpt-tools inspect {file}` "
            "says what it is"
        )
    package = _gguf()
    try:
        return package.GGUFReader(file)
    except (OSError, ValueError, LookupError, TypeError, OverflowError, MemoryError) as error:
        # The reader checks little: sizes out of a damaged header lead it anywhere.
        raise CheckpointError(
            f"{file} must be a whole GGUF file, but is cut short or altered ({error}); take another copy"
        ) from error


def _fields(reader: "GGUFReader") -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _name(file: Path, name: str) -> str:
    """The Hugging Face name of a tensor."""
    match = _TENSOR.fullmatch(name)
    if match is None or match["part"] not in _NAMES:
        raise CheckpointError(f"{file}: tensor {name} has no place in the decoder; choose a model without it")
    layer = "" if match["layer"] is None else f"model.layers.{match['layer']}."
    return f"{layer}{_NAMES[match['part']]}.{match['kind']}"


def _required(file: Path, fields: dict[str, Any], name: str) -> Any:
    key = f"{fields['general.architecture']}.{name}"
    if key not in fields:
        raise CheckpointError(f"{file} must say {key}, found no such field; bring the file again")
    return fields[key]


def _config(file: Path, fields: dict[str, Any], tensors: dict[str, "ReaderTensor"]) -> DecoderConfig:
    architecture = fields.get("general.architecture")
    if architecture not in _ARCHITECTURES:
        raise CheckpointError(
            f"{file}: general.architecture must be one of {', '.join(_ARCHITECTURES)}, got {architecture!r}; "
            "choose a model of these families"
        )
    scaling = fields.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise CheckpointError(
            f"{file}: {architecture}.rope.scaling.type must be none, got {scaling!r}; use its Hugging Face folder"
        )
    hidden, heads = _required(file, fields, "embedding_length"), _required(file, fields, "attention.head_count")
    head_dim = fields.get(f"{architecture}.attention.key_length", hidden // heads)
    if fields.get(f"{architecture}.rope.dimension_count", head_dim) != head_dim:
        raise CheckpointError(
            f"{file}: {architecture}.rope.dimension_count must equal the size of a head ({head_dim}), got "
            f"{fields[f'{architecture}.rope.dimension_count']}; choose a model whose heads are turned whole"
        )
    try:
        return DecoderConfig(
            architecture=architecture,
            hidden_size=hidden,
            num_hidden_layers=_required(file, fields, "block_count"),
            num_attention_heads=heads,
            num_key_value_heads=fields.get(f"{architecture}.attention.head_count_kv", heads),
            head_dim=head_dim,
            intermediate_size=_required(file, fields, "feed_forward_length"),
            vocab_size=int(tensors["model.embed_tokens.weight"].shape[1]),
            rms_norm_eps=_shortest(_required(file, fields, "attention.layer_norm_rms_epsilon")),
            rope_theta=_shortest(fields.get(f"{architecture}.rope.freq_base", 10000.0)),
            tie_word_embeddings="lm_head.weight" not in tensors,
            attention_bias="model.layers.0.self_attn.q_proj.bias" in tensors,
            mlp_bias="model.layers.0.mlp.up_proj.bias" in tensors,
            max_position_embeddings=_required(file, fields, "context_length"),
            sliding_window=fields.get(f"{architecture}.attention.sliding_window"),
        )
    except (ValidationError, KeyError) as error:
        raise CheckpointError(f"{file} must describe a decoder, got {error}; bring the file again") from error


def _shortest(value: float) -> float:
    """The decimal that a float32 of the file was written from: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _values(tensor: "ReaderTensor", name: str, config: DecoderConfig) -> np.ndarray:
    """A tensor's numbers under its Hugging Face name, fp32 (host)."""
    values = np.asarray(_gguf().dequantize(tensor.data, tensor.tensor_type), np.float32)
    heads = {".q_proj.": config.num_attention_heads, ".k_proj.": config.num_key_value_heads}
    for part, count in heads.items():
        if part in name and config.architecture == "llama":
            pairs = values.reshape(count, config.head_dim // 2, 2, *values.shape[1:])
            values = pairs.swapaxes(1, 2).reshape(values.shape)
    return values


def _stored(file: Path, name: str, tensor: "ReaderTensor", config: DecoderConfig) -> StoredTensor:
    shape = tuple(int(size) for size in tensor.shape[::-1])
    return StoredTensor(name, "F32", shape, str(file), lambda: iter([_values(tensor, name, config).reshape(-1)]))


def gguf_tokenizer(file: Path) -> dict[str, Any]:
    """The tokenizer of a GGUF file: the contents of `tokenizer.json` and `tokenizer_config.json`, by name.

    Raises:
        CheckpointError: no GGUF file, or a tokenizer of another kind than `_DIGITS_APART` lists.
    """
    fields = _fields(_reader(file))
    kind = (fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre"))
    begins = bool(fields.get("tokenizer.ggml.add_bos_token"))
    if kind[0] != "gpt2" or kind[1] not in _DIGITS_APART or begins:
        raise CheckpointError(
            f"{file}: the tokenizer must be gpt2 with pre {' or '.join(_DIGITS_APART)} and no beginning-of-text, got "
            f"{kind[0]} with pre {kind[1]}{' and beginning-of-text' if begins else ''}; leave it out (with_tokenizer) "
            "and use the model's own tokenizer.json"
        )
    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    words = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
    if _DIGITS_APART[kind[1]]:
        words.insert(0, pre_tokenizers.Digits(individual_digits=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    for token, token_kind in zip(tokens, fields["tokenizer.ggml.token_type"], strict=True):
        if token_kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False)])
    ids = {name: fields.get(f"tokenizer.ggml.{there}_token_id") for name, there in _SPECIAL.items()}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: tokens[i] for name, i in ids.items() if i is not None},
    }
    if "tokenizer.chat_template" in fields:
        settings["chat_template"] = fields["tokenizer.chat_template"]
    return {"tokenizer.json": json.loads(tokenizer.to_str()), "tokenizer_config.json": settings}
