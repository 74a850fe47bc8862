#!/usr/bin/env bash
# Starts a small real Grid Engine cluster (Debian's gridengine-* 8.1.9) on one machine, for tests. Needs root.
#
#   sge_up.sh STATE [HOSTS]     keeps all files in the folder STATE; 4 execution hosts by default
#   sge_down.sh STATE           ends the cluster
#   STATE/on HOST COMMAND...    runs a command on a host, in the current folder, in a clean environment;
#                               TESTBED_KEEP names the variables to pass on, separated by blanks
#   STATE/power-cut HOST        kills every process of the host at once, and cuts its network link
#   STATE/power-on HOST         starts the host again
#
# A host is a set of namespaces (network, name, mounts, processes): Grid Engine knows hosts by name and address. es1 is
# master and login node, g0001.. run the jobs. All links are connected to a bridge in es1's network namespace, so the
# machine's own network is unchanged and several clusters can run at once. Each link is named bond0. As on a site that
# sells whole nodes, "-l rt_F=N" requests N whole hosts of 80 slots, and every job needs a project, "-g GROUP" on the
# command line. SGE_JOB_HOSTLIST is set, and /etc/profile.d/modules.sh defines module.
set -euo pipefail

state=$1
count=${2:-4}
site=$(cd "$(dirname "$0")/sge_site" && pwd)
net=10.98.2
slots=80
engine=/usr/lib/gridengine
resources=/usr/share/gridengine/util/resources
types="rt_F rt_AF node_f"
fractions="rt_G.small rt_C.small cpu_4"

wait_for() {
    local tries=$(($1 * 20))
    shift
    until "$@" >/dev/null 2>&1; do
        tries=$((tries - 1))
        if ((tries <= 0)); then echo "not done in time: $*" >&2; return 1; fi
        sleep 0.05
    done
}

# --- shared by all hosts: names, files, the commands of a login node
mkdir -p "$state"/{bin,conf,etc/profile.d,execd,jobs,nodes,root/default/common,spool/qmaster/job_scripts,spool/db}
names=()
for ((i = 1; i <= count; i++)); do names+=("$(printf 'g%04d' "$i")"); done
{
    printf '127.0.0.1 localhost\n%s.254 es1\n' "$net"
    for ((i = 1; i <= count; i++)); do echo "$net.$i ${names[i - 1]}"; done
} >"$state/etc/hosts"
echo 'hosts: files' >"$state/etc/nsswitch.conf"
grep -v '^hosts:' /etc/nsswitch.conf >>"$state/etc/nsswitch.conf" || :
: >"$state/etc/resolv.conf"
cp "$site/modules.sh" "$state/etc/profile.d/modules.sh"
for folder in bin lib utilbin util; do ln -s "/var/lib/gridengine/$folder" "$state/root/$folder"; done
for name in qsub qrsh qlogin; do cp "$site/client.sh" "$state/bin/$name"; done
for name in qstat qdel qacct qconf qhost qalter qhold qrls qmod; do ln -s "$engine/$name" "$state/bin/$name"; done

cat >"$state/on" <<ON
#!/bin/bash
host=\$1
shift
own=(SGE_ROOT=$state/root SGE_CELL=default SGE_ARCH=lx-amd64 SGE_QMASTER_PORT=16444 SGE_EXECD_PORT=16445
    PATH=$state/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root USER=root LOGNAME=root SHELL=/bin/bash
    LANG=C.UTF-8 TERM=\${TERM:-dumb})
for name in \${TESTBED_KEEP-}; do if [[ -v \$name ]]; then own+=("\$name=\${!name}"); fi; done
exec env -i "\${own[@]}" nsenter -t "\$(cat "$state/nodes/\$host.pid")" -m -u -n -p --wd="\$PWD" "\$@"
ON
cat >"$state/power-cut" <<CUT
#!/bin/bash
# The link first, so that the other hosts get no message from the killed processes.
"$state/on" es1 ip link del "to\$1" 2>/dev/null
kill -KILL "\$(cat "$state/nodes/\$1.pid")"
CUT
cat >"$state/power-on" <<POWER
#!/bin/bash
# power-on HOST: the host's namespaces, its link to the bridge on es1, and the daemon that runs jobs.
set -e
host=\$1
rm -f "$state/nodes/\$host.ready"
setsid unshare --net --uts --mount --pid --fork --mount-proc --kill-child \\
    "$site/node_init.sh" "$state" "\$host" </dev/null >"$state/nodes/\$host.log" 2>&1 &
outer=\$!
until [[ -e $state/nodes/\$host.ready ]]; do kill -0 "\$outer"; sleep 0.02; done
ps -o pid= --ppid "\$outer" | tr -d ' ' >"$state/nodes/\$host.pid"
"$state/on" "\$host" ip link set lo up
if [[ \$host == es1 ]]; then
    "$state/on" es1 ip link add bond0 type bridge
    "$state/on" es1 ip addr add $net.254/24 dev bond0
    "$state/on" es1 ip link set bond0 up
    exit
