#!/usr/bin/env bash
# Run a command on a clone of this checkout's last commit, in a minimal Debian with the requirements of README only:
# python3, python3-venv, make and git. No settings of pip, no compiler, no further libraries.
#
#   scripts/fresh_system.sh FOLDER make setup          the system is made on first use (about a minute) and kept
#   SUITE=trixie scripts/fresh_system.sh FOLDER ...    Debian 13 with Python 3.13 (default: bookworm, Python 3.11)
#   scripts/fresh_system.sh FOLDER --remove            unmount and delete
#
# Needs root, debootstrap and a Debian mirror. The certificates of this machine are trusted in the system too, because a
# mirror or a package index may be behind them.
set -euo pipefail

system=$1
shift
mounts=(tmp dev sys proc)

unmount() {
    local mount
    for mount in "${mounts[@]}"; do
        if mountpoint -q "$system/$mount"; then umount --recursive --lazy "$system/$mount"; fi
    done
}

if [ "$1" = --remove ]; then
    unmount
    rm -rf --one-file-system "$system"
    exit
fi

checkout=$(cd "$(dirname "$0")/.." && pwd)
clone=/root/grpo_ray
if [ ! -x "$system/usr/bin/make" ]; then
    debootstrap --variant=minbase --include=python3,python3-venv,make,git,ca-certificates \
        "${SUITE:-bookworm}" "$system" >&2
fi
cp --dereference /etc/resolv.conf /etc/hosts "$system/etc/"
cp --dereference /etc/ssl/certs/ca-certificates.crt "$system/etc/ssl/certs/"
mountpoint -q "$system/proc" || mount -t proc proc "$system/proc"
mountpoint -q "$system/sys" || mount -t sysfs sys "$system/sys"
mountpoint -q "$system/dev" || mount --rbind /dev "$system/dev"
mountpoint -q "$system/tmp" || mount -t tmpfs tmpfs "$system/tmp"
commit=$(git -C "$checkout" rev-parse HEAD)
if [ ! -d "$system$clone" ]; then
    git clone --quiet "$checkout" "$system$clone"
fi
git -C "$system$clone" fetch --quiet "$checkout" HEAD
git -C "$system$clone" checkout --quiet --detach "$commit"
# A clean environment: another machine does not have the variables of this one.
certificates=/etc/ssl/certs/ca-certificates.crt
exec chroot "$system" env --ignore-environment HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    SSL_CERT_FILE=$certificates PIP_CERT=$certificates REQUESTS_CA_BUNDLE=$certificates \
    bash -c 'cd "$0" && exec "$@"' "$clone" "$@"
