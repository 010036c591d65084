// SPDX-License-Identifier: Apache-2.0

package manifests

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

func TestAddUpdateDelete(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1)+slice("a-1", "a", "10.244.0.1"))
	h.write("node.yml", "apiVersion: v1\nkind: Node\nmetadata: {name: node1, namespace: x}\nspec: {podCIDR: 10.244.0.0/24}\n---\napiVersion: v1\nkind: Node\nmetadata: {name: node2}\n")
	h.pass("add service default/a 10.96.0.1", "add slice default/a-1 of a 10.244.0.1", "add node node1 10.244.0.0/24")
	h.pass()

	h.write("a.yaml", "# only a comment\n"+service("a", 1)+"\n# and one more\n"+slice("a-1", "a", "10.244.0.1"))
	h.pass()
	h.settled()

	h.write("a.yaml", service("a", 2)+slice("a-1", "a", "10.244.0.1", "10.244.0.2")+slice("a-2", "a"))
	h.pass("update service default/a 10.96.0.2", "update slice default/a-1 of a 10.244.0.1,10.244.0.2", "add slice default/a-2 of a ")
	h.settled()

	h.write("node.yml", "apiVersion: v1\nkind: Node\nmetadata: {name: node1}\nspec: {podCIDR: 10.244.1.0/24}\n")
	h.pass("update node node1 10.244.1.0/24")

	// What is gone is gone for good only once the file has settled.
	h.write("a.yaml", slice("a-2", "a"))
	h.remove("node.yml")
	h.pass()
	h.clock.Step(h.source.opts.Settle)
	if err := h.source.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := strings.Join(h.news(), "\n")
	for _, line := range []string{"delete service default/a", "delete slice default/a-1 of a", "delete node node1"} {
		if !strings.Contains(got, line) {
			t.Errorf("no %q in:\n%s", line, got)
		}
	}
	h.settled()
	if len(h.source.entries) != 1 || len(h.source.files) != 1 {
		t.Errorf("%d entries and %d files are left, want 1 and 1", len(h.source.entries), len(h.source.files))
	}
}

func TestServiceCIDRs(t *testing.T) {
	h := newHarness(t)
	const text = "apiVersion: networking.k8s.io/v1\nkind: ServiceCIDR\nmetadata: {name: kubernetes, namespace: x}\nspec:\n  cidrs: [10.96.0.0/16, %s]\n"
	h.write("a.yaml", fmt.Sprintf(text, "fd00:10:96::/112"))
	h.pass("service CIDR kubernetes [10.96.0.0/16 fd00:10:96::/112]")
	h.write("a.yaml", fmt.Sprintf(text, "ten"))
	h.pass("service CIDR kubernetes [10.96.0.0/16 ten]")
	h.settled(`problem InvalidObject ServiceCIDR /kubernetes [spec.cidrs[1]] a.yaml:1: "ten" is not a CIDR; ignored`)
	h.remove("a.yaml")
	h.pass()
	h.settled("service CIDR kubernetes []")
}

// A writer that truncates first, or an editor that moves the old file away,
// must not cost a delete.
func TestGlimpseOfNothing(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1))
	h.pass("add service default/a 10.96.0.1")
	h.write("a.yaml", "")
	h.pass()
	h.write("a.yaml", service("a", 1))
	h.pass()
	h.settled()
	h.remove("a.yaml")
	h.pass()
	h.write("a.yaml", service("a", 2))
	h.pass("update service default/a 10.96.0.2")
	h.settled()
}

func TestSelectorParity(t *testing.T) {
	h := newHarness(t)
	const head = "apiVersion: v1\nkind: Service\nmetadata:\n  name: a\n"
	const foreign = "  labels: {service.kubernetes.io/service-proxy-name: ''}\n"
	const ip, none = "spec: {clusterIP: 10.96.0.1}\n", "spec: {clusterIP: None}\n"
	headless := strings.Replace(slice("a-1", "a"), "  labels:\n", "  labels:\n    service.kubernetes.io/headless: ''\n", 1)

	h.write("a.yaml", head+foreign+ip+headless)
	h.pass()
	h.write("a.yaml", head+ip+slice("a-1", "a"))
	h.pass("add service default/a 10.96.0.1", "add slice default/a-1 of a ")
	h.write("a.yaml", head+none+headless)
	h.pass("delete service default/a", "delete slice default/a-1 of a")
	h.write("a.yaml", head+ip)
	h.pass("add service default/a 10.96.0.1")
	h.write("a.yaml", head+foreign+ip)
	h.pass("delete service default/a")
	h.remove("a.yaml")
	h.settled()
	h.settled()
	if len(h.source.entries) != 0 {
		t.Errorf("entries are left: %v", h.source.entries)
	}
}

