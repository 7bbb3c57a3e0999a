#!/bin/bash
# Trains on every host of a Cloud TPU slice: one process per host, which has all of its chips.
#
#   tools/launch/tpu_vm.sh my-slice europe-west4-b \
#     --config llama2_7b --workdir /shared/runs/llama2 \
#     --config.data.source=/shared/text --config.data.tokenizer=/shared/tokenizer.json
#
# The name of the slice, its zone, then the arguments of jaxscale.train; the processes find each
# other by what the slice tells them. --workdir must be on a file system that all hosts have mounted,
# such as Filestore, and the package on every host:
#
#   gcloud compute tpus tpu-vm ssh my-slice --zone=europe-west4-b --worker=all \
#     --command="pip install 'jaxscale[tpu]'"
#
# PYTHON=/opt/jaxscale/bin/python before the command names another Python of the hosts.
#
# A supervisor on each host starts its process again. A slice works with all of its hosts or not at
# all: one that fails again and again (incidents.jsonl of --workdir names it) cannot be passed over;
# delete the slice, create it again, and give the same command.
set -euo pipefail

if [ $# -lt 3 ] || [[ $1 == -* || $2 == -* ]]; then
    echo "error: expected the name of a slice, its zone, and the arguments of jaxscale.train, such" \
        "as $0 my-slice europe-west4-b --config llama2_7b" >&2
    exit 2
fi
slice=$1 zone=$2
shift 2
# Only processes that know it take part.
token=${JAXSCALE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
python=${PYTHON:-python}
# Quoted once more, for the shell of the hosts.
arguments=$(printf ' %q' "$@")
gcloud compute tpus tpu-vm ssh "$slice" --zone="$zone" --worker=all \
    --command="JAXSCALE_TOKEN=$token $python -u -m jaxscale.supervise -- $python -u -m jaxscale.train$arguments"
