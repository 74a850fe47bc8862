#!/bin/bash
# T5 on one node.
GPUS_PER_NODE=8
# Change for several nodes.
MASTER_ADDR=localhost
MASTER_PORT=6000
NNODES=1
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR --master_port $MASTER_PORT"
NUM_LAYERS=12
HIDDEN_SIZE=768
NUM_HEADS=12
KV_CHANNELS=64
FFN_HIDDEN_SIZE=3072
DECODER_SEQ_LENGTH=128
MICRO_BATCH_SIZE=16
GLOBAL_BATCH_SIZE=2048
SEQ_LENGTH=512
TRAIN_STEPS=1000000
LR_DECAY_ITERS=990000
DATA_PATH=data/corpus_text_sentence
CHECKPOINT_PATH=checkpoints/masked
VOCAB_FILE=bert-vocab.txt

python -m torch.distributed.launch $DISTRIBUTED_ARGS \
       pretrain_t5.py \
       --num-layers $NUM_LAYERS \
       --hidden-size $HIDDEN_SIZE \
       --num-attention-heads $NUM_HEADS \
       --kv-channels $KV_CHANNELS \
       --ffn-hidden-size $FFN_HIDDEN_SIZE \
       --encoder-seq-length $SEQ_LENGTH \
       --decoder-seq-length $DECODER_SEQ_LENGTH \
       --max-position-embeddings $SEQ_LENGTH \
       --micro-batch-size $MICRO_BATCH_SIZE \
       --global-batch-size $GLOBAL_BATCH_SIZE \
       --train-iters $TRAIN_STEPS \
       --save $CHECKPOINT_PATH \
       --load $CHECKPOINT_PATH \
       --data-path $DATA_PATH \
       --vocab-file $VOCAB_FILE \
       --data-impl mmap \
       --split 949,50,1 \
       --lr 0.0001 \
       --lr-decay-style linear \
       --min-lr 1.0e-5 \
       --lr-decay-iters $LR_DECAY_ITERS \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --lr-warmup-fraction .01 \
       --log-interval 100 \
       --save-interval 10000 \
       --eval-interval 1000 \
       --eval-iters 10 \
       --fp16
