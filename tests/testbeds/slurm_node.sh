#!/bin/bash
# First process of a machine of the test's Slurm cluster, in separate namespaces: slurm_node.sh NAME STATE.
# Ending it ends everything on the machine, as a power cut does.
set -eu
name=$1 state=$2
mount --make-rprivate /
hostname "$name"
mount --bind "$state/hosts" /etc/hosts
# No DNS: without a route to the internet, each look-up would wait for its time-out (10 s in torch's rendezvous).
mount --bind "$state/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$state/resolv.conf" /etc/resolv.conf
# Users besides root, whom this machine itself does not get.
for file in passwd group; do mount --bind "$state/$file" "/etc/$file"; done
mount -t tmpfs -o size=512m shm /dev/shm
ip link set lo up
trap : CHLD
touch "$state/machines/$name"
while :; do
    sleep 3600 &
    wait $! || true
done
