#!/bin/bash
# First process of a host: gives it its name and files, then reaps orphans until it is killed.
#   node_init.sh STATE NAME
state=$1 name=$2
mount --make-rprivate /
hostname "$name"
for file in hosts nsswitch.conf resolv.conf; do mount --bind "$state/etc/$file" "/etc/$file"; done
# The site's module function comes only by sourcing this folder's modules.sh.
mount --bind "$state/etc/profile.d" /etc/profile.d
mount -t tmpfs -o size=512m shm /dev/shm
# A /tmp of its own, as on real machines: a job's folder has the same name on all hosts, and the first to end removes it.
mount -t tmpfs -o size=64m,mode=1777 jobs "$state/jobs"
trap : CHLD
touch "$state/nodes/$name.ready"
while :; do
    sleep 3600 &
    wait "$!"
done
