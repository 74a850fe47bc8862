"""Published config.json: each is read as the model that it is, or refused by a sentence with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.sections.model import ModelConfig
from trainer.families.catalogue import describes, read_model, text_part
from trainer.families.format.errors import FamilyError
from trainer.families.format.family import Family
from trainer.planning.build_config import build_config
from trainer.planning.flops import count_parameters

transformers = pytest.importorskip("transformers")

FILE = Path(__file__).parents[2] / "recorded/published_configs/configs.jsonl"
CONFIGS: dict[str, dict[str, Any]] = {
    row["model"]: row["config"] for row in map(json.loads, FILE.read_text(encoding="utf-8").splitlines())
}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}
YARN = {"rope_type": "yarn", "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096}

# Family, parameters (the published number where the file is whole), and some keys of our model section.
READ: dict[str, tuple[str, int, dict[str, Any]]] = {
    "meta-llama/Llama-3.2-1B-Instruct": ("Llama", 1_235_814_400, {"rope_scaling": LLAMA3 | {"factor": 32.0}}),
    "meta-llama/Llama-3.2-3B-Instruct": ("Llama", 3_212_749_824, {"untie_embeddings_and_output_weights": False}),
    "meta-llama/Llama-3.1-8B-Instruct": ("Llama", 8_030_261_248, {"rope_scaling": LLAMA3 | {"factor": 8.0}}),
    "meta-llama/Llama-3.3-70B-Instruct": ("Llama", 70_553_706_496, {"rotary_base": 500_000.0}),
    "ALLaM-AI/ALLaM-7B-Instruct-preview": ("Llama", 7_000_559_616, {"init_method_std": 0.006}),
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": ("Llama", 1_100_048_384, {"num_query_groups": 4, "rope_scaling": None}),
    "HuggingFaceTB/SmolLM2-135M": ("Llama", 134_515_008, {"rotary_base": 100_000, "rotary_interleaved": False}),
    "the first Llama, one layer": ("Llama", 464_531_456, {"max_position_embeddings": 2048, "num_query_groups": 32}),
    "mistralai/Mistral-7B-Instruct-v0.3": ("Mistral", 7_248_023_552, {"window_size": None}),
    "mistralai/Mistral-7B-v0.1, one layer": ("Mistral", 480_260_096, {"window_size": 4096, "window_layers": "all"}),
    "mistralai/Mixtral-8x7B-v0.1, smaller": ("Mixtral", 848_320_512, {"moe_aux_loss_coeff": 0.02}),
    "Qwen/Qwen2-0.5B": ("Qwen2", 494_032_768, {"add_qkv_bias": True, "add_attention_output_bias": False}),
    "Qwen/Qwen2.5-0.5B": ("Qwen2", 494_032_768, {"window_size": None, "max_position_embeddings": 32_768}),
    "Qwen/Qwen2.5-7B-Instruct": ("Qwen2", 7_615_616_512, {"untie_embeddings_and_output_weights": True}),
    "Qwen/Qwen2.5-32B-Instruct": ("Qwen2", 32_763_876_352, {"window_size": None}),
    "Qwen/Qwen3-Embedding-0.6B": ("Qwen3", 595_776_512, {"kv_channels": 128, "qk_layernorm": True}),
    "Qwen/Qwen3-0.6B, saved again": ("Qwen3", 596_049_920, {"window_size": None}),
    "Qwen/Qwen3-1.7B, saved again": ("Qwen3", 1_720_574_976, {"rotary_base": 1_000_000}),
    "Qwen/Qwen3-32B": ("Qwen3", 32_762_123_264, {"num_attention_heads": 64}),
    "Qwen/Qwen3-30B-A3B, one layer": ("Qwen3-MoE", 1_245_452_544, {"num_experts": 128, "moe_router_topk": 8}),
    "google/gemma-3-1b-it": ("Gemma 3", 999_885_952, {"rotary_base_local": 10_000, "window_size": 512}),
    "google/gemma-3-12b-it": (
        "Gemma 3",
        11_766_034_176,
        {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "rotary_base": 1e6, "kv_channels": 256},
    ),
    "openai/gpt-oss-20b": (
        "gpt-oss",
        20_914_757_184,
        {"rope_scaling": YARN | {"factor": 32.0, "truncate": False}, "activation_alpha": 1.702},
    ),
    "microsoft/phi-1": ("Phi", 1_414_562_935, {"rotary_percent": 0.5}),
    "microsoft/phi-2": ("Phi", 2_779_683_840, {"rotary_percent": 0.4, "hidden_dropout": 0.1}),
    "microsoft/phi-4": ("Phi-3", 14_659_507_200, {"num_query_groups": 10, "rotary_base": 250_000}),
    "microsoft/Phi-3-mini-4k-instruct, one layer": ("Phi-3", 310_256_640, {"window_size": 2048, "rope_scaling": None}),
    "microsoft/Phi-3-vision-128k-instruct, its text model": ("Phi-3", 3_821_079_552, {"rotary_percent": 1.0}),
    "bigcode/starcoder2-3b, six layers": ("StarCoder2", 726_875_136, {"window_size": 4096, "hidden_dropout": 0.1}),
    "google-bert/bert-base-chinese, saved again": ("BERT", 102_882_442, {"vocab_size": 21_128}),
    "google-bert/bert-base-uncased, saved again": ("BERT", 110_106_428, {"norm_epsilon": 1e-12}),
    "BAAI/bge-small-en-v1.5": ("BERT", 33_539_900, {"num_layers": 12}),
    "sentence-transformers/all-MiniLM-L6-v2": ("BERT", 22_893_116, {"num_layers": 6}),
    "openai-community/gpt2-large": ("GPT-2", 774_030_080, {"activation_func": "gelu_tanh"}),
    "distilbert/distilgpt2": ("GPT-2", 81_912_576, {"ffn_hidden_size": 3072}),
    "google-t5/t5-small, saved again": ("T5", 60_506_624, {"untie_embeddings_and_output_weights": False}),
    "google-t5/t5-large": ("T5", 737_668_096, {"decoder_num_layers": 24, "activation_func": "relu"}),
    "google/flan-t5-large": ("T5", 783_150_080, {"gated_linear_unit": True, "activation_func": "gelu_tanh"}),
    "Salesforce/codet5-base": ("T5", 222_882_048, {"vocab_size": 32_100}),
    "EleutherAI/gpt-neox-20b, smaller": (
        "GPT-NeoX",
        324_057_088,
        {"activation_func": "gelu_tanh", "parallel_residual": True, "rotary_percent": 0.25},
    ),
    "allenai/Olmo-3.1-32B-Instruct": (
        "OLMo 3",
        32_233_522_176,
        {"rotary_base_local": 500_000.0, "window_layers": ([True] * 3 + [False]) * 16},
    ),
    "facebook/opt-1.3b, one layer": ("OPT", 157_517_824, {"position_embedding_offset": 2}),
    "deepseek-ai/DeepSeek-V2, smaller": (
        "DeepSeek-V2",
        1_034_805_760,
        {"moe_router_num_groups": 8, "rope_scaling": YARN | {"factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-ai/DeepSeek-V3, smaller": (
        "DeepSeek-V3",
        2_976_353_280,
        {"mtp_num_layers": 1, "moe_router_topk_scaling_factor": 2.5, "latent_norm_epsilon": None},
    ),
}
REFUSED = {
    "microsoft/phi-2 of 2023": "model_type 'mixformer-sequential' is not a family known here; known are bert, ",
    "google-bert/bert-base-chinese of 2018": "has no model_type, which names the family",
    "distilbert/distilgpt2 of 2019": "has no model_type, which names the family",
    "moonshotai/Kimi-K2-Instruct": "model_type 'kimi_k2' is not a family known here",
    "zai-org/GLM-4.7-FP8": "model_type 'glm4_moe' is not a family known here",
    "tiiuae/falcon-40b, smaller": "model_type 'falcon' is not a family known here",
}
# transformers 5 reads longrope under this old name, but can neither build nor save the model.
OLD_NAME = "microsoft/Phi-3-vision-128k-instruct, its text model"
# It ties T5 where the published file has a table of its own.
NOT_BUILT = ("google/flan-t5-large", OLD_NAME)


def read(name: str) -> tuple[Family, ModelConfig]:
    """The model of a recorded file."""
    return read_model(CONFIGS[name], "config.json")


def theirs(name: str) -> Any:
    """The configuration object of transformers, of the text model."""
    _, keys = text_part(CONFIGS[name], "config.json")
    return transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)


def test_every_recorded_file_is_in_a_table() -> None:
    assert CONFIGS.keys() == READ.keys() | REFUSED.keys() and len(CONFIGS) > 40


@pytest.mark.parametrize("name", READ)
def test_a_published_file_is_read(name: str) -> None:
    expected, parameters, values = READ[name]
    family, model = read(name)
    keys = model.model_dump()
    assert family.name == expected and {key: keys[key] for key in values} == values
    without_prediction = model.model_copy(update={"mtp_num_layers": 0})
    config = build_config(
        {
            "model": without_prediction.model_dump(),
            "training": {"train_iters": 1, "seq_length": 64},
            "optimizer": {"lr": 1e-3},
        }
    )
    assert model.vocab_size is not None
    assert count_parameters(config, model.vocab_size).total == parameters
    assert describes(family, model)
    if name not in NOT_BUILT:
        with torch.device("meta"):
            witness = getattr(transformers, family.auto_class).from_config(theirs(name))
        assert sum(parameter.numel() for parameter in witness.parameters()) == parameters


@pytest.mark.parametrize("name", [name for name in READ if name != OLD_NAME])
def test_a_file_that_transformers_saves_again_says_the_same(name: str) -> None:
    family, model = read(name)
    saved = {**theirs(name).to_dict(), "architectures": [family.architecture]}
    assert read_model(saved, "config.json")[1].model_dump() == model.model_dump()


ODD = (
    *(None, [], {}, "x", -1, 0, 0.5, 1e9, 10**9, True, False, float("nan"), [1], ["x"], {"a": 1}),
    *({"rope_type": 5}, {"full_attention": {}, "sliding_attention": {}}),
)


@pytest.mark.parametrize("name", READ)
def test_an_odd_value_under_any_key_is_read_or_refused_in_one_sentence(name: str) -> None:
    for key in CONFIGS[name]:
        for value in ODD:
            try:
                read_model({**CONFIGS[name], key: value}, "config.json")
            except FamilyError as error:
                assert str(error).startswith("config.json: ") and "\n" not in str(error)


@pytest.mark.parametrize("name", REFUSED)
def test_a_file_that_is_not_read_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(FamilyError) as caught:
        read(name)
    assert str(caught.value).startswith(f"config.json: {REFUSED[name]}") and "\n" not in str(caught.value)
