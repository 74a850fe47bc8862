#!/usr/bin/env bash
# test_tiers.sh PYTEST...: both tiers of the tests at once. Tests of schedulers wait most of their time, and what they wait
# for must not come late: all other tests run beside them at the lowest priority. Their output follows that of the others.
set -u
: "${TEST_WORKERS:=3}" "${SCHEDULER_TEST_WORKERS:=2}"
whole_files=(--dist loadfile --no-loadscope-reorder)
log=$(mktemp)
"$@" tests/schedulers -n "$SCHEDULER_TEST_WORKERS" "${whole_files[@]}" >"$log" 2>&1 </dev/null &
schedulers=$!
trap 'kill "$schedulers" 2>/dev/null; wait; cat "$log"; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

code=0
nice -n 19 "$@" --ignore tests/schedulers -n "$TEST_WORKERS" "${whole_files[@]}" </dev/null || code=$?
echo "tests of schedulers:"
wait "$schedulers" || code=$?
exit "$code"
