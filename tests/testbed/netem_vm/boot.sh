#!/bin/bash
# boot.sh WORKDIR COMMAND...: run COMMAND in the kernel that make.sh has made ready. Exits as COMMAND does.
set -euo pipefail
work=$(realpath "${1:?boot.sh WORKDIR COMMAND...}")
shift
printf 'cd %q && exec %s\n' "$PWD" "$(printf '%q ' "$@")" > "$work/command"
accel=(-accel tcg,thread=multi -cpu max)
grep -Eqw 'vmx|svm' /proc/cpuinfo && [ -w /dev/kvm ] && accel=(-accel kvm -cpu host)
timeout "${LIMIT_S:-1200}" qemu-system-x86_64 "${accel[@]}" -smp 2 -m 2048 -nodefaults -no-reboot -display none \
    -serial stdio -kernel "$work/vmlinuz" -initrd "$work/initrd.gz" \
    -virtfs local,path=/,mount_tag=host,security_model=none,readonly=on,multidevs=remap \
    -append "console=ttyS0 quiet loglevel=3 panic=-1" < /dev/null | tr -d '\r' | tee "$work/console"
exit "$(awk '/^exit status [0-9]+$/ {status = $3} END {print status == "" ? 1 : status}' "$work/console")"
