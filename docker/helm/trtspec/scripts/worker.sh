#!/bin/bash
# A node of a LeaderWorkerSet: waits for the leader's MPI daemon, as the user of the pod, without root.
set -euo pipefail
command -v sshd > /dev/null || { echo "this image has no sshd: build one from docker/serve.Dockerfile" >&2; exit 1; }
own=$HOME/ssh
mkdir -p "$own"
chmod 700 "$own"
[ -e "$own/host_key" ] || ssh-keygen -q -t ed25519 -N "" -f "$own/host_key"
exec "$(command -v sshd)" -D -e -p "${TRTSPEC_SSH_PORT:-2222}" -h "$own/host_key" \
  -o PidFile=none -o UsePAM=no -o StrictModes=no -o PasswordAuthentication=no \
  -o AuthorizedKeysFile="${TRTSPEC_SSH_KEYS:-/etc/trtspec-ssh}/id_ed25519.pub"
