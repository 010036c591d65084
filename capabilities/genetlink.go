// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"encoding/binary"
	"errors"
	"fmt"
	"syscall"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// genlHeader is struct genlmsghdr: command, version, two reserved bytes. The
// one in package nl is two bytes long but sends four, and the kernel rejects
// newer commands whose reserved bytes are not zero.
type genlHeader [unix.GENL_HDRLEN]byte

func (h genlHeader) Len() int          { return len(h) }
func (h genlHeader) Serialize() []byte { return h[:] }

// genlAttrs returns the attributes of a generic netlink message by type.
func genlAttrs(message []byte) (map[uint16]syscall.NetlinkRouteAttr, error) {
	if len(message) < unix.GENL_HDRLEN {
		return nil, fmt.Errorf("generic netlink message of %d bytes is too short", len(message))
	}
	return nl.ParseRouteAttrAsMap(message[unix.GENL_HDRLEN:])
}

// findGenlFamily returns the id of a registered generic netlink family. It lists
// all of them: asking for one by name makes the kernel try to load a module of
// that name.
func findGenlFamily(name string) (id uint16, found bool, err error) {
	req := nl.NewNetlinkRequest(unix.GENL_ID_CTRL, unix.NLM_F_DUMP)
	req.AddData(genlHeader{unix.CTRL_CMD_GETFAMILY, 1})
	messages, dumpErr := req.Execute(unix.NETLINK_GENERIC, 0)
	// An interrupted dump is still good for saying what is there.
	if dumpErr != nil && !errors.Is(dumpErr, nl.ErrDumpInterrupted) {
		return 0, false, fmt.Errorf("list generic netlink families: %w", dumpErr)
	}
	for _, message := range messages {
		attrs, err := genlAttrs(message)
		if err != nil {
			return 0, false, fmt.Errorf("list generic netlink families: %w", err)
		}
		if unix.ByteSliceToString(attrs[unix.CTRL_ATTR_FAMILY_NAME].Value) != name {
			continue
		}
		if value := attrs[unix.CTRL_ATTR_FAMILY_ID].Value; len(value) == 2 {
			return binary.NativeEndian.Uint16(value), true, nil
		}
	}
	return 0, false, dumpErr
}
