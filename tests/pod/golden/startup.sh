#!/bin/bash
# Written by Lockstep from the pod section of a config. Every host runs it when it starts.
set -eux
set -o pipefail
mkdir -p /var/lib/lockstep
rm -f /var/lib/lockstep/startup.code
exec >/var/lib/lockstep/startup.log 2>&1
trap 'code=$?; echo "$code" >/var/lib/lockstep/startup.new; mv /var/lib/lockstep/startup.new /var/lib/lockstep/startup.code' EXIT

# The image that ranks run in
docker pull us-central1-docker.pkg.dev/tpu-pytorch-releases/docker/xla:r2.7.0_3.10_tpuvm

# Install gcsfuse
if ! command -v gcsfuse; then
  export GCSFUSE_REPO=gcsfuse-`lsb_release -c -s`
  curl -fsS --retry 5 -o /usr/share/keyrings/cloud.google.asc https://packages.cloud.google.com/apt/doc/apt-key.gpg
  echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc] https://packages.cloud.google.com/apt $GCSFUSE_REPO main" | tee /etc/apt/sources.list.d/gcsfuse.list
  apt-get -o DPkg::Lock::Timeout=300 update
  apt-get -o DPkg::Lock::Timeout=300 install -y fuse gcsfuse --no-install-recommends
fi

# Mount the bucket, and see that it can be written to
mkdir -p /root/logs
mountpoint -q /root/logs || gcsfuse torch-xla-xprof-outputs /root/logs
probe=/root/logs/.lockstep-`hostname`
echo ready >"$probe"
rm "$probe"

# pod.setup
pip3 install 'lockstep-train[xla]' 'two words' '$(id)'
