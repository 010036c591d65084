// SPDX-License-Identifier: Apache-2.0

package capabilities

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const ipvsFamily = "IPVS"

// ipvsSchedulers are all that kernels have had.
var ipvsSchedulers = []string{"rr", "wrr", "lc", "wlc", "fo", "ovf", "lblc", "lblcr", "dh", "sh", "mh", "sed", "nq", "twos"}

func schedulerSymbol(name string) string { return "ip_vs_" + name + "_schedule" }

func probeIPVS(_ context.Context, h *host, _ string) outcome {
	_, found, err := findGenlFamily(ipvsFamily)
	if err != nil {
		return inconclusive(err)
	}
	if found {
		return yes("")
	}
	o := h.fromModules(moduleQuery{module: "ip_vs", symbol: "register_ip_vs_scheduler"})
	if o.state == Yes {
		// The code is there without its netlink side: being loaded or removed.
		return inconclusive(errors.New("ip_vs is loaded, but its netlink family is not registered"))
	}
	return o
}

// probeIPVSSchedulers answers for the default scheduler and lists the others.
func probeIPVSSchedulers(_ context.Context, h *host, _ string) outcome {
	o := h.fromModules(moduleQuery{module: "ip_vs_rr", symbol: schedulerSymbol("rr")})
	var there []string
	for _, name := range ipvsSchedulers {
		if presence, _ := h.module("ip_vs_"+name, schedulerSymbol(name)); presence == moduleLoaded || presence == moduleAvailable {
			there = append(there, name)
		}
	}
	if len(there) > 0 {
		o.detail = "on this host: " + strings.Join(there, ", ")
	}
	return o
}

// probeIPSet asks for the protocol version, which any ipset tool does first.
func probeIPSet(_ context.Context, h *host, _ string) outcome {
	o := h.fromModules(moduleQuery{module: "ip_set", symbol: "ip_set_create"})
	if o.state != Yes && !h.opts.LoadModules {
		return o
	}
	protocol, oldest, err := netlink.IpsetProtocol()
	switch {
	case err == nil:
		return yes(fmt.Sprintf("protocol %d to %d", oldest, protocol))
	case errors.Is(err, unix.EPERM):
		return notPermitted(capNet, err)
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.EOPNOTSUPP):
		// No such netfilter subsystem.
		return no(err)
	}
	return inconclusive(fmt.Errorf("query the ipset protocol: %w", err))
}

// iptablesVariant is one of the two kernels' sides an iptables binary drives.
type iptablesVariant int

const (
	variantLegacy iptablesVariant = iota
	variantNFT
)

func probeIPTablesNFT(ctx context.Context, h *host, _ string) outcome {
	return h.iptablesVariant(ctx, variantNFT)
}

func probeIPTablesLegacy(ctx context.Context, h *host, _ string) outcome {
	return h.iptablesVariant(ctx, variantLegacy)
}

// probeIPTables is Yes where either variant is usable. When neither is, the
// more hopeful of the two answers counts.
func probeIPTables(ctx context.Context, h *host, _ string) outcome {
	nft, legacy := h.iptablesVariant(ctx, variantNFT), h.iptablesVariant(ctx, variantLegacy)
	for _, wanted := range []State{Yes, Inconclusive} {
		for _, o := range []outcome{nft, legacy} {
			if o.state == wanted {
				return o
			}
		}
	}
	return no(errors.Join(nft.err, legacy.err))
}

func (h *host) iptablesVariant(ctx context.Context, want iptablesVariant) outcome {
	binary, version, err := findIPTables(ctx, want)
	if errors.Is(err, exec.ErrNotFound) {
		return no(err)
	}
	if err != nil {
		return inconclusive(err)
	}
	o := h.iptablesKernel(want)
	o.detail = strings.Trim(binary+", "+version+", "+o.detail, ", ")
	return o
}

// iptablesKernel answers for the kernel's side. It never lists rules: a listing
// by the legacy tool creates the table it lists.
func (h *host) iptablesKernel(variant iptablesVariant) outcome {
	if variant == variantLegacy {
		if _, err := os.Stat(h.proc("net/ip_tables_names")); err == nil {
			return yes("")
		}
		return h.fromModules(moduleQuery{module: "ip_tables", symbol: "ipt_do_table"})
	}
	o := h.fromModules(moduleQuery{module: "nf_tables", symbol: "nf_tables_newtable"})
	if o.state != Yes && !h.opts.LoadModules {
		return o
	}
	if err := nftGeneration(); err != nil {
		o = classify(fmt.Errorf("ask nf_tables for its generation: %w", err), capNet)
	} else {
		o = yes("")
	}
	if presence, _ := h.module("nft_compat", "nft_target_init"); presence == moduleAbsent {
		o.detail = "no nft_compat: matches of iptables extensions fail"
	}
	return o
}

// nftGeneration asks nf_tables for its rule set's generation, the cheapest
// read-only question it answers.
func nftGeneration() error {
	const (
		subsystem = 10 // NFNL_SUBSYS_NFTABLES
		getGen    = 16 // NFT_MSG_GETGEN
	)
	req := nl.NewNetlinkRequest(subsystem<<8|getGen, 0)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_UNSPEC, Version: nl.NFNETLINK_V0})
	_, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	return err
}

// findIPTables returns the binary that drives a variant: the one named after
// it, or plain iptables if its version says so.
func findIPTables(ctx context.Context, want iptablesVariant) (path, version string, err error) {
	names := []string{"iptables-legacy", "iptables"}
	if want == variantNFT {
		names = []string{"iptables-nft", "iptables"}
	}
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			continue
		}
		version, err := iptablesVersion(ctx, path)
		if err != nil {
			return "", "", err
		}
		if variantOf(version) == want {
			return path, version, nil
		}
	}
	return "", "", fmt.Errorf("%s: %w", strings.Join(names, " or "), exec.ErrNotFound)
}

func iptablesVersion(ctx context.Context, path string) (string, error) {
	// The tool answers in milliseconds, unless its file system is gone.
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, path, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s --version: %w", path, err)
	}
	_, version, found := strings.Cut(strings.TrimSpace(string(out)), " ")
	if !found {
		return "", fmt.Errorf("%s --version: cannot read %q", path, out)
	}
	return version, nil
}

// variantOf reads "v1.8.9 (nf_tables)". Releases before 1.8 name no variant and
// were all legacy.
func variantOf(version string) iptablesVariant {
	if strings.Contains(version, "(nf_tables)") {
		return variantNFT
	}
	return variantLegacy
}

func probeConntrack(_ context.Context, h *host, _ string) outcome {
	text, err := os.ReadFile(h.proc("sys/net/netfilter/nf_conntrack_max"))
	if err == nil {
		return yes("nf_conntrack_max is " + strings.TrimSpace(string(text)))
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return inconclusive(err)
	}
	return h.fromModules(moduleQuery{module: "nf_conntrack", symbol: "nf_conntrack_in"})
}
