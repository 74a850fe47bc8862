"""Files that the commands of the pages name: texts, vocabularies, configs, scripts, and a small published model."""

from __future__ import annotations

import json
from pathlib import Path

from sentencepiece import SentencePieceTrainer

from examples.train_tokenizer import train_byte_level_bpe

PARAGRAPHS = [f"Paragraph {number} counts to {number + 1}. Then it says nothing more." for number in range(1500)]
_CONFIG = """
model: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, position_embedding_type: rope, normalization: RMSNorm,
        swiglu: true, disable_bias_linear: true, attention_dropout: 0.0, hidden_dropout: 0.0}
training: {train_iters: 4, seq_length: 32, micro_batch_size: 2}
optimizer: {lr: 1.0e-3}
data: {data_path: [corpus_text_document], tokenizer_model: tokenizer.json}
"""
_SCRIPT = """#!/bin/bash
torchrun --nproc_per_node 1 pretrain_gpt.py \\
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 \\
    --micro-batch-size 2 --train-iters 4 --lr 1e-3 --vocab-size 300 --tokenizer-type NullTokenizer --mock-data
"""
_TASK = """
task: colours
dataset_path: json
dataset_kwargs: {data_files: {test: colours.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""


def write_files(folder: Path) -> None:
    """Write all but the published model."""
    (folder / "text").mkdir()
    for number in range(150):
        (folder / f"text/{number}.txt").write_text("\n\n".join(PARAGRAPHS[number * 10 : number * 10 + 10]))
    lines = "".join(json.dumps({"text": text}) + "\n" for text in PARAGRAPHS)
    for name in ("corpus.jsonl", "text.jsonl"):
        (folder / name).write_text(lines)
    (folder / "more.txt").write_text("\n\n".join(PARAGRAPHS[:20]))
    (folder / "prompts.txt").write_text("Paragraph\nThen it\n")
    (folder / "colours.jsonl").write_text(json.dumps({"question": "a", "choices": ["b", "c"], "answer": 0}) + "\n")
    train_byte_level_bpe(PARAGRAPHS, 300, folder / "tokenizer.json")
    words = sorted({word.strip(".").lower() for text in PARAGRAPHS for word in text.split()})
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *words]) + "\n")
    with (folder / "spiece.model").open("wb") as model:
        SentencePieceTrainer.train(sentence_iterator=iter(PARAGRAPHS), model_writer=model, vocab_size=60, pad_id=3)
    for name, text in (("train.yaml", _CONFIG), ("my.yaml", _TASK), ("train.py", "print('trained')\n")):
        (folder / name).write_text(text)
    for name in ("train.sh", "pretrain_gpt.sh"):
        (folder / name).write_text(_SCRIPT)


def write_published_model(folder: Path, name: str) -> None:
    """Write a folder as of Hugging Face, with a tiny Llama and its tokenizer, and the same model as ``MODEL.gguf``."""
    from tests.trainer.conversion.gguf_files import byte_level_keys, tiny_model, write_gguf

    model = tiny_model("llama", vocab_size=302, max_position_embeddings=256)
    model.save_pretrained(folder / name)
    (folder / name / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    keys = {**byte_level_keys(folder / "tokenizer.json"), "tokenizer.ggml.pre": "gpt-2"}
    write_gguf(folder / "MODEL.gguf", model, "Q8_0", metadata=keys)
