// SPDX-License-Identifier: Apache-2.0

package differential

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"testing"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"github.com/tandem-proxy/tandem/proxier"
)

// TracerEnv names the program that hack/upstream.sh -tracer builds.
const TracerEnv = "UPSTREAM_TRACER"

// The questions and answers of testdata/tracer.
type (
	world struct {
		Services           []*v1.Service
		Slices             []*discoveryv1.EndpointSlice
		Node               string
		NodeIPs            []string
		Addresses          []string
		Zone               string
		PodCIDRs           []string
		PodInterface       string
		PodInterfacePrefix bool
		NodePortAddresses  []string
		LocalhostNodePorts bool
		MasqueradeAll      bool
		IgnoreExternalIPs  bool
	}
	packet struct {
		Source, Destination string
		Port                uint16
		Protocol            string
	}
	udpFlow  struct{ Source, Destination, Replies string }
	question struct {
		World  *world    `json:",omitempty"`
		Packet *packet   `json:",omitempty"`
		Flows  []udpFlow `json:",omitempty"`
	}
	check struct {
		Port  uint16
		Local int
	}
	answer struct {
		Rules       map[v1.IPFamily]string
		Checks      map[v1.IPFamily]map[string]check
		Outputs     []string
		Masquerades bool
		Stale       []bool
		Error       string
	}
)

var ipFamilies = [proxier.Families]v1.IPFamily{v1.IPv4Protocol, v1.IPv6Protocol}

// Upstream is a set of processes of the program, as many as can be busy.
type Upstream struct {
	// Spoil, if set, changes upstream's rules, to test how differences are found.
	Spoil func(rules string) string

	path string

	mu   sync.Mutex
	idle []*process
	all  []*process
	free chan struct{} // one for each process that may be started or is idle

	counts map[string]int // differences by name
}

// process answers one question at a time.
type process struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	stderr  strings.Builder
	learned any // whose world it has
}

// StartT starts upstream's side. Without the program the test is skipped.
func StartT(tb testing.TB) *Upstream {
	tb.Helper()
	path := os.Getenv(TracerEnv)
	if path == "" {
		tb.Skipf("missing: %s is not set: it has to be the path of the program that hack/upstream.sh -tracer builds and prints", TracerEnv)
	}
	u := &Upstream{path: path, free: make(chan struct{}, runtime.GOMAXPROCS(0)), counts: map[string]int{}}
	for range cap(u.free) {
		u.free <- struct{}{}
	}
	tb.Cleanup(func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		for _, p := range u.all {
			_ = p.in.Close() // ends it
			if err := p.cmd.Wait(); err != nil {
				tb.Logf("%s ended: %v: %s", path, err, &p.stderr)
			}
		}
	})
	return u
}

// acquire returns an idle process, that which has the world if there is one.
func (u *Upstream) acquire(owner any) (*process, error) {
	<-u.free
	u.mu.Lock()
	defer u.mu.Unlock()
	for i, p := range u.idle {
		if p.learned == owner {
			u.idle = append(u.idle[:i], u.idle[i+1:]...)
			return p, nil
		}
	}
	if len(u.all) == cap(u.free) {
		p := u.idle[0]
		u.idle = u.idle[1:]
		return p, nil
	}
	p := &process{cmd: exec.Command(u.path, "-test.run=^TestTandemTracer$", "-test.timeout=0")}
	p.cmd.Stderr = &p.stderr
	in, err := p.cmd.StdinPipe()
	if err == nil {
		p.in = in
		var out io.ReadCloser
		if out, err = p.cmd.StdoutPipe(); err == nil {
			p.out = bufio.NewReaderSize(out, 1<<20)
			err = p.cmd.Start()
		}
	}
	if err != nil {
		u.free <- struct{}{}
		return nil, fmt.Errorf("start upstream's tracer: %w", err)
	}
	u.all = append(u.all, p)
	return p, nil
}

func (u *Upstream) release(p *process) {
	u.mu.Lock()
	u.idle = append(u.idle, p)
	u.mu.Unlock()
	u.free <- struct{}{}
}

// ask sends a question and waits for the answer.
func (p *process) ask(q question) (a answer, err error) {
	line, err := json.Marshal(&q)
	if err == nil {
		_, err = p.in.Write(append(line, '\n'))
	}
	if err == nil {
		var said []byte
		if said, err = p.out.ReadBytes('\n'); err == nil {
			err = json.Unmarshal(said, &a)
		}
	}
	switch {
	case err != nil:
		return a, fmt.Errorf("ask upstream's tracer: %w", err)
	case a.Error != "":
		return a, errors.New("upstream's tracer: " + a.Error)
	}
	return a, nil
}
