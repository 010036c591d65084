// SPDX-License-Identifier: Apache-2.0

package health

import (
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
)

const timeout = time.Minute

var begin = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

type fixture struct {
	*Health
	clock *clocktesting.FakePassiveClock
	mux   *http.ServeMux
	codes map[string][]int
}

func newFixture() *fixture {
	f := &fixture{clock: clocktesting.NewFakePassiveClock(begin), mux: http.NewServeMux(), codes: map[string][]int{}}
	f.Health = New(Options{
		Timeout: timeout, Families: []proxier.Family{proxier.IPv4, proxier.IPv6}, Clock: f.clock,
		Healthz: func(code int) { f.codes["healthz"] = append(f.codes["healthz"], code) },
		Livez:   func(code int) { f.codes["livez"] = append(f.codes["livez"], code) },
	})
	f.Install(f.mux)
	return f
}

// at moves the clock to some time after the beginning.
func (f *fixture) at(d time.Duration) time.Time {
	f.clock.SetTime(begin.Add(d))
	return begin.Add(d)
}

func (f *fixture) get(path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	f.mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w
}

// synced is a sync that ran between two times.
func (f *fixture) synced(from, to time.Duration, err error) {
	f.at(to)
	f.Synced(proxier.SyncInfo{Start: begin.Add(from), End: begin.Add(to), Err: err})
}

func TestHealthy(t *testing.T) {
	failed := errors.New("failed")
	tests := []struct {
		name string
		do   func(*fixture)
		at   time.Duration
		want bool
	}{
		{"starting up", func(*fixture) {}, time.Hour, true},
		{"nothing to do for long", func(f *fixture) { f.Start() }, time.Hour, true},
		{"queued just now", func(f *fixture) { f.Queued(f.at(0)) }, timeout - 1, true},
		{"queued too long", func(f *fixture) { f.Queued(f.at(0)) }, timeout, false},
		{"another timeout", func(f *fixture) { f.Queued(f.at(0)); f.SetTimeout(2 * timeout) }, timeout, true},
		{"synced in time", func(f *fixture) { f.Queued(f.at(0)); f.synced(1, 2, nil) }, time.Hour, true},
		{"a failed sync changes nothing", func(f *fixture) { f.Queued(f.at(0)); f.synced(1, 2, failed) }, timeout, false},
		{"recovered", func(f *fixture) { f.Queued(f.at(0)); f.synced(1, 2, failed); f.synced(timeout, timeout+1, nil) }, time.Hour, true},
		{"queued while syncing", func(f *fixture) { f.Queued(f.at(0)); f.Queued(f.at(10)); f.synced(5, 20, nil) }, 10 + timeout, false},
		{"queued while syncing, not too long", func(f *fixture) { f.Queued(f.at(0)); f.Queued(f.at(10)); f.synced(5, 20, nil) }, 9 + timeout, true},
		{"the oldest counts", func(f *fixture) { f.Queued(f.at(0)); f.synced(1, 2, failed); f.Queued(f.at(timeout - 2)) }, timeout, false},
		{
			"failed while more was queued, then synced",
			func(f *fixture) {
				f.Queued(f.at(0))
				f.Queued(f.at(10))
				f.synced(5, 20, failed)
				f.Queued(f.at(30))
				f.synced(25, 40, nil)
				f.synced(45, 50, nil)
			},
			time.Hour, true,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture()
			tt.do(f)
			f.at(tt.at)
			if got := f.Healthy(); got != tt.want {
				t.Errorf("healthy is %v, want %v", got, tt.want)
			}
			want := http.StatusOK
			if !tt.want {
				want = http.StatusServiceUnavailable
			}
			for _, path := range []string{"/healthz", "/livez"} {
				if got := f.get(path).Code; got != want {
					t.Errorf("%s answers %d, want %d", path, got, want)
				}
			}
			if d := cmp.Diff(map[string][]int{"healthz": {want}, "livez": {want}}, f.codes); d != "" {
				t.Errorf("counted (-want +got):\n%s", d)
			}
		})
	}
}

func TestBodies(t *testing.T) {
	const (
		first = "2026-01-02T03:04:05Z"
		later = "2026-01-02T03:05:05Z"
		last  = "2026-01-02T03:06:05Z"
	)
	f := newFixture()
	check := func(path, want string) {
		t.Helper()
		w := f.get(path)
		if got := w.Body.String(); got != want {
			t.Errorf("%s answers\n%s, want\n%s", path, got, want)
		}
		if got := w.Header().Get("Content-Type"); got != "application/json" {
			t.Errorf("%s has content type %q", path, got)
		}
		if got := w.Header().Get("X-Content-Type-Options"); got != "nosniff" {
			t.Errorf("%s has X-Content-Type-Options %q", path, got)
		}
	}
	check("/healthz", `{"lastUpdated":"`+first+`","currentTime":"`+first+`","nodeEligible":true,"healthy":true,"status":{}}`)
	f.Start()
	f.Queued(f.at(0))
	f.at(timeout)
	family := `{"lastUpdated":"` + first + `","healthy":false}`
	check("/healthz", `{"lastUpdated":"`+first+`","currentTime":"`+later+`","nodeEligible":true,"healthy":false,"status":{"IPv4":`+family+`,"IPv6":`+family+`}}`)
	f.synced(timeout, timeout, nil)
	f.at(timeout + time.Minute)
	family = `{"lastUpdated":"` + later + `","healthy":true}`
	check("/livez", `{"lastUpdated":"`+last+`","currentTime":"`+last+`","healthy":true,"status":{"IPv4":`+family+`,"IPv6":`+family+`}}`)
	f.OnNodeDelete(&v1.Node{})
	check("/healthz", `{"lastUpdated":"`+later+`","currentTime":"`+last+`","nodeEligible":false,"healthy":true,"status":{"IPv4":`+family+`,"IPv6":`+family+`}}`)
}

func TestEligibility(t *testing.T) {
	tainted := &v1.Node{Spec: v1.NodeSpec{Taints: []v1.Taint{{Key: "other"}, {Key: "ToBeDeletedByClusterAutoscaler"}}}}
	deleted := &v1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &metav1.Time{Time: begin}}}
	tests := []struct {
		name string
		do   func(*fixture)
		want int
	}{
		{"no Node yet", func(*fixture) {}, 200},
		{"usual", func(f *fixture) { f.OnNodeAdd(&v1.Node{}); f.OnNodeSynced() }, 200},
		{"about to be removed", func(f *fixture) { f.OnNodeAdd(tainted) }, 503},
		{"kept after all", func(f *fixture) { f.OnNodeAdd(tainted); f.OnNodeUpdate(tainted, &v1.Node{}) }, 200},
		{"being deleted", func(f *fixture) { f.OnNodeUpdate(&v1.Node{}, deleted) }, 503},
		{"gone", func(f *fixture) { f.OnNodeAdd(&v1.Node{}); f.OnNodeDelete(&v1.Node{}) }, 503},
		{"back", func(f *fixture) { f.OnNodeDelete(&v1.Node{}); f.OnNodeAdd(&v1.Node{}) }, 200},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			f := newFixture()
			tt.do(f)
			if got := f.get("/healthz").Code; got != tt.want {
				t.Errorf("/healthz answers %d, want %d", got, tt.want)
			}
			if got := f.get("/livez").Code; got != 200 {
				t.Errorf("/livez answers %d: a drained node's proxy would be restarted", got)
			}
		})
	}
}
