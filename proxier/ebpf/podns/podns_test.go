// SPDX-License-Identifier: Apache-2.0

package podns

import (
	"errors"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/tandem-proxy/tandem/proxier"
)

const uid = "0a1b2c3d-1111-4222-8333-444455556666"

func TestUIDOf(t *testing.T) {
	const slice = "0a1b2c3d_1111_4222_8333_444455556666.slice"
	for path, want := range map[string]string{
		"/kubepods/pod" + uid + "/0123abcd":                                                               uid,
		"/kubepods/besteffort/pod" + uid:                                                                  uid,
		"/kubepods.slice/kubepods-pod" + slice + "/cri-containerd-0123.scope":                             uid,
		"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + slice:                         uid,
		"/../../kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod" + slice:                        uid,
		"/kubepods/podother/kubepods/pod" + uid + "/x":                                                    uid,
		"/kubepods/pod" + uid[1:]:                                                                         "",
		"/kubepods/pod0" + uid:                                                                            "",
		"/kubepods.slice/kubepods-pod" + uid[:8] + ".slice":                                               "",
		"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podffff_1111_4222_8333_444455556666": "",
		"/kubepods/pod":        "",
		"/system.slice/podman": "",
		"/":                    "",
		"":                     "",
	} {
		if got := uidOf(path, map[string]bool{uid: true}); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	// A static pod has a hash.
	if got := uidOf("/kubepods.slice/kubepods-pod9f8e.slice/x", map[string]bool{"9f8e": true}); got != "9f8e" {
		t.Errorf("static pod: %q", got)
	}
}

// TestFind: pods that are missing are searched for often while they are new; all others from time to time. One
// that runs and is not found is reported.
func TestFind(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	there := map[string][]uint64{}
	searches := 0
	var failing error
	f := &Finder{Now: func() time.Time { return now }, search: func(keyOf func(string) string) (map[string][]uint64, error) {
		searches++
		found := map[string][]uint64{}
		for uid, cookies := range there {
			if keyOf("/kubepods/pod"+uid) == uid {
				found[uid] = cookies
			}
		}
		return found, failing
	}}
	a, b := proxier.OptedOutPod{CgroupUID: "a", Running: true}, proxier.OptedOutPod{CgroupUID: "b"}
	step := func(what string, after time.Duration, pods []proxier.OptedOutPod, searched bool, missing bool, late int, want ...uint64) {
		t.Helper()
		now = now.Add(after)
		was := searches
		got := f.Find(pods)
		if cookies := slices.Sorted(maps.Keys(got.Cookies)); !slices.Equal(cookies, want) || got.Missing != missing || len(got.Late) != late {
			t.Errorf("%s: %v, missing %v, %d late; want %v, %v, %d", what, cookies, got.Missing, len(got.Late), want, missing, late)
		}
		if (searches > was) != searched {
			t.Errorf("%s: searched %v, want %v", what, searches > was, searched)
		}
	}
	both := []proxier.OptedOutPod{a, b}
	step("none", 0, nil, false, false, 0)
	there["b"], there["other"] = []uint64{2}, []uint64{9}
	step("two", 0, both, true, true, 0, 2)
	step("soon", missingInterval/2, both, false, true, 0, 2)
	step("missing", missingInterval/2, both, true, true, 0, 2)
	step("late", startsWithin, both, true, true, 1, 2)
	there["a"] = []uint64{1, 3}
	step("found", missingInterval, both, true, false, 0, 1, 2, 3)
	step("then", missingInterval, both, false, false, 0, 1, 2, 3)
	there["a"] = []uint64{4} // its sandbox was made again
	step("usual", usualInterval, both, true, false, 0, 2, 4)
	failing = errors.New("permission denied")
	step("not all can be read", usualInterval, both, true, false, 0, 2, 4)
	failing = nil
	step("all can", usualInterval, both, true, false, 0, 2, 4)
	delete(there, "b")
	step("it ends", usualInterval, both, true, true, 0, 4)
	step("it is not new any more", newFor, both, true, true, 0, 4)
	step("seldom", missingInterval, both, false, true, 0, 4)
	step("none again", 0, nil, false, false, 0)
}
