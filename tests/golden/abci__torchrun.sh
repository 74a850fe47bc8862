#!/bin/bash
#$ -N gpt-261121-101500-ab12
#$ -l rt_F=2
#$ -l h_rt=2:00:00
#$ -S /bin/bash
#$ -cwd
#$ -j y
#$ -o job.log
#$ -r y
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
            exec "$python" -IB "$LLMCTL_RUN_DIR/code/supervisor" job --job "$LLMCTL_RUN_DIR/job.json" --job-id "$JOB_ID" --end-by file --never-exit 99,100 "$@"
        fi
    done
    fail "$HOSTNAME has no python3 of version 3.6 or later, which starts and watches the ranks: ask the site for one"
fi

load_environment() {
    command -v module >/dev/null || . /etc/profile.d/modules.sh || fail "the module function is not defined by" /etc/profile.d/modules.sh
    for name in python/3.10/3.10.10 cuda/11.8/11.8.0 cudnn/8.9/8.9.2 nccl/2.16/2.16.2-1 hpcx/2.12; do module load "$name" || fail "module load $name failed"; done
    return 0
}

if [[ $part == launch ]]; then
    [[ ${RESTARTED-0} == 0 ]] || echo "llmctl: Grid Engine has started the job again" >&2
    load_environment || exit 1
    # Both files list the head node first. Only some sites set SGE_JOB_HOSTLIST; jobs on one node may have neither file.
    # sge_pe(5): host, slots, queue, processors
    list=${SGE_JOB_HOSTLIST:-${PE_HOSTFILE-}}
    [[ -r $list ]] || list=${PE_HOSTFILE-}
    mapfile -t hosts < <(if [[ -r $list ]]; then awk '!seen[$1]++ { print $1 }' "$list"; else echo "$HOSTNAME"; fi)
    ((${#hosts[@]} == 2)) || fail "requested 2 nodes but got ${#hosts[@]}: ${hosts[*]}"
    printf '%s slots=4\n' "${hosts[@]}" >"$LLMCTL_HOSTFILE"
    # An address of this node that the other nodes reach, and a port: from the supervisor, or else from the job's id.
    MASTER_ADDR=$(PATH=$PATH:/usr/sbin:/sbin; ip -4 -o address show dev bond0 | awk '{ split($4, part, "/"); print part[1]; exit }')
    MASTER_PORT=${LLMCTL_MASTER_PORT:-$((10000 + JOB_ID % 50000))}
    [[ $MASTER_ADDR =~ ^[0-9.]+$ && $MASTER_ADDR != 127.* ]] ||
        fail "$HOSTNAME has no IPv4 address that ${hosts[1]} reaches (${MASTER_ADDR:-none}); set rendezvous.interface to one of:" "$(grep -lxE 'up|unknown' /sys/class/net/*/operstate | cut -d/ -f5 | grep -vx lo | xargs)"
    # Once per host: %h is its name, %n its number. When qrsh or its command ends by a signal, Grid Engine ends the whole
    # job at once. So neither is ever signalled: a file asks the nodes to end.
    qrsh=$SGE_ROOT/bin/$ARC/qrsh
    [[ -x $qrsh ]] || qrsh=qrsh
    exec "$LLMCTL_PYTHON" -IB "$LLMCTL_RUN_DIR/code/supervisor" each-host --end-by file --through-shell "$qrsh" -inherit -nostdin %h \
        bash "$LLMCTL_ATTEMPT_DIR/job.sh" node "$LLMCTL_ATTEMPT" "${MASTER_ADDR:--}" "${MASTER_PORT:--}" %n
fi

# On every node, or in every rank: load the environment, unless the launcher has passed the environment on.
[[ ${LLMCTL_ENVIRONMENT-} == "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" ]] || load_environment || exit 1
cd "$LLMCTL_RUN_DIR/code" || exit 1
set -- /home/ada/venv/bin/python -m torch.distributed.run --nnodes 2 --node-rank "$NODE_RANK" --nproc-per-node 4 \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --rdzv-id "$LLMCTL_RUN_ID.$LLMCTL_ATTEMPT" --max-restarts 0 \
    --log-dir "$LLMCTL_ATTEMPT_DIR/torchrun" -m trainer pretrain --config "$LLMCTL_RUN_DIR/config.yaml"
[[ $LLMCTL_USER_DIR == "$HOME"/* ]] || export LLMCTL_CACHE_DIR=${LLMCTL_CACHE_DIR:-$LLMCTL_USER_DIR/cache/llmctl} TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$LLMCTL_USER_DIR/cache/triton} TORCH_EXTENSIONS_DIR=${TORCH_EXTENSIONS_DIR:-$LLMCTL_USER_DIR/cache/torch_extensions}
[[ $LLMCTL_USER_DIR == "$HOME"/* || -n ${HF_HOME-}${XDG_CACHE_HOME-} || -d $HOME/.cache/huggingface ]] || export HF_HOME="$LLMCTL_USER_DIR/cache/huggingface"
export PYTHONPATH="$LLMCTL_RUN_DIR/code:$LLMCTL_RUN_DIR/code/user${PYTHONPATH:+:$PYTHONPATH}"
export LLMCTL_GPUS_PER_NODE=4
exec "$@"
