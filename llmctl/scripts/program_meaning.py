"""Defaults of Megatron-LM's training programs, which differ from those of GPT."""

from __future__ import annotations

from llmctl.scripts.flag_meaning import FlagMeaning

_TIED_HEAD = {"model.add_head_bias": True, "model.scale_decoder_output": False}
_T5 = {
    "model.position_embedding_type": "learned_absolute",
    "model.normalization": "LayerNorm",
    "model.disable_bias_linear": False,
    "model.stack_output_dropout": False,
}
_NOT_FUSED_GELU = (
    *("model.swiglu", "model.openai_gelu", "model.squared_relu", "model.gated_linear_unit"),
    *("model.disable_bias_linear", "training.no_bias_gelu_fusion"),
)
_ACTIVATION = "model.activation_func"
_EXTRA_IDS, _T5_EXTRA_IDS = "data.vocab_extra_ids", 100
_FULL_BY_METHOD = "--activations-checkpoint-method"
_WORDPIECE = "BertWordPieceLowerCase"


def put_program(architecture: str, program: str, line: int, flags: FlagMeaning) -> None:
    """Set what the training program decides, where no flag does.

    pretrain_bert.py and pretrain_t5.py of Megatron-LM take a vocabulary of words as BertWordPieceLowerCase.
    pretrain_t5.py asks for its sentinels, ``--vocab-extra-ids 100``, if they are left out. Its T5 (T5Model of
    megatron/core/models/T5) has a learned table of positions, LayerNorm and biases unless flags say otherwise, and a
    bias of the output layer with tied embeddings; neither the decoder's output nor dropout is as in T5 as published.
    The Megatron-LM that has --activations-checkpoint-method has no granularity: all of a layer is computed again.
    In all three, a GeLU that is fused with its bias is the tanh approximation (core/fusions/fused_bias_gelu.py).

    Args:
        architecture: that the program trains.
        program: its name.
        line: of the program in the script.
        flags: receives the keys.
    """
    origin = f"{program}, line {line}"
    if _FULL_BY_METHOD in flags.origins.get("training.recompute_method", ""):
        _put({"training.recompute_granularity": ("full", flags.origins["training.recompute_method"])}, flags)
    has_model = any(key.startswith("model.") for key in flags.values)
    if has_model and not any(flags.values.get(key) in (True, "true") for key in _NOT_FUSED_GELU):
        of_gelu = f"the fused GeLU of {origin}; --no-bias-gelu-fusion means the exact one"
        _put({_ACTIVATION: ("gelu_tanh", of_gelu)}, flags)
    if architecture == "decoder":
        return
    defaults: dict[str, tuple[object, str]] = {"model.architecture": (architecture, origin)}
    if "data.vocab_file" in flags.values:
        defaults["data.tokenizer_type"] = (_WORDPIECE, f"default of {origin}")
    if architecture == "t5":
        is_tied = not flags.values.get("model.untie_embeddings_and_output_weights", False)
        of_program = _T5 | (_TIED_HEAD if is_tied else {})
        defaults |= {key: (value, f"of Megatron-LM's T5 in {origin}") for key, value in of_program.items()}
    _put(defaults, flags)
    if architecture == "t5":
        _put_sentinels(origin, line, program, flags)


def _put(defaults: dict[str, tuple[object, str]], flags: FlagMeaning) -> None:
    for key, (value, origin) in defaults.items():
        if key not in flags.values:
            flags.values[key] = value
            flags.origins[key] = origin


def _put_sentinels(origin: str, line: int, program: str, flags: FlagMeaning) -> None:
    """Give a vocabulary of words, which has no sentinels, those that Megatron-LM asks for."""
    is_wordpiece = str(flags.values.get("data.tokenizer_type", "")).startswith("BertWordPiece")
    if not is_wordpiece or _EXTRA_IDS in flags.values:
        return
    flags.values[_EXTRA_IDS] = _T5_EXTRA_IDS
    flags.origins[_EXTRA_IDS] = f"sentinels of {origin}"
    reason = f"has {_T5_EXTRA_IDS} sentinels, without which Megatron-LM asks for --vocab-extra-ids {_T5_EXTRA_IDS}"
    flags.remarks.append((line, program, reason))
