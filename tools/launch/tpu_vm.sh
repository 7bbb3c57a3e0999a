#!/bin/bash
# Trains on every host of a Cloud TPU slice: one process per host, with all of its chips.
#
#   tools/launch/tpu_vm.sh my-slice europe-west4-b \
#     --config llama2_7b --workdir /shared/runs/llama2 \
#     --config.data.source=/shared/text --config.data.tokenizer=/shared/tokenizer.json
#
# Arguments: the name of the slice, its zone, then those of jaxscale.train; the slice's metadata
# connects the processes. --workdir must be on a file system that all hosts have mounted, such as
# Filestore, and the package must be installed on every host:
#
#   gcloud compute tpus tpu-vm ssh my-slice --zone=europe-west4-b --worker=all \
#     --command="pip install 'jaxscale[tpu]'"
#
# PYTHON=/opt/jaxscale/bin/python before the command selects another Python on the hosts.
#
# A supervisor on each host restarts its process. A slice needs all of its hosts: a host that fails
# repeatedly (incidents.jsonl of --workdir names it) cannot be excluded; delete the slice, create it
# again, and run the same command.
set -euo pipefail

if [ $# -lt 3 ] || [[ $1 == -* || $2 == -* ]]; then
    echo "error: expected the name of a slice, its zone, and the arguments of jaxscale.train, such" \
        "as $0 my-slice europe-west4-b --config llama2_7b" >&2
    exit 2
fi
slice=$1 zone=$2
shift 2
# Processes without this token are refused.
token=${JAXSCALE_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
python=${PYTHON:-python}
# Quoted for the shell on the hosts.
arguments=$(printf ' %q' "$@")
gcloud compute tpus tpu-vm ssh "$slice" --zone="$zone" --worker=all \
    --command="JAXSCALE_TOKEN=$token $python -u -m jaxscale.supervise -- $python -u -m jaxscale.train$arguments"
