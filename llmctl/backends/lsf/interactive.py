"""A shell on a host of an LSF allocation: ``bsub -Is``, and what it lacks. Pure.

bsub takes a command of at most 4094 characters (bsub(1), command) and runs it by a Bourne shell. So that script and
command travel whole, and the exit code comes back, they stand in a folder that the hosts see. bsub itself says the
job's id, that the job waits for dispatch, and where it starts.
"""

ENTER = r"""folder=${0%/*}
mapfile -d '' -t words <"$folder/words"
bash -c "${words[@]}"
code=$?
echo "$code" >"$folder/code"
exit "$code"
"""
"""Run on the host."""

SUBMIT = r"""umask 077
root=$1 enter=$2 count=$3
shift 3
options=("${@:1:count}")
shift "$count"
mkdir -p "$root" && folder=$(mktemp -d "$root/.interactive.XXXXXXXX") || exit 4
trap 'rm -rf "$folder"' EXIT
printf '%s' "$enter" >"$folder/enter" && printf '%s\0' "$@" >"$folder/words" || exit 4
# -Is makes a terminal on the host, which needs one here.
mode=-I
if [[ -t 0 && -t 1 ]]; then mode=-Is; fi
quote="'\\''"
bsub "$mode" "${options[@]}" "/bin/bash -l '${folder//\'/$quote}/enter'"
if [[ -s $folder/code ]]; then exit "$(<"$folder/code")"; fi
exit 4
"""
"""Run on the login node with FOLDER ENTER COUNT, COUNT options of bsub, and the words for ``bash -c``."""
