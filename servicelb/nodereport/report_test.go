// SPDX-License-Identifier: Apache-2.0

package nodereport

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"reflect"
	"strconv"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestProbed(t *testing.T) {
	condition := func(status metav1.ConditionStatus, message string) []metav1.Condition {
		return []metav1.Condition{{Type: ConditionAdvertised, Status: status, Message: "192.0.2.1"}, {Type: ConditionProbing, Status: status, Message: message}}
	}
	for _, test := range []struct {
		name       string
		conditions []metav1.Condition
		want       string
	}{
		{"none", nil, "[]"},
		{"two, and what is no address", condition(metav1.ConditionTrue, "10.0.0.2, fd00::1,10.0.0.1 nonsense fe80::1%eth0, 10.0.0.1"), "[10.0.0.1 10.0.0.2 fd00::1]"},
		{"not true", condition(metav1.ConditionFalse, "10.0.0.1"), "[]"},
	} {
		t.Run(test.name, func(t *testing.T) {
			list := Probed(test.conditions)
			if list == nil {
				list = []netip.Addr{}
			}
			if got := text(list); got != test.want {
				t.Errorf("got %s, want %s", got, test.want)
			}
		})
	}
}

func text(list []netip.Addr) string {
	s := "["
	for i, a := range list {
		if i > 0 {
			s += " "
		}
		s += a.String()
	}
	return s + "]"
}

func TestListenerAt(t *testing.T) {
	all4, all6, one := netip.IPv4Unspecified(), netip.IPv6Unspecified(), netip.MustParseAddr("10.0.0.1")
	for _, test := range []struct {
		listener Listener
		want     bool
	}{
		{Listener{"TCP", one, 80}, true},
		{Listener{"TCP", all4, 80}, true},
		{Listener{"TCP", all6, 80}, false},
		{Listener{"UDP", one, 80}, false},
		{Listener{"TCP", one, 81}, false},
		{Listener{"TCP", netip.MustParseAddr("10.0.0.2"), 80}, false},
	} {
		if got := test.listener.At("TCP", one, 80); got != test.want {
			t.Errorf("%+v: %v", test.listener, got)
		}
	}
}

// get asks for the report.
func get(t *testing.T, url, after string) (r Report) {
	t.Helper()
	response, err := http.Get(url + Path + "?after=" + after)
	if err != nil {
		t.Error(err)
		return r
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err == nil {
		err = json.Unmarshal(body, &r)
	}
	if err != nil {
		t.Error(err)
	}
	return r
}

// TestServer: a request waits for a newer report, and a report with the same content is not newer. Requests over the limit are answered immediately.
func TestServer(t *testing.T) {
	s, mux := NewServer(), http.NewServeMux()
	s.Install(mux)
	server := httptest.NewServer(mux)
	defer server.Close()
	if response, err := http.Get(server.URL + Path); err != nil || response.StatusCode != http.StatusServiceUnavailable {
		t.Fatalf("before the first report: %+v, %v", response, err)
	} else {
		response.Body.Close()
	}
	s.Set(Report{})
	first := get(t, server.URL, "")
	if first.Version == "" || get(t, server.URL, "").Version != first.Version {
		t.Fatalf("first report: %+v", first)
	}
	at := netip.MustParseAddr("10.0.0.1")
	web := func(fault string) *Service {
		return &Service{Ports: []Port{{Protocol: "TCP", Port: 80, Served: []Served{{Address: at, Fault: fault}}}}}
	}
	report := Report{Services: map[string]*Service{"ns/web": web("")}}
	var all sync.WaitGroup
	for range maxWaiting {
		all.Go(func() {
			if r := get(t, server.URL, first.Version); r.Version == first.Version {
				t.Error("an answer did not wait for the newer report")
			}
		})
	}
	deadline := time.Now().Add(10 * time.Second)
	for len(s.waiting) < maxWaiting && time.Now().Before(deadline) {
		time.Sleep(time.Millisecond)
	}
	if r := get(t, server.URL, first.Version); r.Version != first.Version {
		t.Errorf("one answer too many waited: %+v", r)
	}
	s.Set(Report{})
	s.Set(report)
	all.Wait()
	second := get(t, server.URL, first.Version)
	s.Set(report)
	if third := get(t, server.URL, ""); third.Version != second.Version {
		t.Errorf("the same report has versions %s and %s", second.Version, third.Version)
	}
	second = *first.Apply(&second)
	if p := second.Services["ns/web"].Find("TCP", 80).At(at); p == nil || p.Fault != "" {
		t.Errorf("port %+v", p)
	}
	if p := second.Services["ns/web"].Find("UDP", 80).At(at); p != nil {
		t.Errorf("port %+v", p)
	}
	// What changed since, over several reports, for one that is known, and a whole one for another.
	s.Set(Report{Services: map[string]*Service{"ns/web": web(""), "ns/a": web("a")}})
	s.Set(Report{Services: map[string]*Service{"ns/web": web(""), "ns/a": web("b"), "ns/c": web("")}})
	s.Set(Report{Services: map[string]*Service{"ns/web": web(""), "ns/a": web("b")}, Listeners: []Listener{{"TCP", at, 80}}})
	change := get(t, server.URL, second.Version)
	if _, there := change.Services["ns/web"]; there || len(change.Services) != 2 {
		t.Errorf("change %+v", change)
	}
	whole, now := get(t, server.URL, "another"), second.Apply(&change)
	if whole.After != "" || now == nil || !reflect.DeepEqual(whole, *now) || whole.Services["ns/c"] != nil {
		t.Errorf("a change leads to\n%+v\nand the report is\n%+v", now, whole)
	}
	if first.Apply(&change) != nil {
		t.Error("a change of another report is taken")
	}
	for i := range history + 1 {
		s.Set(Report{Services: map[string]*Service{"ns/a": web(strconv.Itoa(i))}})
	}
	if r := get(t, server.URL, second.Version); r.After != "" || len(r.Services) != 1 {
		t.Errorf("long ago: %+v", r)
	}
	if NewServer().process == s.process {
		t.Error("two processes have the same version")
	}
	s.End()
	s.End()
	s.Set(Report{})
	get(t, server.URL, get(t, server.URL, "").Version) // does not wait
}
