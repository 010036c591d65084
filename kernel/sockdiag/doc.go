// SPDX-License-Identifier: Apache-2.0

// Package sockdiag finds sockets by the remote address they are connected to, and
// destroys those its caller points at.
//
// It is a small client of the kernel's inet_diag netlink protocol. The filter runs
// in the kernel, so that a handful of sockets among many thousands costs about
// a millisecond. A socket that was connected through a Service address is told from
// one that was connected to the same backend directly by the value that a BPF
// program left on it (socket storage), which StorageReader reads.
//
// inet_diag answers for the network namespace of the calling thread only;
// ForEachNetNS visits all that can be found. Storage is read for all of them at
// once:
//
//	values, err := reader.Read(ctx)
//	f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: gone, Storage: values}
//	err = sockdiag.ForEachNetNS(ctx, "/proc", func(sockdiag.NetNS) error {
//		_, _, err := sockdiag.Dump(ctx, f, func(s sockdiag.Socket) bool { return s.Storage != nil })
//		return err
//	})
package sockdiag
