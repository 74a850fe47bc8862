"""Configuration of the daemons of the test's Slurm cluster; slurm.conf(5), slurmdbd.conf(5)."""

NETWORK = "10.98.1"
LOGIN = "login"

SLURM_CONF = """\
ClusterName=testbed
SlurmctldHost={login}({network}.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={state}/run/munge.sock
SlurmctldPort=16817
SlurmdPort=16818
StateSaveLocation={state}/ctld
SlurmdSpoolDir={state}/spool/%n
SlurmctldPidFile={state}/run/slurmctld.pid
SlurmdPidFile={state}/spool/%n/slurmd.pid
SlurmctldLogFile={state}/log/slurmctld.log
SlurmdLogFile={state}/log/slurmd-%n.log
ReturnToService=2
# Nodes may claim more CPUs and memory than this machine has.
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=5
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=100
GresTypes=gpu
# A loaded machine must not look like a dead one. Tests declare a node dead themselves.
SlurmdTimeout=300
SlurmctldTimeout=300
KillWait=5
MinJobAge={min_job_age_s}
InactiveLimit=0
BatchStartTimeout=100
MessageTimeout=30
SchedulerParameters=sched_interval=2,sched_min_interval=100000,bf_interval=5,batch_sched_delay=0
EnforcePartLimits=ALL
MpiDefault=none
PlugStackConfig={state}/plugstack.conf
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageTRES=gres/gpu
AccountingStorageHost=127.0.0.1
AccountingStoragePort=16819
AccountingStoragePass={state}/run/munge.sock
AccountingStoreFlags=job_comment,job_env,job_script
{nodes}
PartitionName=debug Nodes={names} Default=YES MaxTime=120 DefaultTime=60 State=UP
PartitionName=gpu Nodes={names} MaxTime=4:00:00 State=UP
PartitionName=small Nodes=n1 MaxNodes=1 MaxTime=5 State=UP
PartitionName=closed Nodes={names} State=DOWN
"""

SLURMDBD_CONF = """\
AuthType=auth/munge
AuthInfo=socket={state}/run/munge.sock
DbdHost=localhost
DbdAddr=127.0.0.1
DbdPort=16819
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort=13306
StorageUser=slurm
StoragePass=slurm
StorageLoc=slurm_acct
LogFile={state}/log/slurmdbd.log
PidFile={state}/run/slurmdbd.pid
DebugLevel=info
"""

DATABASE = (
    "create user 'slurm'@'%' identified by 'slurm'; grant all on slurm_acct.* to 'slurm'@'%';"
    "create user 'slurm'@'localhost' identified by 'slurm'; grant all on slurm_acct.* to 'slurm'@'localhost';"
)
