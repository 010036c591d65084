// SPDX-License-Identifier: Apache-2.0

package health

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	clocktesting "k8s.io/utils/clock/testing"

	"github.com/tandem-proxy/tandem/proxier"
)

func TestReadiness(t *testing.T) {
	clock, mux := clocktesting.NewFakePassiveClock(begin), http.NewServeMux()
	healthy, serves, probes, codes := true, true, 0, 0
	r := NewReadiness(ReadinessOptions{
		Healthy: func() bool { return healthy },
		Probe: func(context.Context) []Check {
			probes++
			return []Check{{Name: "ebpf-IPv4", OK: serves, Detail: "somewhere"}}
		},
		Count: func(code int) { codes += code },
		Clock: clock,
	})
	r.Install(mux)
	check := func(what string, code, probed int, body string) {
		t.Helper()
		w := httptest.NewRecorder()
		codes = 0
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/readyz", nil))
		if w.Code != code || codes != code || w.Body.String() != body || probes != probed {
			t.Errorf("%s: answer %d %s, counted %d, probes %d; want %d %s and %d probes", what, w.Code, w.Body, codes, probes, code, body, probed)
		}
	}
	const (
		programmed = `{"name":"programmed","ok":true}`
		keepsUp    = `{"name":"keeps-up","ok":true}`
	)
	check("at first", 503, 0, `{"ready":false,"checks":[{"name":"programmed","ok":false},`+keepsUp+`]}`)
	r.Synced(proxier.SyncInfo{Err: errors.New("failed")})
	check("after a sync that failed", 503, 0, `{"ready":false,"checks":[{"name":"programmed","ok":false},`+keepsUp+`]}`)
	r.Synced(proxier.SyncInfo{})
	ready := `{"ready":true,"checks":[` + programmed + `,` + keepsUp + `,{"name":"ebpf-IPv4","ok":true,"detail":"somewhere"}]}`
	check("after a good one", 200, 1, ready)
	serves = false
	clock.SetTime(begin.Add(probeInterval - 1))
	check("asked again too soon", 200, 1, ready)
	clock.SetTime(begin.Add(probeInterval))
	check("when the kernel does not serve", 503, 2, `{"ready":false,"checks":[`+programmed+`,`+keepsUp+`,{"name":"ebpf-IPv4","ok":false,"detail":"somewhere"}]}`)
	serves, healthy = true, false
	clock.SetTime(begin.Add(time.Minute))
	check("when the proxy does not keep up", 503, 3, `{"ready":false,"checks":[`+programmed+`,{"name":"keeps-up","ok":false},{"name":"ebpf-IPv4","ok":true,"detail":"somewhere"}]}`)
	healthy = true
	r.Synced(proxier.SyncInfo{Err: errors.New("failed")})
	check("after a later sync failed", 200, 3, ready)
}
