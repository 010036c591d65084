// SPDX-License-Identifier: Apache-2.0

package klipperlb

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/tandem-proxy/tandem/kernel/inet"
)

// as K3s sets the variables.
var usual = map[string]string{"SRC_PORT": "80", "SRC_RANGES": "0.0.0.0/0", "DEST_PROTO": "TCP", "DEST_PORT": "80", "DEST_IPS": "10.43.0.10"}

func with(more map[string]string) func(string) (string, bool) {
	all := maps.Clone(usual)
	for name, value := range more {
		if all[name] = value; value == "unset" {
			delete(all, name)
		}
	}
	return func(name string) (string, bool) { value, set := all[name]; return value, set }
}

// text are all rules.
func text(e *Environment) string {
	var lines []string
	for f := range inet.Families {
		for _, h := range hooks {
			for _, r := range e.rulesOf(h, f) {
				lines = append(lines, fmt.Sprintf("%s %s %s", f, strings.ToLower(h.from), r))
			}
		}
	}
	return strings.Join(lines, "\n")
}

func TestRules(t *testing.T) {
	for _, test := range []struct {
		name string
		more map[string]string
		want []string
	}{
		{"usual", nil, []string{
			"IPv4 forward -d 10.43.0.10 -p tcp -m tcp --dport 80 -j ACCEPT", "IPv4 forward -d 10.43.0.10 -p tcp -m tcp --dport 80 -j DROP",
			"IPv4 prerouting -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.43.0.10:80", "IPv4 postrouting -d 10.43.0.10 -p tcp -m tcp --dport 80 -j MASQUERADE",
		}},
		{"other ports, UDP, source ranges", map[string]string{"SRC_PORT": "53", "DEST_PORT": "30053", "DEST_PROTO": "UDP", "SRC_RANGES": "192.0.2.0/24, 198.51.100.7/32"}, []string{
			"IPv4 forward -s 192.0.2.0/24 -d 10.43.0.10 -p udp -m udp --dport 30053 -j ACCEPT", "IPv4 forward -s 198.51.100.7/32 -d 10.43.0.10 -p udp -m udp --dport 30053 -j ACCEPT",
			"IPv4 forward -d 10.43.0.10 -p udp -m udp --dport 30053 -j DROP",
			"IPv4 prerouting -p udp -m udp --dport 53 -j DNAT --to-destination 10.43.0.10:30053", "IPv4 postrouting -d 10.43.0.10 -p udp -m udp --dport 30053 -j MASQUERADE",
		}},
		{"dual stack", map[string]string{"DEST_IPS": "10.43.0.10,fd00::10", "SRC_RANGES": "::/0"}, []string{
			"IPv4 forward -d 10.43.0.10 -p tcp -m tcp --dport 80 -j DROP",
			"IPv4 prerouting -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.43.0.10:80", "IPv4 postrouting -d 10.43.0.10 -p tcp -m tcp --dport 80 -j MASQUERADE",
			"IPv6 forward -d fd00::10 -p tcp -m tcp --dport 80 -j ACCEPT", "IPv6 forward -d fd00::10 -p tcp -m tcp --dport 80 -j DROP",
			"IPv6 prerouting -p tcp -m tcp --dport 80 -j DNAT --to-destination [fd00::10]:80", "IPv6 postrouting -d fd00::10 -p tcp -m tcp --dport 80 -j MASQUERADE",
		}},
		{"no ranges", map[string]string{"SRC_RANGES": "unset"}, []string{
			"IPv4 forward -d 10.43.0.10 -p tcp -m tcp --dport 80 -j ACCEPT", "IPv4 forward -d 10.43.0.10 -p tcp -m tcp --dport 80 -j DROP",
			"IPv4 prerouting -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.43.0.10:80", "IPv4 postrouting -d 10.43.0.10 -p tcp -m tcp --dport 80 -j MASQUERADE",
		}},
		{"addresses that packets have to have", map[string]string{"SRC_IPS": "192.0.2.1,192.0.2.2", "SRC_RANGES": "0.0.0.0/0"}, []string{
			"IPv4 forward -d 10.43.0.10 -p tcp -m tcp --dport 80 -j ACCEPT", "IPv4 forward -d 10.43.0.10 -p tcp -m tcp --dport 80 -j DROP",
			"IPv4 prerouting -d 192.0.2.1 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.43.0.10:80", "IPv4 prerouting -d 192.0.2.2 -p tcp -m tcp --dport 80 -j DNAT --to-destination 10.43.0.10:80",
			"IPv4 postrouting -d 10.43.0.10 -p tcp -m tcp --dport 80 -j MASQUERADE",
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			e, err := Read(with(test.more))
			if err != nil {
				t.Fatal(err)
			}
			if got := text(&e); got != strings.Join(test.want, "\n") {
				t.Errorf("rules\n%s\nwant\n%s", got, strings.Join(test.want, "\n"))
			}
		})
	}
}

// TestErrors: each variable that is wrong is named, all at once.
func TestErrors(t *testing.T) {
	_, err := Read(with(map[string]string{"SRC_PORT": "0", "DEST_PORT": "http", "DEST_PROTO": "icmp", "DEST_IPS": "10.43.0.10,web", "SRC_RANGES": "10.0.0.0/33", "SRC_IPS": "eth0"}))
	if err == nil {
		t.Fatal("no error")
	}
	var named []string
	for line := range strings.Lines(err.Error()) {
		name, _, _ := strings.Cut(line, "=")
		named = append(named, name)
	}
	slices.Sort(named)
	if want := []string{"DEST_IPS", "DEST_PORT", "DEST_PROTO", "SRC_IPS", "SRC_PORT", "SRC_RANGES"}; !slices.Equal(named, want) {
		t.Errorf("the errors name %v, want %v:\n%v", named, want, err)
	}
	if _, err := Read(with(map[string]string{"DEST_IPS": ""})); err == nil || !strings.Contains(err.Error(), "DEST_IPS") {
		t.Errorf("without addresses: %v", err)
	}
}

func TestWanted(t *testing.T) {
	if !Wanted(with(nil)) || Wanted(with(map[string]string{"DEST_IPS": "unset"})) || Wanted(func(string) (string, bool) { return "", false }) {
		t.Error("it depends on all four variables")
	}
}
