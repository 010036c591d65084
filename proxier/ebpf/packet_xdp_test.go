// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"

	ebpfdatapath "github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/test/datapath"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// Verdicts of XDP programs, and of those at tc that redirect.
const (
	xdpPass, xdpTx = 2, 3
	tcRedirect     = 7
)

// accelerated has a path's XDP program run before its program at ingress.
type accelerated struct {
	program *ciliumebpf.Program
	context []byte // struct xdp_md
	out     []byte
	// sent counts what it forwarded, since the last reset and ever.
	sent, total uint64
}

// Offsets in struct xdp_md of linux/bpf.h.
const (
	sizeofXDP  = 24
	xdpDataEnd = 4
	xdpIngress = 12
)

// newAcceleratedPath is a path whose uplink has the XDP program.
func newAcceleratedPath(t testing.TB, opts Options) *path {
	t.Helper()
	opts.Acceleration = ebpfdatapath.Native
	p := newPath(t, opts)
	// The device got another MAC address.
	if err := p.tier.SetUplinks(t.Context(), uplinksOf(t, p.at)); err != nil {
		t.Fatal(err)
	}
	program, err := p.tier.devices.XDP(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, u := range p.tier.Uplinks() {
		if u.Name == lab.Uplink && u.Accelerated != nil {
			t.Fatalf("%s: %v", u.Name, u.Accelerated)
		}
	}
	p.xdp = &accelerated{program: program, context: make([]byte, sizeofXDP), out: make([]byte, largestOut)}
	binary.NativeEndian.PutUint32(p.xdp.context[xdpIngress:], uint32(p.uplink))
	return p
}

// run runs the program on a frame. What it passes has to be unmodified; what it forwards is as if the program at ingress had
// redirected it, but for link-layer addresses, which the kernel replaces after that one.
func (x *accelerated) run(frame []byte) (r datapath.Result, passed bool, err error) {
	binary.NativeEndian.PutUint32(x.context[xdpDataEnd:], uint32(len(frame)))
	opts := ciliumebpf.RunOptions{Data: frame, DataOut: x.out[:largestOut], Context: x.context}
	verdict, err := x.program.Run(&opts)
	if err != nil {
		return r, false, fmt.Errorf("run the XDP program on %x: %w", frame, err)
	}
	switch verdict {
	case xdpPass:
		if !bytes.Equal(opts.DataOut, frame) {
			err = disagreement{fmt.Errorf("XDP passed a modified packet:\n%x\nfor\n%x", opts.DataOut, frame)}
		}
		return r, true, err
	case xdpTx:
		x.sent++
		x.total++
		copy(opts.DataOut[:12], frame)
		return datapath.Result{Verdict: tcRedirect, Frame: opts.DataOut}, false, nil
	}
	return r, false, disagreement{fmt.Errorf("XDP verdict %d for\n%x", verdict, frame)}
}

// TestPacketsAccelerated is TestPackets with XDP before the program at ingress: together they do the same.
func TestPacketsAccelerated(t *testing.T) {
	p := newAcceleratedPath(t, Options{})
	compareRandomly(t, p, kernel.Rounds(*packetCount))
	if least := uint64(kernel.Rounds(*packetCount) / 100); p.xdp.total < least {
		t.Errorf("XDP forwarded %d packets, want %d or more", p.xdp.total, least)
	}
	t.Logf("XDP forwarded %d packets", p.xdp.total)
}