func TestSliceMovesToOtherService(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", slice("x", "a", "10.244.0.1"))
	h.pass("add slice default/x of a 10.244.0.1")
	h.write("a.yaml", slice("x", "b", "10.244.0.1"))
	h.pass("delete slice default/x of a", "add slice default/x of b 10.244.0.1")
}

// One bad file costs nothing else, keeps its last good state, and is reported
// once.
func TestBadFile(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1)+service("b", 2))
	h.write("other.yaml", service("other", 9))
	h.pass("add service default/a 10.96.0.1", "add service default/b 10.96.0.2", "add service default/other 10.96.0.9")

	h.write("a.yaml", service("b", 3)+"---\nkind: [\n")
	h.write("other.yaml", service("other", 8))
	h.pass("update service default/b 10.96.0.3", "update service default/other 10.96.0.8")
	h.settled("problem InvalidFile File /DIR/a.yaml [] a.yaml:11: not valid YAML: did not find expected node content")
	h.settled()

	h.write("a.yaml", service("b", 3))
	h.pass()
	h.settled("delete service default/a")

	// A file that is bad from the start: what can be read of it counts.
	h.write("new.yaml", "}{\n"+service("c", 4))
	h.pass("add service default/c 10.96.0.4")
	h.settled("problem InvalidFile File /DIR/new.yaml [] new.yaml:1: not valid YAML: did not find expected node content")
	// A bad file that is removed is no file.
	h.remove("new.yaml")
	h.pass()
	h.settled("delete service default/c")
}

func TestUnreadableFile(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1))
	h.pass("add service default/a 10.96.0.1")
	h.remove("a.yaml")
	if err := syscall.Mkfifo(filepath.Join(h.dir, "a.yaml"), 0o600); err != nil {
		t.Fatal(err)
	}
	h.pass()
	h.settled("problem InvalidFile File /DIR/a.yaml [] a.yaml: not a regular file")
	h.settled()
	h.remove("a.yaml")
	h.write("a.yaml", service("a", 2))
	h.pass("update service default/a 10.96.0.2")
	h.settled()
}

