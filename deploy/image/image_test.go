// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

var written = time.Unix(1790000000, 0)

// tree writes files, with one umask or another, in this order.
func tree(t *testing.T, private bool, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		file := filepath.Join(dir, name)
		mode, folder := os.FileMode(0o644), os.FileMode(0o755)
		if strings.HasPrefix(name, "bin/") {
			mode = 0o755
		}
		if private {
			mode, folder = mode&0o700, folder&0o700
		}
		err := errors.Join(os.MkdirAll(filepath.Dir(file), folder), os.WriteFile(file, []byte("content of "+name), mode))
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("bin", filepath.Join(dir, "sbin")); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestSameDigest: an image does not depend on the times, the umask and the order of the machine, but on names, contents, permissions to
// execute, and the time that is asked for.
func TestSameDigest(t *testing.T) {
	of := func(dir string, when time.Time) string {
		l, err := NewLayer(filepath.Join(t.TempDir(), "l.tar"), map[string]string{"": dir}, when, true)
		if err != nil {
			t.Fatal(err)
		}
		digests, err := Save(io.Discard, Named{"r.example/a:v1", []Image{{Arch: "amd64", Layers: []Layer{l}, Created: when, SBOM: []byte("{}")}}})
		if err != nil {
			t.Fatal(err)
		}
		return digests[0]
	}
	first := of(tree(t, false, "bin/a", "etc/b", "etc/c"), written)
	again := tree(t, true, "etc/c", "etc/b", "bin/a")
	if err := os.Chtimes(filepath.Join(again, "etc/b"), time.Now(), time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	if of(again, written) != first {
		t.Error("the same files make another image")
	}
	if of(again, written.Add(time.Second)) == first || of(tree(t, false, "bin/a", "etc/b"), written) == first {
		t.Error("other files, or another time, make the same image")
	}
	if err := os.Chmod(filepath.Join(again, "etc/b"), 0o700); err != nil {
		t.Fatal(err)
	}
	if of(again, written) == first {
		t.Error("a file that may be executed makes the same image")
	}
}

// files are those of an archive, by their names.
func files(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	all := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		if all[h.Name] != nil {
			t.Errorf("%s is there twice", h.Name)
		}
		if all[h.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSave: from the index, every descriptor leads to a blob of its size and digest; each platform has an attestation; and the form of docker
// save names the same blobs.
func TestSave(t *testing.T) {
	base, err1 := NewLayer(filepath.Join(t.TempDir(), "base.tar"), map[string]string{"": tree(t, false, "etc/b")}, written, true)
	top, err2 := NewLayer(filepath.Join(t.TempDir(), "top.tar"), map[string]string{"usr/local/bin": tree(t, false, "bin/a")}, written, false)
	if err := errors.Join(err1, err2); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	two := []Image{
		{Arch: "amd64", Entrypoint: []string{"/a"}, Layers: []Layer{base, top}, SBOM: []byte(`{"name":"amd64"}`)},
		{Arch: "arm64", Entrypoint: []string{"/a"}, Layers: []Layer{base}, SBOM: []byte(`{"name":"arm64"}`)},
	}
	digests, err := Save(&out, Named{"r.example:5000/a/b:v1", two}, Named{"r.example/c", []Image{{Arch: "amd64", Layers: []Layer{base}}}})
	if err != nil {
		t.Fatal(err)
	}
	all := files(t, out.Bytes())
	if d := (descriptor{Digest: digests[0]}); all[blob(d.Digest)] == nil {
		t.Errorf("the digest %s is of no blob", d.Digest)
	}
	seen := map[string]bool{"oci-layout": true, "index.json": true, "manifest.json": true}
	var platforms []string
	var follow func(d descriptor)
	follow = func(d descriptor) {
		content := all[blob(d.Digest)]
		seen[blob(d.Digest)] = true
		if int64(len(content)) != d.Size || fmt.Sprintf("sha256:%x", sha256.Sum256(content)) != d.Digest {
			t.Errorf("%s: %d bytes with another digest, or there is none", d.Digest, len(content))
		}
		switch d.MediaType {
		case mediaIndex:
			var x index
			if err := json.Unmarshal(content, &x); err != nil {
				t.Error(err)
			}
			for _, d := range x.Manifests {
				follow(d)
			}
		case mediaManifest:
			var m manifest
			if err := json.Unmarshal(content, &m); err != nil {
				t.Error(err)
			}
			platforms = append(platforms, d.Platform.Architecture)
			for _, d := range append(m.Layers, m.Config) {
				follow(d)
			}
		}
	}
	var top1 index
	if err := json.Unmarshal(all["index.json"], &top1); err != nil {
		t.Fatal(err)
	}
	for _, d := range top1.Manifests {
		follow(d)
	}
	if want := []string{"amd64", "arm64", "unknown", "unknown", "amd64"}; !slices.Equal(platforms, want) {
		t.Errorf("platforms %v, want %v", platforms, want)
	}
	for name := range all {
		if !seen[name] {
			t.Errorf("nothing refers to %s", name)
		}
	}
	if got := top1.Manifests[0].Annotations["org.opencontainers.image.ref.name"]; got != "v1" {
		t.Errorf("tag %q", got)
	}
	var entries []dockerEntry
	if err := json.Unmarshal(all["manifest.json"], &entries); err != nil || len(entries) != 2 {
		t.Fatalf("%d images, %v", len(entries), err)
	}
	for _, e := range entries {
		for _, name := range append(e.Layers, e.Config) {
			if all[name] == nil {
				t.Errorf("%v: %s is missing", e.RepoTags, name)
			}
		}
	}
}

// TestSBOM: packages of Debian and modules of Go are in it, each once.
func TestSBOM(t *testing.T) {
	root, programs := t.TempDir(), t.TempDir()
	status := filepath.Join(root, "var/lib/dpkg/status.d")
	if err := os.MkdirAll(status, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(status, "libc6"), []byte("Package: libc6\nVersion: 2.41-12+deb13u1\nArchitecture: amd64\nDescription: a: b\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := SBOM("x", "v1", written, root, programs); err == nil {
		t.Error("no error without programs")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	program, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"a", "b"} {
		if err := os.WriteFile(filepath.Join(programs, name), program, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	text, err := SBOM("x", "v1+2", written, root, programs)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"pkg:deb/debian/libc6@2.41-12%2Bdeb13u1?arch=amd64"`, `"pkg:golang/stdlib@`, `"pkg:golang/github.com/tandem-proxy/tandem@v1%2B2"`} {
		if n := strings.Count(string(text), want); n != 1 {
			t.Errorf("%s is there %d times:\n%s", want, n, text)
		}
	}
	if again, err := SBOM("x", "v1+2", written, root, programs); err != nil || !bytes.Equal(again, text) {
		t.Errorf("a second document differs, %v", err)
	}
	if _, err := SBOM("x", "v1", written, t.TempDir(), programs); err == nil {
		t.Error("no error without packages")
	}
}
