#!/bin/bash
# First process of a host: sets the host name and mounts the files, then reaps orphans until it is killed.
#   node_init.sh STATE NAME
state=$1 name=$2
mount --make-rprivate /
hostname "$name"
for file in hosts nsswitch.conf resolv.conf; do mount --bind "$state/etc/$file" "/etc/$file"; done
# Only this folder's modules.sh defines the site's module function.
mount --bind "$state/etc/profile.d" /etc/profile.d
mount -t tmpfs -o size=512m shm /dev/shm
# A separate /tmp, as on real machines: a job's folder has the same name on all hosts, and the first host to end removes it.
mount -t tmpfs -o size=64m,mode=1777 jobs "$state/jobs"
trap : CHLD
touch "$state/nodes/$name.ready"
while :; do
    sleep 3600 &
    wait "$!"
done
