// SPDX-License-Identifier: Apache-2.0

package ebpf

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"

	ciliumebpf "github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/tandem-proxy/tandem/capabilities"
	"github.com/tandem-proxy/tandem/kernel/tc"
	"github.com/tandem-proxy/tandem/proxier/ebpf/datapath"
	"github.com/tandem-proxy/tandem/proxier/ebpf/removal"
	"github.com/tandem-proxy/tandem/test/kernel"
	"github.com/tandem-proxy/tandem/test/lab"
)

// TestCleanupOfDevices (I5): Cleanup detaches the proxy's programs from every device, including
// those of other processes. Foreign programs and qdiscs stay, and continue to work.
func TestCleanupOfDevices(t *testing.T) {
	others := len(tcxHooks()) + 3 // two filters and their qdisc
	for _, method := range []tc.Method{tc.TCX, tc.Clsact} {
		for name, shared := range map[string]bool{"by the process, alone": false, "by another process, beside others": true} {
			t.Run(method.String()+" "+name, func(t *testing.T) {
				if method == tc.TCX {
					kernel.Needs(t, capabilities.TCX)
				}
				e := newEdge(t, Options{TC: method, PodDevices: []string{"pod+"}})
				e.use(t, serve(t, e.here), serve(t, e.there))
				if shared {
					e.addForeign(t)
				}
				if err := e.tier.syncOptOuts(t.Context()); err != nil {
					t.Fatal(err)
				}
				for _, n := range e.entries() {
					e.visit(t, n)
				}
				ours := append(objectsOf(t, e.tier), packetObjectsOf(t, e.tier)...)
				before := e.onDevices(t)
				foreign := slices.DeleteFunc(slices.Clone(before), func(s string) bool {
					return !strings.Contains(s, "foreign") && !(shared && s == lab.Uplink+" qdisc clsact")
				})
				// The proxy has programs on two devices, in both directions.
				if len(before)-len(foreign) < 4 || shared != (len(foreign) == others) {
					t.Fatalf("attached to devices:\n%s", strings.Join(before, "\n"))
				}

				var err error
				if !shared {
					err = e.tier.Cleanup(t.Context())
					e.close()
				} else {
					e.close()
					err = cleanupOn(e.at)
				}
				if err != nil {
					t.Fatal(err)
				}
				if got := e.onDevices(t); !slices.Equal(got, foreign) {
					t.Errorf("still attached:\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(foreign, "\n"))
				}
				cgroup, err := datapath.OpenCgroup(e.at.CgroupPath())
				if err != nil {
					t.Fatal(err)
				}
				defer cgroup.Close()
				if found, err := datapath.FindAttached(cgroup); err != nil || len(found) > 0 {
					t.Errorf("still attached to the cgroup: %v, %v", found, err)
				}
				waitFor(t, "the proxy's programs and maps to be freed", func() bool {
					runtime.GC() // see TestCleanup
					return len(existing(ours)) == 0
				})
			})
		}
	}
}

// packetObjectsOf returns the packet programs of a tier, and the maps that they use.
func packetObjectsOf(t testing.TB, tier *Tier) (list []object) {
	t.Helper()
	for _, programs := range tier.devices.Loaded {
		for _, p := range programs {
			info, err := p.Info()
			if err != nil {
				t.Fatal(err)
			}
			id, _ := info.ID()
			list = append(list, object{program: id})
			maps, _ := info.MapIDs()
			for _, id := range maps {
				list = append(list, object{m: id})
			}
		}
	}
	return list
}

// tcxHooks returns the TCX hooks of a device, or none if the kernel lacks TCX.
func tcxHooks() []ciliumebpf.AttachType {
	if !kernel.Has(capabilities.TCX) {
		return nil
	}
	return []ciliumebpf.AttachType{ciliumebpf.AttachTCXIngress, ciliumebpf.AttachTCXEgress}
}

// onDevices lists the programs and qdiscs that are attached to devices of the node.
func (e *edge) onDevices(t testing.TB) (list []string) {
	t.Helper()
	err := e.at.Do(func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		for _, l := range links {
			name := l.Attrs().Name
			for _, direction := range tcxHooks() {
				found, err := link.QueryPrograms(link.QueryOptions{Target: l.Attrs().Index, Attach: direction})
				if err != nil {
					return err
				}
				for _, at := range found.Programs {
					text, err := programName(at.ID)
					if err != nil {
						return err
					}
					list = append(list, fmt.Sprintf("%s %s %s", name, direction, text))
				}
			}
			for side, parent := range map[string]uint32{"ingress": netlink.HANDLE_MIN_INGRESS, "egress": netlink.HANDLE_MIN_EGRESS} {
				filters, err := netlink.FilterList(l, parent)
				if err != nil {
					return err
				}
				for _, f := range filters {
					list = append(list, fmt.Sprintf("%s filter %s %s", name, side, f.(*netlink.BpfFilter).Name))
				}
			}
			qdiscs, err := netlink.QdiscList(l)
			if err != nil {
				return err
			}
			for _, q := range qdiscs {
				if q.Type() == "clsact" {
					list = append(list, name+" qdisc clsact")
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(list)
	return list
}

func programName(id ciliumebpf.ProgramID) (string, error) {
	p, err := ciliumebpf.NewProgramFromID(id)
	if err != nil {
		return "", err
	}
	defer p.Close()
	info, err := p.Info()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("%s %d", info.Name, id), nil
}

// addForeign attaches foreign programs to the uplink, by TCX and by clsact.
func (e *edge) addForeign(t testing.TB) {
	t.Helper()
	p, err := ciliumebpf.NewProgram(&ciliumebpf.ProgramSpec{
		Name: "foreign", Type: ciliumebpf.SchedCLS, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, -1), asm.Return()}, // next
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	uplink, err := e.at.Netlink().LinkByName(lab.Uplink)
	if err != nil {
		t.Fatal(err)
	}
	index := uplink.Attrs().Index
	for _, direction := range tcxHooks() {
		var l link.Link
		err := e.at.Do(func() (err error) {
			l, err = link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: direction})
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	qdisc := &netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}}
	if err := e.at.Netlink().QdiscReplace(qdisc); err != nil {
		t.Fatal(err)
	}
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		err := e.at.Netlink().FilterAdd(&netlink.BpfFilter{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index, Parent: parent, Priority: 1, Handle: 1, Protocol: unix.ETH_P_ALL},
			Fd:          p.FD(), Name: "foreign", DirectAction: true,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestCleanupBesideFailures: while programs cannot be detached from a device, those on the cgroup
// stay, which tells a later cleanup that something is left. No connection is served.
func TestCleanupBesideFailures(t *testing.T) {
	e := newEdge(t, Options{})
	inside := e.at.Pod("inside")
	e.use(t, serve(t, e.here), serve(t, e.there))
	e.close()
	cgroup, err := datapath.OpenCgroup(e.at.CgroupPath())
	if err != nil {
		t.Fatal(err)
	}
	defer cgroup.Close()
	refused := errors.New("refused")
	err = e.at.Do(func() error {
		_, err := removal.Programs(cgroup, func() ([]string, error) { return nil, refused })
		return err
	})
	if !errors.Is(err, refused) {
		t.Errorf("cleanup: %v", err)
	}
	if there, err := removal.Attached(e.at.CgroupPath()); !there || err != nil {
		t.Errorf("Attached does not report the remaining programs: %v", err)
	}
	for network, to := range targets() {
		if r, err := inside.Ask(shortly(t), network[:3], to); err == nil {
			t.Errorf("%s was answered by %s", network, r.Server)
		}
	}
	for _, n := range e.entries() {
		if r, err := e.client.Ask(shortly(t), n.network, n.to); err == nil {
			t.Errorf("%s was answered by %s", n, r.Server)
		}
	}
	if err := cleanupOn(e.at); err != nil {
		t.Error(err)
	}
	if there, err := removal.Attached(e.at.CgroupPath()); there || err != nil {
		t.Errorf("programs are attached to the cgroup: %v %v", there, err)
	}
	if left := e.onDevices(t); len(left) > 0 {
		t.Errorf("still attached to devices: %v", left)
	}
}