func TestBadObjects(t *testing.T) {
	long := strings.Repeat("# padding\n", maxDocument/10)
	tests := []struct {
		name, text string
		want       []string
	}{
		{
			"unsupported kinds", "apiVersion: apps/v1\nkind: Deployment\nmetadata: {name: x}\n---\napiVersion: apps/v1\nkind: Deployment\nmetadata: {name: z}\n" + service("a", 1),
			[]string{
				"add service default/a 10.96.0.1",
				"problem InvalidFile File /DIR/a.yaml [] a.yaml:1: kind Deployment of apps/v1 is ignored; supported are Service and Node of v1, EndpointSlice of discovery.k8s.io/v1 and ServiceCIDR of networking.k8s.io/v1",
			},
		},
		{
			"old version", "apiVersion: discovery.k8s.io/v1beta1\nkind: EndpointSlice\nmetadata: {name: x}\n",
			[]string{"problem InvalidFile File /DIR/a.yaml [] a.yaml:1: kind EndpointSlice of discovery.k8s.io/v1beta1 is ignored; supported are Service and Node of v1, EndpointSlice of discovery.k8s.io/v1 and ServiceCIDR of networking.k8s.io/v1"},
		},
		{
			"no kind", "metadata: {name: x}\n",
			[]string{"problem InvalidFile File /DIR/a.yaml [] a.yaml:1: an object needs apiVersion and kind"},
		},
		{
			"no object", "hello\n",
			[]string{"problem InvalidFile File /DIR/a.yaml [] a.yaml:1: not a Kubernetes object: string where object is expected"},
		},
		{
			"no name", "\n\n---\napiVersion: v1\nkind: Service\n",
			[]string{"problem InvalidObject Service default/ [metadata.name] a.yaml:3: required; the object is not used"},
		},
		{
			"bad name", "apiVersion: v1\nkind: Service\nmetadata: {name: a/b}\n",
			[]string{`problem InvalidObject Service default/a/b [metadata.name] a.yaml:1: "a/b" may not contain '/'; the object is not used`},
		},
		{
			"wrong type of a field", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.96.0.1, ports: [{port: http}]}\n" + service("b", 2),
			[]string{
				"add service default/b 10.96.0.2",
				"problem InvalidObject Service default/a [spec.ports.port] a.yaml:1: string where int32 is expected; the previous version of the object stays in use",
			},
		},
		{
			"unknown field", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.96.0.1, clusterIp: x}\n",
			[]string{
				"add service default/a 10.96.0.1",
				`problem InvalidObject Service default/a [spec.clusterIp] a.yaml:1: unknown field "spec.clusterIp"; ignored`,
			},
		},
		{
			"field twice", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec:\n  clusterIP: 10.96.0.1\n  clusterIP: 10.96.0.2\n",
			[]string{
				"add service default/a 10.96.0.2",
				`problem InvalidObject Service default/a [] a.yaml:6: key "clusterIP" already set in map; the last one is used`,
			},
		},
		{
			"no ClusterIP", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\n",
			[]string{
				"add service default/a ",
				"problem InvalidObject Service default/a [spec.clusterIP] a.yaml:1: required, since there is no API server to allocate one",
			},
		},
		{
			"no ClusterIP and none needed", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {type: ExternalName, externalName: example.com}\n",
			[]string{"add service default/a "},
		},
		{
			"slice of no Service", strings.Replace(slice("x", "a"), "kubernetes.io/service-name: a", "app: a", 1),
			[]string{"problem InvalidObject EndpointSlice default/x [metadata.labels[kubernetes.io/service-name]] a.yaml:1: required for the name of the Service; the slice is not used"},
		},
		{
			"FQDN", strings.Replace(slice("x", "a"), "IPv4", "FQDN", 1),
			[]string{`problem InvalidObject EndpointSlice default/x [addressType] a.yaml:1: "FQDN" is neither IPv4 nor IPv6; the slice is not used`},
		},
		{
			// The trackers judge values; they get the object as it is.
			"invalid values", "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterIP: 10.96.0.1000, ports: [{port: 0, protocol: XYZ}]}\n",
			[]string{"add service default/a 10.96.0.1000"},
		},
		{
			"the same name twice", service("a", 1) + service("a", 2),
			[]string{
				"add service default/a 10.96.0.1",
				"problem DuplicateName Service default/a [metadata.name] a.yaml:10: already in line 1 of this file, which is used",
			},
		},
		{
			"too large", "apiVersion: v1\n" + long + service("b", 2),
			[]string{
				"add service default/b 10.96.0.2",
				"problem InvalidFile File /DIR/a.yaml [] a.yaml:1: document of 4194315 bytes exceeds the limit of 4194304; split it: an EndpointSlice holds up to 1000 endpoints",
			},
		},
		{"nothing", "# just a comment\n---\n---\n\n...\n", nil},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			h := newHarness(t)
			h.write("a.yaml", test.text)
			h.pass(test.want...)
			h.settled()
		})
	}
}

func TestManyProblems(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", strings.Repeat("---\nkind: [\n", 1000))
	if err := h.source.pass(t.Context()); err != nil {
		t.Fatal(err)
	}
	got := h.news()
	if len(got) != maxReported+1 || !strings.HasSuffix(got[maxReported], "and 950 more problems") {
		t.Errorf("%d problems, the last is %q", len(got), got[len(got)-1])
	}
}

// A broken object that is known by name stays; its neighbours come and go.
func TestBrokenObjectStays(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1)+service("b", 2))
	h.pass("add service default/a 10.96.0.1", "add service default/b 10.96.0.2")
	h.write("a.yaml", strings.Replace(service("a", 1), "port: 80", "port: x", 1))
	h.pass()
	h.settled("delete service default/b",
		"problem InvalidObject Service default/a [spec.ports.port] a.yaml:1: string where int32 is expected; the previous version of the object stays in use")
	h.write("a.yaml", service("a", 3))
	h.pass("update service default/a 10.96.0.3")
}

