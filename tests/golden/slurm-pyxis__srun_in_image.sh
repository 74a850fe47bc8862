#!/bin/bash
#SBATCH --job-name=gpt-261121-101500-ab12
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2:00:00
#SBATCH --output=job.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
# Run gpt-261121-101500-ab12, submission 1. Written by llmctl VERSION.
LLMCTL_RUN_ID=gpt-261121-101500-ab12 LLMCTL_RUN_DIR=/runs/gpt-261121-101500-ab12
fail() { echo "llmctl: $*" >&2; exit 1; }

# Started without a part, by the scheduler and on every node by the launcher, this script starts llmctl's supervisor, a Python program.
# The supervisor starts the parts "launch" (first node) and "rank" (every node), keeps logs, forwards signals and writes exit.json.
part=${1-}
if [[ $part != launch && $part != rank && $part != inside ]]; then
    wrong=$(find -H "$LLMCTL_RUN_DIR"{,/job.json,/code/supervisor/,/code/supervisor/*,/code/supervisor/*/*} -maxdepth 0 \( ! -uid 0 ! -uid "$EUID" -o -perm /022 \) -printf '%p is of %u, mode %m' -quit)
    [[ -z $wrong ]] || fail "nothing of $LLMCTL_RUN_ID is started, because only you and root may write to what it starts: $wrong"
    for python in python3 /usr/libexec/platform-python; do
        if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
            exec "$python" -IB "$LLMCTL_RUN_DIR/code/supervisor" job --job "$LLMCTL_RUN_DIR/job.json" --job-id "$SLURM_JOB_ID" --end-by step --end-time "${SLURM_JOB_END_TIME-ask}" "$@"
        fi
    done
    fail "$HOSTNAME has no python3 of version 3.6 or later, which starts and watches the ranks: ask the site for one"
fi

load_environment() { :; }

if [[ $part == launch ]]; then
    load_environment || exit 1
    mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
    ((${#hosts[@]} == 2)) || fail "requested 2 nodes but got ${#hosts[@]}: ${hosts[*]}"
    printf '%s slots=8\n' "${hosts[@]}" >"$LLMCTL_HOSTFILE"
    # An address of this node that the other nodes reach, and a port: from the supervisor, or else from the job's id.
    MASTER_ADDR=$("$LLMCTL_PYTHON" -c 'import socket, sys; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((sys.argv[1], 9)); print(s.getsockname()[0])' "${hosts[1]}" 2>/dev/null)
    MASTER_PORT=${LLMCTL_MASTER_PORT:-$((20000 + SLURM_JOB_ID % 10000))}
    [[ $MASTER_ADDR =~ ^[0-9.]+$ && $MASTER_ADDR != 127.* ]] ||
        fail "$HOSTNAME has no IPv4 address that ${hosts[1]} reaches (${MASTER_ADDR:-none}); set rendezvous.interface to one of:" "$(grep -lxE 'up|unknown' /sys/class/net/*/operstate | cut -d/ -f5 | grep -vx lo | xargs)"
    export SLURM_EXPORT_ENV=ALL # steps get the environment of this script, not the environment of sbatch
    export MASTER_ADDR MASTER_PORT
    export LLMCTL_ENVIRONMENT="$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT"
    exec srun --job-name="$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" --nodes=2 --ntasks=16 --ntasks-per-node=8 --cpu-bind=none \
        --kill-on-bad-exit=1 --wait=0 --overlap --distribution=block --input=none \
 '--container-image=nvcr.io#nvidia/pytorch:25.09-py3' --container-mounts=/runs/gpt-261121-101500-ab12:/runs/gpt-261121-101500-ab12 --no-container-mount-home --no-container-remap-root \
        bash "$LLMCTL_ATTEMPT_DIR/job.sh" inside
fi

# In the container, which may have no Python: the tasks of the supervisor, in bash. The last one is to record the end.
trap 'printf "{\"code\": %d, \"host\": \"%s\"}\n" "$?" "$HOSTNAME" >"$LLMCTL_ATTEMPT_DIR/$(printf ended-rank-%05d.json "$SLURM_PROCID")"' EXIT
trap : TERM INT HUP QUIT USR1 USR2
export NODE_RANK=$((SLURM_PROCID / 8)) NNODES=2
exec >>"$LLMCTL_ATTEMPT_DIR/$(printf 'node-%05d.log' "$NODE_RANK")" 2>&1 </dev/null
while IFS= read -r -d '' name && IFS= read -r -d '' value; do
    export "$name=$value"
done </runs/gpt-261121-101500-ab12/own/secrets/gpt-261121-101500-ab12.1 || fail "$HOSTNAME has no file of the secrets: is runs_root on a file system that the nodes share?"
cd "$LLMCTL_RUN_DIR/code" || exit 1
set -- /home/ada/venv/bin/python -m trainer pretrain --config "$LLMCTL_RUN_DIR/config.yaml"
export LLMCTL_CACHE_DIR=${LLMCTL_CACHE_DIR:-$LLMCTL_USER_DIR/cache/llmctl} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$LLMCTL_USER_DIR/cache/triton} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$LLMCTL_USER_DIR/cache/torch_extensions}
[[ -n ${HF_HOME-}${XDG_CACHE_HOME-} || -d $HOME/.cache/huggingface ]] || export HF_HOME="$LLMCTL_USER_DIR/cache/huggingface"
export PYTHONPATH="$LLMCTL_RUN_DIR/code:$LLMCTL_RUN_DIR/code/user${PYTHONPATH:+:$PYTHONPATH}"
export LLMCTL_GPUS_PER_NODE=8
(exec "$@")
