// SPDX-License-Identifier: Apache-2.0

//go:build linux

package hosts

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"

	"github.com/tandem-proxy/tandem/test/lab"
)

// PluginsDir is the directory of the module plugins. Tests of other packages set it.
var PluginsDir = "plugins"

// buildPlugins links the reference plugins, which are tools of the module in directory plugins,
// into a directory.
func buildPlugins(ctx context.Context, dir string) error {
	list := exec.CommandContext(ctx, "go", "list", "-C", PluginsDir, "tool")
	list.Env = goEnv()
	tools, err := list.Output()
	if err != nil {
		return fmt.Errorf("list the plugins: %w", err)
	}
	for _, tool := range strings.Fields(string(tools)) {
		// This builds into Go's cache, and prints the path there.
		c := exec.CommandContext(ctx, "go", "tool", "-C", PluginsDir, "-n", tool)
		c.Env = goEnv()
		var stderr bytes.Buffer
		c.Stderr = &stderr
		executable, err := c.Output()
		if err != nil {
			return fmt.Errorf("build plugin %s: %w\n%s", tool, err, &stderr)
		}
		if err := os.Symlink(strings.TrimSpace(string(executable)), filepath.Join(dir, path.Base(tool))); err != nil {
			return err
		}
	}
	return nil
}

func goEnv() []string {
	return append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-trimpath -buildvcs=false")
}

// plug adds a pod to the network by the plugins of the profile, as a container runtime does, and
// takes the addresses that they have chosen.
func (w *World) plug(ctx context.Context, pod *lab.Pod) error {
	const version = "1.0.0"
	text, err := w.fill(w.Pods.CNI, place{node: pod.Node, pod: pod})
	if err != nil {
		return err
	}
	var chain []map[string]any
	if err := json.Unmarshal([]byte(text), &chain); err != nil {
		return fmt.Errorf("parse plugin configuration: %w\n%s", err, text)
	}
	var result json.RawMessage
	for _, plugin := range chain {
		plugin["cniVersion"], plugin["name"] = version, "pods"
		if result != nil {
			plugin["prevResult"] = result
		}
		config, err := json.Marshal(plugin)
		if err != nil {
			return err
		}
		name := fmt.Sprint(plugin["type"])
		c := pod.Node.Command(ctx, filepath.Join(w.dir, name))
		c.Stdin = bytes.NewReader(config)
		c.Env = append(os.Environ(), "CNI_COMMAND=ADD", "CNI_CONTAINERID="+pod.Name, "CNI_NETNS="+pod.NetNSPath(), "CNI_IFNAME="+lab.Uplink, "CNI_PATH="+w.dir)
		if result, err = c.Output(); err != nil {
			return fmt.Errorf("plugin %s for pod %s: %w\n%s", name, pod.Name, err, result)
		}
	}
	var given struct {
		IPs []struct {
			Address netip.Prefix `json:"address"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(result, &given); err != nil {
		return fmt.Errorf("parse the result of plugins: %w\n%s", err, result)
	}
	for _, ip := range given.IPs {
		if addr := ip.Address.Addr(); addr.Is4() {
			pod.Addr4 = addr
		} else {
			pod.Addr6 = addr
		}
	}
	return nil
}
