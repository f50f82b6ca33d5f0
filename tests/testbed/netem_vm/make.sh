#!/bin/bash
# make.sh WORKDIR: a stock Debian kernel, downloaded and not installed, and an initramfs that boots into this very
# machine's files, read-only. So the guest has the same python, ip and tc, and nothing needs to be copied.
set -euo pipefail
work=$(realpath -m "${1:?make.sh WORKDIR}")
[ -e "$work/initrd.gz" ] && exit 0
mkdir -p "$work/debs"
package=$(apt-cache depends linux-image-amd64 | awk '/Depends: linux-image/ {print $2; exit}')
(cd "$work/debs" && apt-get -q=2 -o APT::Sandbox::User=root download "$package")
rm -rf "$work/kernel" "$work/root"
dpkg-deb -x "$work/debs/$package"_*.deb "$work/kernel"
release=$(ls "$work/kernel/lib/modules")
busybox depmod -b "$work/kernel" "$release"

root=$work/root modules=lib/modules/$release
mkdir -p "$root"/{bin,sbin,proc,host} "$root/$modules"
cp "$(command -v busybox)" "$root/bin/busybox"
ln -s ../bin/busybox "$root/sbin/modprobe"  # Where the kernel looks when it wants a module.
for name in virtio_pci 9pnet_virtio 9p; do  # What mounting the host takes; all others come from there.
    awk -F: -v name="/$name.ko" 'index($1, name) {print $1 $2}' "$work/kernel/$modules/modules.dep"
done | tr ' ' '\n' | sort -u | while read -r file; do
    install -D "$work/kernel/$modules/$file" "$root/$modules/$file"
done
busybox depmod -b "$root" "$release"
cat > "$root/init" <<INIT
#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin
mount -t proc proc /proc
for name in virtio_pci 9pnet_virtio 9p; do modprobe \$name; done
mount -t 9p -o ro,trans=virtio,version=9p2000.L,cache=loose,msize=1048576 host /host
mount -o bind "/host$work/kernel/lib/modules" /lib/modules
for each in proc:proc sysfs:sys devtmpfs:dev tmpfs:run; do
    mount -t \${each%:*} \${each%:*} /host/\${each#*:}
done
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/run TMPDIR=/run PYTHONDONTWRITEBYTECODE=1
ip link set lo up
chroot /host /bin/bash "$work/command"
echo "exit status \$?"
poweroff -f
INIT
chmod +x "$root/init"
(cd "$root" && find . | cpio -o -H newc --quiet) | gzip -1 > "$work/initrd.gz"
mv "$work"/kernel/boot/vmlinuz-* "$work/vmlinuz"
