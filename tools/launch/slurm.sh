#!/bin/bash
# Trains on several nodes under SLURM: one process per node, with all of its GPUs.
#
#   sbatch --nodes=4 --gpus-per-node=8 tools/launch/slurm.sh \
#     --config configs/llama3_8b.py --workdir /shared/runs/llama3 \
#     --config.data.source=/shared/text --config.data.tokenizer=/shared/tokenizer.json
#   SPARE_NODES=1 sbatch --nodes=5 ...  trains on four nodes, with one spare
#
# The arguments are those of jaxscale.train; srun's environment connects the processes.
# If one of them dies or hangs, or a node is lost, all end, and a supervisor in this job restarts
# them from the last checkpoint, with a spare node in place of a lost one. Incidents are logged to
# NAME-JOB.incidents.jsonl.
# Code, Python and --workdir must be on a file system that all nodes share.
#
#SBATCH --job-name=jaxscale
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# This script gets SIGUSR1 ten minutes before the time limit.
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
# A lost node ends the processes, not the job.
#SBATCH --no-kill

# At SIGUSR1 every process finishes the step and saves, and the job is requeued and continues from
# there; with scancel --signal=TERM --batch JOB it saves and ends. srun forwards SIGUSR1, but cancels
# its processes at SIGTERM. scancel and preemption send SIGTERM to all processes at once, which then
# have KillWait (30 seconds by default).
requeue=no supervisor=
# shellcheck disable=SC2317 # the traps call it
stop() { [ -z "$supervisor" ] || kill -USR1 "$supervisor"; }
trap 'requeue=yes; stop' USR1
trap stop TERM

if [ -z "$SLURM_JOB_NUM_NODES" ]; then
    echo "error: this script is not in a SLURM job; start it by sbatch --nodes=N $0 ..." >&2
    exit 2
fi
nodes=$((SLURM_JOB_NUM_NODES - ${SPARE_NODES:-0}))
if [ "${nodes:-0}" -lt 1 ]; then
    echo "error: SPARE_NODES = $SPARE_NODES leaves none of $SLURM_JOB_NUM_NODES nodes to train on;" \
        "lower it" >&2
    exit 2
fi

# Processes without this token are refused.
JAXSCALE_TOKEN=${JAXSCALE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export JAXSCALE_TOKEN

python=${PYTHON:-python}
incidents=${SLURM_JOB_NAME:-jaxscale}-$SLURM_JOB_ID.incidents.jsonl
# If one process dies the others name it and end by themselves; srun waits for that and does not kill
# them at once.
"$python" -u -m jaxscale.supervise --log "$incidents" -- \
    srun --nodes=$nodes --ntasks=$nodes --label --kill-on-bad-exit=0 --wait=120 \
    "$python" -u -m jaxscale.train "$@" &
supervisor=$!
wait $supervisor
status=$?
while kill -0 $supervisor 2>/dev/null; do # a trap ends a wait, too
    wait $supervisor
    status=$?
done

# At its time limit the job is requeued, unless the run is complete (0), was refused (2) or was
# interrupted (130).
case $status in
0 | 2 | 130) requeue=no ;;
esac
if [ $requeue = yes ]; then
    trap '' TERM # it is sent to this script, too
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
