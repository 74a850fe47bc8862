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

NOT_OF_TEXT = ("MultimodalTokenizer", "NullMultimodalTokenizer", "SFTTokenizer")
"""Its others."""
NOT_OF_TEXT_SAID = "images and chats are not tokenized here; prepare text, and name the tokenizer below it"
