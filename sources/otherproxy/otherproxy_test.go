// SPDX-License-Identifier: Apache-2.0

//go:build linux

package otherproxy

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// asServer makes a copy of this program answer at an address.
const asServer = "TANDEM_TEST_AS_SERVER"

// The answers of servers, by path.
var servers = map[string]map[string]string{
	"metrics of a kube-proxy":    {"/proxyMode": "nftables"},
	"metrics of this proxy":      {"/proxyMode": "ebpf"},
	"health of a kube-proxy":     {"/healthz": `{"lastUpdated": "2024-01-01 00:00:00", "currentTime": "2024-01-01 00:00:00", "nodeEligible": true}`},
	"an answer to everything":    {"/proxyMode": "<html>hello</html>", "/healthz": "ok"},
	"a health check of its own":  {"/healthz": `{"status": "up"}`},
	"nothing that is understood": {},
}

// noAnswer accepts connections and never answers.
const noAnswer = "no answer"

func TestMain(m *testing.M) {
	name, address, ok := strings.Cut(os.Getenv(asServer), "@")
	if !ok {
		os.Exit(m.Run())
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(l.Addr())
	_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if answer, ok := servers[name][r.URL.Path]; ok {
			_, _ = fmt.Fprint(w, answer)
			return
		}
		if name == noAnswer {
			<-r.Context().Done()
		}
		http.NotFound(w, r)
	}))
}

// serve runs a server in a process of its own until the end of the test.
func serve(t *testing.T, name, address string) (at netip.AddrPort, pid int) {
	t.Helper()
	c := exec.CommandContext(t.Context(), os.Args[0])
	c.Env = append(os.Environ(), asServer+"="+name+"@"+address)
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Process.Kill(); _ = c.Wait() })
	line := make([]byte, 64)
	n, err := out.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	at, err = netip.ParseAddrPort(strings.TrimSpace(string(line[:n])))
	if err != nil {
		t.Fatal(err)
	}
	return at, c.Process.Pid
}

