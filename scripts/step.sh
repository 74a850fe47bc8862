#!/usr/bin/env bash
# step.sh NAME COMMAND...: runs a command and prints its name, result and duration in one line; its output only if it fails.
set -u
name=$1
shift
output=$(mktemp)
trap 'rm -f "$output"' EXIT
begin=$(date +%s.%N)
status=0
"$@" >"$output" 2>&1 </dev/null || status=$?
took=$(awk -v a="$begin" -v b="$(date +%s.%N)" 'BEGIN { printf "%.1f", b - a }')
if [ $status = 0 ]; then
  echo "$name: ok, $took s"
else
  cat "$output"
  echo "$name: FAILED with exit status $status, $took s"
fi
exit $status
