// SPDX-License-Identifier: Apache-2.0

// Package sockdiag finds sockets by the remote address they are connected to, and
// destroys those that its caller selects.
//
// It is a small client of the kernel's inet_diag netlink protocol. The filter runs
// in the kernel, so finding a few sockets among many thousands takes about a
// millisecond. Sockets connected through a Service address have a value in the socket
// storage of an eBPF program, and sockets connected to the backend directly have none.
// StorageReader reads these values.
//
// inet_diag answers for the network namespace of the calling thread only. ForEachNetNS
// visits all network namespaces that it can find. Storage is read once for all of them:
//
//	values, err := reader.Read(ctx)
//	f := sockdiag.Filter{Protocol: unix.IPPROTO_UDP, Remote: gone, Storage: values}
//	err = sockdiag.ForEachNetNS(ctx, "/proc", func(sockdiag.NetNS) error {
//		_, _, err := sockdiag.Dump(ctx, f, func(s sockdiag.Socket) bool { return s.Storage != nil })
//		return err
//	})
package sockdiag
