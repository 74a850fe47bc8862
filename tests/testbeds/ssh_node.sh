#!/bin/bash
# First process of a machine of the tests' ssh hosts, in separate namespaces: ssh_node.sh NAME STATE.
# Ending it ends everything on the machine, as a power cut does.
set -eu
name=$1 state=$2
mount --make-rprivate /
hostname "$name"
# No DNS: each look-up would wait for its time-out. Home directories belong to the test.
for file in hosts nsswitch.conf resolv.conf passwd; do mount --bind "$state/etc/$file" "/etc/$file"; done
# The same path on every machine, but a different folder.
mkdir -p "$state/local.$name"
mount --bind "$state/local.$name" "$state/local"
# Configuration of this machine's own ssh client for the other hosts.
mount --bind "$state/etc/ssh_config" /etc/ssh/ssh_config
mount -t tmpfs -o size=512m shm /dev/shm
mount -t tmpfs -o mode=755 run /run
mkdir -p /run/sshd
ip link set lo up
trap : CHLD
touch "$state/up.$name"
while :; do
    sleep 3600 &
    wait $! || true
done
