#!/bin/bash
#BSUB -J gpt-261121-101500-ab12
#BSUB -n 16
#BSUB -R "span[ptile=8]"
#BSUB -gpu "num=8:j_exclusive=yes"
#BSUB -W 2:00
#BSUB -env "PATH, LSF_BINDIR, LSF_ENVDIR, LSF_LIBDIR, LSF_SERVERDIR"
#BSUB -o job.log
#BSUB -r
# Run gpt-261121-101500-ab12, submission 1. Written by llmctl VERSION.
LLMCTL_RUN_ID=gpt-261121-101500-ab12 LLMCTL_RUN_DIR=/runs/gpt-261121-101500-ab12
fail() { echo "llmctl: $*" >&2; exit 1; }

# Started without a part, by the scheduler and on every node by the launcher, this script starts llmctl's supervisor, a Python program.
# The supervisor starts the parts "launch" (first node) and "rank" (every node), keeps logs, forwards signals and writes exit.json.
part=${1-}
if [[ $part != launch && $part != rank && $part != inside ]]; then
    wrong=$(find -H "$LLMCTL_RUN_DIR"{,/job.json,/code/supervisor/,/code/supervisor/*,/code/supervisor/*/*} -maxdepth 0 \( ! -uid 0 ! -uid "$EUID" -o -perm /022 \) -printf '%p is of %u, mode %m' -quit)
    [[ -z $wrong ]] || fail "nothing of $LLMCTL_RUN_ID is started, because only you and root may write to what it starts: $wrong"
    for python in python3 /usr/libexec/platform-python /home/ada/venv/bin/python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
            exec "$python" -IB "$LLMCTL_RUN_DIR/code/supervisor" job --job "$LLMCTL_RUN_DIR/job.json" --job-id "$LSB_JOBID" --end-by file "$@"
        fi
    done
    fail "$HOSTNAME has no python3 of version 3.6 or later, which starts and watches the ranks: ask the site for one"
fi

load_environment() { :; }

if [[ $part == launch ]]; then
    load_environment || exit 1
    # LSB_MCPU_HOSTS: each host followed by its slots (Administering IBM Spectrum LSF, parallel jobs); this script runs on
    # the first host.
    mapfile -t hosts < <(awk '{ for (i = 1; i < NF; i += 2) if (!seen[$i]++) print $i }' <<<"$LSB_MCPU_HOSTS")
    ((${#hosts[@]} == 2)) || fail "requested 2 nodes but got ${#hosts[@]}: ${hosts[*]}"
    printf '%s slots=8\n' "${hosts[@]}" >"$LLMCTL_HOSTFILE"
    # An address of this node that the other nodes reach, and a port: from the supervisor, or else from the job's id.
    MASTER_ADDR=$("$LLMCTL_PYTHON" -c 'import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((sys.argv[1], 9)); print(s.getsockname()[0])' "${hosts[1]}" 2>/dev/null)
    MASTER_PORT=${LLMCTL_MASTER_PORT:-$((20000 + LSB_JOBID % 10000))}
    [[ $MASTER_ADDR =~ ^[0-9.]+$ && $MASTER_ADDR != 127.* ]] ||
        fail "$HOSTNAME has no IPv4 address that ${hosts[1]} reaches (${MASTER_ADDR:-none}); set rendezvous.interface to one of:" "$(grep -lxE 'up|unknown' /sys/class/net/*/operstate | cut -d/ -f5 | grep -vx lo | xargs)"
    # Once per host: %h is its name, %n its number. The manual does not state the effect of a signal to blaunch on its
    # task. So a file asks the nodes to end.
    exec "$LLMCTL_PYTHON" -IB "$LLMCTL_RUN_DIR/code/supervisor" each-host --end-by file blaunch -z %h -no-shell \
        bash "$LLMCTL_ATTEMPT_DIR/job.sh" node "$LLMCTL_ATTEMPT" "${MASTER_ADDR:--}" "${MASTER_PORT:--}" %n
fi

# On every node, or in every rank: load the environment, unless the launcher has passed the environment on.
[[ ${LLMCTL_ENVIRONMENT-} == "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" ]] || load_environment || exit 1
cd "$LLMCTL_RUN_DIR/code" || exit 1
set -- /home/ada/venv/bin/python -m torch.distributed.run --nnodes 2 --node-rank "$NODE_RANK" --nproc-per-node 8 \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" --max-restarts 0 \
    --log-dir "$LLMCTL_ATTEMPT_DIR/torchrun" -m trainer pretrain --config "$LLMCTL_RUN_DIR/config.yaml"
[[ $LLMCTL_USER_DIR == "$HOME"/* ]] || export LLMCTL_CACHE_DIR=${LLMCTL_CACHE_DIR:-$LLMCTL_USER_DIR/cache/llmctl} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$LLMCTL_USER_DIR/cache/triton} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$LLMCTL_USER_DIR/cache/torch_extensions}
[[ $LLMCTL_USER_DIR == "$HOME"/* || -n ${HF_HOME-}${XDG_CACHE_HOME-} || -d $HOME/.cache/huggingface ]] || export HF_HOME="$LLMCTL_USER_DIR/cache/huggingface"
export PYTHONPATH="$LLMCTL_RUN_DIR/code:$LLMCTL_RUN_DIR/code/user${PYTHONPATH:+:$PYTHONPATH}"
export LLMCTL_GPUS_PER_NODE=8
exec "$@"
