#!/bin/bash
#SBATCH --job-name=gpt-261121-101500-ab12
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=2:00:00
#SBATCH --output=job.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@60
# Run gpt-261121-101500-ab12, submission 1. Written by llmctl VERSION.
run_id=gpt-261121-101500-ab12
run_dir=/runs/gpt-261121-101500-ab12
submission=1
nodes=2
ranks_per_node=8
python=/home/ada/venv/bin/python
is_training=yes
port_range=20000-29999
stop_grace_s=120
# Seconds after which the run is told to stop; 0: never.
stop_after_s=7080
attempt_dir=
secrets=()
srun_options=(--kill-on-bad-exit=1 --wait=0 --overlap --distribution=block --input=none)

find_job() {
    job_id=$SLURM_JOB_ID
    # Steps get what job.sh has, not what sbatch was told to take along.
    export SLURM_EXPORT_ENV=ALL
    # Where the time is the site's default, newer versions tell when it is over; with older ones the signal has to do.
    if ((stop_after_s == 0)) && [[ ${SLURM_JOB_END_TIME-} =~ ^[0-9]+$ ]]; then
        local left=$((SLURM_JOB_END_TIME - $(date +%s)))
        stop_after_s=$((SECONDS + (left > 2 * stop_grace_s ? left - stop_grace_s : left / 2)))
    fi
}

list_hosts() {
    scontrol show hostnames "$SLURM_JOB_NODELIST"
}

# Of the steps of the job only ours, by its name: another may be a person's shell (llmctl interactive --run).
tell_step() {
    local steps id name
    if ! steps=$(squeue --noheader --steps --jobs="$job_id" --format='%i|%j'); then
        scancel --signal=TERM "$job_id"
        return
    fi
    while IFS='|' read -r id name; do
        if [[ $name == "$step_name" ]] && scancel --signal=TERM "$id"; then return; fi
    done <<<"$steps"
    # There is none yet.
    kill -TERM "$pid"
}

# srun kills its step when it is told to end. So the ranks are told in its place, and srun only when that was not enough.
run_step() {
    local told= pid= step_name=$run_id.$attempt
    trap 'if [[ -n $told && -n $pid ]]; then kill -TERM "$pid"; else told=yes; [[ -z $pid ]] || tell_step; fi' TERM
    # In a process group of its own, since ours is told too.
    set -m
    srun --job-name="$step_name" "$@" &
    pid=$!
    set +m
    # Told before it was started.
    if [[ -n $told ]]; then kill -TERM "$pid"; fi
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; done
    wait "$pid"
}

on_every_node() {
    start_agent run_step --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none \
        "${srun_options[@]}" "$@"
}

job_id=
hosts=()

load_environment() {
    return 0
}

