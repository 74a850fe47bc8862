#!/usr/bin/env bash
# Run gpt-261121-101500-ab12 on this machine, submission 1. Written by llmctl VERSION.
LLMCTL_RUN_ID=gpt-261121-101500-ab12 LLMCTL_RUN_DIR=/runs/gpt-261121-101500-ab12
fail() { echo "llmctl: $*" >&2; exit 1; }

# Started without a part, by the scheduler and on every node by the launcher, this script starts llmctl's supervisor, a Python program.
# The supervisor starts the parts "launch" (first node) and "rank" (every node), keeps logs, forwards signals and writes exit.json.
part=${1-}
if [[ $part != launch && $part != rank && $part != inside ]]; then
    wrong=$(find -H "$LLMCTL_RUN_DIR"{,/job.json,/code/supervisor/,/code/supervisor/*,/code/supervisor/*/*} -maxdepth 0 \( ! -uid 0 ! -uid "$EUID" -o -perm /022 \) -printf '%p is of %u, mode %m' -quit)
    [[ -z $wrong ]] || fail "nothing of $LLMCTL_RUN_ID is started, because only you and root may write to what it starts: $wrong"
    for python in python3 /usr/libexec/platform-python /usr/bin/python3; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
            exec "$python" -IB "$LLMCTL_RUN_DIR/code/supervisor" job --job "$LLMCTL_RUN_DIR/job.json" --job-id "$$" "$@"
        fi
    done
    fail "$HOSTNAME has no python3 of version 3.6 or later, which starts and watches the ranks: ask the site for one"
fi

load_environment() { :; }

if [[ $part == launch ]]; then
    load_environment || exit 1
    # One agent per node, each with its share of the GPUs.
    for ((node = 0; node < 2; node++)); do echo "127.0.0.1 slots=2"; done >"$LLMCTL_HOSTFILE"
    export MASTER_ADDR=127.0.0.1 LLMCTL_ENVIRONMENT="$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT"
    # A port: from the supervisor, or else from the job's process id.
    export MASTER_PORT=${LLMCTL_MASTER_PORT:-$((20000 + PPID % 10000))}
    # Once per node: %n is the number of the node.
    exec "$LLMCTL_PYTHON" -IB "$LLMCTL_RUN_DIR/code/supervisor" each-host \
        bash "$LLMCTL_ATTEMPT_DIR/job.sh" node "$LLMCTL_ATTEMPT" "$MASTER_ADDR" "$MASTER_PORT" %n
fi

LLMCTL_GPUS=(0,1 2,3 )
# On every node, or in every rank: load the environment, unless the launcher has passed the environment on.
[[ ${LLMCTL_ENVIRONMENT-} == "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" ]] || load_environment || exit 1
cd "$LLMCTL_RUN_DIR/code" || exit 1
set -- /usr/bin/python3 -m torch.distributed.run --nnodes 2 --node-rank "$NODE_RANK" --nproc-per-node 2 \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" --max-restarts 0 \
    --log-dir "$LLMCTL_ATTEMPT_DIR/torchrun" -m trainer pretrain --config "$LLMCTL_RUN_DIR/config.yaml"
export PYTHONPATH="$LLMCTL_RUN_DIR/code:$LLMCTL_RUN_DIR/code/user${PYTHONPATH:+:$PYTHONPATH}"
export CUDA_VISIBLE_DEVICES="${LLMCTL_GPUS[NODE_RANK]}" LLMCTL_GPUS_PER_NODE=2
exec "$@"
