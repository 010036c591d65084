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
		{"Authorization: Bearer hunter2.x-y\r\n", "Authorization: Bearer [redacted]\r\n"},
		{"a bearer hunter2", "a bearer [redacted]"},
		{"https://admin:hunter2@10.0.0.1:6443/api", "https://[redacted]@10.0.0.1:6443/api"},
		{"x eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJr.aHVudGVyMg y", "x [redacted] y"},
		{"k: LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVkt y", "k: [redacted] y"},
		{"before\n" + pem + "after\n", "before\n[redacted]\nafter\n"},
		{"before\n" + pem[:50], "before\n[redacted]"},
		{pem[40:] + "after\n", "[redacted]\nafter\n"},
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
		"/var/lib/kubelet/pods/1/volumes/kubernetes.io~secret/token rw,relatime shared:1 - tmpfs tmpfs rw,size=1k",
	} {
		if got := string(redact([]byte(text))); got != text {
			t.Errorf("%q became %q", text, got)
		}
	}
}