# The variables that the user asked for. Apart from the software, for they may be called like a variable of this script.
export_variables() {
    # Caches belong where the runs are: what a site names for them has more room than a home directory.
    if [[ /runs/.cache == "$HOME"/* ]]; then return 0; fi
    if [[ -z ${LLMCTL_CACHE_DIR-} ]]; then export LLMCTL_CACHE_DIR=/runs/.cache/llmctl; fi
    if [[ -z ${TRITON_CACHE_DIR-} ]]; then export TRITON_CACHE_DIR=/runs/.cache/triton; fi
    if [[ -z ${TORCH_EXTENSIONS_DIR-} ]]; then export TORCH_EXTENSIONS_DIR=/runs/.cache/torch_extensions; fi
    # Models that are there already, and a token beside them, go on to be found.
    if [[ -z ${HF_HOME-}${XDG_CACHE_HOME-} && ! -d $HOME/.cache/huggingface ]]; then
        export HF_HOME=/runs/.cache/huggingface
    fi
    return 0
}

# An attempt has a number of its own; mkdir settles who gets it, also when the scheduler starts the job again.
new_attempt() {
    attempt=1
    mkdir -p "$run_dir/attempts" || exit 1
    while ! mkdir "$run_dir/attempts/$attempt" 2>/dev/null; do
        if [[ ! -d $run_dir/attempts/$attempt ]]; then
            echo "llmctl: $run_dir/attempts/$attempt cannot be made" >&2
            exit 1
        fi
        attempt=$((attempt + 1))
    done
    attempt_dir=$run_dir/attempts/$attempt
    cp "$run_dir/job.sh" "$attempt_dir/"
    if [[ -f $run_dir/config.yaml ]]; then cp "$run_dir/config.yaml" "$attempt_dir/"; fi
    trap leave EXIT
    write_started
}

write_started() {
    local start_time=null boot_id=null line fields
    # proc(5): the 22nd field is the start time; the name before it stands in parentheses and may hold anything.
    if read -r line <"/proc/$$/stat"; then
        read -r -a fields <<<"${line##*) }"
        start_time=${fields[19]}
    fi
    if read -r line </proc/sys/kernel/random/boot_id; then boot_id="\"$line\""; fi
    write_json started.json \
        '{"attempt": %d, "submission": %d, "job_id": "%s", "host": "%s", "pid": %d, "pid_start_time": %s, "boot_id": %s, "time": %d}' \
        "$attempt" "$submission" "$job_id" "$HOSTNAME" "$$" "$start_time" "$boot_id" "$(date +%s)"
} 2>/dev/null

# Readers never see half a file: it is written aside and renamed.
write_json() {
    local name=$1 format=$2
    shift 2
    printf "$format\n" "$@" >"$attempt_dir/.$name" && mv "$attempt_dir/.$name" "$attempt_dir/$name"
}

# Why it ended: what the user asked for comes first, then what rank 0 wrote down, then the exit code.
ending_reason() {
    local outcome=
    if [[ -f $attempt_dir/outcome.json ]]; then outcome=$(<"$attempt_dir/outcome.json"); fi
    if [[ -e $attempt_dir/cancel ]]; then
        echo cancelled
    elif [[ $is_timeout == yes && ! ($code == 0 && $outcome =~ \"reason\":[[:space:]]*\"completed\") ]]; then
        echo timeout
    elif [[ $code == 0 && $outcome =~ \"reason\":[[:space:]]*\"stopped\" ]]; then
        echo stopped
    elif [[ -n $signal && ($is_training == no || $started == no) ]]; then
        echo stopped
    elif [[ $code == 0 ]]; then
        echo completed
    else
        echo failed
    fi
}

# The code of the first rank to fail by its own fault, which errors/ keeps; else CODE. torchrun says 1 whatever its ranks
# left with, and srun the highest code of all, which is that of a rank that it has killed.
code_of_cause() {
    local cause
    # Opening the folder makes a network file system look again.
    : "$attempt_dir"/err*
    cause=$(grep -rhsoE '"consequence": false, "time": [0-9.]+, "exit_code": [0-9]+}$' "$attempt_dir/errors" |
        LC_ALL=C sort -k 4,4n | head -n 1)
    if [[ $cause =~ ([0-9]+)\}$ ]]; then echo "${BASH_REMATCH[1]}"; else echo "$1"; fi
}

leave() {
    code=${code:-$?}
    trap '' TERM INT USR1 HUP
    end_all
    if ((code != 0)); then code=$(code_of_cause "$code"); fi
    write_json exit.json \
        '{"code": %d, "reason": "%s", "signal": %s, "time": %d, "node": "%s"}' \
        "$code" "$(ending_reason)" "${signal:+\"}${signal:-null}${signal:+\"}" "$(date +%s)" "$HOSTNAME"
    exit "$code"
}

# Seconds: to save once told to stop (stop_grace_s), to save once cancelled (unless attempts/K/cancel says how many), and
# to follow an agent that has failed.
cancel_grace_s=10
failure_grace_s=10
kill_grace_s=10
# A warning of the time limit comes no more than this before our own timer: Slurm's is early by up to 60 s (sbatch(1)).
early_warning_s=300
signal=
deadline=
code=
started=no
is_timeout=
is_cancelled=
agents=()

signal_agents() {
    local pid
    for pid in "${agents[@]}"; do kill "-$1" -- "-$pid" 2>/dev/null; done
}

# Agents put their ranks into sessions of their own; what belongs to the attempt is known by its environment.
kill_leftovers() {
    local environ pid
    for environ in $(grep -lszFx "LLMCTL_RUN_DIR=$run_dir" /proc/[0-9]*/environ); do
        pid=${environ#/proc/}
        if grep -qszFx "LLMCTL_ATTEMPT=$attempt" "$environ" && ! grep -qsz '^LLMCTL_INTERACTIVE=' "$environ"; then
            kill -KILL "${pid%/environ}" 2>/dev/null
        fi
    done
}

end_all() {
    signal_agents KILL
    kill_leftovers
}

# Starts COMMAND... as one agent. Its output is job.sh's own, but for what it redirects itself.
start_agent() {
    set -m
    "$@" </dev/null &
    agents+=("$!")
    set +m
}

# Told to stop: the trainer saves at its next step and leaves. Told again: it ends at once, but for a warning of the time
# limit, which comes from the scheduler and from our own timer.
on_signal() {
    if [[ -n $signal ]]; then
        if [[ $1 != USR? ]]; then deadline=$SECONDS; fi
        return
    fi
    signal=$1
    # Schedulers announce the end of the time by USR1 or USR2; what ends a job for any other reason is TERM. Long before
    # our own timer it is another job that takes the nodes (Slurm: send_user_signal), and this one may be started again.
    if [[ $signal == USR? ]]; then
        if ((stop_after_s > SECONDS + early_warning_s)); then signal=TERM; else is_timeout=yes; fi
    fi
    if [[ -z $attempt_dir ]]; then return; fi
    touch "$attempt_dir/stop"
    deadline=$((SECONDS + stop_grace_s))
    if [[ -e $attempt_dir/cancel ]]; then read_cancel; fi
}

# attempts/K/cancel holds the seconds that the trainer gets to save.
read_cancel() {
    local seconds=
    read -r seconds <"$attempt_dir/cancel"
    if [[ ! $seconds =~ ^[0-9]{1,6}$ ]]; then seconds=$cancel_grace_s; fi
    deadline=$((SECONDS + 10#$seconds))
    is_cancelled=yes
}

# Agents that still run stay in the list; the first that failed gives the exit code and takes the others along.
check_agents() {
    local pid status running=()
    for pid in "${agents[@]}"; do
        if kill -0 "$pid" 2>/dev/null; then
            running+=("$pid")
            continue
        fi
        wait "$pid"
        status=$?
        if ((status != 0 && code == 0)); then
            code=$status
            if [[ -z $deadline ]]; then deadline=$((SECONDS + failure_grace_s)); fi
        fi
    done
    agents=("${running[@]}")
}

wait_for_agents() {
    local told= is_second=
    code=0
    while check_agents; ((${#agents[@]} > 0)); do
        if ((stop_after_s > 0 && SECONDS >= stop_after_s)) && [[ -z $signal ]]; then
            echo "llmctl: told to stop at the time limit, after $stop_after_s s" >&2
            on_signal USR1
        fi
        # A cancel may come as a file alone: from another machine, or after the run had been told to stop. Opening the
        # folder makes a network file system look again, which remembers for a minute that a file was not there.
        if [[ -n $is_second ]]; then
            : "$attempt_dir"/canc*
            is_second=
        else
            is_second=yes
        fi
        if [[ -z $is_cancelled && -e $attempt_dir/cancel ]]; then
            if [[ -z $signal ]]; then on_signal TERM; else read_cancel; fi
        fi
        if [[ -n $deadline ]] && ((SECONDS >= deadline)); then
            if [[ -n $told ]]; then end_all; else signal_agents TERM; fi
            told=yes
            deadline=$((SECONDS + kill_grace_s))
        fi
        # A trapped signal ends this wait at once.
        sleep 0.5 &
        wait "$!"
    done
}

# Runs a command with the run's snapshot of the code.
in_code() {
    PYTHONPATH=$run_dir/code:$run_dir/code/user${PYTHONPATH:+:$PYTHONPATH} "$@"
}

# NUL-separated names and values; never evaluated, never on a command line.
read_secrets() {
    local name value
    while IFS= read -r -d '' name && IFS= read -r -d '' value; do
        secrets+=("$name=$value")
    done </runs/.secrets/gpt-261121-101500-ab12.1 || {
        local folder=/runs/.secrets/gpt-261121-101500-ab12.1
        echo "llmctl: $HOSTNAME has no file of the secrets. Nodes must see ${folder%/*}: is runs_root on a file system that" \
            "they share? If they do, it was removed when the job ended before: submit again" >&2
        exit 1
    }
}

# Becomes the command that follows the first --; before it stand further variables, as NAME=VALUE.
become() {
    # From here on only what stands in the arguments is sure: the user's variables may be called like ours.
    set -- "$run_dir/code:$run_dir/code/user" "${secrets[@]}" \
        LLMCTL_RUN_ID="$run_id" LLMCTL_RUN_DIR="$run_dir" LLMCTL_ATTEMPT="$attempt" \
        LLMCTL_HOSTFILE="$attempt_dir/hostfile" NNODES="$nodes" "$@"
    export_variables
    export PYTHONPATH="$1${PYTHONPATH:+:$PYTHONPATH}"
    shift
    while [[ $1 != -- ]]; do
        export "$1"
        shift
    done
    shift
    exec "$@"
}

master_addr=
master_port=

# Sets master_addr and master_port. The lock keeps the port ours from now until the last process that inherits it has
# gone, since another run could find the port free as well, before ours has begun to listen.
choose_rendezvous() {
    local locks try found
    locks=/tmp/llmctl-ports-$UID
    mkdir -p -m 700 "$locks" 2>/dev/null
    for try in 1 2 3 4 5 6 7 8 9 10; do
        found=$(in_code "$python" -m trainer rendezvous --job-id "$run_id.$attempt.$try" --ports "$port_range" "$@") ||
            return 1
        master_addr=${found% *} master_port=${found##* }
        if [[ ! -O $locks ]] || ! command -v flock >/dev/null; then return 0; fi
        exec 9>"$locks/$master_port"
        if flock -n 9; then return 0; fi
        exec 9>&-
        # The site's rule gives one port only; from the second try on the job's id does.
        if [[ ${1-} == --start ]]; then shift 2; fi
    done
    echo "llmctl: no free port in $port_range after $try tries; widen rendezvous.ports in the profile" >&2
    return 1
}

write_hostfile() {
    local host
    hosts=()
    while IFS= read -r host; do hosts+=("$host"); done < <(list_hosts)
    if ((${#hosts[@]} != nodes)); then
        echo "llmctl: asked for $nodes nodes and given ${#hosts[@]}: ${hosts[*]}" >&2
        return 1
    fi
    for host in "${hosts[@]}"; do printf '%s slots=%d\n' "$host" "$ranks_per_node"; done >"$attempt_dir/hostfile"
}

# Address and port of the head node, found on the head node.
meet() {
    local options=()
    if ((${#hosts[@]} > 1)); then options+=(--peer "${hosts[1]}"); fi
    choose_rendezvous "${options[@]}" --with-address && return 0
    # Only the trainer needs to meet; a COMMAND may have no Python at all.
    if [[ $is_training == yes ]]; then return 1; fi
    master_addr= master_port=
}

start_ranks() {
    local inside=(bash "$attempt_dir/job.sh")
    local meeting=("$attempt" "${master_addr:--}" "${master_port:--}")
    started=yes
    on_every_node "${inside[@]}" node "${meeting[@]}"
}

# What node and rank have in common: ATTEMPT ADDRESS PORT, the number of this node, and that of this process.
enter_node() {
    attempt=$1 master_addr=${2#-} master_port=${3#-}
    local node=$4
    attempt_dir=$run_dir/attempts/$attempt
    exec >>"$attempt_dir/$(printf 'node-%05d.log' "$node")" 2>&1 </dev/null
    read_secrets
    if [[ ${LLMCTL_ENVIRONMENT-} != "$run_id.$attempt" ]]; then load_environment || exit 1; fi
    cd "$run_dir/code" || exit 1
}

# The innermost launcher knows best which process this is: mpirun inside a Slurm step leaves Slurm's variables about.
rank_of_launcher() {
    local rank=${OMPI_COMM_WORLD_RANK:-${PMI_RANK:-}}
    if [[ -z $rank && -n ${SLURM_STEP_ID-} ]]; then rank=${SLURM_PROCID-}; fi
    echo "${rank:-0}"
}

run_node() {
    local node=${4:-}
    if [[ -z $node ]]; then node=$(rank_of_launcher); fi
    enter_node "$1" "$2" "$3" "$node" "$node"
    set -- "$python" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node" --nproc-per-node "$ranks_per_node" \
        --master-addr "$master_addr" --master-port "$master_port" --rdzv-id "$run_id.$attempt" --max-restarts 0 \
        --log-dir "$attempt_dir/torchrun" -m trainer pretrain --config "$run_dir/config.yaml"
    become MASTER_ADDR="$master_addr" MASTER_PORT="$master_port" NODE_RANK="$node" \
        LLMCTL_GPUS_PER_NODE=8 -- "$@"
}

leave_job() {
    # A job that the scheduler takes back and starts again needs its secrets again; llmctl removes them when it has ended.
    if [[ $signal != TERM || -n $is_cancelled ]]; then rm -f /runs/.secrets/gpt-261121-101500-ab12.1; fi
    leave
}

# A submission is one job, settled by ln: a scheduler whose answer was lost may have been given it twice. A job that is
# started again keeps its id; one that comes after a later submission comes too late.
claim_submission() {
    local claims=$run_dir/attempts/.submission owner later
    mkdir -p "$run_dir/attempts" || exit 1
    ln -sn -- "$job_id" "$claims-$submission" 2>/dev/null
    owner=$(readlink "$claims-$submission")
    if [[ -n $owner && $owner != "$job_id" ]]; then
        echo "llmctl: job $owner is submission $submission of $run_id already; job $job_id starts nothing" >&2
        exit 1
    fi
    for later in "$claims"-*; do
        if ((${later##*-} > submission)); then
            echo "llmctl: $run_id was submitted again since (submission ${later##*-}); job $job_id starts nothing" >&2
            exit 1
        fi
    done
}

run_job() {
    trap '' HUP
    trap 'on_signal TERM' TERM
    trap 'on_signal INT' INT
    trap 'on_signal USR1' USR1
    trap 'on_signal USR2' USR2
    cd "$run_dir" || exit 1
    find_job
    claim_submission
    new_attempt
    trap leave_job EXIT
    load_environment || exit 1
    write_hostfile || exit 1
    meet || exit 1
    # Told to stop before anything has begun: nothing begins.
    if [[ -n $signal ]]; then exit 0; fi
    start_ranks
    wait_for_agents
    exit "$code"
}

case ${1-} in
    node) shift && run_node "$@" ;;
    *) run_job ;;
esac
