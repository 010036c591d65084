// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/tandem-proxy/tandem/proxier"
)

// probes are the frontends at which a probe was led to an endpoint, by the programs that are attached now.
type probes struct {
	mu   sync.Mutex
	done map[probed]types.UID
}

// probed is a frontend of a Service, while the index of the decision is that of the Service.
type probed struct {
	index uint32
	at    netip.AddrPort
}

// reset is called when other programs are attached.
func (p *probes) reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.done = map[probed]types.UID{}
}

func (p *probes) has(d *proxier.Decision, f *proxier.Frontend) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	uid, ok := p.done[probed{d.Index(), f.Addr}]
	return ok && uid == d.UID
}

func (p *probes) set(d *proxier.Decision, f *proxier.Frontend, served bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if at := (probed{d.Index(), f.Addr}); served {
		p.done[at] = d.UID
	} else {
		delete(p.done, at)
	}
}

// Lacks is why clients outside whose packets come in by these uplinks, or any if there is none, are not served at a frontend; nil if they
// are. It looks at what is attached and in the maps, and once has the programs handle a packet, which the Service counts as a connection.
func (t *Tier) Lacks(d *proxier.Decision, f *proxier.Frontend, uplinks []string) (err error) {
	defer func() { t.probes.set(d, f, err == nil) }()
	for _, u := range t.Uplinks() {
		if u.Err != nil && (len(uplinks) == 0 || slices.Contains(uplinks, u.Name)) {
			return fmt.Errorf("uplink %s: %w", u.Name, u.Err)
		}
	}
	if err := t.writer.Lacks(d, f); err != nil || t.probes.has(d, f) {
		return err
	}
	err = t.probe(d, f, uplinks)
	if errors.Is(err, errNotProbed) {
		klog.Background().V(2).Info("Cannot probe a frontend; the maps of the programs have it", "servicePort", d.Name, "frontend", f.Addr, "reason", err.Error())
		return nil
	}
	return err
}