func TestDuplicates(t *testing.T) {
	h := newHarness(t)
	h.write("b.yaml", service("a", 2))
	h.pass("add service default/a 10.96.0.2")
	// The owner keeps the object, although a.yaml is first by name.
	h.write("a.yaml", service("a", 1))
	h.write("c.yaml", service("x", 7)+service("a", 3))
	h.pass("add service default/x 10.96.0.7")
	h.settled(
		"problem DuplicateName Service default/a [metadata.name] a.yaml:1: already in b.yaml:1, which is used",
		"problem DuplicateName Service default/a [metadata.name] c.yaml:10: already in b.yaml:1, which is used")
	h.settled()

	// The owner drops it: the first by name takes over, as an update.
	h.write("b.yaml", service("w", 8))
	h.pass("add service default/w 10.96.0.8", "update service default/a 10.96.0.1")
	h.settled("problem DuplicateName Service default/a [metadata.name] c.yaml:10: already in a.yaml:1, which is used")

	// The owner vanishes.
	h.remove("a.yaml")
	h.pass("update service default/a 10.96.0.3")
	h.settled()
	h.write("c.yaml", service("a", 3))
	h.pass()
	h.settled("delete service default/x")
	h.remove("c.yaml")
	h.pass()
	h.settled("delete service default/a")
}

func TestFirstByNameWins(t *testing.T) {
	h := newHarness(t)
	h.write("b.yaml", service("a", 2))
	h.write("a.yaml", service("a", 1))
	h.pass("add service default/a 10.96.0.1",
		"problem DuplicateName Service default/a [metadata.name] b.yaml:1: already in a.yaml:1, which is used")
}

// Objects that move between files are neither deleted nor reported.
func TestMoveBetweenFiles(t *testing.T) {
	h := newHarness(t)
	for _, move := range []struct{ from, to string }{{"a.yaml", "b.yaml"}, {"b.yaml", "a.yaml"}, {"a.yaml", "c.yaml"}} {
		if move.from == "a.yaml" && move.to == "b.yaml" {
			h.write("a.yaml", service("x", 1)+service("w", 2))
			h.pass("add service default/x 10.96.0.1", "add service default/w 10.96.0.2")
		}
		h.write(move.to, service("w", 2)+service("x", 1))
		h.write(move.from, "")
		h.pass()
		h.settled()
	}
	if err := os.Rename(filepath.Join(h.dir, "c.yaml"), filepath.Join(h.dir, "0.yaml")); err != nil {
		t.Fatal(err)
	}
	h.pass()
	h.settled()
	h.settled()
	if n := len(h.source.entries); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
}

// The order of two documents of one name decides, on every read.
func TestDuplicateInFileChangesOrder(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1))
	h.pass("add service default/a 10.96.0.1")
	h.write("a.yaml", service("a", 2)+service("a", 1))
	h.pass("update service default/a 10.96.0.2")
	h.settled("problem DuplicateName Service default/a [metadata.name] a.yaml:10: already in line 1 of this file, which is used")
	h.write("a.yaml", service("a", 1))
	h.pass("update service default/a 10.96.0.1")
	h.settled()
	h.write("a.yaml", service("a", 1)+service("a", 1))
	h.pass()
	h.settled("problem DuplicateName Service default/a [metadata.name] a.yaml:10: already in line 1 of this file, which is used")
}

