#!/usr/bin/env bash
# test_tiers.sh PYTEST...: runs both tiers of the tests at once. Tests of schedulers mostly wait, and their events should not
# come late, so all other tests run at a lower priority: not the lowest, at which other work on the machine would stop them.
# The output of the schedulers' tests follows that of the others.
set -u
: "${TEST_WORKERS:=3}" "${SCHEDULER_TEST_WORKERS:=2}"
whole_files=(--dist loadfile --no-loadscope-reorder)
log=$(mktemp)
"$@" tests/schedulers -n "$SCHEDULER_TEST_WORKERS" "${whole_files[@]}" >"$log" 2>&1 </dev/null &
schedulers=$!
trap 'kill "$schedulers" 2>/dev/null; wait; cat "$log"; rm -f "$log"' EXIT
trap 'exit 130' INT TERM

code=0
# "make check" has run the architecture rules.
checked=(--ignore tests/test_architecture.py --ignore tests/test_rooms.py --ignore tests/test_docs.py)
nice -n 5 "$@" --ignore tests/schedulers "${checked[@]}" -n "$TEST_WORKERS" "${whole_files[@]}" </dev/null || code=$?
echo "tests of schedulers:"
wait "$schedulers" || code=$?
exit "$code"
