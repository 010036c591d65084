// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
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
