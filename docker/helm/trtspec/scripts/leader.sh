#!/bin/bash
# The leader of a LeaderWorkerSet: one rank per GPU of every pod of the group. Arguments: the trtllm-serve command.
set -euo pipefail
port=${TRTSPEC_SSH_PORT:-2222}
gpus=${TRTSPEC_GPUS_PER_NODE:?}
own=$HOME/ssh
mkdir -p "$own"
install -m 600 "${TRTSPEC_SSH_KEYS:-/etc/trtspec-ssh}/id_ed25519" "$own/id_ed25519"
reach="-p $port -i $own/id_ed25519 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"

# the pods of a group are <leader> and <leader>-<i> in one headless service
leader=${LWS_LEADER_ADDRESS%%.*}
domain=${LWS_LEADER_ADDRESS#*.}
hosts="$LWS_LEADER_ADDRESS:$gpus"
for ((index = 1; index < LWS_GROUP_SIZE; index++)); do
  worker="$leader-$index.$domain"
  # shellcheck disable=SC2086  # several words
  until ssh $reach -o ConnectTimeout=5 "$worker" true; do
    echo "waiting for $worker"
    sleep 5
  done
  hosts+=",$worker:$gpus"
done

# MPI hands on nothing by itself; what belongs to one pod stays there
exported=()
for name in $(compgen -e); do
  case $name in
    HOSTNAME | PWD | OLDPWD | SHLVL | _ | KUBERNETES_* | LWS_* | OMPI_* | PMIX_*) ;;
    *) exported+=(-x "$name") ;;
  esac
done
# by its full path, so that the daemons on the other nodes are found beside it
exec "$(command -v mpirun)" -np "$((gpus * LWS_GROUP_SIZE))" -N "$gpus" --host "$hosts" \
  --mca plm_rsh_args "$reach" "${exported[@]}" trtllm-llmapi-launch "$@"
