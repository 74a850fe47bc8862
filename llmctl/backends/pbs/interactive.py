"""Shell on a node of a PBS allocation: ``qsub -I`` with a script, an exit code and reasons for waiting. Pure.

qsub -I waits without a reason, runs no script, and always exits with 0 (qsub(1B), -I and -W block). The script, the
command and its exit code are therefore files in a folder that the nodes see. PBS gets only the path, because everybody
can read the words after ``--`` with qstat -f.
"""

ENTER = r"""folder=${0%/*}
mapfile -d '' -t words <"$folder/words"
: >"$folder/begun"
cd "${PBS_O_WORKDIR:-.}" || echo "llmctl: this node does not see $PBS_O_WORKDIR" >&2
bash -c "${words[@]}"
code=$?
echo "$code" >"$folder/code"
exit "$code"
"""
"""Run on the node."""

SUBMIT = r"""umask 077
root=$1 asked=$2 enter=$3 count=$4
shift 4
options=("${@:1:count}")
shift "$count"
mkdir -p "$root" && folder=$(mktemp -d "$root/.interactive.XXXXXXXX") || exit 4
trap 'rm -rf "$folder"' EXIT
printf '%s' "$enter" >"$folder/enter" && printf '%s\0' "$@" >"$folder/words" || exit 4
name=llmctl-${folder##*.} interrupted=''

# Print the scheduler's reason for the wait whenever it changes.
tell_why() {
    local ids why pause told=''
    trap 'kill "$pause"; exit' TERM
    sleep 10 &
    pause=$!
    wait "$pause"
    while [[ -d $folder && ! -e $folder/begun ]]; do
        mapfile -t ids < <(qselect -N "$name" 2>/dev/null)
        if ((${#ids[@]} > 0)); then
            why=$(qstat -f "${ids[@]}" 2>/dev/null | awk '
                function tell() { if (sub(/^ *comment = (Not Running: )?/, "", line)) print line }
                /^\t/ { line = line substr($0, 2); next }
                { tell(); line = $0 }
                END { tell() }')
            if [[ -n $why && $why != "$told" && ! -e $folder/begun ]]; then
                echo "llmctl: PBS says: $why" >&2
                told=$why
            fi
        fi
        sleep 60 &
        pause=$!
        wait "$pause"
    done
}

end_job() {
    local ids
    mapfile -t ids < <(qselect -N "$name")
    if ((${#ids[@]} > 0)); then qdel "${ids[@]}"; else kill "$qsub" 2>/dev/null; fi
}

echo "llmctl: requesting $asked from PBS, waiting until the nodes are free; press Ctrl-C, then y, to give up" >&2
tell_why </dev/null &
why=$!
trap 'interrupted=yes' INT
trap end_job TERM HUP
qsub -I -N "$name" "${options[@]}" -- /bin/bash -l "$folder/enter" <&0 &
qsub=$!
# A signal interrupts wait while qsub may still run.
while wait "$qsub"; kill -0 "$qsub" 2>/dev/null; do :; done
kill "$why" 2>/dev/null
if [[ -s $folder/code ]]; then exit "$(<"$folder/code")"; fi
if [[ -e $folder/begun ]]; then echo "llmctl: PBS ended the job before the command ended" >&2; fi
if [[ -n $interrupted ]]; then exit 130; fi
exit 4
"""
"""Run on the login node with FOLDER ASKED ENTER COUNT, COUNT options of qsub, and the words for ``bash -c``."""
