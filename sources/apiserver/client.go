// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/component-base/version"
	"k8s.io/klog/v2"
)

// Defaults of ClientConfig.
const (
	// DefaultQPS and DefaultBurst are kube-proxy's: a proxy opens four
	// watches and then hardly ever speaks, so they only pace reconnects.
	DefaultQPS   = 5
	DefaultBurst = 10

	// defaultAccept lets a server (or an aggregating front) that has no
	// protobuf answer in JSON instead of 406.
	defaultAccept = runtime.ContentTypeProtobuf + "," + runtime.ContentTypeJSON
)

// ClientConfig says how to reach the API server. The zero value is a pod's own
// service account with kube-proxy's rates, speaking protobuf.
type ClientConfig struct {
	// Kubeconfig is the path of a kubeconfig file.
	Kubeconfig string
	// Master is the URL of the API server and wins over the kubeconfig's. When
	// both are empty the client uses the pod's service account.
	Master string
	// ContentType of requests; protobuf when empty.
	ContentType string
	// AcceptContentTypes of answers, comma separated, best first; protobuf and
	// then JSON when empty.
	AcceptContentTypes string
	// QPS and Burst pace requests; DefaultQPS and DefaultBurst when zero. A
	// negative QPS lifts the limit, as it does in client-go.
	QPS   float32
	Burst int
}

// NewClient builds a client. It does not connect.
func NewClient(cfg ClientConfig) (kubernetes.Interface, error) {
	restConfig, err := restConfigFor(cfg)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(restConfig)
	if err != nil {
		return nil, fmt.Errorf("create API client: %w", err)
	}
	return client, nil
}

func restConfigFor(cfg ClientConfig) (*rest.Config, error) {
	var restConfig *rest.Config
	var err error
	if cfg.Kubeconfig == "" && cfg.Master == "" {
		// Its address is that of a Service, which this process is to make work.
		klog.Background().Info("Neither a kubeconfig nor a master URL is set; reaching the API server by its Service address, which may not work on a new node")
		if restConfig, err = rest.InClusterConfig(); err != nil {
			return nil, fmt.Errorf("load in-cluster client config (neither a kubeconfig nor a master URL is set): %w", err)
		}
	} else {
		// An explicit path instead of the default loading rules: a proxy must
		// not pick up $KUBECONFIG or a home directory by accident.
		restConfig, err = clientcmd.NewNonInteractiveDeferredLoadingClientConfig(
			&clientcmd.ClientConfigLoadingRules{ExplicitPath: cfg.Kubeconfig},
			&clientcmd.ConfigOverrides{ClusterInfo: clientcmdapi.Cluster{Server: cfg.Master}},
		).ClientConfig()
		if err != nil {
			return nil, fmt.Errorf("load client config from kubeconfig %q: %w", cfg.Kubeconfig, err)
		}
	}

	restConfig.ContentType = cfg.ContentType
	if restConfig.ContentType == "" {
		restConfig.ContentType = runtime.ContentTypeProtobuf
	}
	restConfig.AcceptContentTypes = cfg.AcceptContentTypes
	if restConfig.AcceptContentTypes == "" {
		restConfig.AcceptContentTypes = defaultAccept
	}
	restConfig.QPS = cfg.QPS
	if restConfig.QPS == 0 {
		restConfig.QPS = DefaultQPS
	}
	restConfig.Burst = cfg.Burst
	if restConfig.Burst == 0 {
		restConfig.Burst = DefaultBurst
	}
	// Starts like upstream's, so that audit and API priority rules that match
	// on the agent's name keep matching.
	restConfig.UserAgent = fmt.Sprintf("kube-proxy/%s tandem", version.Get().GitVersion)
	return restConfig, nil
}
