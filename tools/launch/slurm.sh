#!/bin/bash
# Trains on several nodes under SLURM: one process per node, which has all of its GPUs.
#
#   sbatch --nodes=4 --gpus-per-node=8 tools/launch/slurm.sh \
#     --config configs/llama3_8b.py --workdir /shared/runs/llama3 \
#     --config.data.source=/shared/text --config.data.tokenizer=/shared/tokenizer.json
#   SPARE_NODES=1 sbatch --nodes=5 ...  trains on four, and has one in reserve
#
# The arguments are those of jaxscale.train; the processes find each other by what srun tells them.
# When one of them dies or hangs, or a node is lost, all end, and a supervisor beside this script
# starts them again from the last checkpoint, on a spare node in place of a lost one. What happened
# is in NAME-JOB.incidents.jsonl.
# Code, Python and --workdir must be on a file system that all nodes share.
#
#SBATCH --job-name=jaxscale
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
# Ten minutes before the time is up this script gets SIGUSR1.
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
# A lost node ends the processes, not the job.
#SBATCH --no-kill

# Then every process finishes the step and saves, and the job goes back into the queue and continues
# from there; with scancel --signal=TERM --batch JOB it saves and ends. srun passes SIGUSR1 on, and
# cancels what it runs after SIGTERM. That comes by scancel and by preemption to all processes at
# once, which have KillWait then (30 seconds, unless the site says otherwise).
requeue=no supervisor=
# shellcheck disable=SC2317 # the traps call it
stop() { [ -z "$supervisor" ] || kill -USR1 "$supervisor"; }
trap 'requeue=yes; stop' USR1
trap stop TERM

if [ -z "$SLURM_JOB_NUM_NODES" ]; then
    echo "error: this is the script of a job, which sbatch --nodes=N $0 ... starts" >&2
    exit 2
fi
nodes=$((SLURM_JOB_NUM_NODES - ${SPARE_NODES:-0}))
if [ "${nodes:-0}" -lt 1 ]; then
    echo "error: SPARE_NODES = $SPARE_NODES leaves none of $SLURM_JOB_NUM_NODES nodes to train on" >&2
    exit 2
fi

# Only processes that know it take part.
JAXSCALE_TOKEN=${JAXSCALE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export JAXSCALE_TOKEN

python=${PYTHON:-python}
incidents=${SLURM_JOB_NAME:-jaxscale}-$SLURM_JOB_ID.incidents.jsonl
# When one process dies the others end by themselves, having said which one it was; srun waits for
# that, and does not kill them at once.
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

# Time that is up sends the job back into the queue, unless the run is complete (0), was refused (2)
# or was ended by hand (130).
case $status in
0 | 2 | 130) requeue=no ;;
esac
if [ $requeue = yes ]; then
    trap '' TERM # it is sent to this script, too
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
