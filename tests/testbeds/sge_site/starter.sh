#!/bin/bash
# The queue's starter_method, which starts each job: adds the site's variables to the job's environment.
export TMPDIR=${TMPDIR:-${TMP:-/tmp}}
# A task of qrsh on the head node has the folder of the job, but not its PE_HOSTFILE.
[[ -e $TMPDIR/hostlist ]] || if [[ -r ${PE_HOSTFILE-} ]]; then cut -d' ' -f1 "$PE_HOSTFILE"; else hostname; fi >"$TMPDIR/hostlist"
export SGE_JOB_HOSTLIST=$TMPDIR/hostlist
# Jobs run as root here, which Open MPI refuses without these.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
# qrsh passes a command line as one word, as for "sh -c".
if command -v -- "$1" >/dev/null; then exec "$@"; else exec /bin/bash -c "$*"; fi
