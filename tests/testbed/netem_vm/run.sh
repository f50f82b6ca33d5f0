#!/bin/bash
# run.sh [WORKDIR]: check delay, jitter and loss (check.py) in a virtual machine with a stock Debian kernel, for kernels
# without sch_netem. Needs a checkout with .venv (make test), Debian's apt, and the packages qemu-system-x86,
# busybox-static, cpio, iproute2; and 500 MB in WORKDIR. The machine is emulated where KVM is not to be had.
set -euo pipefail
here=$(dirname "$(realpath "$0")")
cd "$here/../../.."
work=${1:-runs/netem_vm}
"$here/make.sh" "$work"
"$here/boot.sh" "$work" "${PYTHON:-$PWD/.venv/bin/python}" "$here/check.py"
