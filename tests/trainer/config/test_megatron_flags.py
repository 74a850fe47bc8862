"""Megatron-LM's flags over a config file: the three lists of flags, and the messages."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.reference.megatron_flags import answer, flags_page, recorded_flags
from tests.waiting import HANG_S
from trainer.commands.pretrain import main
from trainer.config.errors import ConfigError
from trainer.config.megatron_flags import ALIASES, REFUSED, WITHOUT_EFFECT
from trainer.planning.checks import check_world_size
from trainer.planning.command_line import UsageError, build_train_config, flag_keys, parse_command_line
from trainer.process.launch_environment import resolve_launch_environment

MEETING = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}

# "Llama pretraining and continual pretraining with Megatron-LM", the GENIAC project, 2024: the whole option block.
_PUBLISHED_TEXT = """
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --context-parallel-size 1 --sequence-parallel
--use-distributed-optimizer --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
--group-query-attention --num-query-groups 8 --seq-length 2048 --max-position-embeddings 2048 --micro-batch-size 1
--global-batch-size 1536 --train-iters 12500 --tokenizer-type SentencePieceTokenizer --tokenizer-model t.model
--load ckpt --finetune --no-load-rng --no-load-optim --save out --data-path text_document --split 998,1,1
--distributed-backend nccl --init-method-std 0.008 --lr 1.0E-4 --min-lr 1.0E-6 --lr-decay-style cosine
--lr-decay-iters 12500 --weight-decay 0.1 --clip-grad 0.8 --lr-warmup-iters 1000 --optimizer adam --adam-beta1 0.9
--adam-beta2 0.95 --adam-eps 1e-05 --log-interval 1 --save-interval 500 --eval-interval 10000 --eval-iters 10 --bf16
--use-checkpoint-args --untie-embeddings-and-output-weights --no-position-embedding --position-embedding-type rope
--rope-theta 500000.0 --disable-bias-linear --use-mcore-models --normalization RMSNorm --norm-epsilon 1e-5
--no-masked-softmax-fusion --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --use-flash-attn
--attention-softmax-in-fp32 --recompute-activations --recompute-granularity selective
--transformer-impl transformer_engine --fp8-format hybrid --fp8-amax-compute-algo max --fp8-amax-history-len 1024
--use-z-loss --log-throughput --wandb-name n --wandb-project p --wandb-entity e
"""
PUBLISHED = _PUBLISHED_TEXT.split()
# Megatron-LM's BERT example as published with a cluster's patch, with its launcher's flags.
_BERT_TEXT = """
--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --micro-batch-size 4 --global-batch-size 32
--seq-length 512 --max-position-embeddings 512 --train-iters 1000000 --save c --load c --data-path d
--vocab-file bert-vocab.txt --data-impl mmap --split 949,50,1 --distributed-backend nccl --lr 0.0001
--lr-decay-style linear --min-lr 1.0e-5 --lr-decay-iters 990000 --weight-decay 1e-2 --clip-grad 1.0
--lr-warmup-fraction .01 --log-interval 100 --save-interval 10000 --eval-interval 1000 --eval-iters 10 --fp16
--nproc_per_node 4 --nnodes 2 --node_rank 0 --master_addr a --master_port 1 --local_rank 0
"""
BERT = _BERT_TEXT.split()
# Megatron-LM's examples/mixtral, with its launcher's flags.
_MIXTRAL_TEXT = """
--nproc_per_node 2 --nnodes 1 --node_rank 0 --master_addr localhost --master_port 6000
--use-mcore-models --disable-bias-linear --seq-length 256 --max-position-embeddings 2048 --num-layers 2
--hidden-size 256 --ffn-hidden-size 896 --num-attention-heads 2 --init-method-std 0.01 --attention-dropout 0.0
--hidden-dropout 0.0 --normalization RMSNorm --position-embedding-type rope --swiglu
--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --no-masked-softmax-fusion
--no-position-embedding --rotary-base 1000000 --num-experts 2 --moe-router-topk 2
--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2 --moe-grouped-gemm
--moe-token-dispatcher-type alltoall --overlap-param-gather --overlap-grad-reduce
--tokenizer-type NullTokenizer --tokenizer-model t --mock-data --split 99990,8,2 --micro-batch-size 1
--global-batch-size 4 --lr 1e-4 --train-iters 7 --min-lr 1.0e-5 --weight-decay 0.1 --clip-grad 1.0
--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --expert-model-parallel-size 2
--use-distributed-optimizer --sequence-parallel --eval-iters 10 --no-load-optim --no-load-rng
--wandb-project Mixtral --wandb-exp-name Mixtral_8x7B
"""
MIXTRAL = _MIXTRAL_TEXT.split()
LAUNCHER = ("nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port")


def without(arguments, *flags):
    kept, skip = [], False
    for argument in arguments:
        if argument.startswith("--"):
            skip = argument[2:] in flags
        if not skip:
            kept.append(argument)
    return kept


@pytest.mark.parametrize("arguments", [PUBLISHED, BERT, MIXTRAL])
def test_every_published_flag_is_on_exactly_one_list(arguments):
    for flag in (argument[2:].replace("_", "-") for argument in arguments if argument.startswith("--")):
        lists = [flag in known for known in (flag_keys(), ALIASES, WITHOUT_EFFECT, REFUSED)]
        assert sum(lists) == 1, f"--{flag} is on {sum(lists)} lists"


def test_lists_do_not_overlap_and_aliases_exist():
    keys = flag_keys()
    everything = [*keys, *ALIASES, *WITHOUT_EFFECT, *REFUSED]
    assert len(everything) == len(set(everything))
    assert {alias.key for alias in ALIASES.values()} <= set(keys.values())


def test_published_script_becomes_a_config():
    refused = [argument[2:] for argument in PUBLISHED if argument[2:] in REFUSED]
    assert refused == ["fp8-format"]
    line = parse_command_line(without(PUBLISHED, *refused))
    config = build_train_config(line)
    assert config.model.rotary_base == 500000.0
    assert config.model.position_embedding_type == "rope"  # overrides --no-position-embedding
    assert config.model.num_query_groups == 8
    assert config.training.bf16
    assert config.model.z_loss_coeff == 1e-4
    assert config.optimizer.lr == 1e-4
    assert config.data.data_path == ["text_document"]
    assert (config.data.tokenizer_type, config.data.tokenizer_model) == ("SentencePieceTokenizer", "t.model")
    assert config.checkpoint.finetune
    assert config.parallel.zero_stage == 1
    # --recompute-activations and the newer flag have the same meaning.
    assert config.training.recompute_granularity == "selective"
    assert any("--use-flash-attn is without effect here" in note for note in line.notes)
    assert all(note.count("\n") == 0 for note in line.notes)


def test_published_mixture_of_experts_becomes_a_config():
    line = parse_command_line(without(MIXTRAL, *LAUNCHER))
    config = build_train_config(line)
    assert (config.model.num_experts, config.parallel.expert_model_parallel_size) == (2, 2)
    assert config.model.moe_aux_loss_coeff == 0.01
    assert config.parallel.overlap_param_gather
    assert any("--moe-token-dispatcher-type alltoall is without effect" in note for note in line.notes)
    check_world_size(config, 2)


def test_flags_of_functional_tests_are_read():
    flags = ["--use-tp-pp-dp-mapping", "--rerun-mode", "disabled", "--head-lr-mult", "1.0", "--num-experts", "8", "8"]
    flags += ["--init-method-xavier-uniform", "--embedding-init-method-std", "0.1"]
    line = parse_command_line(flags)
    assert line.values == {
        "parallel.rank_order": "tp-cp-ep-pp-dp",
        "model.num_experts": "8",
        "model.init_method": "xavier_uniform",
        "model.embedding_init_method_std": "0.1",
    }
    assert [note.split(" is without effect")[0] for note in line.notes] == [
        "--rerun-mode disabled",
        "--head-lr-mult 1.0",
    ]


def test_the_dtypes_of_the_precision_aware_optimizer_are_read():
    flags = ["--bf16", "--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16", "--main-grads-dtype", "bf16"]
    found = build_train_config(parse_command_line([*without(MIXTRAL, *LAUNCHER), *flags])).optimizer
    assert (found.exp_avg_dtype, found.exp_avg_sq_dtype, found.main_grads_dtype) == ("bf16",) * 3


def test_llama3_rope_has_the_given_factor():
    """Megatron-LM's other numbers are constants; its factor was ignored in releases."""
    expected = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    expected["original_max_position_embeddings"] = 8192
    script = without(MIXTRAL, *LAUNCHER)
    flags = ["--use-rope-scaling"]
    for more, factor in (([], 8), (["--rope-scaling-factor", "32.5"], 32.5)):
        for order in ([*flags, *more], [*more, *flags]):
            config = build_train_config(parse_command_line([*script, *order]))
            assert config.model.rope_scaling == {**expected, "factor": factor}
    with pytest.raises(ConfigError, match="has no rope_type"):
        build_train_config(parse_command_line([*script, "--rope-scaling-factor", "8"]))


