// SPDX-License-Identifier: Apache-2.0

// Package podns finds the network namespaces of pods by the cgroups that kubelet makes for them.
package podns

import (
	"strings"
	"time"

	"github.com/tandem-proxy/tandem/kernel/netns"
	"github.com/tandem-proxy/tandem/proxier"
)

// Times between two searches: while pods are missing that are new, and otherwise. A pod keeps its UID if
// its sandbox is made again, and its processes may make further namespaces.
const (
	missingInterval = time.Second
	usualInterval   = 5 * time.Second
	// newFor is how long a pod that is missing counts as new.
	newFor = time.Minute
	// startsWithin is how long a running pod may be missing before it is reported.
	startsWithin = 10 * time.Second
)

// Finder finds and remembers the network namespaces of pods. The zero value searches nothing; see New.
type Finder struct {
	search func(keyOf func(path string) string) (map[string][]uint64, error)
	// Now is the time; tests change it.
	Now func() time.Time

	found    map[string][]uint64  // by the UID in names of cgroups
	since    map[string]time.Time // when a pod became missing, and was running
	searched time.Time
	err      error // of the last search
}

// New makes a Finder of processes under procRoot. Its methods are called in the node's network namespace.
func New(procRoot string) *Finder {
	return &Finder{Now: time.Now, search: func(keyOf func(string) string) (map[string][]uint64, error) {
		return netns.InCgroups(procRoot, keyOf)
	}}
}

// Found is what is known about some pods.
type Found struct {
	// Cookies are those of the network namespaces of the pods, with a pod of each.
	Cookies map[uint64]proxier.OptedOutPod
	// Missing says that some pods were not found.
	Missing bool
	// Late are running pods that should have been found by now, and Err is an error that may be why.
	Late []proxier.OptedOutPod
	Err  error
}

// Find returns the network namespaces of pods, and searches for those that it does not know.
func (f *Finder) Find(pods []proxier.OptedOutPod) Found {
	if len(pods) == 0 {
		f.found, f.since, f.searched, f.err = nil, nil, time.Time{}, nil
		return Found{}
	}
	now := f.Now()
	if f.due(now, pods) {
		wanted := map[string]bool{}
		for _, p := range pods {
			wanted[p.CgroupUID] = true
		}
		f.found, f.err = f.search(func(path string) string { return uidOf(path, wanted) })
		f.searched = now
	}
	result := Found{Cookies: map[uint64]proxier.OptedOutPod{}, Err: f.err}
	since := map[string]time.Time{}
	for _, p := range pods {
		for _, cookie := range f.found[p.CgroupUID] {
			result.Cookies[cookie] = p
		}
		if len(f.found[p.CgroupUID]) > 0 {
			continue
		}
		result.Missing = true
		began, before := f.since[p.CgroupUID]
		if !before {
			began = now
		}
		since[p.CgroupUID] = began
		if p.Running && now.Sub(began) >= startsWithin {
			result.Late = append(result.Late, p)
		}
	}
	f.since = since
	return result
}

// due reports whether it is time for a search.
func (f *Finder) due(now time.Time, pods []proxier.OptedOutPod) bool {
	interval := usualInterval
	for _, p := range pods {
		began, known := f.since[p.CgroupUID]
		switch {
		case len(f.found[p.CgroupUID]) > 0:
		case !known:
			return true // it was not searched for
		case now.Sub(began) < newFor:
			interval = missingInterval
		}
	}
	return now.Sub(f.searched) >= interval
}

// uidOf returns the UID of the pod, out of those wanted, whose cgroup is on a path, or nothing. Names of such cgroups
// end in pod<UID> with the cgroup driver cgroupfs, and in pod<UID>.slice with the driver systemd, where _ stands for
// each - of the UID.
func uidOf(path string, wanted map[string]bool) string {
	for name := range strings.SplitSeq(path, "/") {
		unit, isSlice := strings.CutSuffix(name, ".slice")
		at := strings.LastIndex(unit, "pod")
		if at < 0 {
			continue
		}
		uid := unit[at+len("pod"):]
		if isSlice {
			uid = strings.ReplaceAll(uid, "_", "-")
		}
		if uid != "" && wanted[uid] {
			return uid
		}
	}
	return ""
}
