// SPDX-License-Identifier: Apache-2.0

package inspect

import (
	"cmp"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/tandem-proxy/tandem/proxier"
	"github.com/tandem-proxy/tandem/proxier/ebpf/flowtable"
	"github.com/tandem-proxy/tandem/proxier/ebpf/lbmap"
)

// ServiceView is one service port as the programs serve it.
type ServiceView struct {
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	Port      string `json:"port"`
	Protocol  string `json:"protocol"`
	ID        uint32 `json:"id"`
	State     string `json:"state"`
	// Reason is why State is NotProgrammed.
	Reason          string         `json:"reason"`
	AffinitySeconds uint32         `json:"affinitySeconds"`
	Counters        CountersView   `json:"counters"`
	Frontends       []FrontendView `json:"frontends"`
	Sets            []SetView      `json:"sets"`
	Backends        []BackendView  `json:"backends"`
	// Signals are null if connections of sockets are not watched, or there were none.
	Signals *SignalsView `json:"signals"`
	// Changing says that the backends changed faster than they could be read,
	// and some may be missing here.
	Changing bool `json:"changing"`
}

// States of a service port. One that is not fully programmed still serves what
// fitted.
const (
	Programmed    = "programmed"
	NotProgrammed = "not programmed"
)

// CountersView counts connections to a service port.
type CountersView struct {
	Connections uint64 `json:"connections"`
	Rejected    uint64 `json:"rejected"`
	Dropped     uint64 `json:"dropped"`
	Raced       uint64 `json:"raced"`
	// Refused and Unanswered are TCP connections, of clients outside and of pods that opted out, that an endpoint did not accept.
	Refused    uint64 `json:"refused"`
	Unanswered uint64 `json:"unanswered"`
	flowtable.Traffic
}

// FrontendView is an address that clients dial.
type FrontendView struct {
	Address netip.AddrPort `json:"address"`
	Kind    string         `json:"kind"`
	// Clients are all, or some of pod, host and outside: those whose connections go to
	// this set. A frontend has a FrontendView for each set.
	Clients string `json:"clients"`
	// Set names the backend set that their connections go to.
	Set string `json:"set"`
	// Filtered says that source ranges guard it.
	Filtered bool `json:"filtered"`
}

// SetView is a backend set that is in use.
type SetView struct {
	Name string `json:"name"`
	// Size in slots.
	Size int `json:"size"`
	// Verdict on connections to an empty set; empty where there are backends.
	Verdict string `json:"verdict"`
}

// BackendView is an endpoint. Without Sets it gets no new connections, and keeps
// established ones.
type BackendView struct {
	Address     netip.AddrPort `json:"address"`
	ID          uint32         `json:"id"`
	Generation  uint32         `json:"generation"`
	Sets        []string       `json:"sets"`
	Local       bool           `json:"local"`
	Terminating bool           `json:"terminating"`
	Connections uint64         `json:"connections"`
}

// Services reads every service port, sorted by name. Each is
// consistent in itself; two may be of different moments.
func (i *Inspector) Services() ([]ServiceView, error) {
	views, err := tableReader{i.tables}.view()
	if err != nil || i.Maps["tdm_flow"] == nil {
		return views, err
	}
	used, err := i.flowsUsed()
	if err != nil {
		return nil, err
	}
	traffic, err := i.traffic(used)
	if err != nil {
		return nil, err
	}
	for k := range views {
		views[k].Counters.Traffic = traffic[views[k].ID]
		if views[k].Signals, err = i.signals(views[k].ID); err != nil {
			return nil, err
		}
	}
	return views, nil
}

// traffic reads the traffic of each service id. used is the number of flows.
func (i *Inspector) traffic(used int) (by map[uint32]flowtable.Traffic, err error) {
	err = i.withFlowMaps(func(maps lbmap.Maps) error {
		by, err = flowtable.TrafficByService(i.tables, maps, used)
		return err
	})
	return by, err
}

const (
	// viewPasses bounds how often service ports are read again whose id went
	// to another one while they were read.
	viewPasses = 4
	// setReads bounds how often sets are read again that were published
	// while they were read. A read takes microseconds, as a publication does, so
	// a few are enough.
	setReads = 64
)

// tableReader reads tables that a writer may be changing.
type tableReader struct{ *lbmap.Tables }