def test_rope_scaling_on_the_command_line():
    line = parse_command_line([*without(MIXTRAL, *LAUNCHER), "--rope-scaling", "rope_type=linear", "factor=4"])
    assert build_train_config(line).model.rope_scaling == {"rope_type": "linear", "factor": 4}
    numbers = ["factor=1e1", "original_max_position_embeddings=64", "truncate=false"]
    line = parse_command_line([*without(MIXTRAL, *LAUNCHER), "--rope-scaling", "rope_type=yarn", *numbers])
    assert build_train_config(line).model.rope_scaling["truncate"] is False


def test_newer_and_older_names_of_a_key():
    line = parse_command_line(["--recompute-granularity", "full", "--recompute-activations"])
    assert line.values["training.recompute_granularity"] == "full"
    line = parse_command_line(["--use-torch-fsdp2", "--no-overlap-param-gather"])
    assert line.values == {
        "parallel.data_parallel_sharding_strategy": "optim_grads_params",
        "parallel.overlap_param_gather": False,
    }
    line = parse_command_line(["--recompute-modules", "core_attn", "mlp"])
    assert line.values == {"training.recompute_modules": ["core_attn", "mlp"]}


@pytest.mark.parametrize(
    ("arguments", "key", "said"),
    [
        (
            ["--moe-router-load-balancing-type", "global_aux_loss"],
            "model.moe_router_load_balancing_type",
            "use aux_loss, over each micro-batch, or seq_aux_loss",
        ),
        (
            ["--moe-router-load-balancing-type", "dense"],
            "model.moe_router_load_balancing_type",
            "'aux_loss', 'seq_aux_loss', 'sinkhorn' or 'none'",
        ),
        (["--cp-comm-type", "ring"], "parallel.cp_comm_type", "'p2p' or 'a2a'"),
        (["--num-experts=2", "--expert-tensor-parallel-size=2"], "parallel.expert_tensor_parallel_size", "must divide"),
        (["--moe-layer-freq", "([1]*3)"], "model.moe_layer_freq", "one entry for each of the 2 layers"),
        (["--exp-avg-sq-dtype", "fp16"], "optimizer.exp_avg_sq_dtype", "use bf16, or fp32"),
        (["--mtp-loss-scaling-factor", "0.3"], "model.mtp_loss_scaling_factor", "needs mtp_num_layers"),
    ],
)
def test_values_that_are_not_supported(arguments, key, said):
    with pytest.raises(ConfigError) as caught:
        build_train_config(parse_command_line([*without(MIXTRAL, *LAUNCHER, arguments[0][2:]), *arguments]))
    assert caught.value.key == key
    assert said in caught.value.problem


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ([], {}),
        (["--tensor-model-parallel-size", "2"], {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        (
            ["--tensor-model-parallel-size", "2", "--use-distributed-optimizer"],
            {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        ),
        (["--tensor-model-parallel-size", "2", "--data-parallel-sharding-strategy", "optim_grads_params"], {}),
    ],
)
def test_kernels_start_in_order_where_tensor_parallel_collectives_are_to_be_hidden(parallel, expected, monkeypatch):
    shape = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "2", "--seq-length", "4"]
    arguments = [*shape, "--train-iters", "0", "--lr", "0.1", "--mock-data", *parallel]
    launch = resolve_launch_environment({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **MEETING})
    monkeypatch.setattr("trainer.training.pretraining.run_pretraining", lambda *_: 0)
    environment = {}
    assert main(arguments, launch, None, environment) == 0
    assert environment == expected
    users_own = {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}
    assert main(arguments, launch, None, users_own) == 0
    assert users_own == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(
        "model: {num_layers: 2, hidden_size: 8, num_attention_heads: 2}\n"
        "training: {train_iters: 5, seq_length: 4}\noptimizer: {lr: 0.1}\nparallel: {sequence_parallel: true}\n"
    )
    line = parse_command_line(
        ["--config", str(path), "--lr=0.2", "--sequence-parallel", "false", "--no-overlap-grad-reduce", "--openai-gelu"]
    )
    config = build_train_config(line)
    assert config.model.openai_gelu
    assert config.optimizer.lr == 0.2
    assert config.training.train_iters == 5
    assert not config.parallel.sequence_parallel
    assert not config.parallel.overlap_grad_reduce


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tensor-model-paralel-size", "2"], "did you mean --tensor-model-parallel-size?"),
        (["--train-samples", "8"], "--global-batch-size"),
        (["--zero-stage", "4"], "use 0 or 1"),
        (["--fp8-format", "hybrid"], "--bf16"),
        (["--is-hybrid-model"], "state-space layers"),
        (["--qk-l2-norm"], "use --qk-layernorm"),
        (["--moe-router-topk-limited-devices", "2"], "this way of routing"),
        (["--moe-token-dispatcher-type", "pigeon"], "use alltoall or"),
        (["--moe-layer-recompute"], "--recompute-modules moe"),
        (["--spec", "my.model", "layers"], "takes 1 value"),
        (["--spec", "mine"], "layers of your own are not supported"),
        (["--nproc_per_node", "8"], "torchrun"),
        (["--lr"], "takes one value, not 0"),
        (["--rerun-mode", "report_stats"], "results of repeated steps are not compared"),
        (["--num-experts"], "takes one value, not 0"),
        (["--num-experts", "4", "8"], "'4 8' is not valid: all layers with experts have equally many; give one"),
        (["--moe-router-load-balancing-type", "aux_loss", "seq_aux_loss"], "a router has one way to balance"),
        (["--moe-aux-loss-coeff", "0.01", "0.02"], "a router has one loss that balances"),
        (["--bf16", "perhaps"], "true or false"),
        (["--swiglu", "true", "x"], "takes no value"),
        (["--data-path"], "one or more"),
        (["--rope-theta", "1", "2"], "takes one value"),
        (["pretrain_gpt.py"], "use flags only"),
        (["--vocabulary-of-no-known-kind-at-all-xyz", "1"], "unknown flag"),
    ],
)
def test_refused(arguments, said):
    with pytest.raises(UsageError) as caught:
        parse_command_line(arguments)
    assert said in str(caught.value), str(caught.value)


