// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// readDump is the content of each file, by its name below the directory.
func readDump(t *testing.T, archive []byte) map[string]string {
	t.Helper()
	z, err := gzip.NewReader(bytes.NewReader(archive))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		dir, name, _ := strings.Cut(h.Name, "/")
		if !strings.HasPrefix(dir, "tandem-sysdump-") || h.Mode != 0o600 {
			t.Errorf("%s has mode %o", h.Name, h.Mode)
		}
		if _, twice := files[name]; twice {
			t.Errorf("%s is there twice", name)
		}
		files[name] = string(text)
	}
}

func TestSysdump(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/metrics":
			io.WriteString(w, "tandem_services 4\n")
		case "/readyz":
			http.Error(w, "uplink-eth0 failed", http.StatusServiceUnavailable)
		default:
			http.NotFound(w, r)
		}
	}))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	t.Setenv("PATH", t.TempDir()) // no tool of the node

	a, out, errs := newTestApp(sample())
	if code := a.run([]string{"sysdump", "--file", "-", "--server", address, "--health-server", address}); code != exitOK {
		t.Fatalf("exit code %d: %s", code, errs)
	}
	files := readDump(t, out.Bytes())
	for name, want := range map[string]string{
		"tandemctl/status.txt": "tdm_frontend", "tandemctl/services.json": `"kube-dns"`, "tandemctl/flows.txt": "198.51.100.7:40000",
		"kube-proxy/metrics": "tandem_services 4", "kube-proxy/readyz": "503 Service Unavailable\nuplink-eth0 failed",
		"files/proc/version": "Linux", "files/sysctls.txt": "net.ipv4.ip_forward = ",
		"index.txt": "commands/ip_rule.txt: exec: \"ip\": executable file not found",
	} {
		if !strings.Contains(files[name], want) {
			t.Errorf("%s has no %q: %.500s", name, want, files[name])
		}
	}

	file := filepath.Join(t.TempDir(), "dump.tar.gz")
	for _, want := range []int{exitOK, exitError} { // it is not overwritten
		a, out, errs := newTestApp(sample())
		if code := a.run([]string{"sysdump", "-f", file, "--server", address, "--health-server", address}); code != want {
			t.Errorf("exit code %d: %s%s", code, out, errs)
		}
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if files := readDump(t, text); files["index.txt"] == "" {
		t.Errorf("the archive has no index: %d files", len(files))
	}
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// TestSysdumpSecrets: no secret is in the archive, wherever it stands in what is read and near it.
func TestSysdumpSecrets(t *testing.T) {
	const secret = "hunter2-0123456789"
	encoded := base64.StdEncoding.EncodeToString([]byte(secret))
	pem := "-----BEGIN PRIVATE KEY-----\n" + encoded + "\n" + encoded + "\n-----END PRIVATE KEY-----\n"
	jwt := "eyJhbGciOiJSUzI1NiJ9." + strings.TrimRight(encoded, "=") + "." + strings.TrimRight(encoded, "=")
	kubeconfig := "users:\n- user:\n    token: " + secret + "\n    password: \"" + secret + "\"\n    client-key-data: " + base64.StdEncoding.EncodeToString([]byte(pem)) + "\n"
	annotated := `{"metadata":{"annotations":{"example.com/api-token":"` + secret + `","kubectl.kubernetes.io/last-applied-configuration":"{\"password\":\"` + secret + `\"}"}}}`
	text := strings.Join([]string{
		"kept", annotated, kubeconfig, pem, "Authorization: Bearer " + secret, "--bearer-token=" + secret + " --token " + secret, "TOKEN=" + secret, jwt,
		"https://admin:" + secret + "@10.0.0.1:6443", "kept", "token:\n  " + secret, "password: |\n    " + secret + "\n\n    " + secret, "- --token\n- " + secret,
		`["--token","` + secret + `"]`, "  \"--token\",\n  \"" + secret + `"`, `{"name":"DB_PASSWORD","value":"` + secret + `"}`, "- name: DB_PASSWORD\n  value: " + secret,
		`{"Authorization":["Basic ` + encoded + `"],"X-Auth-Token":["` + secret + `"]}`, "\"Authorization\": [\n  \"Basic " + encoded + "\"\n]",
		"failed to get a token: connection refused", "kept", "",
	}, "\n")

	dir := t.TempDir()
	write := func(name, text string, mode os.FileMode) string {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), mode)); err != nil {
			t.Fatal(err)
		}
		return path
	}
	// What it reads: logs of which some are cut in the middle of a secret, files, tools of the node, answers of kube-proxy.
	write("pods/a/kube-proxy/0.log", text, 0o644)
	for cut, text := range map[int]string{8: "token=" + secret + "\n", 30: pem, 60: pem} {
		write(fmt.Sprintf("pods/b/kube-proxy/%d.log", cut), text+strings.Repeat(".", sysdumpLogLimit-len(text)+cut-1)+"\n", 0o644)
	}
	logs, files := sysdumpLogs, sysdumpFiles
	defer func() { sysdumpLogs, sysdumpFiles = logs, files }()
	sysdumpLogs, sysdumpFiles = []string{dir + "/pods/*/kube-proxy/*.log"}, append(slices.Clone(files), write("file", text, 0o644))
	for _, c := range sysdumpCommands {
		name := strings.Fields(c.line)[0]
		write("bin/"+name, "#!/bin/sh\n/bin/cat "+dir+"/file\n/bin/cat "+dir+"/file >&2\nexit "+strconv.Itoa(len(name)%2)+"\n", 0o755)
	}
	t.Setenv("PATH", filepath.Join(dir, "bin"))
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/debug") {
			http.Error(w, text, http.StatusInternalServerError)
			return
		}
		io.WriteString(w, text)
	}))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	// What is near it: the environment, a kubeconfig where clients look for one, and the command line of kube-proxy.
	t.Setenv("SERVICE_TOKEN", secret)
	t.Setenv("HOME", dir)
	t.Setenv("KUBECONFIG", write(".kube/config", kubeconfig, 0o600))
	proxy := exec.Command("/bin/sh", "-c", "read x", "kube-proxy", "--bearer-token="+secret)
	if stdin, err := proxy.StdinPipe(); err != nil {
		t.Fatal(err)
	} else if err := proxy.Start(); err != nil {
		t.Fatal(err)
	} else {
		defer func() { _ = stdin.Close(); _ = proxy.Wait() }()
	}

	for _, flags := range [][]string{
		{"--server", address, "--health-server", address},
		{"--server", "admin:" + secret + "@127.0.0.1:1", "--health-server", "admin:" + secret + "@127.0.0.1:1"},
	} {
		a, out, errs := newTestApp(sample())
		a.filters = func(context.Context) []string { return []string{"rule 3 with comment token=" + secret} }
		if code := a.run(append([]string{"sysdump", "--file", "-"}, flags...)); code != exitOK {
			t.Fatalf("exit code %d: %s", code, errs)
		}
		files := readDump(t, out.Bytes())
		for name, text := range files {
			for _, leak := range []string{"hunter2", "0123456789", encoded[:12], "LS0tLS1CRUdJTi"} {
				if line, ok := lineWith(text, leak); ok {
					t.Errorf("%s has %q: %s", name, leak, line)
				}
			}
		}
		for _, name := range []string{"commands/ip_rule.txt", "logs" + dir + "/pods/a/kube-proxy/0.log", "files" + dir + "/file"} {
			if strings.Count(files[name], "kept\n") < 2 {
				t.Errorf("%s lacks what is no secret: %q", name, files[name])
			}
		}
	}
}

func lineWith(text, part string) (string, bool) {
	for line := range strings.Lines(text) {
		if strings.Contains(line, part) {
			return line, true
		}
	}
	return "", false
}