// Only what answers as a kube-proxy is one, whatever else listens at its ports.
func TestFind(t *testing.T) {
	for name, want := range map[string]string{
		"metrics of a kube-proxy": "mode nftables at ", "health of a kube-proxy": "at ",
		"an answer to everything": "", "a health check of its own": "", "nothing that is understood": "",
	} {
		for _, address := range []string{"127.0.0.1:0", "0.0.0.0:0", "[::]:0"} {
			t.Run(name+" at "+address, func(t *testing.T) {
				at, pid := serve(t, name, address)
				f := Finder{Ports: []uint16{at.Port()}}
				found, err := f.Find(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				if (found != nil) != (want != "") {
					t.Fatalf("found %v", found)
				}
				if found != nil && (!strings.HasPrefix(found.String(), want) || !strings.HasSuffix(found.Process, fmt.Sprintf("(pid %d)", pid))) {
					t.Errorf("found %q", found)
				}
				if found != nil && !slices.Equal(found.Listeners, []netip.AddrPort{at}) {
					t.Errorf("it listens at %v, want %v", found.Listeners, at)
				}
				if holder := f.Holder(t.Context(), at.Port()); !strings.HasSuffix(holder, fmt.Sprintf("(pid %d)", pid)) {
					t.Errorf("the holder is %q", holder)
				}
			})
		}
	}
}

// A kube-proxy that is stopped is neither found nor gone, until its sockets are.
func TestFindSilent(t *testing.T) {
	for _, address := range []string{"127.0.0.1:0", "[::]:0"} {
		t.Run(address, func(t *testing.T) {
			t.Parallel()
			at, pid := serve(t, "metrics of a kube-proxy", address)
			f := Finder{Ports: []uint16{at.Port()}}
			if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			if found, err := f.Find(t.Context()); found != nil || !errors.Is(err, ErrSilent) {
				t.Errorf("stopped: found %v, %v; want %v", found, err, ErrSilent)
			}
			// Another one that answers is found all the same.
			other, _ := serve(t, "metrics of a kube-proxy", "127.0.0.1:0")
			both := Finder{Ports: []uint16{at.Port(), other.Port()}}
			if found, err := both.Find(t.Context()); err != nil || found == nil || found.Server != other {
				t.Errorf("beside one that is stopped: found %v, %v", found, err)
			}
			if err := unix.Kill(pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			for deadline := time.Now().Add(10 * time.Second); ; {
				found, err := f.Find(t.Context())
				if found == nil && err == nil {
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("killed: found %v, %v", found, err)
				}
			}
		})
	}
}

// Metrics servers are found at any address and port, by the name of their process, and nothing else that it serves. One that
// never answers hides none of them.
func TestMetricsServers(t *testing.T) {
	var want []netip.AddrPort
	_, pid := serve(t, "health of a kube-proxy", "127.0.0.1:0")
	serve(t, noAnswer, "127.0.0.77:10248") // the first by its port
	for _, address := range []string{"127.0.0.9:0", "0.0.0.0:0"} {
		at, _ := serve(t, "metrics of this proxy", address)
		want = append(want, reachable(at)[0])
	}
	serve(t, "an answer to everything", "127.0.0.1:0")
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	if err != nil {
		t.Fatal(err)
	}
	slices.SortFunc(want, func(a, b netip.AddrPort) int { return cmp.Compare(a.Port(), b.Port()) })
	if got, err := MetricsServers(t.Context(), strings.TrimSpace(string(name))); err != nil || !slices.Equal(got, want) {
		t.Errorf("got %v, %v; want %v", got, err, want)
	}
	if got, err := MetricsServers(t.Context(), "another"); err != nil || got != nil {
		t.Errorf("of no process: %v, %v", got, err)
	}
}

// The servers of this process are not another proxy, nor are those at other ports.
func TestFindsOthersOnly(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "iptables") })}
	go func() { _ = server.Serve(l) }()
	defer server.Close()
	own := netip.MustParseAddrPort(l.Addr().String()).Port()
	elsewhere, _ := serve(t, "metrics of a kube-proxy", "127.0.0.1:0")
	f := Finder{Ports: []uint16{own, elsewhere.Port() ^ 1}}
	if found, err := f.Find(t.Context()); found != nil || err != nil {
		t.Errorf("found %v, %v", found, err)
	}
}

// A server of this process is not another proxy either if it begins meanwhile.
func TestFindsNoBeginning(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().String()
	f := Finder{Ports: []uint16{netip.MustParseAddrPort(at).Port()}}
	for range 1000 {
		_ = l.Close()
		begun := make(chan error)
		go func() {
			var err error
			l, err = net.Listen("tcp", at)
			begun <- err
		}()
		found, err := f.listeners(t.Context())
		if begun := <-begun; begun != nil || err != nil || len(found) > 0 {
			t.Fatalf("found %v, %v; listen: %v", found, err, begun)
		}
	}
	_ = l.Close()
}

// Another process of this proxy is not another kube-proxy, even if its health server is seen; one
// beside it is.
func TestFindOwn(t *testing.T) {
	own, _ := serve(t, "metrics of this proxy", "127.0.0.1:0")
	health, _ := serve(t, "health of a kube-proxy", "127.0.0.1:0")
	other, _ := serve(t, "metrics of a kube-proxy", "127.0.0.1:0")
	f := Finder{Ports: []uint16{own.Port(), health.Port()}, Own: "ebpf"}
	if found, err := f.Find(t.Context()); found != nil || err != nil {
		t.Errorf("found %v, %v", found, err)
	}
	f.Ports = append(f.Ports, other.Port())
	if found, err := f.Find(t.Context()); err != nil || found == nil || found.Mode != "nftables" {
		t.Errorf("found %v, %v", found, err)
	}
}
