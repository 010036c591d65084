// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/test/lab"
)

// Trace plays a cell again, and returns its packets at all devices on the way, in order of time.
func (w *World) Trace(ctx context.Context, c Cell) string {
	type seen struct {
		lab.Captured
		where string
	}
	var captures []*lab.Capture
	var wheres []string
	machines := []*lab.Sandbox{w.client(c.Client)}
	for _, s := range []*lab.Sandbox{w.Node.Sandbox, w.Other.Sandbox, w.Here.Sandbox, w.There.Sandbox} {
		if !slices.Contains(machines, s) {
			machines = append(machines, s)
		}
	}
	for _, s := range machines {
		links, err := s.Netlink().LinkList()
		if err != nil {
			return err.Error()
		}
		for _, l := range links {
			if l.Attrs().Flags&net.FlagUp == 0 || l.Attrs().Flags&net.FlagLoopback != 0 {
				continue
			}
			capture, err := s.Capture(l.Attrs().Name, func(p lab.Captured) bool {
				return (p.TCP != nil || p.UDP != nil || p.ICMP != nil) && (p.IPv4 != nil) == (c.family() == IPv4)
			})
			if err != nil {
				return err.Error()
			}
			captures = append(captures, capture)
			wheres = append(wheres, fmt.Sprintf("%s/%s", s.Name, l.Attrs().Name))
		}
	}
	err := w.play(ctx, c)
	var all []seen
	for i, capture := range captures {
		_ = capture.Close()
		for _, p := range capture.Packets() {
			all = append(all, seen{p, wheres[i]})
		}
	}
	slices.SortStableFunc(all, func(a, b seen) int { return a.Time.Compare(b.Time) })
	// Retransmissions, also of earlier cells, tell nothing new.
	const most, first = 24, 500 * time.Millisecond
	all = slices.DeleteFunc(all, func(s seen) bool { return s.Time.Sub(all[0].Time) > first })
	var b strings.Builder
	fmt.Fprintf(&b, "%s: %v\n", c, err)
	for _, p := range all[:min(most, len(all))] {
		fmt.Fprintf(&b, "  %-16s %s\n", p.where, line(p.Captured))
	}
	return b.String()
}

// line is a packet without what does not matter to its way.
func line(p lab.Captured) string {
	direction := "in "
	if p.Outgoing {
		direction = "out"
	}
	text := fmt.Sprintf("%s %s %s > %s", p.Time.Format("05.0000"), direction, p.Source(), p.Destination())
	switch {
	case p.TCP != nil:
		text += fmt.Sprintf(" tcp %s", p.TCP.Flags)
	case p.UDP != nil:
		text += " udp"
	default:
		text += fmt.Sprintf(" icmp %d/%d", p.ICMP.Type, p.ICMP.Code)
	}
	return fmt.Sprintf("%s length %d", text, len(p.Frame))
}

// State are the devices, addresses, routes and rules of the node.
func (w *World) State(ctx context.Context) string {
	var b strings.Builder
	for _, command := range []string{"ip -br link", "ip -br address", "ip rule", "ip route show table all", "ip -6 rule", "ip -6 route show table all"} {
		args := strings.Fields(command)
		out, err := w.Node.Command(ctx, args[0], args[1:]...).CombinedOutput()
		fmt.Fprintf(&b, "# %s (%v)\n%s", command, err, out)
	}
	return b.String()
}
