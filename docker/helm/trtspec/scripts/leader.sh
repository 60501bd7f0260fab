#!/bin/bash
# The leader of a LeaderWorkerSet, when every pod of the group can be reached. Arguments: the trtspec serve command.
set -euo pipefail
port=${TRTSPEC_SSH_PORT:-2222}
own=$HOME/ssh
mkdir -p "$own"
install -m 600 "${TRTSPEC_SSH_KEYS:-/etc/trtspec-ssh}/id_ed25519" "$own/id_ed25519"
reach="-p $port -i $own/id_ed25519 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"

# the pods of a group are <leader> and <leader>-<i> in one headless service
leader=${LWS_LEADER_ADDRESS%%.*}
domain=${LWS_LEADER_ADDRESS#*.}
for ((index = 1; index < LWS_GROUP_SIZE; index++)); do
  worker="$leader-$index.$domain"
  # shellcheck disable=SC2086  # several words
  until ssh $reach -o ConnectTimeout=5 "$worker" true; do
    echo "waiting for $worker"
    sleep 5
  done
done

# trtspec writes the mpirun command; MPI hands on nothing by itself, and what belongs to one pod stays there.
# The prefix finds the daemons on the other nodes.
program=$(readlink -f "$(command -v mpirun)")
words="--prefix ${program%/bin/*} --mca plm_rsh_args '$reach'"
for name in $(compgen -e); do
  case $name in
    HOSTNAME | PWD | OLDPWD | SHLVL | _ | KUBERNETES_* | LWS_* | OMPI_* | PMIX_* | PYTHONUNBUFFERED | TRTSPEC_*) ;;
    *) words+=" -x $name" ;;
  esac
done
exec "$1" "$2" --launcher-args "$words" "${@:3}"
