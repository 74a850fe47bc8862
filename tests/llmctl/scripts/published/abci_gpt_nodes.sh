#!/bin/bash
# Several nodes of ABCI.
#$ -l rt_F=8
#$ -l h_rt=1:00:00
#$ -j y
#$ -cwd
#$ -o results/o.$JOB_ID
source /etc/profile.d/modules.sh
module load python/3.10/3.10.10 cuda/11.8/11.8.0 hpcx/2.12
GPUS_PER_NODE=4
TENSOR_PARALLEL_SIZE=4
export MASTER_ADDR=$(/usr/sbin/ip a show dev bond0 | grep inet | cut -d " " -f 6 | cut -d "/" -f 1)
export MASTER_PORT=$((10000 + ($JOB_ID % 50000)))
NNODES=$NHOSTS
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
MICRO_BATCH_SIZE=32
GLOBAL_BATCH_SIZE=512
NUM_LAYERS=24
HIDDEN_SIZE=1024
NUM_HEADS=16
SEQ_LENGTH=1024
TRAIN_STEPS=5000
LR_DECAY_ITERS=3200
DATA_PATH=dataset/books_text_document
CHECKPOINT_PATH=checkpoints/gpt2/${JOB_ID}/
VOCAB_FILE=dataset/gpt2-vocab.json
MERGE_FILE=dataset/gpt2-merges.txt

HOSTFILE_NAME=./hostfile_${JOB_ID}
cat $SGE_JOB_HOSTLIST > $HOSTFILE_NAME

mpirun -np $WORLD_SIZE -npernode $GPUS_PER_NODE --hostfile $HOSTFILE_NAME python \
       pretrain_gpt.py \
       --tensor-model-parallel-size $TENSOR_PARALLEL_SIZE \
       --pipeline-model-parallel-size 1 \
       --num-layers $NUM_LAYERS \
       --hidden-size $HIDDEN_SIZE \
       --num-attention-heads $NUM_HEADS \
       --micro-batch-size $MICRO_BATCH_SIZE \
       --global-batch-size $GLOBAL_BATCH_SIZE \
       --seq-length $SEQ_LENGTH \
       --max-position-embeddings $SEQ_LENGTH \
       --train-iters $TRAIN_STEPS \
       --lr-decay-iters $LR_DECAY_ITERS \
       --save $CHECKPOINT_PATH \
       --load $CHECKPOINT_PATH \
       --data-path $DATA_PATH \
       --vocab-file $VOCAB_FILE \
       --merge-file $MERGE_FILE \
       --data-impl mmap \
       --split 949,50,1 \
       --distributed-backend nccl \
       --lr 0.00015 \
       --min-lr 1.0e-5 \
       --lr-decay-style cosine \
       --weight-decay 1e-2 \
       --clip-grad 1.0 \
       --lr-warmup-fraction .01 \
       --checkpoint-activations \
       --log-interval 1 \
       --save-interval 10000 \
       --eval-interval 1000 \
       --eval-iters 10 \
       --fp16 \
       --use-mpi

rm $HOSTFILE_NAME