func TestIgnoredNames(t *testing.T) {
	h := newHarness(t)
	for _, name := range []string{".hidden.yaml", ".a.yaml.swp", "a.yaml~", "#a.yaml#", ".#a.yaml", "a.txt", "4913", "a.yaml.bak", "#a.yaml"} {
		h.write(name, service("x", 1))
	}
	if err := os.Mkdir(filepath.Join(h.dir, "sub.yaml"), 0o700); err != nil {
		t.Fatal(err)
	}
	h.write("sub.yaml/x.yaml", service("x", 1))
	for link, target := range map[string]string{"nowhere.yaml": "nothing", "dir.yaml": "sub.yaml", "loop.yaml": "loop.yaml"} {
		if err := os.Symlink(target, filepath.Join(h.dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	h.write("b.YAML", service("b", 1))
	h.write("c.yml", service("c", 2))
	h.write("d.json", `{"apiVersion":"v1","kind":"Service","metadata":{"name":"d"},"spec":{"clusterIP":"10.96.0.3"}}`)
	h.pass("add service default/b 10.96.0.1", "add service default/c 10.96.0.2", "add service default/d 10.96.0.3",
		"problem InvalidFile File /DIR/loop.yaml [] loop.yaml: open DIR/loop.yaml: too many levels of symbolic links")
	h.settled()
	for _, f := range h.source.files {
		if !f.stableAt.IsZero() {
			t.Errorf("%s will never settle", f.name)
		}
	}
}

func TestUnchangedDocumentsAreNotDecoded(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1)+slice("a-1", "a", "10.244.0.1"))
	h.pass("add service default/a 10.96.0.1", "add slice default/a-1 of a 10.244.0.1")
	f := h.source.files["a.yaml"]
	if len(f.documents) != 2 {
		t.Fatalf("%d documents are known, want 2", len(f.documents))
	}
	docs := split("a.yaml", []byte(service("a", 1)+slice("a-1", "a", "10.244.0.1", "10.244.0.2")))
	known := 0
	for _, doc := range decodeAll(docs, func(d digest) bool { _, ok := f.documents[d]; return ok }) {
		if doc.known {
			known++
		}
	}
	if known != 1 {
		t.Errorf("%d of two documents were taken as known, want the unchanged one", known)
	}
}

// Without a sign of change a file that is old enough is not even opened.
func TestOldFilesAreNotRead(t *testing.T) {
	h := newHarness(t)
	h.write("a.yaml", service("a", 1))
	path := filepath.Join(h.dir, "a.yaml")
	old := time.Now().Add(-time.Hour)
	if err := os.Chtimes(path, old, old); err != nil {
		t.Fatal(err)
	}
	h.pass("add service default/a 10.96.0.1")
	f := h.source.files["a.yaml"]
	f.content = digest{} // a read would load it again
	h.pass()
	if f.content != (digest{}) {
		t.Error("the file was read though nothing about it changed")
	}
	f.dirty = true
	h.pass()
	if f.content == (digest{}) {
		t.Error("the file was not read though it was asked for")
	}
}

// Any sequence of states leads to what the last state alone leads to.
func TestConverges(t *testing.T) {
	states := []map[string]string{
		{"a.yaml": service("x", 1) + service("w", 2), "b.yaml": service("z", 3)},
		{"a.yaml": service("w", 4), "b.yaml": service("x", 5) + service("w", 6)},
		{"b.yaml": service("x", 5) + service("w", 6)},
		{"a.yaml": "---\n: [", "b.yaml": service("x", 5)},
		{},
		{"c.yaml": service("x", 1) + service("x", 2)},
		{"a.yaml": service("z", 1), "c.yaml": service("z", 2), "b.yaml": service("z", 3)},
	}
	for n := range 2 * len(states) * len(states) {
		sequence := []int{n / len(states) / len(states), n % len(states), n / len(states) % len(states)}
		h := newHarness(t)
		live := map[string]string{}
		for _, i := range sequence {
			for _, name := range []string{"a.yaml", "b.yaml", "c.yaml"} {
				if text, ok := states[i][name]; ok {
					h.write(name, text)
				} else if err := os.RemoveAll(filepath.Join(h.dir, name)); err != nil {
					t.Fatal(err)
				}
			}
			for range 3 {
				if err := h.source.pass(t.Context()); err != nil {
					t.Fatal(err)
				}
				h.source.synced = true
				h.clock.Step(time.Second)
			}
			for _, line := range h.news() {
				fields := strings.Fields(line)
				switch fields[0] {
				case "add":
					if live[fields[2]] != "" {
						t.Fatalf("%v: %s is added twice", sequence, fields[2])
					}
					live[fields[2]] = fields[3]
				case "update":
					if live[fields[2]] == "" {
						t.Fatalf("%v: %s is updated without an add", sequence, fields[2])
					}
					live[fields[2]] = fields[3]
				case "delete":
					if live[fields[2]] == "" {
						t.Fatalf("%v: %s is deleted without an add", sequence, fields[2])
					}
					delete(live, fields[2])
				}
			}
		}
		last := states[sequence[len(sequence)-1]]
		broken := strings.Contains(last["a.yaml"], "[")
		for _, name := range []string{"x", "w", "z"} {
			in := false
			for _, text := range last {
				for _, doc := range split("f.yaml", []byte(text)) {
					for _, o := range decode(doc).objects {
						in = in || o.key.name == name && o.service.Spec.ClusterIP == live["default/"+name]
					}
				}
			}
			if !in && live["default/"+name] != "" && !broken {
				t.Errorf("%v: %s is left with %s", sequence, name, live["default/"+name])
			}
			if live["default/"+name] == "" && strings.Contains(fmt.Sprint(last), "name: "+name) {
				t.Errorf("%v: %s is missing", sequence, name)
			}
		}
	}
}
