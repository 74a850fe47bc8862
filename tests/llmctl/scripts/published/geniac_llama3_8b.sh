#!/bin/bash
# One node, started by eval of a command that is put together; the node number is an argument.
source /opt/conda/etc/profile.d/conda.sh
conda activate train
export CUDA_DEVICE_MAX_CONNECTIONS=1
export CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7
MASTER_ADDR=node-0
MASTER_PORT=65534
NODE_RANK=${1}
NNODES=1
GPUS_PER_NODE=8
NUM_LAYERS=32
HIDDEN_SIZE=4096
FFN_HIDDEN_SIZE=14336 # 3.5 times the hidden size
NUM_HEADS=32
NUM_KEY_VALUE_HEADS=8
SEQ_LENGTH=2048
TENSOR_PARALLEL_SIZE=1
PIPELINE_PARALLEL_SIZE=2
CONTEXT_PARALLEL_SIZE=1
MICRO_BATCH_SIZE=1
GLOBAL_BATCH_SIZE=1536
TRAIN_STEPS=12500
LR_DECAY_ITERS=12500
LR=1.0E-4
MIN_LR=1.0E-6
LR_WARMUP_STEPS=1000
WEIGHT_DECAY=0.1
GRAD_CLIP=0.8
TOKENIZER_MODEL="/data/tokenizer/tokenizer.model"
TRAIN_DATA_PATH="/data/tokenized/text_document"
CHECKPOINT_SAVE_DIR=/data/checkpoints/llama8b_tp${TENSOR_PARALLEL_SIZE}_pp${PIPELINE_PARALLEL_SIZE}
mkdir -p ${CHECKPOINT_SAVE_DIR}/log
#if [[ -f "${CHECKPOINT_SAVE_DIR}/latest_checkpointed_iteration.txt" ]]; then
CHECKPOINT_ARGS="--load ${CHECKPOINT_SAVE_DIR} --finetune"
JOB_NAME="Llama-3-8b-test"
megatron_options=" \
--tensor-model-parallel-size ${TENSOR_PARALLEL_SIZE} \
--pipeline-model-parallel-size ${PIPELINE_PARALLEL_SIZE} \
--context-parallel-size ${CONTEXT_PARALLEL_SIZE} \
--sequence-parallel \
--use-distributed-optimizer \
--num-layers ${NUM_LAYERS} \
--hidden-size ${HIDDEN_SIZE} \
--ffn-hidden-size ${FFN_HIDDEN_SIZE} \
--num-attention-heads ${NUM_HEADS} \
--group-query-attention \
--num-query-groups ${NUM_KEY_VALUE_HEADS} \
--seq-length ${SEQ_LENGTH} \
--max-position-embeddings ${SEQ_LENGTH} \
--micro-batch-size ${MICRO_BATCH_SIZE} \
--global-batch-size ${GLOBAL_BATCH_SIZE} \
--train-iters ${TRAIN_STEPS} \
--tokenizer-type SentencePieceTokenizer \
--tokenizer-model ${TOKENIZER_MODEL} \
${CHECKPOINT_ARGS} \
--save ${CHECKPOINT_SAVE_DIR} \
--data-path ${TRAIN_DATA_PATH} \
--split 998,1,1 \
--distributed-backend nccl \
--init-method-std 0.008 \
--lr ${LR} \
--min-lr ${MIN_LR} \
--lr-decay-style cosine \
--lr-decay-iters ${LR_DECAY_ITERS} \
--weight-decay ${WEIGHT_DECAY} \
--clip-grad ${GRAD_CLIP} \
--lr-warmup-iters ${LR_WARMUP_STEPS} \
--optimizer adam --adam-beta1 0.9 --adam-beta2 0.95 --adam-eps 1e-05 \
--log-interval 1 --save-interval 500 --eval-interval 10000 --eval-iters 10 \
--bf16 \
--use-checkpoint-args \
--untie-embeddings-and-output-weights \
--no-position-embedding \
--position-embedding-type rope \
--rope-theta 500000.0 \
--disable-bias-linear \
--use-mcore-models \
--normalization RMSNorm \
--norm-epsilon 1e-5 \
--no-masked-softmax-fusion \
--attention-dropout 0.0 \
--hidden-dropout 0.0 \
--swiglu \
--use-flash-attn \
--attention-softmax-in-fp32 \
--recompute-activations \
--recompute-granularity "selective" \
--transformer-impl "transformer_engine" \
--fp8-format 'hybrid' \
--fp8-amax-compute-algo max \
--fp8-amax-history-len 1024 \
--use-z-loss \
--log-throughput \
--wandb-name ${JOB_NAME} \
--wandb-project "Llama-3-8B" \
--wandb-entity "team" \
"
current_time=$(date "+%Y.%m.%d_%H.%M.%S")
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
if [[ $node_rank -gt 0 ]]; then
  run_cmd="torchrun $DISTRIBUTED_ARGS /data/Megatron-LM/pretrain_gpt.py
  ${megatron_options} \
  2>&1 | tee ${CHECKPOINT_SAVE_DIR}/log/rank_${node_rank}_${current_time}.log"
else
  run_cmd="torchrun $DISTRIBUTED_ARGS /data/Megatron-LM/pretrain_gpt.py
  ${megatron_options}"
fi
echo ${run_cmd}
eval ${run_cmd}
set +x
