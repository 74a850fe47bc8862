"""Published config.json: each is read as the model that it is, or refused by a sentence with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.config.sections.model import ModelConfig
from trainer.families.catalogue import OTHER_NAMES, describes, family_of_model, read_model, text_part
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
    "meta-llama/Llama-2-7b-hf": ("Llama", 6_738_415_616, {"max_position_embeddings": 4096}),
    "meta-llama/Llama-2-13b-hf": ("Llama", 13_015_864_320, {"ffn_hidden_size": 13824}),
    "meta-llama/Llama-2-70b-chat-hf": ("Llama", 68_976_648_192, {"num_query_groups": 8}),
    "meta-llama/Meta-Llama-3.1-70B": ("Llama", 70_553_706_496, {"rotary_base": 500000.0}),
    "meta-llama/Meta-Llama-3.1-405B": ("Llama", 405_853_388_800, {"num_layers": 126}),
    "codellama/CodeLlama-7b-hf": ("Llama", 6_738_546_688, {"rotary_base": 1000000.0}),
    "codellama/CodeLlama-34b-hf": ("Llama", 33_744_232_448, {"vocab_size": 32016}),
    "TinyLlama/TinyLlama-1.1B-Chat-v0.4": ("Llama", 1_100_060_672, {"vocab_size": 32003}),
    "HuggingFaceTB/SmolLM-135M": ("Llama", 134_515_008, {"untie_embeddings_and_output_weights": False}),
    "HuggingFaceTB/SmolLM-360M": ("Llama", 361_821_120, {"num_query_groups": 5}),
    "HuggingFaceTB/SmolLM-1.7B": ("Llama", 1_711_376_384, {"rotary_base": 10000.0}),
    "HuggingFaceTB/SmolLM2-360M-Instruct": ("Llama", 361_821_120, {"rotary_interleaved": False}),
    "HuggingFaceTB/SmolLM2-1.7B-Instruct": ("Llama", 1_711_376_384, {"rotary_base": 130000.0}),
    "tiiuae/Falcon3-7B-Instruct": ("Llama", 7_455_550_464, {"kv_channels": 256}),
    "mistralai/Mistral-7B-v0.3": ("Mistral", 7_248_023_552, {"vocab_size": 32768, "window_size": None}),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503, four layers": ("Mistral", 3_565_204_480, {"kv_channels": 128}),
    "mistralai/Devstral-Small-2-24B-Instruct-2512": ("Ministral 3", 23_572_403_200, {"window_size": None}),
    "mistralai/Devstral-2-123B-Instruct-2512": ("Ministral 3", 125_025_988_608, {"rotary_base": 1000000.0}),
    "mistralai/Mixtral-8x7B-v0.1": ("Mixtral", 46_702_792_704, {"num_experts": 8}),
    "mistralai/Mixtral-8x22B-v0.1": ("Mixtral", 140_620_634_112, {"moe_router_topk": 2}),
    "Qwen/Qwen1.5-1.8B": ("Qwen2", 1_525_663_744, {"add_qkv_bias": True}),
    "Qwen/Qwen2-1.5B-Instruct": ("Qwen2", 1_543_714_304, {"untie_embeddings_and_output_weights": False}),
    "Qwen/Qwen2-7B-Instruct": ("Qwen2", 7_615_616_512, {"vocab_size": 152064}),
    "Qwen/Qwen2.5-3B-Instruct": ("Qwen2", 3_085_938_688, {"num_query_groups": 2}),
    "Qwen/Qwen1.5-MoE-A2.7B": ("Qwen2-MoE", 14_315_784_192, {"moe_shared_expert_gate": True}),
    "Qwen/Qwen3-8B": ("Qwen3", 8_190_735_360, {"qk_layernorm": True}),
    "Qwen/Qwen3-32B-FP8": ("Qwen3", 32_762_123_264, {"kv_channels": 128}),
    "Qwen/Qwen3-235B-A22B": ("Qwen3-MoE", 235_093_634_560, {"moe_router_pre_softmax": False}),
    "Qwen/Qwen3-Coder-480B-A35B-Instruct": ("Qwen3-MoE", 480_154_875_392, {"num_experts": 160}),
    "google/gemma-2b": ("Gemma 1", 2_506_172_416, {"apply_layernorm_1p": True, "num_query_groups": 1}),
    "google/gemma-2-2b": ("Gemma 2", 2_614_341_888, {"attn_logit_softcapping": 50.0}),
    "google/gemma-2-2b-jpn-it": ("Gemma 2", 2_614_341_888, {"final_logit_softcapping": 30.0}),
    "google/gemma-2-9b": ("Gemma 2", 9_241_705_984, {"softmax_scale": 0.0625}),
    "google/gemma-2-27b": ("Gemma 2", 27_227_128_320, {"kv_channels": 128}),
    "google/gemma-3-270m-it": ("Gemma 3", 268_098_176, {"window_size": 512}),
    "bigscience/bloom, smaller": ("BLOOM", 564_168_704, {"max_position_embeddings": 4096}),
    "openai-community/gpt2": ("GPT-2", 124_439_808, {"norm_epsilon": 1e-05}),
    "openai-community/gpt2-medium": ("GPT-2", 354_823_168, {"num_layers": 24}),
    "togethercomputer/RedPajama-INCITE-Chat-3B-v1": ("GPT-NeoX", 2_775_864_320, {"parallel_residual": False}),
    "microsoft/Phi-3.5-mini-instruct": ("Phi-3", 3_821_079_552, {"window_size": 262144}),
    "microsoft/Phi-4-mini-instruct": ("Phi-3", 3_836_021_760, {"rotary_percent": 0.75}),
    "deepseek-ai/DeepSeek-V2-Lite": ("DeepSeek-V2", 15_706_484_224, {"q_lora_rank": None, "kv_lora_rank": 512}),
    "deepseek-ai/DeepSeek-R1": ("DeepSeek-V3", 671_026_404_352, {"moe_router_num_groups": 8, "mtp_num_layers": 1}),
    "moonshotai/Kimi-K2-Instruct": ("Kimi K2", 1_026_408_209_408, {"moe_router_num_groups": None}),
    "openai/gpt-oss-120b": ("gpt-oss", 116_829_156_672, {"num_experts": 128}),
    "allenai/OLMo-2-1124-7B": ("OLMo 2", 7_298_617_344, {"norm_placement": "output"}),
    "allenai/OLMo-2-1124-13B": ("OLMo 2", 13_716_198_400, {"qk_layernorm_scope": "all"}),
    "allenai/OLMo-2-0325-32B": ("OLMo 2", 32_234_279_936, {"num_query_groups": 8}),
    "allenai/OLMoE-1B-7B-0125-Instruct": ("OLMoE", 6_919_161_856, {"moe_router_topk": 8}),
    "ibm-granite/granite-3.3-8b-instruct": ("Granite", 8_170_864_640, {"residual_multiplier": 0.22}),
    "ibm-granite/granite-4.0-350m": ("Granite 4", 352_379_904, {"embedding_scale": 12.0, "ffn_hidden_size": 2048}),
    "HuggingFaceTB/SmolLM3-3B": ("SmolLM3", 3_075_098_624, {"rotary_base": 5000000.0}),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": ("Seed-OSS", 36_151_104_512, {"add_qkv_bias": True}),
    "bigcode/starcoder2-7b": ("StarCoder2", 7_173_923_840, {"window_size": 4096, "activation_func": "gelu_tanh"}),
    "Snowflake/snowflake-arctic-embed-m": ("BERT", 110_106_428, {"num_layers": 12}),
    "google/mt5-small": ("mT5", 300_176_768, {"untie_embeddings_and_output_weights": True, "decoder_num_layers": 8}),
    "internlm/internlm3-8b-instruct": (
        "InternLM3",
        8_804_241_408,
        {"rope_scaling": {"rope_type": "dynamic", "factor": 6.0}, "add_qkv_bias": False, "kv_channels": 128},
    ),
}
REFUSED = {
    "microsoft/phi-2 of 2023": "model_type 'mixformer-sequential' is Phi for Microsoft's first code, which this ",
    "google-bert/bert-base-chinese of 2018": "has no model_type, which names the family",
    "distilbert/distilgpt2 of 2019": "has no model_type, which names the family",
    "zai-org/GLM-4.7-FP8": "model_type 'glm4_moe' is not a family known here",
    "tiiuae/falcon-40b, smaller": "model_type 'falcon' is not a family known here",
    "Qwen/Qwen3-VL-8B-Instruct": "model_type 'qwen3_vl' has a part for images or sound beside its text model",
    "Qwen/Qwen3.5-27B": "model_type 'qwen3_5' has layers of linear attention",
    "deepseek-ai/DeepSeek-V3.2": "model_type 'deepseek_v32' has attention to the tokens that an indexer chooses",
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": "model_type 'llama4' has a part for images or sound",
    "google/gemma-4-26B-A4B": "model_type 'gemma4' has a part for images or sound beside its text model",
    "zai-org/GLM-5.1": "model_type 'glm_moe_dsa' has attention to the tokens that an indexer chooses",
    "MiniMaxAI/MiniMax-M2.5": "model_type 'minimax_m2' is not a family known here",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "model_type 'nemotron_h' has state-space layers",
    "XiaomiMiMo/MiMo-7B-Base": "model_type 'mimo' is not a family known here",
    "LiquidAI/LFM2-VL-450M": "model_type 'lfm2-vl' has a part for images or sound beside its text model",
    "LGAI-EXAONE/EXAONE-4.0-32B": "model_type 'exaone4' is not a family known here",
    "dicta-il/dictalm2.0-instruct": "the meaning of document_attention is unknown, and leaving it out",
    "internlm/internlm2_5-7b-chat": "model_type 'internlm2' is InternLM2 with queries, keys and values in one tensor",
    "RWKV/rwkv-5-world-3b": "model_type 'rwkv5' has recurrent layers",
    "zai-org/chatglm3-6b": "model_type 'chatglm' is GLM for its own code",
    "microsoft/phi-1_5 of 2023": "model_type 'phi-msft' is Phi for Microsoft's first code",
    "CohereLabs/aya-23-8B": "model_type 'cohere' is not a family known here",
    "EleutherAI/gpt-j-6b": "model_type 'gptj' is not a family known here",
    "stabilityai/stablelm-2-zephyr-1_6b": "model_type 'stablelm' is not a family known here",
    "baichuan-inc/Baichuan-7B": "model_type 'baichuan' is not a family known here",
    "bigcode/gpt_bigcode-santacoder": "model_type 'gpt_bigcode' is not a family known here",
    "mosaicml/mpt-7b, smaller": "model_type 'mpt' has biases of attention by distance (ALiBi)",
}
# transformers 5 reads longrope under this old name, but can neither build nor save the model.
OLD_NAME = "microsoft/Phi-3-vision-128k-instruct, its text model"
# It ties T5 where the published file has a table of its own.
NOT_BUILT = ("google/flan-t5-large", "google/mt5-small", OLD_NAME)


def read(name: str) -> tuple[Family, ModelConfig]:
    """The model of a recorded file."""
    return read_model(CONFIGS[name], "config.json")


def theirs(name: str) -> Any:
    """The configuration object of transformers, of the text model."""
    _, keys = text_part(CONFIGS[name], "config.json")
    model_type = keys.pop("model_type")
    return transformers.AutoConfig.for_model({"kimi_k2": "deepseek_v3"}.get(model_type, model_type), **keys)


def test_every_recorded_file_is_in_a_table() -> None:
    assert CONFIGS.keys() == READ.keys() | REFUSED.keys() and len(CONFIGS) > 120


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
    assert describes(family_of_model(model) if family in OTHER_NAMES else family, model)
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
