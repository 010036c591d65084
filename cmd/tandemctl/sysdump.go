// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/tandem-proxy/tandem/observe/explain"
	"github.com/tandem-proxy/tandem/observe/status"
)

// What a dump is limited to.
const (
	sysdumpFileLimit    = 32 << 20 // bytes of one file in it
	sysdumpLogLimit     = 1 << 20  // bytes of a log, its end
	sysdumpCommandLimit = 20 * time.Second
	sysdumpRequestLimit = 10 * time.Second
)

func (a *app) sysdumpCommand() *cobra.Command {
	var file, server, health string
	c := &cobra.Command{
		Use:   "sysdump",
		Short: "Write what is known of this node to one archive",
		Long: `Writes a compressed tar archive for a bug report, and changes nothing on the node:

  tandemctl/  what the other commands show
  kube-proxy/ metrics, configuration and health of the running process
  commands/   devices, addresses, routes, neighbours, rules, sets, virtual servers
              and BPF programs, as the node's tools show them
  files/      kernel version, sysctls, counters of the stack
  logs/       the end of kube-proxy's logs, where the node keeps them
  index.txt   what is missing, and why

It has addresses of pods, Services and nodes, names of Services, and rules of
firewalls. It reads no Secret, token, kubeconfig or environment, and no packet.
What looks like a token, password or private key is replaced by [redacted]: rules
have comments, and logs with -v=8 what the API server answered.
Where the command runs in a container, a node's own files are missing.`,
		Example: `  tandemctl sysdump
  kubectl -n kube-system exec POD -- tandemctl sysdump --file - > node1.tar.gz`,
		Args: args(cobra.NoArgs),
		RunE: func(c *cobra.Command, _ []string) (err error) {
			at := a.now().UTC()
			name := "tandem-sysdump-" + at.Format("20060102-150405")
			if host, err := os.Hostname(); err == nil {
				name = "tandem-sysdump-" + host + "-" + at.Format("20060102-150405")
			}
			out := a.out
			if file != "-" {
				if file == "" {
					file = name + ".tar.gz"
				}
				// It is for the administrator alone.
				f, err := os.OpenFile(file, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
				if err != nil {
					return fmt.Errorf("create the archive: %w", err)
				}
				defer func() { err = errors.Join(err, f.Close()) }()
				out = f
			}
			z := gzip.NewWriter(out)
			d := &sysdump{w: tar.NewWriter(z), dir: name, at: at}
			d.collect(c.Context(), a, server, health)
			if err := errors.Join(d.err, d.w.Close(), z.Close()); err != nil {
				return fmt.Errorf("write the archive: %w", err)
			}
			fmt.Fprintf(a.err, "%d files; %d are missing, see index.txt\n", d.files, len(d.missing))
			if file != "-" {
				fmt.Fprintln(a.out, file)
			}
			return nil
		},
	}
	c.Flags().StringVarP(&file, "file", "f", "", "the archive to write, - for the standard output (default: tandem-sysdump-HOST-TIME.tar.gz)")
	addServerFlag(c.Flags(), &server)
	c.Flags().StringVar(&health, "health-server", "127.0.0.1:10256", "address and port of kube-proxy's health server")
	return c
}

// sysdump is an archive that is being written.
type sysdump struct {
	w       *tar.Writer
	dir     string
	at      time.Time
	files   int
	missing []string
	err     error // of writing
}

func (d *sysdump) collect(ctx context.Context, a *app, server, health string) {
	servers := a.serversOr(ctx, server)
	for _, command := range []string{"version", "status", "services", "flows", "capabilities", "optout list", "backend list", "preflight"} {
		d.tool(a, servers, command)
	}
	for _, path := range []string{"/metrics", "/configz", "/proxyMode", status.Path, explain.PlacementsPath} {
		d.request(ctx, servers, path)
	}
	for _, path := range []string{"/healthz", "/livez", "/readyz"} {
		d.request(ctx, []string{health}, path)
	}
	for _, c := range sysdumpCommands {
		d.command(ctx, strings.Fields(c.line), c.needs)
	}
	for _, path := range sysdumpFiles {
		d.copy("files", path)
	}
	d.sysctls()
	d.logs()
	d.add("index.txt", fmt.Appendf(nil, "Written at %s by tandemctl %s.\n\nMissing:\n%s\n", d.at.Format(time.RFC3339), a.version().Version, strings.Join(d.missing, "\n")))
}

// sysdumpCommands change nothing. Some would load a kernel module: they run only if there is the file that the
// module makes.
var sysdumpCommands = []struct{ line, needs string }{
	{"ip -details -statistics link", ""}, {"ip address", ""}, {"ip rule", ""}, {"ip -6 rule", ""},
	{"ip route show table all", ""}, {"ip -6 route show table all", ""}, {"ip neighbour", ""},
	{"ip xfrm policy", "/proc/net/xfrm_stat"}, {"tc -statistics qdisc", ""}, {"ss -s", ""},
	{"nft list ruleset", nfTables}, {"iptables-save -c", nfTables}, {"ip6tables-save -c", nfTables},
	{"iptables-legacy-save -c", "/proc/net/ip_tables_names"}, {"ip6tables-legacy-save -c", "/proc/net/ip6_tables_names"},
	{"ipset list", "/sys/module/ip_set"}, {"ipvsadm -Ln --stats", "/proc/net/ip_vs"},
	{"conntrack -S", "/sys/module/nf_conntrack_netlink"}, {"conntrack -C", "/sys/module/nf_conntrack_netlink"},
	{"bpftool net", ""}, {"bpftool cgroup tree", ""}, {"bpftool prog", ""}, {"bpftool map", ""},
}

// nfTables stands for a kernel that uses nf_tables: as a module, or built in.
const nfTables = "nf_tables"

var sysdumpFiles = []string{
	"/proc/version", "/etc/os-release", "/proc/meminfo", "/proc/loadavg", "/proc/modules", "/proc/self/mountinfo", "/proc/self/limits", "/proc/self/status",
	"/proc/net/softnet_stat", "/proc/net/snmp", "/proc/net/snmp6", "/proc/net/netstat", "/proc/net/ip_vs_stats", "/sys/kernel/security/lockdown", "/sys/kernel/security/lsm",
}

// sysdumpSysctls are the ones that decide about Service traffic.
var sysdumpSysctls = []string{
	"net/ipv4/ip_forward", "net/ipv4/vs/*", "net/ipv4/ip_local_port_range", "net/ipv4/ip_local_reserved_ports", "net/ipv4/ip_nonlocal_bind", "net/ipv4/tcp_tw_reuse",
	"net/ipv4/conf/*/rp_filter", "net/ipv4/conf/*/route_localnet", "net/ipv4/conf/*/forwarding", "net/ipv4/conf/*/accept_local", "net/ipv4/conf/*/arp_ignore", "net/ipv4/conf/*/arp_announce",
	"net/ipv6/conf/*/forwarding", "net/ipv6/conf/*/disable_ipv6", "net/netfilter/nf_conntrack_*", "net/bridge/*", "net/core/bpf_jit_*", "net/core/netdev_budget*",
	"kernel/unprivileged_bpf_disabled", "kernel/bpf_stats_enabled", "fs/file-max",
}

// sysdumpLogs are where kubelet keeps those of containers with kube-proxy's name.
var sysdumpLogs = []string{"/var/log/pods/*/kube-proxy/*.log"}

// add adds a file, without secrets.
func (d *sysdump) add(name string, content []byte) {
	if d.err != nil {
		return
	}
	if len(content) > sysdumpFileLimit {
		d.lacks(name, fmt.Errorf("it has %d bytes; the first %d are here", len(content), sysdumpFileLimit))
		content = content[:sysdumpFileLimit]
	}
	content = redact(content)
	d.files++
	d.err = d.w.WriteHeader(&tar.Header{Name: d.dir + "/" + name, Mode: 0o600, Size: int64(len(content)), ModTime: d.at, Format: tar.FormatPAX})
	if d.err == nil {
		_, d.err = d.w.Write(content)
	}
}

func (d *sysdump) lacks(name string, why error) {
	d.missing = append(d.missing, "  "+name+": "+strings.ReplaceAll(strings.TrimSpace(why.Error()), "\n", "; "))
}

// tool adds what a command of this program says, for people and for machines.
func (d *sysdump) tool(a *app, servers []string, command string) {
	name := "tandemctl/" + strings.ReplaceAll(command, " ", "-")
	for _, output := range []struct{ format, end string }{{outputWide, ".txt"}, {outputJSON, ".json"}} {
		var out, errs bytes.Buffer
		one := *a
		one.out, one.err, one.servers = &out, &errs, servers
		one.findServers = func(context.Context) []string { return nil }
		list := strings.Fields(command)
		if a.cgroupRoot != "" {
			list = append(list, "--cgroup-root", a.cgroupRoot)
		}
		list = append(list, "--output", output.format)
		code := one.run(list)
		if out.Len() > 0 {
			d.add(name+output.end, out.Bytes())
		}
		if code != exitOK && errs.Len() > 0 {
			d.lacks(name+output.end, errors.New(errs.String()))
		}
	}
}

// serversOr is the server of a flag, or the default ones and those that are found.
func (a *app) serversOr(ctx context.Context, server string) []string {
	if server != "" {
		return []string{strings.TrimSuffix(strings.TrimPrefix(server, "http://"), "/")}
	}
	return slices.Concat(a.servers, a.findServers(ctx))
}

// request adds the answer of the first server that has one.
func (d *sysdump) request(ctx context.Context, servers []string, path string) {
	name := "kube-proxy" + path
	var failed []error
	for _, server := range servers {
		text, err := fetch(ctx, "http://"+server+path)
		if err == nil {
			d.add(name, text)
			return
		}
		failed = append(failed, err)
	}
	d.lacks(name, errors.Join(failed...))
}

// fetch is the answer with its status, if that is not 200.
func fetch(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, sysdumpRequestLimit)
	defer cancel()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	response, err := direct.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	if response.StatusCode == http.StatusNotFound { // of another kube-proxy, or because it is off
		return nil, fmt.Errorf("%s: %s", url, response.Status)
	}
	text, err := io.ReadAll(io.LimitReader(response.Body, sysdumpFileLimit+1))
	if response.StatusCode != http.StatusOK {
		text = append([]byte(response.Status+"\n"), text...)
	}
	return text, err
}

