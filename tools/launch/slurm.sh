#!/bin/bash
# Trains on several nodes under SLURM: one process per node, which has all of its GPUs.
#
#   sbatch --nodes=4 --gpus-per-node=8 tools/launch/slurm.sh \
#     --config configs/llama3_8b.py --workdir /shared/runs/llama3
#
# The arguments are those of jaxscale.train; the processes find each other by what srun tells them.
# When one of them dies or hangs all end, and their supervisors start them again from the last
# checkpoint; what happened is in incidents.jsonl of --workdir.
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

# Then every process gets SIGTERM, finishes the step and saves; the job goes back into the queue
# and continues from there. Preemption and scancel send SIGTERM themselves.
requeue=no
trap 'requeue=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1

# Only processes that know it take part.
JAXSCALE_TOKEN=${JAXSCALE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
export JAXSCALE_TOKEN

# A supervisor that gave up ends the job: with status 2 when the run was refused.
python=${PYTHON:-python}
srun --kill-on-bad-exit=1 --label "$python" -u -m jaxscale.supervise -- \
    "$python" -u -m jaxscale.train "$@" &
wait $!
status=$?
while kill -0 $! 2>/dev/null; do # the trap ends a wait, too
    wait $!
    status=$?
done

if [ $requeue = yes ] && [ $status -eq 143 ]; then # 143: stopped by SIGTERM, saved
    scontrol requeue "$SLURM_JOB_ID"
fi
exit $status
