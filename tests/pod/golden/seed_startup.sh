#!/bin/bash
set -eux

# get torch_xla docker image
docker pull us-central1-docker.pkg.dev/tpu-pytorch-releases/docker/xla:r2.7.0_3.10_tpuvm

# Install gcsfuse
export GCSFUSE_REPO=gcsfuse-`lsb_release -c -s`
echo "deb https://packages.cloud.google.com/apt $GCSFUSE_REPO main" | tee /etc/apt/sources.list.d/gcsfuse.list
curl https://packages.cloud.google.com/apt/doc/apt-key.gpg | apt-key add -
apt-get update
apt-get install -y fuse gcsfuse --no-install-recommends

# Mount GCS bucket
mkdir -p /root/logs
gcsfuse torch-xla-xprof-outputs /root/logs
