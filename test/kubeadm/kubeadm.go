// SPDX-License-Identifier: Apache-2.0

// Package kubeadm has the configuration and permissions that kubeadm gives kube-proxy, for tests
// that must work with nothing else. Package test/cluster compares them with kubeadm's own code.
package kubeadm

import (
	"net/http"
	"slices"
	"strings"
)

// PodSubnet is the pod subnet of the clusters in tests.
const PodSubnet = "10.244.0.0/16,fd00:10:244::/48"

// ConfigFile and KubeconfigFile are the keys of the ConfigMap, and the files of its volume.
const (
	ConfigFile     = "config.conf"
	KubeconfigFile = "kubeconfig.conf"
)

// Config returns the configuration with a mode. The empty mode is kubeadm's default.
func Config(mode string) string {
	if mode == "" {
		return config
	}
	return strings.Replace(config, "\nmode: \"\"\n", "\nmode: "+mode+"\n", 1)
}

// config has every field, most of them with zero values.
const config = `apiVersion: kubeproxy.config.k8s.io/v1alpha1
bindAddress: 0.0.0.0
bindAddressHardFail: false
clientConnection:
  acceptContentTypes: ""
  burst: 0
  contentType: ""
  kubeconfig: /var/lib/kube-proxy/kubeconfig.conf
  qps: 0
clusterCIDR: ` + PodSubnet + `
configSyncPeriod: 0s
conntrack:
  maxPerCore: null
  min: null
  tcpBeLiberal: false
  tcpCloseWaitTimeout: null
  tcpEstablishedTimeout: null
  udpStreamTimeout: 0s
  udpTimeout: 0s
detectLocal:
  bridgeInterface: ""
  interfaceNamePrefix: ""
detectLocalMode: ""
enableProfiling: false
healthzBindAddress: ""
hostnameOverride: ""
iptables:
  localhostNodePorts: null
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
ipvs:
  excludeCIDRs: null
  minSyncPeriod: 0s
  scheduler: ""
  strictARP: false
  syncPeriod: 0s
  tcpFinTimeout: 0s
  tcpTimeout: 0s
  udpTimeout: 0s
kind: KubeProxyConfiguration
logging:
  flushFrequency: 0
  options:
    json:
      infoBufferSize: "0"
    text:
      infoBufferSize: "0"
  verbosity: 0
metricsBindAddress: ""
mode: ""
nftables:
  masqueradeAll: false
  masqueradeBit: null
  minSyncPeriod: 0s
  syncPeriod: 0s
nodePortAddresses: null
oomScoreAdj: null
portRange: ""
showHiddenMetricsForVersion: ""
winkernel:
  enableDSR: false
  forwardHealthCheckVip: false
  networkName: ""
  rootHnsEndpointName: ""
  sourceVip: ""
`

// Kubeconfig leads to the API server at a URL, with the token of the pod's ServiceAccount.
func Kubeconfig(url string) string {
	return `apiVersion: v1
kind: Config
clusters:
- cluster:
    certificate-authority: /var/run/secrets/kubernetes.io/serviceaccount/ca.crt
    server: ` + url + `
  name: default
contexts:
- context:
    cluster: default
    namespace: default
    user: default
  name: default
current-context: default
users:
- name: default
  user:
    tokenFile: /var/run/secrets/kubernetes.io/serviceaccount/token
`
}

// Allowed are the permissions that a kube-proxy needs, sorted. The role that kubeadm binds,
// system:node-proxier, has them.
var Allowed = []string{
	"create events.events.k8s.io", "get nodes", "list endpointslices.discovery.k8s.io", "list nodes", "list servicecidrs.networking.k8s.io",
	"list services", "patch events.events.k8s.io", "watch endpointslices.discovery.k8s.io", "watch nodes", "watch servicecidrs.networking.k8s.io", "watch services",
}

// IsAllowed reports whether a kube-proxy has a permission: one of Allowed, or the one to ask what it may do, which
// system:basic-user gives to everyone.
func IsAllowed(permission string) bool {
	return slices.Contains(Allowed, permission) || permission == "create selfsubjectaccessreviews.authorization.k8s.io"
}

// Permission is one in the words of Allowed. The group of core resources and the subresource
// of most requests are empty.
func Permission(verb, group, resource, subresource string) string {
	text := verb + " " + resource
	if group != "" {
		text += "." + group
	}
	if subresource != "" {
		text += "/" + subresource
	}
	return text
}

// Needs is the permission that an API server asks for before it answers a request; the
// path, where it is none of a resource.
func Needs(r *http.Request) string {
	verb := map[string]string{
		http.MethodGet: "get", http.MethodPost: "create", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete",
	}[r.Method]
	group, path := "", strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	switch {
	case path[0] == "api" && len(path) > 2: // its version, and what is in it
		path = path[2:]
	case path[0] == "apis" && len(path) > 3:
		group, path = path[1], path[3:]
	default:
		return Permission(verb, "", r.URL.Path, "")
	}
	if path[0] == "namespaces" && len(path) > 2 {
		path = path[2:]
	}
	path = slices.Concat(path, []string{"", "", ""})[:3] // resource, name, subresource
	if query := r.URL.Query(); verb == "get" && path[1] == "" {
		verb = "list"
		if watch := query.Get("watch"); watch == "true" || watch == "1" {
			verb = "watch"
		}
	}
	return Permission(verb, group, path[0], path[2])
}
