// SPDX-License-Identifier: Apache-2.0

package status

import (
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/tandem-proxy/tandem/proxier"
)

func TestRecorder(t *testing.T) {
	var r Recorder
	var s Status
	r.Fill(&s)
	if d := cmp.Diff(Status{Problems: []Problem{}}, s); d != "" {
		t.Errorf("before anything happened (-want +got):\n%s", d)
	}
	at := time.Unix(1000, 0)
	r.Synced(proxier.SyncInfo{Start: at, End: at.Add(time.Second), Full: true})
	r.Synced(proxier.SyncInfo{Start: at.Add(2 * time.Second), End: at.Add(2500 * time.Millisecond), Err: errors.New("no luck")})
	r.Problem("Service", "AddressConflict")
	r.Problem("Node", "Unsupported")
	r.Problem("Node", "Unsupported")
	r.Fill(&s)
	success := at.Add(time.Second)
	want := Status{
		LastSync: &Sync{End: at.Add(2500 * time.Millisecond), Duration: 0.5, Error: "no luck"}, LastSuccess: &success,
		Problems: []Problem{{"Node", "Unsupported", 2}, {"Service", "AddressConflict", 1}},
	}
	if d := cmp.Diff(want, s); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}
