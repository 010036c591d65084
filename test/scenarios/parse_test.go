// SPDX-License-Identifier: Apache-2.0

package scenarios

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/tandem-proxy/tandem/proxier"
)

var comparable = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
	cmp.FilterPath(func(p cmp.Path) bool { return p.Last().String() == ".Line" }, cmp.Ignore()),
}

func TestFilesAreFormatted(t *testing.T) {
	for _, s := range all(t) {
		text, err := files.ReadFile(s.Name + ".txtar")
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(Format(s)), string(text)); diff != "" {
			t.Errorf("%s.txtar is not as Format writes it (-formatted +file):\n%s", s.Name, diff)
		}
	}
}

const head = `# Title.
# Statements: S01

node node1 zone=z1
node node2
pod web1 node1
client c

`

const someFiles = `
-- a.yaml --
apiVersion: v1
kind: Service
metadata: {name: web}
spec: {clusterIPs: [10.96.0.10]}
-- want.txt --
`

func TestParseErrors(t *testing.T) {
	for _, test := range []struct{ name, script, want string }{
		{"unknown command", "frobnicate", `:9: unknown command "frobnicate"`},
		{"unknown setting", "config speed=high", ":9: config: speed=high: unknown setting"},
		{"setting without a value", "config masqueradeAll", ":9: config: "},
		{"setting of another type", "config masqueradeAll=yes", ":9: config: masqueradeAll=yes: want true or false"},
		{"unknown detector", "config detectLocal=Guess", ":9: config: detectLocal=Guess: unknown mode Guess"},
		{"detector without a device", "config detectLocal=BridgeInterface", ":9: config: "},
		{"bad selection", "config nodePortAddresses=secondary", ":9: config: "},
		{"late node", "restart node1\nnode node3", ":10: node after an event"},
		{"missing file", "apply b.yaml", ":9: there is no file b.yaml"},
		{"restart of nothing", "restart node3", ":9: there is no node node3"},
		{"deleting a node", "delete node default/web", ":9: delete: "},
		{"name without a namespace", "delete service web", `:9: "web" is not namespace/name`},
		{"prefix with host bits", "announce 203.0.113.10/24 node1", ":9: announce: "},
		{"announced to a stranger", "announce 203.0.113.0/24 node3", ":9: there is no node node3"},
		{"address how", "address put node1 203.0.113.10", ":9: address: "},
		{"no address", "address add node1 203.0.113", ":9: "},
		{"table of an unknown node", "table node3 want.txt", ":9: there is no node node3"},
		{"table without a file", "table node1 other.txt", ":9: table: there is no file other.txt"},
		{"text used twice", "table node1 want.txt\nchanges node1 want.txt", ":10: changes: file want.txt is already used"},
		{"health check without a count", "healthcheck node1 default/web", ":9: healthcheck: "},
		{"health check of another family", "healthcheck node1 default/web ipv5=1", `:9: healthcheck: unknown word "ipv5=1"`},
		{"problem without a reason", "problem Service default/web spec", ":9: problem: "},
		{"unknown caller", "reach pod web2 -> 10.96.0.10:80 : refused", ":9: reach: there is no pod web2"},
		{"a client is no pod", "reach pod c -> 10.96.0.10:80 : refused", ":9: reach: there is no pod c"},
		{"target without a port", "reach pod web1 -> 10.96.0.10 : refused", ":9: reach: "},
		{"unknown target", "reach pod web1 -> web2:80 : refused", ":9: reach: nothing has the name web2"},
		{"port 0", "reach pod web1 -> node1:0 : refused", ":9: reach: "},
		{"mapped target", "reach pod web1 -> [::ffff:10.96.0.10]:80 : refused", ":9: reach: "},
		{"unknown protocol", "reach pod web1 -> 10.96.0.10:80/quic : refused", ":9: reach: unknown protocol"},
		{"no expectation", "reach pod web1 -> 10.96.0.10:80", ":9: reach: want a colon and an expectation"},
		{"unknown expectation", "reach pod web1 -> 10.96.0.10:80 : works", `:9: reach: unknown expectation "works"`},
		{"backends without names", "reach pod web1 -> 10.96.0.10:80 : backends", ":9: reach: backends: want names"},
		{"unknown backend", "reach pod web1 -> 10.96.0.10:80 : backends web2", `:9: reach: backends: there is no pod or node "web2"`},
		{"client as a backend", "reach pod web1 -> 10.96.0.10:80 : backends c", `:9: reach: backends: there is no pod or node "c"`},
		{"backend twice", "reach pod web1 -> 10.96.0.10:80 : backends web1,web1", ":9: reach: backends: web1 is listed twice"},
		{"unknown source", "reach pod web1 -> 10.96.0.10:80 : backends web1 source web1", ":9: reach: source: there is no node web1"},
		{"source of a refusal", "reach pod web1 -> 10.96.0.10:80 : refused source client", `:9: reach: cannot read "source client"`},
		{"trailing words", "reach pod web1 -> 10.96.0.10:80 : backends web1 sticky please", `:9: reach: cannot read "please"`},
		{"via for a pod", "reach pod web1 -> 10.96.0.10:80 via node1 : refused", ":9: reach: via is only for clients"},
		{"via for a node", "reach client c -> node1:80 via node2 : refused", ":9: reach: via is only for addresses that no node or pod has"},
		{"same without a flow", "reach pod web1 -> 10.96.0.10:80 : same", ":9: reach: same is only for flows"},
		{"flow that never began", "flow f : same", ":9: flow: there is no label f"},
		{"flow without a first answer", "flow f pod web1 -> 10.96.0.10:80 : refused", ":9: flow: its first call needs backends"},
		{"flow that begins twice", "flow f pod web1 -> 10.96.0.10:80 : backends web1\nflow f pod web1 -> 10.96.0.10:80 : backends web1", ":10: flow: label f is already used"},
		{"comment at the end", "restart node1\n# And then?", ":10: comment without a command"},
		{"file that is not used", "restart node1", "file a.yaml is not used"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("x.txtar", []byte(head+test.script+"\n"+someFiles))
			if err == nil || !strings.HasPrefix(err.Error(), "x.txtar:") || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
	for _, test := range []struct{ name, text, want string }{
		{"empty", "", "x.txtar:1: "},
		{"no title", "node node1\n", "x.txtar:1: a scenario begins with its title"},
		{"no statements", "# Title.\n\n", "x.txtar:1: want a title and a line of statements"},
		{"other last line", "# Title.\n# More.\n\n", "x.txtar:2: the last line of the first comment"},
		{"bad statement", "# Title.\n# Statements: X1\n\n", `x.txtar:2: "X1" is not the number of a statement`},
		{"bad name", "# Title.\n# Statements: S01\n\nnode Node_1\n", `x.txtar:4: "Node_1" cannot be a name`},
		{"reserved name", "# Title.\n# Statements: S01\n\nnode any\n", `x.txtar:4: "any" cannot be a name`},
		{"name twice", "# Title.\n# Statements: S01\n\nnode a\npod a a\n", "x.txtar:5: a is declared twice"},
		{"pod on an unknown node", "# Title.\n# Statements: S01\n\npod a b\n", "x.txtar:4: pod a: want its node"},
		{"node after a pod", "# Title.\n# Statements: S01\n\nnode a\npod b a\nnode c\n", "x.txtar:6: nodes come before pods"},
		{"too many words", "# Title.\n# Statements: S01\n\nnode a zone=b c\n", `x.txtar:4: node a: cannot read "zone=b c"`},
		{"another kind", head + "apply a.yaml\n\n-- a.yaml --\napiVersion: v1\nkind: Secret\n", `x.txtar:9: a.yaml, object 1: "v1 Secret" is not`},
		{"unknown field", head + "apply a.yaml\n\n-- a.yaml --\napiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {clusterip: 1}\n", `x.txtar:9: a.yaml, object 1: `},
		{"number for a word", head + "apply a.yaml\n\n-- a.yaml --\napiVersion: v1\nkind: Service\nmetadata: {name: off}\n", `x.txtar:9: a.yaml, object 1: `},
		{"nameless", head + "apply a.yaml\n\n-- a.yaml --\napiVersion: v1\nkind: Service\n", "x.txtar:9: a.yaml, object 1: it has no name"},
		{"strange pod", head + "apply a.yaml\n\n-- a.yaml --\napiVersion: v1\nkind: Pod\nmetadata: {name: pod9}\n", "x.txtar:9: a.yaml, object 1: there is no pod pod9"},
		{"strange node", head + "apply a.yaml\n\n-- a.yaml --\napiVersion: v1\nkind: Node\nmetadata: {name: node3}\n", "x.txtar:9: a.yaml, object 1: there is no node node3"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := Parse("x.txtar", []byte(test.text))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got %v, want %q", err, test.want)
			}
		})
	}
}