// view reads the tables while a writer may be at work. What it relies on is
// the order of the writer's stores, as the programs do: a set's word changes
// when its slots do, a backend's generation when the backend does, and an id
// does not get a new name while a frontend leads to it.
func (t tableReader) view() ([]ServiceView, error) {
	views := []ServiceView{}
	var pending []uint32
	for id := range t.Services {
		if atomic.LoadUint32(&t.Services[id].State) != lbmap.ServiceFree {
			pending = append(pending, uint32(id))
		}
	}
	for pass := range viewPasses {
		if len(pending) == 0 {
			break
		}
		before := make(map[uint32]lbmap.Service, len(pending))
		for _, id := range pending {
			before[id] = copyWords(&t.Services[id])
		}
		frontends, err := t.frontendsByService()
		if err != nil {
			return nil, err
		}
		candidates := t.backendsByService()
		var again []uint32
		for _, id := range pending {
			v := t.viewService(id, frontends[id], candidates[id])
			after := copyWords(&t.Services[id])
			if after.State == lbmap.ServiceFree {
				continue
			}
			name := before[id]
			if name.Name != after.Name || name.NameLen != after.NameLen || name.Proto != after.Proto {
				again = append(again, id)
				if pass < viewPasses-1 {
					continue
				}
				// Frontends of another service port may be among them.
				v.Frontends, v.Changing = []FrontendView{}, true
			}
			v.describe(&after)
			views = append(views, v)
		}
		pending = again
	}
	slices.SortFunc(views, func(a, b ServiceView) int {
		return cmp.Or(strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name),
			strings.Compare(a.Port, b.Port), strings.Compare(a.Protocol, b.Protocol), cmp.Compare(a.ID, b.ID))
	})
	return views, nil
}

// describe fills in what the entry of the service port says.
func (v *ServiceView) describe(e *lbmap.Service) {
	v.Namespace, v.Name, v.Port = e.SplitName()
	v.Protocol = proxier.Protocol(e.Proto).String()
	v.State = Programmed
	if e.State == lbmap.ServiceNotProgrammed {
		v.State = NotProgrammed
		v.Reason = lbmap.Refusal(e.Reason).String()
	}
}

func (t tableReader) frontendsByService() (map[uint32][]lbmap.FrontendEntry, error) {
	seen := map[lbmap.FrontendKey]lbmap.FrontendValue{} // a dump may repeat itself
	err := t.Frontends.Dump(func(key lbmap.FrontendKey, value lbmap.FrontendValue) { seen[key] = value })
	if err != nil {
		return nil, fmt.Errorf("read the frontends: %w", err)
	}
	by := map[uint32][]lbmap.FrontendEntry{}
	for key, value := range seen {
		// Programs ignore one whose checksum is wrong.
		if f := (lbmap.FrontendEntry{Key: key, Value: value}); f.IsWhole() {
			by[value.Service] = append(by[value.Service], f)
		}
	}
	return by, nil
}

func (t tableReader) backendsByService() map[uint32][]uint32 {
	by := map[uint32][]uint32{}
	for id := range t.Backends {
		if service := atomic.LoadUint32(&t.Backends[id].Service); service != 0 {
			by[service] = append(by[service], uint32(id))
		}
	}
	return by
}

func (t tableReader) viewService(id uint32, frontends []lbmap.FrontendEntry, candidates []uint32) ServiceView {
	stats := &t.ServiceStats[id]
	node, outside := stats.Outcomes()
	all := node.Plus(outside)
	v := ServiceView{
		ID: id,
		Counters: CountersView{
			Connections: all.Connections,
			Rejected:    all.Rejected,
			Dropped:     all.Dropped,
			Raced:       atomic.LoadUint64(&stats.Raced),
			Refused:     atomic.LoadUint64(&stats.Refused),
			Unanswered:  atomic.LoadUint64(&stats.Unanswered),
		},
		Frontends: []FrontendView{}, Sets: []SetView{}, Backends: []BackendView{},
	}
	var used [proxier.Sets]bool
	for _, f := range frontends {
		v.AffinitySeconds = max(v.AffinitySeconds, f.Value.Affinity)
		for _, view := range viewFrontend(f) {
			used[view.set] = true
			v.Frontends = append(v.Frontends, view.FrontendView)
		}
	}
	slices.SortFunc(v.Frontends, func(a, b FrontendView) int {
		return cmp.Or(a.Address.Compare(b.Address), strings.Compare(a.Set, b.Set))
	})

	var sets setsRead
	for range setReads {
		if sets = t.readSets(id, candidates); sets.consistent {
			break
		}
		runtime.Gosched()
	}
	v.Changing = !sets.consistent
	for s := range proxier.Sets {
		base, size := lbmap.SplitSetWord(sets.words[s])
		switch {
		case size > 0:
			v.Sets = append(v.Sets, SetView{Name: s.String(), Size: size})
		case used[s]:
			if verdict, ok := lbmap.VerdictOf(base); ok {
				v.Sets = append(v.Sets, SetView{Name: s.String(), Verdict: verdict.String()})
			} else {
				v.Changing = true
			}
		}
	}
	for backend, member := range sets.members {
		e := sets.entries[backend]
		b := BackendView{
			Address: lbmap.ToAddrPort(e.Addr, e.Port), ID: backend, Generation: e.Generation, Sets: []string{},
			Local: e.Flags&lbmap.BackendLocal != 0, Terminating: e.Flags&lbmap.BackendTerminating != 0,
			Connections: atomic.LoadUint64(&t.BackendStats[backend]),
		}
		for s := range proxier.Sets {
			if member[s] {
				b.Sets = append(b.Sets, s.String())
			}
		}
		v.Backends = append(v.Backends, b)
	}
	slices.SortFunc(v.Backends, func(a, b BackendView) int {
		return cmp.Or(a.Address.Compare(b.Address), cmp.Compare(a.ID, b.ID))
	})
	return v
}

