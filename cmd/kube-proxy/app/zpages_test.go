// SPDX-License-Identifier: Apache-2.0

package app

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestZPages: text for who asks for nothing else, and objects of each version by name.
func TestZPages(t *testing.T) {
	o, err := complete(t, "", "--proxy-mode=ebpf", "--hostname-override=node1")
	if err != nil {
		t.Fatal(err)
	}
	p := &proxy{opts: o, started: time.Now().Add(-3*time.Hour - 4*time.Minute - 5*time.Second)}
	mux := http.NewServeMux()
	p.installZPages(mux)
	const (
		notAcceptable = "406 application/json  " + `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"only the following media types are accepted: application/json, application/yaml, text/plain","reason":"NotAcceptable","code":406}`
		warning       = "\nWarning: This endpoint is not meant to be machine parseable, has no formatting compatibility guarantees and is for debugging purposes only.\n"
		status        = "200 text/plain; charset=utf-8  \nkube-proxy statusz" + warning + "\nStarted: TIME\nUp: 3 hr 04 min 05 sec\nGo version: GO\nBinary version: VERSION\nEmulation version: 1.37\nPaths: /configz /flagz /healthz /metrics /proxyMode"
		object        = `"metadata":{"name":"kube-proxy"},"startTime":"TIME","uptimeSeconds":11045,"goVersion":"GO","binaryVersion":"VERSION","emulationVersion":"1.37","paths":["/configz","/flagz","/healthz","/metrics","/proxyMode"]}`
	)
	for _, tt := range []struct{ path, accept, want string }{
		{"/statusz", "", status},
		{"/statusz", "*/*", status},
		{"/statusz", "text/plain;q=0.9", status},
		{"/statusz", "application/json", notAcceptable},
		{"/statusz", "text/html", notAcceptable},
		{"/statusz", "application/json;v=v1beta1;g=config.k8s.io;as=Flagz", notAcceptable},
		{"/statusz", "application/json;v=v2;g=config.k8s.io;as=Statusz", notAcceptable},
		{
			"/statusz", "text/html, application/json;v=v1beta1;g=config.k8s.io;as=Statusz, text/plain",
			`200 application/json;g=config.k8s.io;v=v1beta1;as=Statusz  {"kind":"Statusz","apiVersion":"config.k8s.io/v1beta1",` + object,
		},
		{
			"/statusz", "application/json;v=v1alpha1;g=config.k8s.io;as=Statusz",
			`200 application/json;g=config.k8s.io;v=v1alpha1;as=Statusz 299 - "This version of the statusz endpoint is deprecated. Please use a newer version." {"kind":"Statusz","apiVersion":"config.k8s.io/v1alpha1",` + object,
		},
		{"/flagz", "text/plain", "200 text/plain; charset=utf-8  \nkube-proxy flagz" + warning + "FLAGS"},
		{
			"/flagz", "application/yaml;v=v1beta1;g=config.k8s.io;as=Flagz",
			"200 application/yaml;g=config.k8s.io;v=v1beta1;as=Flagz  apiVersion: config.k8s.io/v1beta1\nflags:\nFLAGS\nkind: Flagz\nmetadata:\n  name: kube-proxy",
		},
	} {
		w, r := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, tt.path, nil)
		r.Header.Set("Accept", tt.accept)
		mux.ServeHTTP(w, r)
		got := fmt.Sprintf("%d %s %s %s", w.Code, w.Header().Get("Content-Type"), w.Header().Get("Warning"), strings.TrimRight(w.Body.String(), "\n"))
		for _, is := range []struct{ text, name string }{
			{`(Started: |startTime":")[^"\n]+`, "${1}TIME"}, {`(Go version: |goVersion":")[^"\n]+`, "${1}GO"}, {`(Binary version: |binaryVersion":")[^"\n]+`, "${1}VERSION"},
			{`(?s) *bind-address(=|: ).*\n *proxy-mode(=|: )ebpf\n.*\n *write-config-to[^\n]*`, "FLAGS"},
		} {
			got = regexp.MustCompile(is.text).ReplaceAllString(got, is.name)
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s, accepting %q (-want +got):\n%s", tt.path, tt.accept, d)
		}
	}
}
