# SPDX-License-Identifier: Apache-2.0
#
# Usage: sh node.sh <name> <cgroup> <parts> <dir>
#
# Becomes a node in the network namespace it is started in: a machine with its own mounts,
# processes, name and cgroups, which runs containerd and kubelet. <parts> is what hack/kubeadm.sh makes, which
# is not changed; what it writes is in <dir>. The node ends with this process.
set -eu
name=$1 cgroup=$2 parts=$3 dir=$4

case ${stage:=cgroup} in
cgroup) # of which the cgroup namespace begins
	echo 0 >"$cgroup/cgroup.procs"
	stage=leaf exec unshare --cgroup sh "$0" "$@"
	;;
leaf) # as only leaves have processes where cgroups have controllers
	mkdir -p "$cgroup/node"
	echo 0 >"$cgroup/node/cgroup.procs"
	stage=node exec unshare --mount --uts --ipc --pid --fork --kill-child sh "$0" "$@"
	;;
esac

# Of the files of this machine it gets the devices that every container has, and the log, which
# kubelet reads.
root=$dir/root
mkdir -p "$dir/upper" "$dir/work" "$dir/containerd" "$root"
mount -t overlay -o "lowerdir=$parts/root,upperdir=$dir/upper,workdir=$dir/work" overlay "$root"
mkdir -p "$root/var/lib/containerd" "$root/usr/local/bin" "$root/lib/modules" "$root/old"
mount --bind "$dir/containerd" "$root/var/lib/containerd" # which makes overlays, not possible on one
mount --bind "$parts/bin" "$root/usr/local/bin"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t bpf bpf "$root/sys/fs/bpf"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=666 devpts "$root/dev/pts"
mount -t tmpfs tmpfs "$root/dev/shm"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
for device in null zero full random urandom tty kmsg; do
	[ ! -e /dev/$device ] || { : >"$root/dev/$device" && mount --bind /dev/$device "$root/dev/$device"; }
done
# kubelet sets them, and they are this machine's: it gets files with the values that it wants.
for setting in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1; do
	file=$root/run/sysctl-$(basename "${setting%=*}")
	echo "${setting#*=}" >"$file"
	mount --bind "$file" "$root/proc/sys/${setting%=*}"
done
cd "$root"
pivot_root . old
umount -l /old
mount --make-rshared /
echo "$name" >/proc/sys/kernel/hostname
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin HOME=/root

containerd >/var/log/containerd.log 2>&1 &
# kubeadm writes how kubelet is to run. It would start it, if there was systemd.
while :; do
	if [ -e /var/lib/kubelet/kubeadm-flags.env ] && [ -e /var/lib/kubelet/config.yaml ]; then
		. /var/lib/kubelet/kubeadm-flags.env
		kubelet --bootstrap-kubeconfig=/etc/kubernetes/bootstrap-kubelet.conf --kubeconfig=/etc/kubernetes/kubelet.conf \
			--config=/var/lib/kubelet/config.yaml $KUBELET_KUBEADM_ARGS >>/var/log/kubelet.log 2>&1 || true
	fi
	sleep 0.2
done