type setView struct {
	FrontendView
	set proxier.Set
}

// viewFrontend has a view for each set of the frontend.
func viewFrontend(entry lbmap.FrontendEntry) []setView {
	f := entry.Decode()
	var views []setView
	for origin, r := range f.Routes {
		who := proxier.Origin(origin).String()
		if proxier.Origin(origin) == proxier.FromOutside && entry.Value.Flags&lbmap.FrontendLeft != 0 {
			continue // to netfilter
		}
		if i := slices.IndexFunc(views, func(v setView) bool { return v.set == r.Set }); i >= 0 {
			views[i].Clients += "," + who
			continue
		}
		views = append(views, setView{FrontendView{Address: f.Addr, Kind: f.Kind.String(), Clients: who, Set: r.Set.String(), Filtered: f.Filtered}, r.Set})
	}
	if len(views) == 1 && entry.Value.Flags&lbmap.FrontendLeft == 0 {
		views[0].Clients = "all"
	}
	return views
}

// setsRead is one attempt to read the sets of a service port.
type setsRead struct {
	words      [proxier.Sets]uint64
	members    map[uint32][proxier.Sets]bool
	entries    map[uint32]lbmap.Backend
	consistent bool
}

// readSets reads sets and backends, and reports whether they belong together.
func (t tableReader) readSets(service uint32, candidates []uint32) setsRead {
	r := setsRead{members: map[uint32][proxier.Sets]bool{}, entries: map[uint32]lbmap.Backend{}, consistent: true}
	at := t.Sets[service*lbmap.SetsPerService:][:proxier.Sets]
	for s := range proxier.Sets {
		r.words[s] = atomic.LoadUint64(&at[s])
	}
	for s := range proxier.Sets {
		base, size := lbmap.SplitSetWord(r.words[s])
		if size == 0 {
			continue
		}
		if int(base)+size > len(t.Slots) {
			r.consistent = false
			continue
		}
		for i := range size {
			slot := atomic.LoadUint32(&t.Slots[int(base)+i])
			id := lbmap.SlotBackend(slot)
			e, ok := t.readBackend(id, service)
			if !ok || lbmap.SlotWord(id, e.Generation) != slot {
				r.consistent = false
				continue
			}
			in := r.members[id]
			in[s] = true
			r.members[id], r.entries[id] = in, e
		}
	}
	// Backends that only keep established connections are in no set. Any other backend
	// in no set is about to get into one, or about to be removed.
	for _, id := range candidates {
		if _, known := r.members[id]; known {
			continue
		}
		if e, ok := t.readBackend(id, service); ok && e.Members == 0 {
			r.members[id], r.entries[id] = [proxier.Sets]bool{}, e
		}
	}
	for s := range proxier.Sets {
		if atomic.LoadUint64(&at[s]) != r.words[s] {
			r.consistent = false
		}
	}
	for id, e := range r.entries {
		if atomic.LoadUint32(&t.Backends[id].Generation) != e.Generation {
			r.consistent = false
			delete(r.members, id)
		}
	}
	return r
}

// readBackend returns a backend of a service, if it does not change meanwhile.
func (t tableReader) readBackend(id, service uint32) (lbmap.Backend, bool) {
	if int(id) >= len(t.Backends) {
		return lbmap.Backend{}, false
	}
	e := copyWords(&t.Backends[id])
	return e, atomic.LoadUint32(&t.Backends[id].Generation) == e.Generation && e.Service == service
}

// copyWords copies what another process may be writing, so that at least no
// field of up to 4 bytes is half old and half new.
func copyWords[T any](from *T) T {
	var to T
	words := unsafe.Sizeof(to) / 4
	source := unsafe.Slice((*uint32)(unsafe.Pointer(from)), words)
	target := unsafe.Slice((*uint32)(unsafe.Pointer(&to)), words)
	for i := range source {
		target[i] = atomic.LoadUint32(&source[i])
	}
	return to
}