// A generated scenario can be written, read back and played.
func TestFormatOfMadeScenario(t *testing.T) {
	config := DefaultConfig()
	config.Detect = Detect{Mode: DetectNodeCIDR}
	config.NodePortAddresses = []string{"primary", "172.18.0.0/16"}
	config.ServiceCIDRs = nil
	config.MasqueradeAll, config.LocalhostNodePorts, config.StrictSourceRanges, config.AllowServiceExternalIPs = true, true, true, false
	s := &Scenario{
		Name: "made", Title: "Made by a program.", Notes: []string{"For reasons of its own."}, Statements: []string{"S50"},
		Nodes: []Node{{Name: "node1", Zone: "z1"}, {Name: "node2"}}, Pods: []Pod{{"web1", "node1"}, {"web2", "node2"}}, Clients: []string{"c"},
		Steps: []Step{
			{Above: []string{""}, Command: Configure{config.Settings()}},
			{Command: Apply{"all.yaml"}},
			{Command: Announce{netip.MustParsePrefix("203.0.113.10/32"), []string{"node1"}}},
			{Command: Address{Node: "node1", Addr: netip.MustParseAddr("203.0.113.10")}},
			{Above: []string{"# Look."}, Command: Table{"node1", "table.txt"}},
			{Command: Changes{"node2", "changes.txt"}},
			{Command: HealthCheck{Node: "node1", Namespace: "default", Name: "web", None: true}},
			{Command: Reach{Call{From: "web2", To: Target{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: proxier.TCP}}, Expectation{Backends: []string{"web1"}, Source: "node2", Sticky: true, Label: "x"}}},
			{Command: Reach{Call{From: "c", Via: "node2", To: Target{Addr: netip.MustParseAddr("10.96.0.10"), Port: 81, Protocol: proxier.SCTP}}, Expectation{Outcome: Passes}}},
			{Command: Reach{Call{From: "c", To: Target{Name: "node1", Family: proxier.IPv6, Port: 80, Protocol: proxier.UDP}}, Expectation{Outcome: Passes}}},
			{Command: Flow{"f", &Call{From: "node1", To: Target{Addr: netip.MustParseAddr("10.96.0.10"), Port: 80, Protocol: proxier.TCP}}, Expectation{Backends: []string{"web1"}}}},
			{Command: Restart{"node1"}},
			{Command: Delete{"service", "default", "web"}},
			{Command: Flow{"f", nil, Expectation{Outcome: Same}}},
			{Command: Address{Node: "node1", Addr: netip.MustParseAddr("203.0.113.10"), Gone: true}},
		},
	}
	err := s.AddObjects("all.yaml",
		&v1.Service{
			TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"}, ObjectMeta: metav1.ObjectMeta{Name: "web"},
			Spec: v1.ServiceSpec{ClusterIPs: []string{"10.96.0.10"}, Ports: []v1.ServicePort{{Name: "p", Port: 80}}, SessionAffinity: v1.ServiceAffinityClientIP},
		},
		&discoveryv1.EndpointSlice{
			TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"}, AddressType: discoveryv1.AddressTypeIPv4,
			ObjectMeta: metav1.ObjectMeta{Name: "web-1", Labels: map[string]string{discoveryv1.LabelServiceName: "web"}},
			Ports:      []discoveryv1.EndpointPort{{Name: ptr.To("p"), Port: ptr.To[int32](8080)}},
			Endpoints:  []discoveryv1.Endpoint{{Addresses: []string{"10.244.1.1"}}},
		})
	if err != nil {
		t.Fatal(err)
	}
	s.Files = append(s.Files, File{"table.txt", ""}, File{"changes.txt", ""})
	text := Format(s)
	back, err := Parse("made.txtar", text)
	if err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	if diff := cmp.Diff(s, back, comparable); diff != "" {
		t.Errorf("(-made +read):\n%s", diff)
	}
	got := DefaultConfig()
	for _, setting := range back.Steps[0].Command.(Configure).Settings {
		if err := got.Set(setting); err != nil {
			t.Error(err)
		}
	}
	if diff := cmp.Diff(config, got, comparable); diff != "" {
		t.Errorf("(-made +read):\n%s", diff)
	}
	run(t, back, NewModel(back), func(string, string) {})
}

func FuzzParse(f *testing.F) {
	for _, s := range all(f) {
		text, err := files.ReadFile(s.Name + ".txtar")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := Parse("x.txtar", text)
		if err != nil {
			return
		}
		again, err := Parse("x.txtar", Format(s))
		if err != nil {
			t.Fatalf("%v in\n%s", err, Format(s))
		}
		if diff := cmp.Diff(s, again, comparable); diff != "" {
			t.Errorf("(-first +second):\n%s", diff)
		}
	})
}
