#!/usr/bin/env bash
# Installs the Debian packages of the real schedulers, the browser and the tracer that the tests start. Only root can install and
# start them: for other users this does nothing, their tests are skipped, and the run says so. Where npm is, it also
# installs the language server of the editors' tests; npm is not installed for it, since Debian's has 400 packages.
set -euo pipefail
cd "$(dirname "$0")/.."

editor=tests/llmctl/cli/reference/editor
if command -v npm >/dev/null && ! cmp -s $editor/package-lock.json .make/editor/package-lock.json; then
  rm -rf .make/editor
  mkdir -p .make/editor.new
  cp $editor/package.json $editor/package-lock.json .make/editor.new
  if npm ci --silent --no-audit --no-fund --prefix .make/editor.new >.make/editor.log 2>&1; then
    mv .make/editor.new .make/editor
  else
    echo "real tier: npm failed, see .make/editor.log; the tests of editors will be skipped"
    rm -rf .make/editor.new
  fi
fi

[ "$(id -u)" = 0 ] || exit 0
command -v apt-get >/dev/null || { echo "real tier: no apt-get here; the tests of real schedulers will be skipped"; exit 0; }

packages=(
  munge slurmctld slurmd slurm-client slurmdbd mariadb-server
  gridengine-master gridengine-exec gridengine-client
  openssh-server openssh-client openmpi-bin
  iproute2 iptables procps shellcheck strace gcc libc6-dev libslurm-dev
  chromium fonts-dejavu-core
)
missing=()
for package in "${packages[@]}"; do
  state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$state" = installed ] || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

mkdir -p .make
log=$PWD/.make/real-tier.log
begin=$SECONDS
echo "real tier: installing ${#missing[@]} Debian packages"
export DEBIAN_FRONTEND=noninteractive
# The tests start separate daemons in separate namespaces, so the packages' services stay off (policy-rc.d(8)).
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
  trap 'rm -f $policy' EXIT
  printf '#!/bin/sh\nexit 101\n' >$policy
  chmod 755 $policy
fi
apt() { apt-get -qq -o DPkg::Lock::Timeout=300 -o Dpkg::Use-Pty=0 "$@" >>"$log" 2>&1; }
apt update || true
apt install -y --no-install-recommends "${missing[@]}" || { tail -5 "$log" >&2; echo "real tier: apt-get failed, see $log" >&2; exit 1; }
echo "real tier: done in $((SECONDS - begin)) s"