// inUse returns an error if the kernel does not use what a command would have it load.
func inUse(needs string) error {
	if needs != nfTables {
		_, err := os.Stat(needs)
		return err
	}
	// Without modules, what is there is built in.
	if _, err := os.Stat("/proc/modules"); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	_, err := os.Stat("/sys/module/nf_tables")
	return err
}

// command adds what a tool of the node says.
func (d *sysdump) command(ctx context.Context, args []string, needs string) {
	name := "commands/" + strings.ReplaceAll(strings.Join(args, "_"), "/", "_") + ".txt"
	if needs != "" {
		if err := inUse(needs); err != nil {
			d.lacks(name, fmt.Errorf("the kernel does not use it: %w", err))
			return
		}
	}
	ctx, cancel := context.WithTimeout(ctx, sysdumpCommandLimit)
	defer cancel()
	var errs bytes.Buffer
	command := exec.CommandContext(ctx, args[0], args[1:]...)
	command.Stderr = &errs
	out, err := command.Output()
	if err != nil {
		d.lacks(name, fmt.Errorf("%w: %s", err, errs.String()))
	}
	if len(out) > 0 || err == nil {
		d.add(name, append(out, errs.Bytes()...))
	}
}

// copy adds a file of the node.
func (d *sysdump) copy(to, path string) {
	f, err := os.Open(path)
	if err != nil {
		d.lacks(to+path, err)
		return
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, sysdumpFileLimit+1))
	if err != nil {
		d.lacks(to+path, err)
	}
	d.add(to+path, text)
}

