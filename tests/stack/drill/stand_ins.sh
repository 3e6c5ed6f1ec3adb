#!/usr/bin/env bash
# Local stand-ins for the base images, made from Debian's packages alone, for a machine that reaches no image registry.
# Usage: DOCKER_HOST=... stand_ins.sh WORK_FOLDER   (needs root, debootstrap and a Docker engine)
set -euo pipefail
work=${1:?a folder for the root file system}
here=$(cd "$(dirname "$0")" && pwd)
bundle=/etc/ssl/certs/ca-certificates.crt

if ! docker image inspect thimble-stand-in/python:3.11 >/dev/null 2>&1; then
  [[ -d $work/rootfs/usr ]] || debootstrap --variant=minbase --include=python3,python3-pip,python3-venv,ca-certificates bookworm "$work/rootfs"
  cp "$bundle" "$work/rootfs$bundle" # whatever this machine trusts, so that pip works behind its proxy
  ln -sf python3 "$work/rootfs/usr/bin/python"
  rm -f "$work"/rootfs/usr/lib/python3*/EXTERNALLY-MANAGED
  rm -rf "$work"/rootfs/var/cache/apt/* "$work"/rootfs/var/lib/apt/lists/*
  tar -C "$work/rootfs" -c . | docker import -c "ENV PIP_CERT=$bundle SSL_CERT_FILE=$bundle" -c 'CMD ["python3"]' - thimble-stand-in/python:3.11
fi

for name in valkey prometheus; do
  docker build --network host --tag "thimble-stand-in/$name:1" --file "$here/$name.Dockerfile" "$here"
done
