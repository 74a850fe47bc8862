#!/bin/bash
# First process of a machine of the test's Slurm cluster, in namespaces of its own: slurm_node.sh NAME STATE.
# Ending it ends everything on the machine, as a power cut does.
set -eu
name=$1 state=$2
mount --make-rprivate /
hostname "$name"
mount --bind "$state/hosts" /etc/hosts
# No DNS: a look-up would only wait for its time-out (10 s each in torch's rendezvous); the network has no way out.
mount --bind "$state/nsswitch.conf" /etc/nsswitch.conf
mount --bind "$state/resolv.conf" /etc/resolv.conf
mount -t tmpfs -o size=512m shm /dev/shm
ip link set lo up
trap : CHLD
touch "$state/machines/$name"
while :; do
    sleep 3600 &
    wait $! || true
done
