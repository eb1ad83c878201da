#!/bin/sh
# Install the locked packages into /opt/venv:  install.sh cuda|cpu [INDEX]. Runs while the image is built.
set -eu
variant=$1 index=$2

# BuildKit secrets, where they are given
if [ -f /run/secrets/pip_conf ]; then export PIP_CONFIG_FILE=/run/secrets/pip_conf; fi
if [ -f /run/secrets/ca ]; then export PIP_CERT=/run/secrets/ca; fi

set -- --no-cache-dir --no-compile --disable-pip-version-check --root-user-action=ignore \
  --constraint requirements.lock --requirement dependencies.txt
case $variant in
  cuda) ;;
  cpu)
    # a version with "+cpu" satisfies the lock, and only CPU builds have one
    sed -nE 's/^(torch|torchvision)==([^ ;]+)/\1==\2+cpu/p' requirements.lock >/tmp/cpu.txt
    set -- "$@" --requirement /tmp/cpu.txt
    ;;
  *)
    echo "evenkeel: TORCH_VARIANT=$variant: must be cuda or cpu" >&2
    exit 2
    ;;
esac
python3 -m venv --without-pip /opt/venv
if [ -n "$index" ]; then set -- "$@" --extra-index-url "$index"; fi
if ! python3 -m pip --python /opt/venv/bin/python3 install "$@"; then
  if [ "$variant" = cpu ]; then
    echo "evenkeel: TORCH_VARIANT=cpu: is the index of PyTorch's CPU wheels named by --build-arg TORCH_INDEX?" >&2
  fi
  exit 1
fi
rm -f /tmp/cpu.txt

# as pip would, but on all cores; packages may bring files for other versions of Python, which do not compile
/opt/venv/bin/python3 -m compileall -q -j 0 -x '/(tests|testing)/' /opt/venv/lib >/dev/null || true

# The code lies beside the packages, so that a change of it leaves their layer alone.
echo /app/src >"$(/opt/venv/bin/python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/evenkeel.pth"
