// SPDX-License-Identifier: Apache-2.0

//go:build linux

package netlink

import "os"

// OpenSocket opens the socket of a follower.
func (f *Follower) OpenSocket() (*os.File, error) { return f.open() }

// ReceiveFrom signals changed for each message.
func (f *Follower) ReceiveFrom(socket *os.File, changed chan<- struct{}) error {
	return f.receive(socket, changed)
}
