#!/bin/bash
# Megatron-DeepSpeed on ABCI: token-counted schedules, ZeRO-1, DeepSpeed's launcher.
#$ -l rt_AF=2
#$ -l h_rt=10:00:00
#$ -cwd
set -e
input_tokenizer_file=""
output_model_dir=""
save_interval=1000
while [[ ${#} -gt 0 ]]; do
    case ${1} in
        --input_tokenizer_file) input_tokenizer_file=${2}; shift ;;
        --output_model_dir) output_model_dir=${2}; shift ;;
        --save_interval) save_interval=${2}; shift ;;
        *) echo "Unknown parameter passed: ${1}"; exit 1 ;;
    esac
    shift
done
if [[ -z ${input_tokenizer_file} ]] || [[ -z ${output_model_dir} ]]; then
    echo "Error: Missing required arguments."
    exit 1
fi
output_model_dir="${output_model_dir%/}"
megatron_deepspeed_dir="${HOME}/train/Megatron-DeepSpeed"

seq_len=2048
model_size=1.3
num_layers=24
hidden_size=2048
num_attn_heads=16
global_batch_size=512
lr=2.0e-4
min_lr=1.0e-6
init_std=0.013
train_tokens_in_billion=300
train_tokens=$((${train_tokens_in_billion} * 1000 * 1000 * 1000))
train_samples=$(( 300 * 1000 * 1000 * 1000 * 2 / ${seq_len} ))
exit_duration=30000000
lr_warmup_tokens_in_million=3000
lr_warmup_tokens=$((${lr_warmup_tokens_in_million} * 1000 * 1000))
lr_decay_tokens=${train_tokens}
mp_size=2
pp_size=2
no_pp="false"
zero_stage=1
num_gpus_pernode=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)
num_node="${NHOSTS}"
num_gpus=$((${num_gpus_pernode} * ${num_node}))
batch_size=1
num_workers=0
activation_checkpoint="true"
current_time=$(date "+%Y.%m.%d_%H.%M.%S")
host="${HOSTNAME}"

data_path="${megatron_deepspeed_dir}/dataset/arxiv_text_document"
if [ ! -f "${data_path}.bin" ] || [ ! -f "${data_path}.idx" ]; then
    python ${megatron_deepspeed_dir}/tools/preprocess_data.py --input arxiv.jsonl --append-eod
fi
jobname="gpt_${model_size}B_tok${train_tokens_in_billion}B"
if [[ $zero_stage -gt 0 ]]; then
    jobname="${jobname}_z${zero_stage}"
fi
if [ "${no_pp}" = "false" ]; then
    jobname="${jobname}_pp${pp_size}"
fi
checkpoint_path="${output_model_dir}/checkpoint/${jobname}"
tensorboard_path="${output_model_dir}/tensorboard/${jobname}_${host}_${current_time}"
mkdir -p ${checkpoint_path} ${tensorboard_path}

data_options=" \
    --tokenizer-type SentencePieceTokenizer \
    --tokenizer-model ${input_tokenizer_file} \
    --data-path ${data_path} \
    --data-impl mmap"
megatron_options=" \
    --override-opt_param-scheduler \
    --adam-beta1 0.9 \
    --adam-beta2 0.95 \
    --tensor-model-parallel-size ${mp_size} \
    --init-method-std ${init_std} \
    --lr-decay-tokens ${lr_decay_tokens} \
    --lr-warmup-tokens ${lr_warmup_tokens} \
    --micro-batch-size ${batch_size} \
    --exit-duration-in-mins ${exit_duration} \
    --global-batch-size ${global_batch_size} \
    --num-layers ${num_layers} \
    --hidden-size ${hidden_size} \
    --num-attention-heads ${num_attn_heads} \
    --seq-length ${seq_len} \
    --max-position-embeddings ${seq_len} \
    --train-tokens ${train_tokens} \
    --train-samples ${train_samples} \
    --lr ${lr} \
    --min-lr ${min_lr} \
    --lr-decay-style cosine \
    --split 949,50,1 \
    --log-interval 10 \
    --eval-interval 100 \
    --eval-iters 10 \
    --save-interval ${save_interval} \
    --weight-decay 0.1 \
    --clip-grad 1.0 \
    --hysteresis 2 \
    --num-workers ${num_workers} \
    --fp16 \
    --seed 1234 \
    --load ${checkpoint_path} \
    --save ${checkpoint_path} \
    --no-async-tensor-model-parallel-allreduce \
    --use-flash-attn-v2 \
    --tensorboard-queue-size 1 \
    --log-timers-to-tensorboard \
    --log-batch-size-to-tensorboard \
    --log-validation-ppl-to-tensorboard \
    --log-optimizer-states-to-tensorboard \
    --tensorboard-dir ${tensorboard_path}"
if [ "${activation_checkpoint}" = "true" ]; then
megatron_options="${megatron_options} \
    --checkpoint-activations"
fi

config_json="${output_model_dir}/ds_config_zero${zero_stage}.json"
cat <<EOT > ${config_json}
{
  "train_batch_size": ${global_batch_size},
  "train_micro_batch_size_per_gpu": ${batch_size},
  "zero_optimization": {"stage": ${zero_stage}},
  "gradient_clipping": 1.0,
  "fp16": {"enabled": true, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "initial_scale_power": 11},
  "wall_clock_breakdown": false
}
EOT
deepspeed_options=" \
    --deepspeed \
    --deepspeed_config ${config_json} \
    --zero-stage ${zero_stage} \
    --pipeline-model-parallel-size ${pp_size}"
if [[ "${no_pp}" = "true" ]]; then
deepspeed_options="${deepspeed_options} \
    --no-pipeline-parallel"
fi
if [ "${activation_checkpoint}" = "true" ]; then
deepspeed_options="${deepspeed_options} \
    --deepspeed-activation-checkpointing"
fi

iteration=0
for (( node = 0; node <= num_node-1; node++ ))
do
    if $(ssh -q worker-"$node" "test -f \"$checkpoint_path/latest\""); then
        iteration=$(ssh -q worker-"$node" cat $checkpoint_path/latest)
    fi
done
if [[ $iteration -gt 0 ]]; then
    ds_ssh "echo $iteration > $checkpoint_path/latest"
fi

wandb_options=" \
    --use_wandb \
    --wandb_entity team \
    --wandb_project phase-1 \
    --wandb_group pretrain_gpt_${model_size}B_${host}_${current_time} \
    --wandb_tag other_gpt"

script_dir=$(dirname "$0")
hostfile="${script_dir}/hostfile_jobid-${JOB_ID}"
while read -r line
do
  echo "${line} slots=$(nvidia-smi --query-gpu=name --format=csv,noheader | wc -l)"
done < "${SGE_JOB_HOSTLIST}" > "${hostfile}"

deepspeed --hostfile ${hostfile} \
    ${megatron_deepspeed_dir}/pretrain_gpt.py \
    ${megatron_options} \
    ${data_options} \
    ${deepspeed_options} \
    ${wandb_options} \
    2>&1 | tee ${output_model_dir}/${jobname}_${host}_${current_time}.log