// sysctls adds all in one file.
func (d *sysdump) sysctls() {
	var b bytes.Buffer
	for _, pattern := range sysdumpSysctls {
		paths, _ := filepath.Glob("/proc/sys/" + pattern) // the patterns are well-formed
		for _, path := range paths {
			if text, err := os.ReadFile(path); err == nil {
				fmt.Fprintf(&b, "%s = %s\n", strings.ReplaceAll(strings.TrimPrefix(path, "/proc/sys/"), "/", "."), bytes.TrimSpace(text))
			}
		}
	}
	d.add("files/sysctls.txt", b.Bytes())
}

// logs adds the ends of logs.
func (d *sysdump) logs() {
	found := false
	for _, pattern := range sysdumpLogs {
		paths, _ := filepath.Glob(pattern) // likewise
		for _, path := range paths {
			found = true
			text, err := tail(path, sysdumpLogLimit)
			if err != nil {
				d.lacks("logs"+path, err)
				continue
			}
			d.add("logs"+path, text)
		}
	}
	if !found {
		d.lacks("logs", fmt.Errorf("there are none as %s; kubectl logs has them", strings.Join(sysdumpLogs, " or ")))
	}
}

// tail is the end of a file, from the beginning of a line.
func tail(path string, limit int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	from := max(0, info.Size()-limit)
	if _, err := f.Seek(from, io.SeekStart); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, limit))
	if from > 0 { // the end of a line tells less, and a secret in it cannot be recognised
		_, text, _ = bytes.Cut(text, []byte("\n"))
	}
	return text, err
}