fi
number=\$((10#\${host#g}))
"$state/on" es1 ip link del "to\$host" 2>/dev/null || :
# A fixed hardware address, so that the other hosts' ARP entries stay valid when the host starts again.
"$state/on" es1 ip link add "to\$host" type veth peer name to_es1
"$state/on" es1 ip link set to_es1 netns "/proc/self/fd/3" 3<"/proc/\$(cat "$state/nodes/\$host.pid")/ns/net"
"$state/on" es1 ip link set "to\$host" master bond0 up
"$state/on" "\$host" ip link set to_es1 name bond0 address "\$(printf '02:98:02:00:00:%02x' "\$number")"
"$state/on" "\$host" ip addr add "$net.\$number/24" dev bond0
"$state/on" "\$host" ip link set bond0 up
"$state/on" "\$host" $engine/sge_execd
POWER
chmod +x "$state/on" "$state/power-cut" "$state/power-on"

# --- the cell: short report intervals, jobs of root, a required group, and a server-side check of the node types
cat >"$state/root/default/common/bootstrap" <<CONF
admin_user              none
default_domain          none
ignore_fqdn             true
spooling_method         berkeleydb
spooling_lib            libspoolb
spooling_params         $state/spool/db
binary_path             /usr/sbin
qmaster_spool_dir       $state/spool/qmaster
security_mode           none
listener_threads        2
worker_threads          2
scheduler_threads       1
CONF
echo es1 >"$state/root/default/common/act_qmaster"
sed -e "s|^execd_spool_dir.*|execd_spool_dir $state/execd|" \
    -e 's|^min_uid.*|min_uid 0|; s|^min_gid.*|min_gid 0|' \
    -e 's|^load_report_time.*|load_report_time 00:00:02|' \
    -e 's|^max_unheard.*|max_unheard 00:00:15|' \
    -e 's|^mailer.*|mailer /bin/true|' \
    -e 's|^enforce_project.*|enforce_project true|' \
    -e 's|flush_time=00:00:15|flush_time=00:00:01|' \
    -e "s|^jsv_url.*|jsv_url script:$site/site.jsv|" \
    /usr/share/gridengine/default-configuration >"$state/conf/global"
cp -r "$resources/centry" "$state/conf/centry"
for type in $types $fractions; do
    printf '%s\n' "name $type" "shortcut $type" "type INT" "relop <=" "requestable YES" "consumable YES" "default 0" \
        "urgency 0" >"$state/conf/centry/$type"
done
export SGE_ROOT=$state/root SGE_CELL=default
{
    "$engine/spoolinit" berkeleydb libspoolb "$state/spool/db" init
    "$engine/spooldefaults" configuration "$state/conf/global"
    "$engine/spooldefaults" complexes "$state/conf/centry"
    "$engine/spooldefaults" usersets "$resources/usersets"
    "$engine/spooldefaults" managers root
} >"$state/conf/init.log" 2>&1 || { cat "$state/conf/init.log" >&2; exit 1; }

# --- the master and its configuration
"$state/power-on" es1
"$state/on" es1 "$engine/sge_qmaster" >"$state/conf/qmaster.log" 2>&1 || { cat "$state/conf/qmaster.log" >&2; exit 1; }
configure() { "$state/on" es1 "$engine/qconf" "$@"; }
wait_for 20 configure -sh
cd "$state/conf"
tell_master() {
    local type host group
    configure -as es1
    for host in "${names[@]}"; do
        printf '%s\n' "hostname $host" "load_scaling NONE" "user_lists NONE" "xuser_lists NONE" "projects NONE" \
            "xprojects NONE" "usage_scaling NONE" "report_variables NONE" \
            "complex_values slots=$slots,rt_F=1,rt_AF=1,node_f=1,rt_G.small=4,rt_C.small=4,cpu_4=4" >"host.$host"
        configure -ah "$host"
        configure -Ae "$PWD/host.$host"
        configure -as "$host"
    done
    printf 'group_name @allhosts\nhostlist %s\n' "${names[*]}" >hostgroup
    configure -Ahgrp "$PWD/hostgroup"
    for type in $types; do
        printf '%s\n' "pe_name $type" "slots 99999" "user_lists NONE" "xuser_lists NONE" "start_proc_args NONE" \
            "stop_proc_args NONE" "allocation_rule $slots" "control_slaves TRUE" "job_is_first_task FALSE" \
            "urgency_slots min" "accounting_summary TRUE" "qsort_args NONE" >"pe.$type"
        configure -Ap "$PWD/pe.$type"
    done
    configure -sq | sed -e 's|^qname .*|qname gpu|' -e 's|^hostlist .*|hostlist @allhosts|' \
        -e "s|^slots .*|slots $slots|" -e "s|^pe_list .*|pe_list $types|" -e 's|^load_thresholds .*|load_thresholds NONE|' \
        -e 's|^qtype .*|qtype BATCH INTERACTIVE|' -e "s|^starter_method .*|starter_method $site/starter.sh|" \
        -e "s|^tmpdir .*|tmpdir $state/jobs|" \
        -e 's|^rerun .*|rerun FALSE|' >queue
    configure -Aq "$PWD/queue"
    for group in gaa50001 gaa50002; do
        printf '%s\n' "name $group" "oticket 0" "fshare 0" "acl NONE" "xacl NONE" >"project.$group"
        configure -Aprj "$PWD/project.$group"
    done
    configure -ssconf | sed -e 's|^schedule_interval .*|schedule_interval 0:0:2|' \
        -e 's|^flush_submit_sec .*|flush_submit_sec 1|' -e 's|^flush_finish_sec .*|flush_finish_sec 1|' \
        -e 's|^schedd_job_info .*|schedd_job_info true|' >scheduler
    configure -Msconf "$PWD/scheduler"
}
tell_master >qconf.log 2>&1 || { tail qconf.log >&2; exit 1; }

# --- the execution hosts
for host in "${names[@]}"; do "$state/power-on" "$host"; done >execd.log 2>&1 || { cat execd.log >&2; exit 1; }
all_report() { [[ $("$state/on" es1 "$engine/qstat" -f -q gpu | awk '/^gpu@/ && $4 != "-NA-" && NF == 5' | wc -l) == "$count" ]]; }
wait_for 60 all_report
