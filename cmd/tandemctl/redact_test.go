// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// TestRedact: secrets are replaced in each notation, and what an operator has to read stays.
func TestRedact(t *testing.T) {
	const pem = "-----BEGIN RSA PRIVATE KEY-----\nhunter2\nhunter2==\n-----END RSA PRIVATE KEY-----\n"
	for _, test := range []struct{ text, want string }{
		{"client-key-data: hunter2==\nnext", "client-key-data: [redacted]\nnext"},
		{"token=hunter2&x=1", "token=[redacted]&x=1"},
		{"--api-token hunter2 --bearer-token='hunter2' -v", "--api-token [redacted] --bearer-token=[redacted] -v"},
		{"AWS_SECRET_ACCESS_KEY=hunter2 X=1", "AWS_SECRET_ACCESS_KEY=[redacted] X=1"},
		{`{"password": "a \"hunter2\", b", "x": 1}`, `{"password": [redacted], "x": 1}`},
		{`body="{\"token\":\"a \\\"hunter2\\\" b\",\"x\":1}"`, `body="{\"token\":[redacted],\"x\":1}"`},
		{`example.com/api-key: 'hunter2'`, `example.com/api-key: [redacted]`},
		{`token: "hunter2`, `token: [redacted]`}, // cut off
		{`["--token","hunter2","-v"]`, `["--token",[redacted],"-v"]`},
		{`args=["--api-token" "hunter2" "-v"]`, `args=["--api-token" [redacted] "-v"]`},
		{`{\"args\":[\"--token\", \"hunter2\"]}`, `{\"args\":[\"--token\", [redacted]]}`},
		{`{"name":"DB_PASSWORD","value":"hunter2"},{"name":"A","value":"b"}`, `{"name":"DB_PASSWORD","value":[redacted]},{"name":"A","value":"b"}`},
		{`{name: DB_PASSWORD, value: hunter2}`, `{name: DB_PASSWORD, value: [redacted]}`},
		{`{"Authorization":["Basic hunter2="],"X-Auth-Token":["hunter2","hunter2"],"Accept":["a"]}`, `{"Authorization":["Basic [redacted]"],"X-Auth-Token":[redacted],"Accept":["a"]}`},
		{"map[Authorization:[Basic hunter2] Accept:[a]]", "map[Authorization:[Basic [redacted]] Accept:[a]]"},
		{`I1128 19:34:30.214598 1 a.go:3] token: hunter2 of b`, `I1128 19:34:30.214598 1 a.go:3] token: [redacted] of b`},
		{`x="a:\n  token: hunter2\n" {token: hunter2, b: c}`, `x="a:\n  token: [redacted]" {token: [redacted], b: c}`},
		{"> X-Auth-Token: hunter2", "> X-Auth-Token: [redacted]"},
		{"password: )hunter2 hunter2\nnext", "password: [redacted]\nnext"},
		{"a:\n  token:\n    hunter2\n\n    hunter2\n  next: b\n", "a:\n  token:\n    [redacted]\n\n    [redacted]\n  next: b\n"},
		{"- token: |-\r\n    hunter2\r\n  next: b\r\n", "- token: [redacted]\r\n    [redacted]\r\n  next: b\r\n"},
		{"- passwords:\n  - hunter2\n- next: b\n", "- passwords:\n  - [redacted]\n- next: b\n"},
		{"- name: DB_PASSWORD\n  value: hunter2\n- name: A\n  value: b\n", "- name: DB_PASSWORD\n  value: [redacted]\n- name: A\n  value: b\n"},
		{"- --token\n- hunter2\n- -v\n", "- --token\n- [redacted]\n- -v\n"},
		{"  \"--token\",\n  \"hunter2\",\n  \"-v\"\n", "  \"--token\",\n  [redacted]\n  \"-v\"\n"},
		{"  \"Authorization\": [\n    \"Basic hunter2\"\n  ],\n  \"next\": 1\n", "  \"Authorization\": [\n    [redacted]\n  ],\n  \"next\": 1\n"},
		{"2024-01-01T00:00:00.1Z stderr F token: >\n2024-01-01T00:00:00.1Z stderr F   hunter2\n2024-01-01T00:00:00.1Z stderr F next\n",
			"2024-01-01T00:00:00.1Z stderr F token: [redacted]\n2024-01-01T00:00:00.1Z stderr F   [redacted]\n2024-01-01T00:00:00.1Z stderr F next\n"},
		{"Authorization: Bearer hunter2.x-y\r\n", "Authorization: Bearer [redacted]\r\n"},
		{"a bearer hunter2", "a bearer [redacted]"},
		{"https://admin:hunter2@10.0.0.1:6443/api", "https://[redacted]@10.0.0.1:6443/api"},
		{"x eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJr.aHVudGVyMg y", "x [redacted] y"},
		{"k: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVkt y", "k: [redacted] y"},
		{"before\n" + pem + "after\n", "before\n[redacted]\nafter\n"},
		{"before\n" + pem[:50], "before\n[redacted]"},
		{pem[40:] + "after\n", "[redacted]\nafter\n"},
		{"a log: begins\n" + pem[32:] + "after\n", "a log: begins\n[redacted]\nafter\n"},
		{"a log: begins\nit ends with -----END PRIVATE KEY-----\n" + pem[32:] + "b: c\n", "a log: begins\n[redacted][redacted]\nb: c\n"},
		{`a="b" c="` + strings.ReplaceAll(pem[32:], "\n", `\n`) + `" d`, `a="b" c="[redacted]\n" d`},
		{"t stderr F a b\nt stderr F hunter2\nt stderr F -----END PRIVATE KEY-----\n", "t stderr F a b\n[redacted]\n"},
		{"token=hunter2 " + strings.ReplaceAll(pem+"x\n"+pem, "\n", "; ") + "token=hunter2", "token=[redacted] [redacted]; x; [redacted]; token=[redacted]"},
		{`key="` + strings.ReplaceAll(pem, "\n", `\n`) + `" after`, `key="[redacted]\n" after`},
	} {
		got := string(redact([]byte(test.text)))
		if got != test.want {
			t.Errorf("%q became %q, want %q", test.text, got, test.want)
		}
	}
	for _, text := range []string{
		`I1128 19:34:30.214598 1 proxier.go:342] "Service port over capacity" servicePortName="shop/token:http" map="tdm_backend"`,
		`-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "shop/secret:https cluster IP" -m tcp --dport 443 -j KUBE-SVC-ABCDEF`,
		`kubernetes_feature_enabled{name="KubeletServiceAccountTokenForCredentialProviders",stage="BETA"} 1`,
		`      "name": "api-secret",` + "\n" + `      "port": "https"`,
		"shop/token  https  TCP  10.96.0.10:443\n", "Authorization: Bearer <masked>", "basic checks of tokens passed", "",
		"failed to get a token: connection refused", `I1128 19:34:30.214598 1 a.go:3] "Failed to get secret: not found" err="get \"a\" token: timeout"`,
		"token:\nnext: a\n", "  secret: \n  next: a\n", `{"name":"shop","value":"token"}`,
		"/var/lib/kubelet/pods/1/volumes/kubernetes.io~secret/token rw,relatime shared:1 - tmpfs tmpfs rw,size=1k",
	} {
		if got := string(redact([]byte(text))); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}
