#!/usr/bin/env bash
# Ends the Grid Engine cluster that sge_up.sh started in the folder STATE, and only that: every process of a host, and its
# network, end with the host's first process.
state=$1
for file in "$state"/nodes/*.pid; do
    if read -r pid <"$file" && grep -qszxF "$state" "/proc/$pid/cmdline"; then kill -KILL "$pid"; fi
    rm -f "$file"
done
