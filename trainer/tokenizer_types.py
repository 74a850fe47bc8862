"""Megatron-LM's names of tokenizers. On its own, as processes that only encode need not know what a config is."""

from typing import Literal

TokenizerType = Literal[
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "GPT2BPETokenizer",
    "TikTokenizer",
    "BertWordPieceLowerCase",
    "BertWordPieceCase",
    "NullTokenizer",
]
"""Its three SentencePiece ones mean the same since it gave up adding tokens of its own."""