def test_config_error_keeps_its_key():
    with pytest.raises(ConfigError) as caught:
        flags = [*without(PUBLISHED, "fp8-format", "use-z-loss", "tokenizer-type"), "--tokenizer-type", "SFTTokenizer"]
        build_train_config(parse_command_line(flags))
    assert caught.value.key == "data.tokenizer_type"
    assert "tokenizers of images and chats are not supported" in caught.value.problem


def trainer(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "trainer", *arguments], capture_output=True, text=True, timeout=HANG_S, check=False
    )


def test_exit_codes_and_one_line_a_problem_without_torch(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("model: {num_layer: 2}\n")
    bad_flag = trainer("pretrain", "--config", str(path), "--tran-iters", "3")
    assert (bad_flag.returncode, bad_flag.stderr.count("\n")) == (2, 1)
    assert "--train-iters" in bad_flag.stderr
    bad_config = trainer("pretrain", "--config", str(path))
    assert bad_config.returncode == 3
    unknown, *missing = bad_config.stderr.splitlines()
    assert unknown == f"{path}: model.num_layer: unknown key; did you mean model.num_layers?"
    keys = ("model.hidden_size", "model.num_attention_heads", "training", "optimizer")
    assert missing == [f"also: {path}: {key}: is required and has no default; set it" for key in keys]
    unknown = trainer("pretrian")
    assert unknown.returncode == 2
    assert "pretrain" in unknown.stderr
    assert re.search(r"^  kernels +\w", trainer().stdout, re.MULTILINE)


INTERRUPTED = """
import sys
from types import SimpleNamespace
from trainer import __main__ as trainer

def interrupted(*_):
    raise KeyboardInterrupt

sys.modules["interrupted"] = SimpleNamespace(main=interrupted)
trainer.COMMANDS["pretrain"] = ("interrupted", "")
sys.exit(trainer.main(["pretrain"]))
"""


def test_an_interrupt_during_the_import_prints_no_traceback():
    command = [sys.executable, "-c", INTERRUPTED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stderr) == (130, "trainer: interrupted\n")


@pytest.mark.parametrize("word", ["use-mpi-2", "used_wandb", "exit-duration-in-minutes", "zero-stages", "deep"])
def test_a_distant_flag_is_no_suggestion(word):
    with pytest.raises(UsageError) as caught:
        parse_command_line([f"--{word}"])
    said = str(caught.value)
    for misleading in ("use-megatron-fsdp", "use-gigatoken", "reset-attention-mask", "eod-token", "--seed"):
        assert misleading not in said


@pytest.mark.parametrize("word", ["use-mpi", "deepspeed", "override-opt_param-scheduler"])
def test_words_of_other_programs_are_told(word):
    assert len(parse_command_line([f"--{word}"]).notes) == 1


def test_flags_of_trackers_set_their_keys():
    flags = "--tensorboard-dir t --tensorboard-log-interval 5 --wandb-exp-name n --wandb_tag a --use_wandb"
    assert parse_command_line(flags.split()).values == {
        "logging.tensorboard_dir": "t",
        "logging.tensorboard_log_interval": "5",
        "logging.wandb_name": "n",
        "logging.wandb_tags": "a",
        "logging.wandb_project": "llmctl",
    }
    values = parse_command_line(["--wandb-project", "p", "--use-wandb"]).values
    assert values == {"logging.wandb_project": "p"}


def test_words_of_older_and_other_programs():
    line = parse_command_line(["--checkpoint-activations", "--zero-stage", "2", "--train_iters", "3"])
    assert line.values == {
        "training.recompute_granularity": "full",
        "training.recompute_method": "uniform",
        "training.recompute_num_layers": 1,
        "parallel.data_parallel_sharding_strategy": "optim_grads",
        "training.train_iters": "3",
    }


def test_lengths_in_samples_and_tokens_are_iterations():
    """The numbers of Megatron-DeepSpeed's 1.3B script: 300e9 tokens in batches of 512 x 2048, 600e9/2048 samples."""
    sizes = ["--global-batch-size", "512", "--seq-length", "2048"]
    tokens = ["--train-tokens", "300000000000", "--train-samples", "292968750"]
    schedule = ["--lr-decay-tokens", "300000000000", "--lr-warmup-tokens", "3000000000"]
    values = parse_command_line([*tokens, *schedule, *sizes]).values
    assert values["training.train_iters"] == 286103
    assert values["optimizer.lr_decay_iters"] == 300e9 / (512 * 2048)
    assert values["optimizer.lr_warmup_iters"] == 3e9 / (512 * 2048)
    values = parse_command_line(["--train-samples", "1030", "--lr-warmup-samples", "1024", *sizes]).values
    assert (values["training.train_iters"], values["optimizer.lr_warmup_iters"]) == (2, 2)
    for limit, iterations in (("9", 9), ("500000", 286103)):
        both = parse_command_line(["--train-iters", limit, *tokens[:2], *sizes]).values
        assert int(both["training.train_iters"]) == iterations
    with pytest.raises(UsageError, match="cannot be combined with --train-iters"):
        parse_command_line(["--train-samples", "8", "--train-iters", "8", *sizes])


def test_every_flag_of_megatron_has_an_answer():
    flags = recorded_flags()
    assert len(flags) > 800
    assert {answer(flag)[0] for flag in flags} == {"meant", "no effect", "refused"}


def test_the_page_of_flags_is_current():
    page = Path(__file__).parents[3] / "docs/reference/megatron-flags.md"
    assert page.read_text() == flags_page(), "run python -m scripts.reference"
