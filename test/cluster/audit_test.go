// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRequestsOf(t *testing.T) {
	const log = `{"verb":"watch","requestURI":"/api/v1/services?watch=true","user":{"username":"proxy"},"objectRef":{"resource":"services"},"responseStatus":{"code":200},"annotations":{"authorization.k8s.io/decision":"allow"}}
{"verb":"watch","requestURI":"/api/v1/services?watch=true","user":{"username":"proxy"},"objectRef":{"resource":"services"},"responseStatus":{"code":200}}
{"verb":"create","requestURI":"/e","user":{"username":"proxy"},"objectRef":{"resource":"events","apiGroup":"events.k8s.io"},"responseStatus":{"code":201}}
{"verb":"get","requestURI":"/n","user":{"username":"proxy"},"objectRef":{"resource":"nodes","subresource":"status"},"responseStatus":{"code":200}}
{"verb":"get","requestURI":"/n","user":{"username":"proxy"},"objectRef":{"resource":"nodes"},"responseStatus":{"code":404}}
{"verb":"list","requestURI":"/p","user":{"username":"proxy"},"objectRef":{"resource":"pods"},"responseStatus":{"code":403,"message":"no"}}
{"verb":"list","requestURI":"/q","user":{"username":"proxy"},"annotations":{"authorization.k8s.io/decision":"forbid"}}
{"verb":"list","requestURI":"/r","user":{"username":"other"},"responseStatus":{"code":403}}
{"verb":"list","requestURI":"/s","user":{},"responseStatus":{"code":401,"message":"who"}}
{"verb":"list","user":{"userna`
	path := filepath.Join(t.TempDir(), "audit.log")
	if err := os.WriteFile(path, []byte(log), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := requestsOf(path, "proxy")
	if err != nil {
		t.Fatal(err)
	}
	want := requests{
		Granted: []string{"create events.events.k8s.io", "get nodes/status", "watch services"},
		Refused: []string{`list /p by "proxy": 403 no`, `list /q by "proxy": 0 `, `list /s by "": 401 who`},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}
